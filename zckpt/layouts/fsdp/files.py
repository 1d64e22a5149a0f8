"""Which files are ranks' files of FSDP, by their names.

For `FAMILY` and `read`.
"""

from __future__ import annotations

import re

from zckpt.base.patterns import compile_late
from zckpt.layouts.save.listing import Listing

VERL = compile_late(r"(?P<kind>model|optim|extra_state)_world_size_\d+_rank_(?P<dp>\d+)\.pt")
ANY = compile_late(
    r"(?!(?:bf16_|fp16_)?zero_pp_rank|zckpt_rank)(?P<kind>[\w.-]*?)(?<![A-Za-z])[Rr]ank[-_]?(?P<dp>\d+)[\w.-]*?\.(?:pt|pth|bin|ckpt)"
)
NONE = "no model_world_size_*_rank_*.pt, and no *rank*.pt with DTensors or ShardedTensors"


def pattern_of(listing: Listing) -> re.Pattern[str]:
    """How rank files of a save are called."""
    return VERL if listing.matching(VERL) else ANY
