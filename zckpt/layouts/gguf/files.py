"""Which files are GGUF, by their names, and under which name a catalog has their metadata.

For `FAMILY`, `read`, and what is made from the metadata.
"""

from __future__ import annotations

from zckpt.base.patterns import compile_late
from zckpt.layouts.plain import FAMILY as PLAIN
from zckpt.layouts.save.listing import Listing

NAME = compile_late(r"(?P<save>.+?)(?:-(?P<part>\d{5})-of-(?P<parts>\d{5}))?\.gguf")

METADATA = "gguf"
"""The entry of a catalog's extras with the metadata: key -> number, text or list; None for long arrays."""


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not."""
    names = listing.matching(NAME)
    if not names:
        return "no .gguf file"
    if len(listing.files) > len(names) and any(PLAIN.owns(name) for name in listing.files):
        return "plain weights are there too"
    return None
