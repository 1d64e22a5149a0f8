"""Fragments and routes against brute force: element by element."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zckpt.catalog import TensorEntry
from zckpt.dtypes import BF16, F32
from zckpt.errors import CorruptError, IncompleteError, InconsistentError
from zckpt.fragments import FileStore, Fragment, clip, first_gap
from zckpt.plan import Move, route

Place = tuple[str, int]
SIZE = 1 << 20


def places(fragments: Iterable[Fragment], itemsize: int) -> dict[int, Place]:
    """Element number -> (store, byte offset), by the definition in [Note: the geometry of a fragment]."""
    return {
        f.start + row * f.pitch + k: (str(f.store), f.byte_offset + (row * f.store_pitch + k) * itemsize)
        for f in fragments
        for row in range(f.rows)
        for k in range(f.count)
    }


@st.composite
def ways(draw: st.DrawFn, shape: tuple[int, int], label: str) -> tuple[Fragment, ...]:
    """A way to hold a matrix: whole, cut flat, cut into boxes on either dim, transposed, or flat cuts of boxes."""
    rows, columns = shape
    numel = rows * columns
    kind = draw(st.sampled_from(["whole", "flat", "rows", "columns", "transposed"]))
    store = [FileStore(f"{label}{i}", SIZE) for i in range(numel + 1)]
    cut = lambda n: sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))})  # noqa: E731
    if kind == "whole":
        return (Fragment(store[0], 64, 0, numel),)
    if kind == "flat":
        return tuple(Fragment(store[i], 8 * i, a, b - a) for i, (a, b) in enumerate(itertools.pairwise(cut(numel))))
    if kind == "rows":
        parts = enumerate(itertools.pairwise(cut(rows)))
        return tuple(Fragment(store[i], 0, a * columns, (b - a) * columns) for i, (a, b) in parts)
    if kind == "columns":
        parts = enumerate(itertools.pairwise(cut(columns)))
        return tuple(Fragment(store[i], 16, a, b - a, rows, columns, b - a) for i, (a, b) in parts)
    return tuple(Fragment(store[0], 4 * r, r * columns, 1, columns, 1, rows) for r in range(rows))


matrices = st.tuples(st.integers(1, 6), st.integers(1, 6))


def carried(moves: Iterable[Move], src_size: int, dst_size: int) -> dict[Place, Place]:
    return {
        (str(m.dst), m.dst_offset + r * m.dst_pitch + k * m.dst_step * dst_size): (
            str(m.src), m.src_offset + r * m.src_pitch + k * m.src_step * src_size,
        )
        for m in moves for r in range(m.rows) for k in range(m.count)
    }  # fmt: skip


@settings(max_examples=300)
@given(data=st.data(), shape=matrices)
def test_every_element_goes_where_it_belongs(data: st.DataObject, shape: tuple[int, int]) -> None:
    source = TensorEntry("x", shape, F32, "parameter", data.draw(ways(shape, "s")))
    target = TensorEntry("x", shape, BF16, "parameter", data.draw(ways(shape, "d")))
    moves = list(route(source, target, 7))
    froms, tos = places(source.fragments, 4), places(target.fragments, 2)
    assert carried(moves, 4, 2) == {tos[k]: froms[k] for k in tos}
    assert sum(m.count * m.rows for m in moves) == source.numel
    assert {m.tensor for m in moves} <= {7}


def test_boxes_of_equal_pitch_are_one_move() -> None:
    whole = (Fragment(FileStore("a", SIZE), 0, 0, 1000 * 64),)
    box = tuple(Fragment(FileStore(f"b{i}", SIZE), 0, 16 * i, 16, 1000, 64, 16) for i in range(4))
    one, four = (TensorEntry("x", (1000, 64), F32, "parameter", f) for f in (whole, box))
    assert len(list(route(four, one))) == 4000  # the destination's order: row by row from four files
    assert len(list(route(TensorEntry("y", (1000, 16), F32, "parameter", (
        Fragment(box[0].store, 0, 0, 16, 1000, 16, 64),)), TensorEntry("y", (1000, 16), F32, "parameter", (
            Fragment(whole[0].store, 0, 0, 16000),))))) == 1  # fmt: skip


@given(data=st.data(), shape=matrices)
def test_gaps_and_overlaps_are_found(data: st.DataObject, shape: tuple[int, int]) -> None:
    fragments = [f for f in data.draw(ways(shape, "s")) if f.numel]
    numel = shape[0] * shape[1]
    assert first_gap(fragments, numel, 4) is None
    victim = data.draw(st.integers(0, len(fragments) - 1))
    left = fragments[:victim] + fragments[victim + 1 :]
    gap = first_gap(left, numel, 4)
    held = places(left, 4)
    assert gap is not None and gap[0] == min(set(range(numel)) - set(held))
    with pytest.raises(InconsistentError):
        first_gap([*fragments, fragments[victim]], numel, 4)


@given(data=st.data(), shape=matrices)
def test_clip(data: st.DataObject, shape: tuple[int, int]) -> None:
    fragments = data.draw(ways(shape, "s"))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, shape[0] * shape[1]), st.integers(0, shape[0] * shape[1]))))
    everything = places(fragments, 4)
    assert places(clip(fragments, start, stop, 4), 4) == {k - start: everything[k] for k in range(start, stop)}


def test_an_entry_is_checked_at_birth() -> None:
    store = FileStore("f", 100)
    with pytest.raises(IncompleteError) as incomplete:
        TensorEntry("x", (10,), F32, "parameter", (Fragment(store, 0, 0, 4), Fragment(store, 16, 6, 4)))
    assert incomplete.value.found.startswith("4-5 of 10")
    with pytest.raises(CorruptError, match="beyond the end"):
        TensorEntry("x", (26,), F32, "parameter", (Fragment(store, 0, 0, 26),))
    with pytest.raises(InconsistentError, match="two files hold"):
        TensorEntry("x", (6,), F32, "parameter", (Fragment(store, 0, 0, 4), Fragment(store, 0, 3, 3)))
    with pytest.raises(InconsistentError, match="more elements"):
        TensorEntry("x", (3,), F32, "parameter", (Fragment(store, 0, 0, 4),))
    with pytest.raises(CorruptError, match="impossible"):
        TensorEntry("x", (1 << 40, 1 << 40), F32, "parameter", ())
    for bad in ({"start": -1}, {"rows": 0}, {"rows": 2, "pitch": 1}, {"byte_offset": -4}):
        with pytest.raises(CorruptError):
            Fragment(**{"store": store, "byte_offset": 0, "start": 0, "count": 2, **bad})
    assert np.prod(TensorEntry("s", (), F32, "buffer", (Fragment(store, 0, 0, 1),)).shape) == 1
