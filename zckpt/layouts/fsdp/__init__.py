"""Rank files of FSDP: each rank's part of a model, as `torch.save` wrote its state dict of DTensors or ShardedTensors."""

import re
from dataclasses import replace

from zckpt.base.patterns import compile_late
from zckpt.layouts.save.family import Family, FileKind, later, where_there
from zckpt.layouts.save.listing import Listing

VERL = compile_late(r"(?P<kind>model|optim|extra_state)_world_size_\d+_rank_(?P<dp>\d+)\.pt")
ANY = compile_late(
    r"(?!(?:bf16_|fp16_)?zero_pp_rank|zckpt_rank)(?P<kind>[\w.-]*?)(?<![A-Za-z])[Rr]ank[-_]?(?P<dp>\d+)[\w.-]*?\.(?:pt|pth|bin|ckpt)"
)
NONE = "no model_world_size_*_rank_*.pt, and no *rank*.pt with DTensors or ShardedTensors"

FAMILY = Family(
    name="FSDP rank files",
    files=(FileKind("{kind}", VERL),),
    match=where_there((VERL, ANY), later("fsdp.read", "match"), NONE),
    read=later("fsdp.read", "read"),
    second=later("fsdp.second", "find_again"),
    read_training=later("fsdp.read", "read_training"),
    further=(compile_late(r"extra_state_world_size_\d+_rank_\d+\.pt"),),
    reads_absent=True,
    holds_run=False,
    resumes="by the trainer that wrote it, at this world size (for others, run zckpt to-dcp, or reshard for DeepSpeed)",
    unread_states=later("fsdp.read", "unread_states"),
    beside=later("fsdp.read", "beside"),
)

ANY_NAME = replace(FAMILY, files=(FileKind("{kind}", ANY),), fallback=True)
"""The same files under other names, such as `rank0.pt`. A directory of other saves may have such files too."""


def pattern_of(listing: Listing) -> re.Pattern[str]:
    """The pattern of the names of a save's rank files."""
    return VERL if listing.matching(VERL) else ANY
