"""Megatron-LM's legacy saves (`--ckpt-format torch`): each model-parallel rank's part of the model in a directory of its own."""

from zckpt.layouts.megatron_legacy import files as _files
from zckpt.layouts.save.family import Family, FileKind, later

FAMILY = Family(
    name="Megatron-LM, legacy",
    files=(FileKind("model", _files.MODEL), FileKind("optim", _files.OPTIMIZER)),
    match=_files.match,
    read=later("megatron_legacy.read", "read"),
    second=later("megatron_legacy.second", "find_again"),
    directories=_files.DIRECTORY,
    axes=_files.axes_of,
    every_rank=False,  # ranks that would write the same write nothing
    read_training=later("megatron_legacy.training", "read_training"),
    unread_states=later("megatron_legacy.training", "unread_states"),
    resumes="by Megatron-LM at the same split (for DeepSpeed run zckpt reshard, for others zckpt to-dcp)",
    holds_run=False,
)
