"""Megatron-LM's legacy saves (`--ckpt-format torch`): each model-parallel rank's part of the model in a directory of its own."""

from zckpt.base.patterns import compile_late
from zckpt.layouts.save.family import Family, FileKind, later, where_there

DIRECTORY = compile_late(r"mp_rank_\d{2,}(?:_\d{3,}){0,2}")
_IN = r"mp_rank_(?P<first>\d{2,})(?:_(?P<second>\d{3,}))?(?:_(?P<third>\d{3,}))?/"
MODEL = compile_late(_IN + r"model_optim_rng\.pt")
OPTIMIZER = compile_late(_IN + r"distrib_optim\.pt")

FAMILY = Family(
    name="Megatron-LM, legacy",
    files=(FileKind("model", MODEL), FileKind("optim", OPTIMIZER)),
    match=where_there((MODEL,), None, "no mp_rank_*/model_optim_rng.pt"),
    read=later("megatron_legacy.read", "read"),
    second=later("megatron_legacy.second", "find_again"),
    directories=DIRECTORY,
    axes=later("megatron_legacy.files", "axes_of"),
    every_rank=False,  # ranks that would write the same write nothing
    read_training=later("megatron_legacy.training", "read_training"),
    unread_states=later("megatron_legacy.training", "unread_states"),
    resumes="by Megatron-LM at the same split (for DeepSpeed run zckpt reshard, for others zckpt to-dcp)",
    holds_run=False,
)
