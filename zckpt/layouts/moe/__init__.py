"""Mixtures of experts: DeepSpeed's MoE layers and AutoEP."""

from dataclasses import replace

from zckpt.containers import value_at
from zckpt.layouts import zero
from zckpt.layouts.save.family import later
from zckpt.layouts.save.listing import EXPERT_NAME, EXPERT_OPTIMIZER_NAME, MODEL_NAME, Listing


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not."""
    if listing.matching(EXPERT_NAME) or listing.matching(EXPERT_OPTIMIZER_NAME):
        return None
    names = (*listing.matching(MODEL_NAME), *listing.shards("model").values())
    listing.open_alike(names)
    # where one does, files of experts are missing
    return None if any(holds_experts(listing.open(name).root) for name in names) else "no experts"


def holds_experts(root: object) -> bool:
    """Whether a model file records experts; in a pipeline, whether its own stage has any."""
    counts = value_at(root, "num_experts")
    return isinstance(counts, list) and bool(counts)


FAMILY = replace(
    zero.FAMILY,
    name="mixture of experts",
    match=match,
    read=later("moe.read", "read"),
    second=later("moe.second", "find_again"),
    read_training=later("moe.read", "read_training"),
)
