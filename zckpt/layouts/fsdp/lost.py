"""Finds the parts of cut tensors that are in missing rank files: what no other rank has. For pictures of incomplete
saves.

Files are missing so only if `Listing.absent` names them. Which elements a rank held is known, for the others say what they hold;
where they were in its file is not, so they are given places one after the other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from zckpt.base.errors import IncompleteError
from zckpt.containers import TensorRef
from zckpt.core.dtypes import DType
from zckpt.layouts.dcp.metadata import Path
from zckpt.layouts.dcp.state import join_path
from zckpt.layouts.fsdp import pattern_of
from zckpt.layouts.save.listing import Listing

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offsets and sizes of a part of a tensor."""

_MOST_CELLS = 1 << 14


def lost_ranks(listing: Listing, pattern: re.Pattern[str], kind: str) -> dict[int, str]:
    """Rank -> name of its file of a kind, of those that are known to be missing."""
    matches = {name: match for name in listing.absent if (match := pattern.fullmatch(name)) and match["kind"] == kind}
    return dict(sorted((int(match["dp"]), name) for name, match in matches.items()))


def gaps(size: Shape, boxes: Sequence[Box], *, of_several: bool = True) -> list[Box]:
    """The boxes that others leave of a tensor, row-major; if they are of several ranks, none is longer than the longest
    of `boxes`. Raises IncompleteError if it is in too many pieces.
    """
    cuts: list[list[int]] = []
    for dim, extent in enumerate(size):
        longest = max((sizes[dim] for _, sizes in boxes), default=extent) if of_several else extent
        marks = sorted(
            {0, extent, *(at for offsets, sizes in boxes for at in (offsets[dim], offsets[dim] + sizes[dim]))}
        )
        fine = [at for low, high in itertools.pairwise(marks) for at in range(low, high, max(1, longest))]
        cuts.append([*fine, extent])
    if math.prod(len(marks) for marks in cuts) > _MOST_CELLS:
        raise IncompleteError(
            "the parts of a tensor are too many to say which are missing",
            found=f"{len(boxes):,} parts in {len(size)} dimensions",
            remedy="Copy the missing files here, or use another save.",
        )
    taken = {
        cell
        for offsets, sizes in boxes
        for cell in itertools.product(*(_within(m, o, o + s) for m, o, s in zip(cuts, offsets, sizes, strict=True)))
    }
    cells = itertools.product(*(itertools.pairwise(marks) for marks in cuts))
    return [
        (tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        for cell in cells
        if tuple(low for low, _ in cell) not in taken
    ]


def _within(marks: Sequence[int], low: int, high: int) -> list[int]:
    return [mark for mark in marks if low <= mark < high]


class LostFiles:
    """The missing files of one kind; they take what is left of one tensor after another.

    Args:
        listing: of the save.
        names: rank -> file.
    """

    def __init__(self, listing: Listing, names: Mapping[int, str]) -> None:
        self.ranks = list(names)
        self._listing = listing
        self._names = names
        self._ends = dict.fromkeys(names, 0)

    def parts(self, name: str, size: Shape, dtype: DType, boxes: Sequence[Box]) -> Iterator[tuple[Box, int, TensorRef]]:
        """(part, rank, its place) of what the boxes leave; one rank takes all, several take one part each in their
        order. Raises IncompleteError if there are more parts than ranks.
        """
        left = gaps(size, boxes, of_several=len(self.ranks) > 1)
        if len(self.ranks) > 1 and len(left) > len(self.ranks):
            raise IncompleteError(
                f"it is not known which rank held which part of {name!r}",
                found=f"{len(left):,} parts and {len(self.ranks)} ranks",
                remedy="Copy the missing files here, or use another save.",
            )
        for box, rank in zip(left, itertools.cycle(self.ranks)):
            ref = self._listing.absent_tensor(self._names[rank], self._ends[rank], dtype, box[1])
            self._ends[rank] += ref.nbytes
            yield box, rank, ref


class Gathered(Protocol):
    """A tensor while its parts are collected: its size, and for each part where each rank that has it keeps it."""

    dtype: DType
    size: Shape
    is_cut: bool
    boxes: dict[Box, list[tuple[int, TensorRef]]]


def take_lost(listing: Listing, tensors: Mapping[Path, Gathered], optimizer: str) -> set[int]:
    """Adds to tensors what must be in the files that are known to be missing.

    Args:
        listing: of the save.
        tensors: by path; those under the key `optimizer` are in files of their own.
        optimizer: that key.

    Returns:
        The ranks of these files; errors as in `LostFiles.parts`.
    """
    if not listing.absent:
        return set()
    kinds = {kind: lost_ranks(listing, pattern_of(listing), kind) for kind in ("model", "optim")}
    lost = {kind: LostFiles(listing, names) for kind, names in kinds.items() if names}
    for path, held in tensors.items():
        files = lost.get("optim" if path[0] == optimizer else "model")
        if files is not None and held.is_cut:
            for box, rank, ref in files.parts(join_path(path), held.size, held.dtype, list(held.boxes)):
                held.boxes[box] = [(rank, ref)]
    return {rank for files in lost.values() for rank in files.ranks}
