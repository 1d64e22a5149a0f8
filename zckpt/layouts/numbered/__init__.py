"""Plain weights with an optimizer's state dict beside them, whole or in parts as OSS and ZeroRedundancyOptimizer have it."""

import re

from zckpt.base.patterns import compile_late
from zckpt.layouts.save.family import Family, FileKind, later

RANK = compile_late(
    r"(?=[\w.-]*optim)(?!(?:bf16_|fp16_)?zero_pp_rank)[\w.-]*?rank[-_]?(?P<dp>\d+)\.(?:pt|pth|bin|ckpt)", re.IGNORECASE
)
WHOLE = compile_late(r"[\w-]*optim[\w-]*\.(?:pt|pth|bin|ckpt)", re.IGNORECASE)

FAMILY = Family(
    name="weights with optimizer states",
    files=(FileKind("optimizer", RANK), FileKind("optimizer", WHOLE, of_rank=False)),
    match=later("numbered.files", "match"),
    read=later("numbered.read", "read"),
    second=later("numbered.second", "find_again"),
    read_training=later("numbered.read", "read_training"),
    fallback=True,
    has_keys=True,
    holds_run=False,
    resumes="by the script that wrote it (zckpt to-dcp and reshard make saves with names)",
    unread_states=later("numbered.read", "unread_states"),
    left_out=later("plain.read", "left_out"),
    beside=later("plain.read", "left_out"),
)
