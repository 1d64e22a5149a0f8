"""Tensors cut into their parts, and parts put together: the same fragments, renumbered, with their replicas. Nothing is copied.

What is added to elements (`shifted_by`) is computed while they are moved.

For `decompose` and `compose`. [Note: groups of rows] Several parts lie in one tensor as `groups` groups of rows, each with some
rows of every part; one group is one part after the other, and groups with a row of each are rows in turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt.base.errors import InconsistentError
from zckpt.core.catalog import Replica, TensorEntry, replace_name
from zckpt.core.dtypes import F32, DType
from zckpt.core.fragments import Block, ComputedStore, Fragment
from zckpt.core.overlaps import place, reorder_rows, shift, split_at
from zckpt.core.recipes import Formula, derive_entry
from zckpt.core.views import transpose_fragments

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Tools

Shape = tuple[int, ...]
Fragments = tuple[Fragment, ...]
Renumber = Callable[[Fragments, int], Fragments]
"""A function from (fragments, bytes of an element) to renumbered fragments."""


def move_rows(entry: TensorEntry, name: str, shape: Shape, move: Renumber) -> TensorEntry:
    """A tensor of another tensor's elements, with its replicas."""
    replicas = tuple(replace(r, fragments=move(r.fragments, r.dtype.itemsize)) for r in entry.replicas)
    return TensorEntry(name, shape, entry.dtype, entry.role, move(entry.fragments, entry.dtype.itemsize), replicas)


def split_rows(entry: TensorEntry, pieces: Sequence[tuple[str, Shape]]) -> list[TensorEntry]:
    """A tensor's pieces, which lie end to end: their names and shapes are given."""
    if len(pieces) == 1 and pieces[0][1] == entry.shape:
        return [replace_name(entry, pieces[0][0])]
    bounds = [0, *itertools.accumulate(math.prod(shape) for _, shape in pieces)]
    own = split_at(entry.fragments, bounds, entry.dtype.itemsize)
    if not entry.replicas:
        return [
            TensorEntry(name, shape, entry.dtype, entry.role, fragments)
            for (name, shape), fragments in zip(pieces, own, strict=True)
        ]
    copies = [split_at(replica.fragments, bounds, replica.dtype.itemsize) for replica in entry.replicas]
    return [
        TensorEntry(
            name, shape, entry.dtype, entry.role, own[at],
            tuple(replace(r, fragments=copy[at]) for r, copy in zip(entry.replicas, copies, strict=True)),
        )
        for at, (name, shape) in enumerate(pieces)
    ]  # fmt: skip


def rows_of(entry: TensorEntry, name: str, groups: int, widths: Sequence[int], number: int) -> TensorEntry:
    """The part with this number of a tensor that holds several, which have so many rows (`widths`) in a group; see [Note:
    groups of rows].
    """
    width = math.prod(entry.shape[1:])
    own, pitch = widths[number] * width, sum(widths) * width
    block = Block(sum(widths[:number]) * width, own, groups, pitch, pitch, 1)
    shape = (widths[number] * groups, *entry.shape[1:])
    return move_rows(
        entry, name, shape, lambda fragments, itemsize: reorder_rows(fragments, [(block, 0, own)], itemsize)
    )


