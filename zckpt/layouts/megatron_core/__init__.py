"""Megatron-Core's distributed checkpoints (`torch_dist`, `fsdp_dtensor`), of Megatron-LM, Bridge, NeMo 2, verl and slime."""

import re

from zckpt.layouts.dcp.files import DATA, METADATA
from zckpt.layouts.megatron_core import read as _read
from zckpt.layouts.megatron_core.run_state import digests
from zckpt.layouts.save.family import Family, FileKind

FAMILY = Family(
    name="Megatron-Core",
    files=(
        FileKind("data {number}", DATA),
        FileKind("", METADATA, of_rank=False),
        FileKind("", re.compile(r".*\.distcp|common\.pt"), of_rank=False),
    ),
    match=_read.match,
    read=_read.read,
    read_training=_read.read_training,
    holds_run=False,
    every_rank=False,  # a rank that had nothing to write has no file
    resumes="by Megatron-Core (dist_checkpointing.load), at any tensor, pipeline and expert parallel sizes",
    records=_read.records,
    unread_states=_read.unread_states,
    left_out=_read.left_out,
    digests=digests,
)
