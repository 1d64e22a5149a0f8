"""Checkpoints of torch.distributed.checkpoint: read, of any version, and written."""

import re

from zckpt.layouts.dcp import read as _read
from zckpt.layouts.dcp.files import DATA, METADATA, SAFETENSORS
from zckpt.layouts.save.family import Family, FileKind

FAMILY = Family(
    name="torch.distributed.checkpoint",
    files=(
        FileKind("data {number}", DATA),
        FileKind("", METADATA, of_rank=False),
        FileKind("", SAFETENSORS, of_rank=False),
        FileKind("", re.compile(r".*\.distcp"), of_rank=False),
    ),
    match=_read.match,
    read=_read.read,
    read_training=_read.read_training,
    has_keys=True,
    holds_run=False,
    every_rank=False,  # a rank that had nothing to write has no file
    resumes="by torch.distributed.checkpoint.load, on any number of ranks",
    records=_read.records,
    unread_states=_read.unread_states,
    left_out=_read.left_out,
)
