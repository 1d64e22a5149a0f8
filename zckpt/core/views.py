"""A tensor's fragments in another order of its dimensions: of its transpose, or of a strided view.

For `naming`. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zckpt.core.fragments import Block, Fragment, runs_in_order


def _start_of(fragment: Fragment) -> int:
    return fragment.start


def transposed(fragments: Sequence[Fragment], rows: int, columns: int, itemsize: int) -> tuple[Fragment, ...]:
    """The fragments of a matrix of `rows` by `columns`, as those of the transposed one: each row becomes a column."""
    if fragments and all(f.count == 1 and f.rows > 1 and f.pitch == columns for f in fragments):
        return _columns_as_rows(fragments, rows, columns)
    turned: list[Fragment] = []
    for run in runs_in_order(fragments, itemsize):
        done = 0
        while done < run.count:
            row, column = divmod(run.start + done, columns)
            held = min(columns - column, run.count - done)
            byte_offset = run.byte_offset + done * run.store_step * itemsize
            several = (held, rows, run.store_step) if held > 1 else (1, 0, 0)
            turned.append(Fragment(run.store, byte_offset, column * rows + row, 1, *several))
            done += held
    return tuple(sorted(turned, key=_start_of))


def _columns_as_rows(fragments: Sequence[Fragment], rows: int, columns: int) -> tuple[Fragment, ...]:
    """As `transposed`, for fragments that are columns, as of a matrix that was transposed before."""
    turned: list[Fragment] = []
    for f in fragments:
        row, column = divmod(f.start, columns)
        pitches = (1, f.rows, 1, f.store_pitch) if f.store_pitch != 1 else (f.rows, 1, 0, 0)
        turned.append(Fragment(f.store, f.byte_offset, column * rows + row, *pitches))
    return tuple(sorted(turned, key=_start_of))


def strided(offset: int, shape: Sequence[int], strides: Sequence[int]) -> list[tuple[Block, int, int]]:
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
