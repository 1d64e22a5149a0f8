"""DeepSpeed's own files: ZeRO-1, -2, -3, the bf16 optimizer, and runs without ZeRO; read and written."""

from zckpt.layouts.save.family import Family, FileKind, later
from zckpt.layouts.save.listing import (
    EXPERT_NAME,
    EXPERT_OPTIMIZER_NAME,
    LAYER_NAME,
    MODEL_NAME,
    RANK_FILE,
    SHARD_NAME,
    SWAPPED,
)

FAMILY = Family(
    name="DeepSpeed",
    files=(  # of models that are split over ranks and of experts too: their families differ in nothing else
        FileKind("{kind}", SHARD_NAME),
        FileKind("model", MODEL_NAME),
        FileKind("layer", LAYER_NAME, of_rank=False),
        FileKind("expert", EXPERT_NAME, of_rank=False),
        FileKind("expert optim", EXPERT_OPTIMIZER_NAME, of_rank=False),
    ),
    match=later("zero.read", "match"),
    read=later("zero.read", "read"),
    second=later("zero.second", "find_again"),
    read_training=later("zero.read", "read_training"),
    raw_directory=SWAPPED,
    tagged=True,
    further=(RANK_FILE,),
    facts=later("save.origins", "rank_facts"),
)
