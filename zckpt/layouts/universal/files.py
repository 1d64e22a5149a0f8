"""Which files make a universal checkpoint, by their names.

For `FAMILY`, `read` and `write`.
"""

from __future__ import annotations

from zckpt.layouts.save.listing import UNIVERSAL, Listing

HOME = f"{UNIVERSAL}/"
MASTER = "fp32"


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not."""
    if any(name.startswith(HOME) and name.endswith(f"/{MASTER}.pt") for name in listing.files):
        return None
    return f"no {HOME}<parameter>/{MASTER}.pt"


def is_state(name: str) -> bool:
    """Whether a file holds a state of one parameter, or its step: all in its directory but the fp32 weights."""
    directory, _, file = name.removeprefix(HOME).rpartition("/")
    return name.startswith(HOME) and bool(directory) and file.endswith(".pt") and file != f"{MASTER}.pt"
