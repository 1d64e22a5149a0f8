"""Sizes as a person writes them, such as `12GB`, for options and arguments of every room; and what fits together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from zckpt.base.errors import UsageError


def to_bytes(size: int | str) -> int:
    """A size such as "12GB" (decimal, as the hub counts) or "8GiB", as a number of bytes. Raises UsageError if `size`
    is of another form.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(size), re.IGNORECASE)
    if not found:
        remedy = "Use one of these forms."
        expected = "a number of bytes, or a form such as 12GB"
        raise UsageError(f"{size!r} is not a size", expected=expected, remedy=remedy)
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))


def file_bytes(size: int | str, option: str) -> int:
    """The largest size of a file, in bytes, at least one; `option` is the name of the option that says it, for the
    error. Raises UsageError for a smaller one,
    or a text of another form.
    """
    nbytes = to_bytes(size)
    if nbytes < 1:
        raise UsageError(
            f"{option} is too small",
            found=f"{size}",
            expected="at least 1 byte, such as 5GB",
            remedy="Give a larger size.",
        )
    return nbytes


Sized = TypeVar("Sized")


def group_by_size(things: Iterable[tuple[Sized, int]], most: int) -> list[list[Sized]]:
    """The things, each given with its size, in groups of at most `most` together or of one thing, in their order."""
    groups: list[list[Sized]] = []
    room = 0
    for thing, size in things:
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(thing)
        room -= size
    return groups
