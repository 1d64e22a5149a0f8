"""Rank files of FSDP: each rank's part of a model, as `torch.save` wrote its state dict of DTensors or ShardedTensors."""

from dataclasses import replace

from zckpt.base.patterns import compile_late
from zckpt.layouts.fsdp.files import ANY, NONE, VERL
from zckpt.layouts.save.family import Family, FileKind, later, where_there

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
)

ANY_NAME = replace(FAMILY, files=(FileKind("{kind}", ANY),), fallback=True)
"""The same under other names, such as `rank0.pt`. A directory of other saves may have such files too."""
