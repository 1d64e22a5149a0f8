"""Checkpoints of torch.distributed.checkpoint: read, of any version, and written."""

from zckpt.base.patterns import compile_late
from zckpt.layouts.save.family import Family, FileKind, later, where_there

METADATA = compile_late(r"\.metadata|__\d+\.metadata")
DATA = compile_late(r"__(?P<dp>\d+)_(?P<number>\d+)\.distcp")
SAFETENSORS = compile_late(r"shard-(?P<rank>\d{5})-model-(?P<file>\d{5})-of-(?P<files>\d{5})\.safetensors")

_RANK = compile_late(r"__(\d+)_|shard-(\d{5})-")

FAMILY = Family(
    name="torch.distributed.checkpoint",
    files=(
        FileKind("data {number}", DATA),
        FileKind("", METADATA, of_rank=False),
        FileKind("", SAFETENSORS, of_rank=False),
        FileKind("", compile_late(r".*\.distcp"), of_rank=False),
    ),
    match=where_there((METADATA, DATA, SAFETENSORS), None, "no .metadata and no *.distcp"),
    read=later("dcp.read", "read"),
    second=later("dcp.second", "find_again"),
    read_training=later("dcp.read", "read_training"),
    has_keys=True,
    holds_run=False,
    reads_absent=True,
    every_rank=False,  # a rank that had nothing to write has no file
    resumes="by torch.distributed.checkpoint.load, on any number of ranks",
    records=later("dcp.read", "records"),
    named_data=later("dcp.read", "named_data"),
    unread_states=later("dcp.read", "unread_states"),
    left_out=later("dcp.read", "left_out"),
    beside=later("dcp.read", "beside"),
)


def rank_of(name: str) -> int | None:
    """The rank that wrote a data file, by its name; None for other names."""
    match = _RANK.match(name)
    return None if match is None else int(match[1]) if match[1] else int(match[2]) - 1
