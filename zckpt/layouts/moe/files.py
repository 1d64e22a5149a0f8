"""Whether files are of a mixture of experts: by their names, or by what a model file records.

For `FAMILY` and `read`.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    """Whether a model file records experts; in a pipeline, in its own stage."""
    counts = root.get("num_experts") if isinstance(root, Mapping) else None
    return isinstance(counts, list) and bool(counts)
