"""Models split over tensor- and pipeline-parallel ranks: the files of each rank are a save of slices."""

from dataclasses import replace

from zckpt.layouts import zero
from zckpt.layouts.save.family import later
from zckpt.layouts.save.listing import LAYER_NAME, MODEL_NAME, Listing


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not."""
    if listing.matching(LAYER_NAME) or len(listing.model_parallel_ranks()) > 1:
        return None
    first = next(iter((*listing.matching(MODEL_NAME), *listing.shards("model").values())), None)
    if first is not None and listing.numbers(first, "mp_world_size").get("mp_world_size", 1) > 1:
        return None  # the others are missing
    return "files of one model-parallel rank only"


FAMILY = replace(
    zero.FAMILY,
    name="model parallel",
    match=match,
    read=later("parallel.read", "read"),
    second=later("parallel.second", "find_again"),
    read_training=later("parallel.read", "read_training"),
)