def group_rows(name: str, parts: Sequence[TensorEntry], groups: int) -> TensorEntry:
    """Several parts as one tensor; see [Note: groups of rows]. Raises InconsistentError if they have not all one dtype,
    one row's shape, and rows for that many groups.
    """
    first = parts[0]
    if len(parts) == 1:
        return replace_name(first, name)
    rest = first.shape[1:]
    for part in parts[1:]:
        if part.dtype != first.dtype or part.shape[1:] != rest or not part.shape:
            raise InconsistentError(
                f"parts of {name!r} do not fit each other", found=f"{first.name!r} {first.dtype} {list(first.shape)} and "
                f"{part.name!r} {part.dtype} {list(part.shape)}", expected="one dtype, and rows of one length",
            )  # fmt: skip
    if any(part.shape[0] % groups for part in parts):
        raise InconsistentError(
            f"rows of {first.name!r} and others do not fit into {name!r}",
            found=" and ".join(f"{part.shape[0]:,}" for part in parts) + " rows", expected=f"a multiple of {groups:,} each",
        )  # fmt: skip
    width = math.prod(rest)
    inside = [part.shape[0] // groups * width for part in parts]
    pitch = sum(inside)
    starts = [0, *itertools.accumulate(inside)]

    def together(held: Sequence[Fragments], itemsize: int) -> Fragments:
        if groups == 1:
            return tuple(f for own, at in zip(held, starts) for f in shift(own, at))
        passes = [Block(0, own, groups, own, own, 1) for own in inside]
        placed = (f for own, block, at in zip(held, passes, starts) for f in place(own, block, at, pitch, itemsize))
        return tuple(sorted(placed, key=lambda fragment: fragment.start))

    return _combine(name, (sum(part.shape[0] for part in parts), *rest), parts, together)


def stack_rows(name: str, items: Sequence[TensorEntry], lead: Shape) -> TensorEntry:
    """Equal tensors stacked into one, with leading axes. Raises InconsistentError if they have not all one dtype and
    shape.
    """
    first = items[0]
    numel = first.numel
    for item in items:
        if item.dtype != first.dtype or item.shape != first.shape:
            raise InconsistentError(
                f"parts of {name!r} do not fit each other", found=f"{first.name!r} {first.dtype} {list(first.shape)} and "
                f"{item.name!r} {item.dtype} {list(item.shape)}", expected="one dtype and shape",
            )  # fmt: skip

    def together(held: Sequence[Fragments], itemsize: int) -> Fragments:
        return tuple(f for number, own in enumerate(held) for f in shift(own, number * numel))

    return _combine(name, (*lead, *first.shape), items, together)


def _combine(
    name: str, shape: Shape, parts: Sequence[TensorEntry], together: Callable[[Sequence[Fragments], int], Fragments]
) -> TensorEntry:
    """A tensor of several parts, with the replicas that all of them have."""
    first = parts[0]
    role = first.role if all(part.role == first.role for part in parts) else "parameter"
    replicas: list[Replica] = []
    for number in range(min(len(part.replicas) for part in parts)):
        copies = [part.replicas[number] for part in parts]
        one = copies[0]
        if all((copy.dtype, copy.rank) == (one.dtype, one.rank) for copy in copies):
            fragments = together([copy.fragments for copy in copies], one.dtype.itemsize)
            replicas.append(Replica(one.dtype, fragments, one.rank, all(copy.whole for copy in copies)))
    fragments = together([part.fragments for part in parts], first.dtype.itemsize)
    return TensorEntry(name, shape, first.dtype, role, fragments, tuple(replicas))


def transpose(entry: TensorEntry) -> TensorEntry:
    """The transposed matrix; any other tensor as it is."""
    if len(entry.shape) != 2:
        return entry
    rows, columns = entry.shape
    return move_rows(
        entry, entry.name, (columns, rows), lambda fragments, size: transpose_fragments(fragments, rows, columns, size)
    )


def swap_head_halves(entry: TensorEntry, heads: int, *, apart: bool) -> TensorEntry:
    """A part with rows of heads that are neighbouring pairs, with them in two halves (`apart`); or the other way. Raises
    InconsistentError if heads have an odd number of rows, or the rows are not a multiple of them.
    """
    rows, width = entry.shape[0], math.prod(entry.shape[1:])
    if rows % (2 * heads):
        raise InconsistentError(
            f"the rows of {entry.name!r} are not pairs in heads", found=f"{rows:,} rows",
            expected=f"an even number for each of {heads:,} heads",
        )  # fmt: skip
    half = rows // heads // 2
    order: list[tuple[Block, int, int]] = []
    for head, second in itertools.product(range(heads), (0, 1)):
        halves, pairs = (head * 2 + second) * half * width, (head * half * 2 + second) * width
        if apart:
            order.append((Block(pairs, width, half, 2 * width, 2 * width, 1), halves, width))
        else:
            order.append((Block(halves, width, half, width, width, 1), pairs, 2 * width))
    return move_rows(entry, entry.name, entry.shape, lambda fragments, size: reorder_rows(fragments, order, size))


def with_rows(entry: TensorEntry, rows: int) -> TensorEntry:
    """The tensor with this number of rows: its first rows, or all of them and zeros."""
    if rows == entry.shape[0]:
        return entry
    rest = entry.shape[1:]
    if rows < entry.shape[0]:
        return split_rows(entry, [(entry.name, (rows, *rest)), ("", (entry.shape[0] - rows, *rest))])[0]
    numel = entry.numel
    more = rows * math.prod(rest) - numel

    def padded(fragments: Fragments, dtype: DType) -> Fragments:
        nbytes = more * dtype.itemsize
        return (*fragments, Fragment(ComputedStore(nbytes, lambda: bytearray(nbytes), ()), 0, numel, more))

    replicas = tuple(replace(r, fragments=padded(r.fragments, r.dtype)) for r in entry.replicas)
    fragments = padded(entry.fragments, entry.dtype)
    return TensorEntry(entry.name, (rows, *rest), entry.dtype, entry.role, fragments, replicas)


def shifted_by(entry: TensorEntry, amount: float, times: float = 1, over: float = 1) -> TensorEntry:
    """The tensor as fp32, each element times a number, over one, with one added to it; without its replicas."""

    def compute(start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        found = tools.read_floats(entry, start, stop) * np.float32(times)
        return (found if over == 1 else found / np.float32(over)) + np.float32(amount)

    facts = ("shifted", amount, times, over)
    recipe = Formula((entry,), facts, compute, reads=lambda start, stop: [(entry, start, stop)])
    return derive_entry(entry.name, entry.shape, F32, recipe, entry.role)
