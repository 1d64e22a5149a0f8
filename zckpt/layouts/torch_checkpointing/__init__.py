"""Saves of the package torch_checkpointing: each rank's items in files of its own, and how they were cut in `metadata.pkl`."""

import re
from dataclasses import replace

from zckpt.base.patterns import compile_late
from zckpt.layouts.save.family import Family, FileKind, later, where_there

METADATA = "metadata.pkl"
ITEM = compile_late(r"(?P<item>[\w-]+?)_(?P<dp>\d+)\.pt")
NO_ITEM = "no <item>_<rank>.pt with DTensors"

_METADATA = compile_late(re.escape(METADATA))

FAMILY = Family(
    name="torch_checkpointing",
    files=(FileKind("", _METADATA, of_rank=False),),
    common=(FileKind("{item}", ITEM),),
    match=where_there((_METADATA,), None, f"no {METADATA}"),
    read=later("torch_checkpointing.read", "read"),
    second=later("torch_checkpointing.second", "find_again"),
    read_training=later("torch_checkpointing.read", "read_training"),
    holds_run=False,
    every_rank=False,
    records=later("torch_checkpointing.read", "records"),
    resumes="by torch_checkpointing's CheckpointManager, on any number of ranks",
    unread_states=later("torch_checkpointing.read", "unread_states"),
    beside=later("torch_checkpointing.read", "beside"),
)

WITHOUT_METADATA = replace(
    FAMILY,
    files=FAMILY.common,
    common=(),
    match=where_there((ITEM,), later("torch_checkpointing.read", "match_files"), NO_ITEM),
    fallback=True,
)
"""The same without `metadata.pkl`, which is written where an item has a resharder. DTensors say themselves how they were cut."""
