"""Megatron-LM's legacy saves (`--ckpt-format torch`): each model-parallel rank's part of the model in a directory of its own."""

from zckpt.layouts.megatron_legacy import files as _files
from zckpt.layouts.megatron_legacy import read as _read
from zckpt.layouts.megatron_legacy import training as _training
from zckpt.layouts.save.family import Family, FileKind

FAMILY = Family(
    name="Megatron-LM, legacy",
    files=(FileKind("model", _files.MODEL), FileKind("optim", _files.OPTIMIZER)),
    match=_files.match,
    read=_read.read,
    directories=_files.DIRECTORY,
    axes=_files.axes_of,
    every_rank=False,  # ranks that would write the same write nothing
    read_training=_training.read_training,
    unread_states=_training.unread_states,
    resumes="by Megatron-LM at the same split (for DeepSpeed run zckpt reshard, for others zckpt to-dcp)",
    holds_run=False,
)
