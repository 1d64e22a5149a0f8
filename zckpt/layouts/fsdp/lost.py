"""Finds the parts of cut tensors that are in missing rank files: what no other rank has. For pictures of incomplete
saves.

Files are missing so only if `Listing.absent` names them. Which elements a rank held is known, for the others say what they hold;
where they were in its file is not, so they are given places one after the other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError
from zckpt.containers import TensorRef
from zckpt.core.dtypes import DType
from zckpt.core.fragments import Box
from zckpt.layouts.dcp.metadata import Path
from zckpt.layouts.dcp.state import join_path
from zckpt.layouts.fsdp import pattern_of
from zckpt.layouts.save.listing import Listing

Shape = tuple[int, ...]

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
        Box(first, tuple(high - low for low, high in cell))
        for cell in cells
        if (first := tuple(low for low, _ in cell)) not in taken
    ]


def _within(marks: Sequence[int], low: int, high: int) -> list[int]:
    return [mark for mark in marks if low <= mark < high]


@dataclass(slots=True)
class GatheredTensor:
    """A tensor, while the ranks' parts of it are collected.

    Attributes:
        dtype: of its elements.
        size: of the whole.
        is_cut: whether it says which part a rank has.
        boxes: a part -> where each rank that has it keeps it.
        view: its own shape, where it was flattened before it was cut.
    """

    dtype: DType
    size: Shape
    is_cut: bool
    boxes: dict[Box, list[tuple[int, TensorRef]]] = field(default_factory=dict[Box, "list[tuple[int, TensorRef]]"])
    view: Shape | None = None

    @property
    def shape(self) -> Shape:
        """Its own shape."""
        return self.size if self.view is None else self.view


def take_lost(listing: Listing, tensors: Mapping[Path, GatheredTensor], optimizer: str) -> set[int]:
    """Adds to tensors what must be in the files that are known to be missing: one rank takes all that others leave of a tensor,
    several take a part each, in their order.

    Args:
        listing: of the save.
        tensors: by path; those under the key `optimizer` are in files of their own.
        optimizer: that key.

    Returns:
        The ranks of these files.

    Raises:
        IncompleteError: there are more parts than ranks.
    """
    if not listing.absent:
        return set()
    lost = {kind: lost_ranks(listing, pattern_of(listing), kind) for kind in ("model", "optim")}
    ends: Counter[str] = Counter()
    for path, held in tensors.items():
        names = lost["optim" if path[0] == optimizer else "model"]
        if not names or not held.is_cut:
            continue
        left = gaps(held.size, list(held.boxes), of_several=len(names) > 1)
        if len(left) > len(names) > 1:
            raise IncompleteError(
                f"it is not known which rank held which part of {join_path(path)!r}",
                found=f"{len(left):,} parts and {len(names)} ranks",
                remedy="Copy the missing files here, or use another save.",
            )
        for box, (rank, file) in zip(left, itertools.cycle(names.items())):
            ref = listing.absent_tensor(file, ends[file], held.dtype, box.sizes)
            ends[file] += ref.nbytes
            held.boxes[box] = [(rank, ref)]
    return {rank for names in lost.values() for rank in names}
