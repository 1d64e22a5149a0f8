"""A tensor's fragments in another order of its dimensions: of its transpose, or of a strided view.

For `naming`. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from zckpt.core.fragments import Block, Fragment, fragment_of


def _start_of(fragment: Fragment) -> int:
    return fragment.start


def transpose_fragments(fragments: Sequence[Fragment], rows: int, columns: int, itemsize: int) -> tuple[Fragment, ...]:
    """The fragments of a matrix of `rows` by `columns`, as those of the transposed one: each box in rows becomes one box."""
    turned: list[Fragment] = []
    for f in fragments:
        if not f.numel:
            continue
        for block, before in _boxes(f.block(), columns):
            row, column = divmod(block.start, columns)
            start, byte_offset = column * rows + row, f.byte_offset + before * itemsize
            height, width, down = block.rows, block.count, block.pitch // columns
            if height == 1 or down == 1:
                box = Block(start, height, width, rows, block.step, block.store_pitch)
                turned.append(fragment_of(f.store, byte_offset, box))
                continue
            for n in range(width):  # rows that are not neighbours do not become runs
                at = byte_offset + n * block.step * itemsize
                column_of = Block(start + n * rows, 1, height, down, block.store_pitch, 1)
                turned.append(fragment_of(f.store, at, column_of))
    return tuple(sorted(turned, key=_start_of))


def _boxes(block: Block, columns: int) -> Iterator[tuple[Block, int]]:
    """A block in boxes with rows that are each in one row of the matrix, and how many elements of the store are before each."""
    start, count, rows, pitch, store_pitch, step = block
    if rows > 1 and pitch % columns == 0 and start % columns + count <= columns:
        yield block, 0
        return
    for row in range(rows):
        at, left, before = start + row * pitch, count, row * store_pitch
        while left:
            whole = left // columns if at % columns == 0 else 0
            taken = whole * columns or min(left, columns - at % columns)
            yield Block(at, columns if whole else taken, max(whole, 1), columns, columns * step, step), before
            at, left, before = at + taken, left - taken, before + taken * step


def rows_of_strided(offset: int, shape: Sequence[int], strides: Sequence[int]) -> list[tuple[Block, int, int]]:
    """A strided view of a dense tensor, as rows of that tensor, as long as possible.

    Args:
        offset: the view's first element in the tensor.
        shape: of the view, which is itself numbered row-major.
        strides: elements of the tensor from one index to the next, for each dimension.
    """
    own = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if 0 in shape:
        return []
    dims = sorted((step, extent, to) for extent, step, to in zip(shape, strides, own, strict=True) if extent > 1)
    count = 1
    while dims and dims[0][0] == count == dims[0][2]:
        count *= dims.pop(0)[1]
    step, rows, to = dims.pop(0) if dims else (count, 1, count)
    places = [(offset, 0)]
    for outer, extent, outer_to in dims:
        places = [(of + n * outer, at + n * outer_to) for of, at in places for n in range(extent)]
    return [(Block(of, count, rows, step, step, 1), at, to) for of, at in places]
