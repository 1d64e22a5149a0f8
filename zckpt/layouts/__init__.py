"""What a family of files means: the list of layouts, and the choice among them.

A layout is a module with `match(listing)`, which says None or why not, and `read(listing)`, which gives a catalog.
"""

from __future__ import annotations

from typing import Protocol

from zckpt.catalog import Catalog
from zckpt.errors import NotACheckpointError
from zckpt.layouts import huggingface, unsharded, zero3, zero12
from zckpt.layouts.listing import Listing


class Layout(Protocol):
    """What a module of this package offers."""

    def match(self, listing: Listing) -> str | None:
        """None when it reads these files; otherwise why not."""

    def read(self, listing: Listing, *, allow_unknown: bool = False) -> Catalog:
        """The catalog of these files."""


LAYOUTS: dict[str, Layout] = {
    "ZeRO-3": zero3,
    "ZeRO-1/2": zero12,
    "DeepSpeed without ZeRO": unsharded,
    "plain weights": huggingface,
}


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a save, by the first layout that knows its files.

    Raises:
        NotACheckpointError: none does; lists each layout's refusal.
    """
    refusals: list[str] = []
    for name, layout in LAYOUTS.items():
        refusal = layout.match(listing)
        if refusal is None:
            return layout.read(listing, allow_unknown=allow_unknown)
        refusals.append(f"{name}: {refusal}")
    raise NotACheckpointError(
        "nothing that zckpt can read",
        file=listing.directory,
        found="; ".join(refusals),
        remedy="Give the directory that holds 'latest', a tag directory such as global_step500, or a weights file.",
    )
