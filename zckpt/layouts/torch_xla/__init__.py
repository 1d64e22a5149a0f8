"""torch_xla's FullyShardedDataParallel: each rank's part of a model in a file, with how it was cut."""

import re

from zckpt.layouts.save.family import Family, FileKind, later, where_there

SHARD = re.compile(r"(?P<save>.+?)_rank-(?P<dp>\d{8})-of-\d{8}\.pth")
OF_TRAINER = re.compile(r"rank(?P<dp>\d+)-of-\d+-pytorch_model\.bin")
"""How torch_xla's own examples call the files, and how transformers' Trainer does."""

_KINDS = (FileKind("shard", SHARD), FileKind("shard", OF_TRAINER))

FAMILY = Family(
    name="torch_xla",
    files=_KINDS,
    match=where_there([SHARD, OF_TRAINER], later("torch_xla.read", "match"), "no *_rank-*-of-*.pth of torch_xla"),
    read=later("torch_xla.read", "read"),
    second=later("torch_xla.second", "find_again"),
    holds_run=False,
    facts=later("torch_xla.read", "facts"),
    unread_states=later("torch_xla.read", "unread_states"),
)
