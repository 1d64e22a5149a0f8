"""Which files are of the package torch_checkpointing, by their names.

For `FAMILY` and `read`.
"""

from __future__ import annotations

from zckpt.base.patterns import compile_late
from zckpt.layouts.save.listing import Listing

METADATA = "metadata.pkl"
ITEM = compile_late(r"(?P<item>[\w-]+?)_(?P<dp>\d+)\.pt")
NO_ITEM = "no <item>_<rank>.pt with DTensors"


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not."""
    return None if METADATA in listing.files else f"no {METADATA}"
