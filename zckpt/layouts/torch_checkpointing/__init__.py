"""Saves of the package torch_checkpointing: each rank's items in files of its own, and how they were cut in `metadata.pkl`."""

import re
from dataclasses import replace

from zckpt.layouts.save.family import Family, FileKind
from zckpt.layouts.torch_checkpointing import read as _read

FAMILY = Family(
    name="torch_checkpointing",
    files=(FileKind("", re.compile(re.escape(_read.METADATA)), of_rank=False),),
    common=(FileKind("{item}", _read.ITEM),),
    match=_read.match,
    read=_read.read,
    read_training=_read.read_training,
    holds_run=False,
    every_rank=False,
    records=_read.records,
    resumes="by torch_checkpointing's CheckpointManager, on any number of ranks",
    unread_states=_read.unread_states,
)

WITHOUT_METADATA = replace(FAMILY, files=FAMILY.common, common=(), match=_read.match_files, fallback=True)
"""The same without `metadata.pkl`, which is written where an item has a resharder. DTensors say themselves how they were cut."""
