"""Plain weights with an optimizer's state dict beside them, whole or in parts as OSS and ZeroRedundancyOptimizer have it."""

from zckpt.layouts.numbered import files as _files
from zckpt.layouts.save.family import Family, FileKind, later

FAMILY = Family(
    name="weights with optimizer states",
    files=(FileKind("optimizer", _files.RANK), FileKind("optimizer", _files.WHOLE, of_rank=False)),
    match=_files.match,
    read=later("numbered.read", "read"),
    second=later("numbered.second", "find_again"),
    read_training=later("numbered.read", "read_training"),
    fallback=True,
    has_keys=True,
    holds_run=False,
    resumes="by the script that wrote it (zckpt to-dcp and reshard make saves with names)",
    unread_states=later("numbered.read", "unread_states"),
    left_out=later("plain.read", "left_out"),
)
