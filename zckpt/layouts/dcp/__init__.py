"""Checkpoints of torch.distributed.checkpoint: read, of any version, and written."""

from zckpt.base.patterns import compile_late
from zckpt.layouts.dcp.files import DATA, METADATA, SAFETENSORS, match
from zckpt.layouts.save.family import Family, FileKind, later

FAMILY = Family(
    name="torch.distributed.checkpoint",
    files=(
        FileKind("data {number}", DATA),
        FileKind("", METADATA, of_rank=False),
        FileKind("", SAFETENSORS, of_rank=False),
        FileKind("", compile_late(r".*\.distcp"), of_rank=False),
    ),
    match=match,
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
)
