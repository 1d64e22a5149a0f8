"""Saves that lie in one directory, told from each other by the names of their files: `checkpoint_last-shard0.pt`,
`checkpoint_2-shard0.pt`.

For `places`. Which part of a name it is says the family (`Family.apart`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from zckpt.base.errors import IncompleteError
from zckpt.base.words import examples
from zckpt.layouts.save.family import Family
from zckpt.layouts.save.listing import Listing, natural
from zckpt.storage.location import Location


def saves_in(names: Iterable[str], family: Family) -> list[str]:
    """The saves of a family among files of these names, in natural order."""
    return sorted({save for name in names if (save := family.save_of(name)) is not None}, key=natural)


def last_of(saves: list[str], directory: Location) -> str:
    """The save, among several in one directory, that is called the last or has the greatest number. Raises
    IncompleteError if their names do not say which is the last.
    """
    called = [save for save in saves if save.endswith("last")]
    if called or len({re.sub(r"\d+", "#", save) for save in saves}) == 1:
        return (called or saves)[-1]
    raise IncompleteError(
        "holds several saves, and no name says which is the last", file=directory, found=examples(saves),
        remedy=f"Choose one: --tag {saves[-1]}.",
    )  # fmt: skip


def one_of(listing: Listing, family: Family, save: str) -> Listing:
    """The files of one save, with those that belong to no save."""
    files = {name: file for name, file in listing.files.items() if family.save_of(name) in (save, None)}
    return replace(listing, files=files)


def is_alone(listing: Listing, family: Family) -> bool:
    """Whether a save is one file that is the whole checkpoint, whatever lies beside it; see `Family.alone`."""
    return family.alone and sum(family.save_of(name) is not None for name in listing.files) == 1
