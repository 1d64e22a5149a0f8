"""Megatron-Core's distributed checkpoints (`torch_dist`, `fsdp_dtensor`), of Megatron-LM, Bridge, NeMo 2, verl and slime."""

import re

from zckpt.base.patterns import compile_late
from zckpt.layouts.dcp import DATA, METADATA
from zckpt.layouts.save.family import Family, FileKind, later, where_there

COMMON = "common.pt"
CONFIG = "metadata.json"
NONE = f"no {CONFIG} of Megatron-Core, and no names of its models"
"""The reason why files are not of this family."""

FAMILY = Family(
    name="Megatron-Core",
    files=(
        FileKind("data {number}", DATA),
        FileKind("", METADATA, of_rank=False),
        FileKind("", compile_late(r".*\.distcp|common\.pt"), of_rank=False),
    ),
    match=where_there((METADATA, compile_late(re.escape(CONFIG))), later("megatron_core.read", "match"), NONE),
    read=later("megatron_core.read", "read"),
    second=later("megatron_core.second", "find_again"),
    read_training=later("megatron_core.read", "read_training"),
    holds_run=False,
    reads_absent=True,
    every_rank=False,  # a rank that had nothing to write has no file
    resumes="by Megatron-Core (dist_checkpointing.load), at any tensor, pipeline and expert parallel sizes",
    records=later("megatron_core.read", "records"),
    named_data=later("dcp.read", "named_data"),
    unread_states=later("megatron_core.read", "unread_states"),
    left_out=later("megatron_core.read", "left_out"),
    beside=later("dcp.read", "unnamed_files"),
    digests=later("megatron_core.run_state", "digests"),
)
