"""Where fragments meet: overlaps of two, gaps among many, parts of them, and their places in a larger tensor.

For catalogs, where tensors must be covered exactly once, and for the router. Pure arithmetic: its cost grows with
the number of fragments, not of rows or elements.

[Note: how two fragments overlap]
Both in normal form (`Fragment.block`), there are five cases.
1. Two single rows overlap in one run.
2. A single row [a, b) cuts rows of `count`, `pitch` apart, into at most three parts: the end of a first row, whole rows,
the start of a last one. Example: [5, 30) of rows of 4, 10 apart from 0: nothing of row 0; rows 1 and 2 whole; row 3
begins at 30.
3. Rows of the same pitch overlap alike in every row: each row of one meets at most two neighbouring rows of the other.
4. If one pitch is n times the other, every n-th row of the narrower one makes a case 3, if n is less than the rows of either.
5. Rows of unlike pitch: each row of the one with fewer rows is a case 2.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from zckpt.base.errors import OTHER_SAVE, InconsistentError
from zckpt.core.fragments import Block, Fragment, Run, fragment_of, runs_in_order


class Overlap(NamedTuple):
    """Elements that two blocks share: `rows` rows of `count`, `pitch` apart in the tensor from `start` on.

    `a` and `b` count the elements before the first of them in each block's store, `a_pitch` and `b_pitch` those from row to row.
    """

    start: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed
    rows: int
    pitch: int
    a: int
    a_pitch: int
    b: int
    b_pitch: int


def overlaps(a: Block, b: Block) -> Iterator[Overlap]:
    """The elements that two blocks share, in a few pieces; see [Note: how two fragments overlap]."""
    if a.rows == 1:
        yield from _row_with(a, b)
    elif b.rows == 1 or b.pitch > a.pitch:
        yield from (_swap_sides(overlap) for overlap in overlaps(b, a))
    elif a.pitch == b.pitch:
        yield from _rows_with_rows(a, b)
    elif a.pitch % b.pitch == 0 and (n := a.pitch // b.pitch) < min(a.rows, b.rows):
        for row in range(n):
            yield from _rows_with_rows(a, b.every(n, row), row * b.store_pitch)
    elif a.rows <= b.rows:
        for row in range(a.rows):
            yield from _row_with(_row(a, row), b, row * a.store_pitch)
    else:
        for row in range(b.rows):
            yield from (_swap_sides(overlap) for overlap in _row_with(_row(b, row), a, row * b.store_pitch))


def _swap_sides(o: Overlap) -> Overlap:
    return Overlap(o.start, o.count, o.rows, o.pitch, o.b, o.b_pitch, o.a, o.a_pitch)


def _row(block: Block, row: int) -> Block:
    return Block(block.start + row * block.pitch, block.count, 1, 0, 0, block.step)


def _row_with(a: Block, b: Block, before: int = 0) -> Iterator[Overlap]:
    """Cases 1 and 2; `a` is a single row, `before` elements into its store."""
    low, high = max(a.start, b.start), min(a.stop, b.stop)
    if low >= high:
        return
    if b.rows == 1:
        yield Overlap(low, high - low, 1, 0, before + (low - a.start) * a.step, 0, (low - b.start) * b.step, 0)
        return
    first = max(0, -((b.start + b.count - 1 - low) // b.pitch))  # the first row that ends after `low`
    last = min(b.rows - 1, (high - 1 - b.start) // b.pitch)  # the last one that starts before `high`
    while first <= last:
        start = b.start + first * b.pitch
        from_, to = max(start, low), min(start + b.count, high)
        whole = 1
        if to - from_ == b.count:  # then all rows up to the last are whole, except perhaps that one
            whole = last - first + (b.start + last * b.pitch + b.count <= high)
        at = before + (from_ - a.start) * a.step, first * b.store_pitch + (from_ - start) * b.step
        yield Overlap(from_, to - from_, whole, b.pitch, at[0], b.pitch * a.step, at[1], b.store_pitch)
        first += whole


def _rows_with_rows(a: Block, b: Block, before: int = 0) -> Iterator[Overlap]:
    """Cases 3 and 4; `b` is `before` elements into its store. Row r of `a` begins `shift` elements into the pitch of row
    r + `behind` of `b`.
    """
    behind, shift = divmod(a.start - b.start, a.pitch)
    for neighbour in (0, 1):
        low = max(shift, neighbour * a.pitch)
        high = min(shift + a.count, neighbour * a.pitch + b.count)
        first = max(0, -(behind + neighbour))
        rows = min(a.rows, b.rows - behind - neighbour) - first
        if low < high and rows > 0:
            in_a, in_b = (low - shift) * a.step, (low - neighbour * a.pitch) * b.step
            yield Overlap(
                *(a.start + first * a.pitch + low - shift, high - low, rows, a.pitch),
                *(first * a.store_pitch + in_a, a.store_pitch),
                *(before + (first + behind + neighbour) * b.store_pitch + in_b, b.store_pitch),
            )


_start_of = attrgetter("start")


def touching(fragments: Sequence[Fragment], start: int, stop: int, *, flat: bool = False) -> Iterator[Fragment]:
    """The fragments, of some that are sorted by their start, that may hold elements of [start, stop).

    `flat`: all are single rows, so that the first is found by bisection.
    """
    at = max(0, bisect_right(fragments, start, key=_start_of) - 1) if flat else 0
    for index in range(at, len(fragments)):
        fragment = fragments[index]
        if fragment.start >= stop:
            return
        if fragment.stop > start and fragment.numel:
            yield fragment


def first_gap(fragments: Sequence[Fragment], numel: int, itemsize: int) -> tuple[int, int] | None:
    """The first range (start, stop) of elements that no fragment holds, or None if all are held exactly once. Raises
    InconsistentError if two fragments hold the same element, or one reaches beyond the tensor.
    """
    if _follow_each_other(fragments, numel):
        return None
    held = sorted((_covered_block(fragment) for fragment in fragments if fragment.numel), key=lambda block: block.start)
    if sum(fragment.numel for fragment in fragments) == numel and (_tile(held, numel) or _are_disjoint(held, numel)):
        return None
    return _walked_gap(fragments, numel, itemsize)


def _follow_each_other(fragments: Sequence[Fragment], numel: int) -> bool:
    """Whether fragments are single rows that cover the tensor in order, as nearly all are."""
    covered = 0
    for fragment in fragments:
        if fragment.rows != 1 or (fragment.start != covered and fragment.count):
            return False
        covered += fragment.count
    return covered == numel


def _covered_block(fragment: Fragment) -> Block:
    """The elements of the tensor that a fragment holds, wherever they are in the store."""
    if fragment.rows == 1 or fragment.pitch == fragment.count:
        return Block(fragment.start, fragment.numel, 1, 0, 0, 1)
    return Block(fragment.start, fragment.count, fragment.rows, fragment.pitch, 0, 1)


def tile(boxes: Iterable[Sequence[tuple[int, int]]], whole: Sequence[int]) -> bool:
    """Whether boxes, which hold as many elements as the whole has, cover it exactly once.

    Each box, and the whole, has 2^n corners. If boxes meet without gap or overlap, an even number of corners meets at
    every point but the whole's own corners. The converse holds too: corners, counted modulo 2, are the mixed difference of
    the number of times that each element is covered, so they determine it modulo 2. So every element of the whole is covered an
    odd number of times, which is once, since the boxes hold no more elements. The cost is one pass.

    Args:
        boxes: (start, stop) per dimension.
        whole: extents.
    """
    corners: set[tuple[int, ...]] = set()
    for box in boxes:
        corners.symmetric_difference_update(itertools.product(*box))
    return corners == set(itertools.product(*((0, extent) for extent in whole)))


def _tile(held: Sequence[Block], numel: int) -> bool:
    """Whether blocks are rectangles in rows of one pitch and cover the tensor."""
    pitch = max((block.pitch for block in held), default=0)
    if not pitch or numel % pitch:
        return False
    boxes: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for block in held:
        row, column = divmod(block.start, pitch)
        if block.rows == 1 and not column and not block.count % pitch:
            boxes.append(((row, row + block.count // pitch), (0, pitch)))
        elif block.pitch in (0, pitch) and column + block.count <= pitch:
            boxes.append(((row, row + block.rows), (column, column + block.count)))
        else:
            return False
    return tile(boxes, (numel // pitch, pitch))


def _are_disjoint(held: Sequence[Block], numel: int) -> bool:
    """Whether no element is held twice or beyond `numel`; blocks are sorted by their start."""
    if any(block.stop > numel for block in held):
        return False
    if all(block.rows == 1 for block in held):
        return all(a.stop <= b.start for a, b in itertools.pairwise(held))
    if are_other_cells(held):
        return True
    for index, block in enumerate(held):
        for other in held[index + 1 :]:
            if other.start >= block.stop:
                break
            if next(overlaps(block, other), None):
                return False
    return True


def are_other_cells(blocks: Sequence[Block]) -> bool:
    """Whether blocks are rectangles of one grid in different columns or rows of it, and so disjoint."""
    pitch = max(block.pitch for block in blocks)
    cells = sorted((block.start % pitch, block.count, block.start // pitch, block.rows) for block in blocks)
    return (
        all(block.pitch == pitch or block.rows == 1 for block in blocks)
        and all(column + count <= pitch for column, count, _, _ in cells)
        and all(a[0] + a[1] <= b[0] or (a[:2] == b[:2] and a[2] + a[3] <= b[2]) for a, b in itertools.pairwise(cells))
    )


def _walked_gap(fragments: Sequence[Fragment], numel: int, itemsize: int) -> tuple[int, int] | None:
    """As `first_gap`, row by row: slow, but its error names the place."""
    covered = 0
    previous: Run | None = None
    for run in runs_in_order(fragments, itemsize):
        if run.start < covered:
            raise InconsistentError(
                "elements are held twice", file=str(run.store),
                found=f"elements {run.start:,}-{min(run.start + run.count, covered) - 1:,}, also in "
                f"{str(previous.store if previous else run.store)!r}",
                expected="each element once", remedy=OTHER_SAVE,
            )  # fmt: skip
        if run.start > covered:
            return covered, run.start
        covered = run.start + run.count
        previous = run
    if covered > numel:
        raise InconsistentError(
            "holds more elements than the shape has", file=str(previous.store if previous else ""),
            found=f"{covered:,} elements", expected=f"{numel:,} elements", remedy=OTHER_SAVE,
        )  # fmt: skip
    return None if covered == numel else (covered, numel)


def clip(fragments: Sequence[Fragment], start: int, stop: int, itemsize: int) -> tuple[Fragment, ...]:
    """The parts of fragments, sorted by their start, with elements [start, stop), renumbered from 0."""
    window = Block(start, stop - start, 1, 0, 0, 1)
    found: list[Fragment] = []
    for fragment in touching(fragments, start, stop):
        if fragment.rows == 1:  # most are, and a checkpoint has very many of them
            low, high = max(fragment.start, start), min(fragment.stop, stop)
            offset = fragment.byte_offset + (low - fragment.start) * itemsize
            found.append(Fragment(fragment.store, offset, low - start, high - low))
            continue
        block = fragment.block()
        found += (_part(fragment, block, o, o.start - start, itemsize) for o in overlaps(window, block))
    return tuple(found)


def split_at(fragments: Sequence[Fragment], bounds: Sequence[int], itemsize: int) -> list[tuple[Fragment, ...]]:
    """The fragments of a tensor's pieces, each renumbered from 0; the time is linear in fragments and pieces.

    Args:
        fragments: sorted by their start.
        bounds: the first element of each piece and, at the end, one past the last one's; ascending.
        itemsize: bytes of one element.
    """
    pieces: list[list[Fragment]] = [[] for _ in bounds[1:]]
    for fragment in fragments:
        if not fragment.numel:
            continue
        start, stop = fragment.start, fragment.stop
        at = max(0, bisect_right(bounds, start) - 1)
        while at < len(pieces) and bounds[at] < stop:
            low, high = bounds[at], bounds[at + 1]
            if low <= start and stop <= high:
                pieces[at].append(_shift_one(fragment, -low))
                break
            block = fragment.block()
            for overlap in overlaps(Block(low, high - low, 1, 0, 0, 1), block):
                pieces[at].append(_part(fragment, block, overlap, overlap.start - low, itemsize))
            at += 1
    return [tuple(piece) for piece in pieces]


def shift(fragments: Sequence[Fragment], by: int) -> tuple[Fragment, ...]:
    """The same fragments in a tensor that has `by` more elements in front."""
    return tuple(fragments) if not by else tuple(_shift_one(fragment, by) for fragment in fragments)


def _shift_one(f: Fragment, by: int) -> Fragment:
    return Fragment(f.store, f.byte_offset, f.start + by, f.count, f.rows, f.pitch, f.store_pitch, f.step) if by else f


def _part(
    fragment: Fragment, block: Block, o: Overlap, start: int, itemsize: int, pitch: int | None = None
) -> Fragment:
    """The part of a fragment that is the `b` side of an overlap, with its first element numbered `start`.

    `pitch`: elements from row to row, where they are others than in the overlap.
    """
    held = Block(start, o.count, o.rows, o.pitch if pitch is None else pitch, o.b_pitch, block.step)
    return fragment_of(fragment.store, fragment.byte_offset + o.b * itemsize, held)


def embed(
    fragments: Sequence[Fragment], shape: Sequence[int], dim: int, offset: int, extent: int, itemsize: int
) -> tuple[Fragment, ...]:
    """Fragments of a slice, as fragments of the whole tensor.

    Args:
        fragments: of the slice.
        shape: of the slice.
        dim: the dimension in which the whole was sliced.
        offset: where the slice begins in that dimension of the whole.
        extent: of the whole in that dimension.
        itemsize: bytes of one element.
    """
    inner, outer = math.prod(shape[dim + 1 :]), math.prod(shape[:dim])
    row = shape[dim] * inner
    return place(fragments, Block(0, row, outer, row, row, 1), offset * inner, extent * inner, itemsize)


def embed_box(
    fragments: Sequence[Fragment], sizes: Sequence[int], offsets: Sequence[int], shape: Sequence[int], itemsize: int
) -> Sequence[Fragment]:
    """Fragments of a box of `sizes` at `offsets`, as fragments of the whole tensor, which has this shape."""
    cut = list(sizes)
    for dim in reversed(range(len(cut))):
        if cut[dim] != shape[dim]:
            fragments = embed(fragments, cut, dim, offsets[dim], shape[dim], itemsize)
            cut[dim] = shape[dim]
    return fragments


def place(fragments: Sequence[Fragment], rows: Block, start: int, pitch: int, itemsize: int) -> tuple[Fragment, ...]:
    """Some rows of one tensor, as fragments of another.

    Args:
        fragments: of the tensor that has the rows.
        rows: the elements to take: `rows` rows of `count`, `pitch` apart from `start` on.
        start: number of the first of them in the other tensor.
        pitch: elements from row to row there.
        itemsize: bytes of one element.
    """
    if not rows.count or not rows.rows:
        return ()
    placed: list[Fragment] = []
    for fragment in fragments:
        block = fragment.block()
        for o in overlaps(rows, block):
            row, column = divmod(o.start - rows.start, rows.pitch) if rows.rows > 1 else (0, o.start - rows.start)
            one_in_each = o.rows > 1 and rows.rows > 1 and o.pitch >= rows.pitch  # otherwise all are in one row
            own = o.pitch // rows.pitch * pitch if one_in_each else o.pitch
            placed.append(_part(fragment, block, o, start + row * pitch + column, itemsize, own))
    return tuple(sorted(placed, key=_start_of))


Pass = Sequence[tuple[Block, int, int]]
"""Rows of one tensor, each with its start and pitch in another; see `place`."""


def reorder_rows(fragments: Sequence[Fragment], rows: Pass, itemsize: int) -> tuple[Fragment, ...]:
    """The fragments of a tensor that is made from rows of another one, with fragments sorted by their start."""
    apart = all(a.stop <= b.start for a, b in itertools.pairwise(fragments))
    placed: list[Fragment] = []
    for block, start, pitch in rows:
        near = list(touching(fragments, block.start, block.stop, flat=True)) if apart else fragments
        placed += place(near, block, start, pitch, itemsize)
    return tuple(sorted(placed, key=_start_of))
