"""Fragments and routes against brute force: element by element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zckpt.base.errors import CorruptError, IncompleteError, InconsistentError
from zckpt.core import plan
from zckpt.core.catalog import TensorEntry, TensorPart
from zckpt.core.claims import ByteSpan, Claim, Claims
from zckpt.core.dtypes import BF16, F32
from zckpt.core.fragments import Block, Fragment
from zckpt.core.overlaps import clip, embed, first_gap, place, shift
from zckpt.core.plan import Move, Plan, route
from zckpt.core.stores import FileStore
from zckpt.core.views import transpose_fragments

Place = tuple[str, int]
SIZE = 1 << 20


def places(fragments: Iterable[Fragment], itemsize: int) -> dict[int, Place]:
    """Element number -> (store, byte offset), by the definition in [Note: the geometry of a fragment]."""
    return {
        f.start + row * f.pitch + k: (str(f.store), f.byte_offset + (row * f.store_pitch + k * f.step) * itemsize)
        for f in fragments
        for row in range(f.rows)
        for k in range(f.count)
    }


def cuts(draw: st.DrawFn, length: int, most: int = 3) -> list[tuple[int, int]]:
    return list(itertools.pairwise(sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=most))})))


@st.composite
def ways(draw: st.DrawFn, shape: tuple[int, ...], label: str) -> tuple[Fragment, ...]:
    """A way to hold a tensor: whole, cut flat, cut into slices of any dimension, flat cuts of such slices, boxes (slices of
    slices), transposed, or transposed in slices of it."""
    numel = math.prod(shape)
    kind = draw(
        st.sampled_from(["whole", "flat", "slices", "zero over slices", "boxes", "columns", "turned", "turned slices"])
    )
    stores = (FileStore(f"{label}{i}", SIZE) for i in itertools.count())
    if kind == "whole":
        return (Fragment(next(stores), 64, 0, numel),)
    if kind == "flat":
        return tuple(Fragment(next(stores), 8, a, b - a) for a, b in cuts(draw, numel))
    rows, columns = shape[0], numel // shape[0]
    if kind == "columns":
        store = next(stores)
        return tuple(Fragment(store, 4 * r, r * columns, 1, columns, 1, rows) for r in range(rows))
    if kind == "turned":
        flat = tuple(Fragment(next(stores), 8, a, b - a) for a, b in cuts(draw, numel))
        return transpose_fragments(flat, columns, rows, 4)
    if kind == "turned slices":  # such as a part of every other row
        store, width = next(stores), draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0]))
        whole = transpose_fragments((Fragment(store, 8, 0, numel),), columns, rows, 4)
        every = rows // width
        parts = [(Block(n * columns, columns, width, every * columns, every * columns, 1), n) for n in range(every)]
        alone = Block(0, columns, width, columns, columns, 1)
        own = [(place(whole, part, 0, columns, 4), n) for part, n in parts]
        return tuple(f for held, n in own for f in place(held, alone, n * columns, every * columns, 4))
    dim = draw(st.integers(0, len(shape) - 1))
    fragments: list[Fragment] = []
    for low, high in cuts(draw, shape[dim]):
        local = (*shape[:dim], high - low, *shape[dim + 1 :])
        inside = [Fragment(next(stores), 16, 0, math.prod(local))]
        if kind == "zero over slices":
            inside = [Fragment(next(stores), 4, a, b - a) for a, b in cuts(draw, math.prod(local))]
        if kind == "boxes":
            other = draw(st.integers(0, len(shape) - 1))
            inside = []
            for low2, high2 in cuts(draw, local[other], 2):
                box = (*local[:other], high2 - low2, *local[other + 1 :])
                held = [Fragment(next(stores), 0, 0, math.prod(box))]
                inside += embed(held, box, other, low2, local[other], 4)
        fragments += embed(inside, local, dim, low, shape[dim], 4)
    return tuple(fragments)


matrices = st.lists(st.integers(1, 6), min_size=2, max_size=3).map(tuple)


def carried(moves: Iterable[Move], src_size: int, dst_size: int) -> dict[Place, Place]:
    return {
        (str(m.dst), m.dst_offset + r * m.dst_pitch + k * m.dst_step * dst_size): (
            str(m.src), m.src_offset + r * m.src_pitch + k * m.src_step * src_size,
        )
        for m in moves for r in range(m.rows) for k in range(m.count)
    }  # fmt: skip


@settings(max_examples=600)
@given(data=st.data(), shape=matrices)
def test_every_element_goes_where_it_belongs(data: st.DataObject, shape: tuple[int, ...]) -> None:
    source = TensorEntry("x", shape, F32, "parameter", data.draw(ways(shape, "s")))
    target = TensorEntry("x", shape, BF16, "parameter", data.draw(ways(shape, "d")))
    moves = list(route(source, target, 7))
    froms, tos = places(source.fragments, 4), places(target.fragments, 2)
    assert carried(moves, 4, 2) == {tos[k]: froms[k] for k in tos}
    assert carried(filter(None, Plan((), [(source, target)]).moves()), 4, 2) == carried(moves, 4, 2)
    assert sum(m.count * m.rows for m in moves) == source.numel
    assert {m.tensor for m in moves} <= {7}


@given(data=st.data(), shape=matrices)
def test_far_sources_of_transposed_matrices_are_named_row_by_row(data: st.DataObject, shape: tuple[int, ...]) -> None:
    rows, columns = shape[0], math.prod(shape[1:])
    store = FileStore("s", SIZE, is_remote=True)
    flat = tuple(Fragment(store, 8 + 4 * a, a, b - a) for a, b in cuts(data.draw, rows * columns))
    source = TensorEntry("x", (columns, rows), F32, "parameter", transpose_fragments(flat, rows, columns, 4))
    target = TensorEntry("x", (columns, rows), F32, "parameter", data.draw(ways((columns, rows), "d")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SLAB_BYTES", 4 * data.draw(st.integers(1, 40)))
        moves = [move for move in Plan((), [(source, target)]).moves() if move]
    froms, tos = places(source.fragments, 4), places(target.fragments, 4)
    assert carried(moves, 4, 4) == {tos[k]: froms[k] for k in tos}
    assert sum(m.count * m.rows for m in moves) == source.numel


@given(data=st.data(), shape=matrices)
def test_claims_are_the_bytes_of_the_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    fragments = data.draw(ways(shape, "s"))
    held = sorted(place for place in places(fragments, 4).values())
    store = next(f.store for f in fragments if str(f.store) == held[0][0])
    mine = [at for name, at in held if name == str(store)]
    victim = data.draw(st.integers(0, min(mine[-1] + 8, 600)))
    meets = any(at - 3 <= victim < at + 4 for at in mine)
    both = [Claim("x", 0, 4, fragments), Claim("y", 0, 1, (Fragment(store, victim, 0, 4),))]
    claims = Claims(both[:1])
    assert not list(claims.unused([ByteSpan(store, at, at + 4) for at in mine]))
    if meets:
        with pytest.raises(InconsistentError, match="same bytes"):
            Claims(both)
    else:
        Claims(both)


def test_boxes_of_equal_pitch_are_one_move() -> None:
    whole = (Fragment(FileStore("a", SIZE), 0, 0, 1000 * 64),)
    box = tuple(Fragment(FileStore(f"b{i}", SIZE), 0, 16 * i, 16, 1000, 64, 16) for i in range(4))
    one, four = (TensorEntry("x", (1000, 64), F32, "parameter", f) for f in (whole, box))
    assert len(list(route(four, one))) == len(list(route(one, four))) == 4
    assert len(list(route(TensorEntry("y", (1000, 16), F32, "parameter", (
        Fragment(box[0].store, 0, 0, 16, 1000, 16, 64),)), TensorEntry("y", (1000, 16), F32, "parameter", (
            Fragment(whole[0].store, 0, 0, 16000),))))) == 1  # fmt: skip


@given(data=st.data(), shape=matrices)
def test_gaps_and_overlaps_are_found(data: st.DataObject, shape: tuple[int, ...]) -> None:
    fragments = [f for f in data.draw(ways(shape, "s")) if f.numel]
    numel = math.prod(shape)
    assert first_gap(fragments, numel, 4) is None
    victim = data.draw(st.integers(0, len(fragments) - 1))
    left = fragments[:victim] + fragments[victim + 1 :]
    gap = first_gap(left, numel, 4)
    held = places(left, 4)
    assert gap is not None and gap[0] == min(set(range(numel)) - set(held))
    with pytest.raises(InconsistentError):
        first_gap([*fragments, fragments[victim]], numel, 4)


@given(data=st.data(), shape=matrices)
def test_clip(data: st.DataObject, shape: tuple[int, ...]) -> None:
    fragments = sorted(data.draw(ways(shape, "s")), key=lambda f: f.start)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    everything = places(fragments, 4)
    assert places(clip(fragments, start, stop, 4), 4) == {k - start: everything[k] for k in range(start, stop)}


@given(data=st.data(), shape=matrices)
def test_parts_route_what_both_know_of(data: st.DataObject, shape: tuple[int, ...]) -> None:
    def some_of(label: str) -> TensorPart:
        fragments = sorted(data.draw(ways(shape, label)), key=lambda f: f.start)
        kept = data.draw(st.lists(st.booleans(), min_size=len(fragments), max_size=len(fragments)))
        return TensorPart("x", shape, F32, tuple(f for f, keep in zip(fragments, kept, strict=True) if keep))

    source, target = some_of("s"), some_of("d")
    froms, tos = places(source.fragments, 4), places(target.fragments, 4)
    assert carried(route(source, target), 4, 4) == {tos[k]: froms[k] for k in tos.keys() & froms.keys()}
    assert source.nbytes == 4 * len(froms)


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), dim=st.integers(0, 3))
def test_a_slice_is_where_numpy_says(data: st.DataObject, shape: list[int], dim: int) -> None:
    dim %= len(shape)
    offset, behind = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    extent = offset + shape[dim] + behind
    fragments = data.draw(ways((math.prod(shape), 1), "s"))
    whole = np.arange(math.prod(shape) // shape[dim] * extent).reshape(*shape[:dim], extent, *shape[dim + 1 :])
    numbers = whole.take(range(offset, offset + shape[dim]), axis=dim).ravel()
    held = places(fragments, 4)
    embedded = embed(fragments, shape, dim, offset, extent, 4)
    assert places(embedded, 4) == {int(numbers[k]): place for k, place in held.items()}


def test_plans_do_not_grow_with_rows() -> None:
    """A slice of ten million rows, cut flat over a hundred ranks, joined with seven others: some three moves a cut."""
    rows, tp, dp = 10_000_000, 8, 100
    fragments: list[Fragment] = []
    for rank in range(tp):
        step = rows * 16 // dp
        cut = [Fragment(FileStore(f"{rank}.{d}", 1 << 40), 0, d * step, step) for d in range(dp)]
        fragments += embed(cut, (rows, 16), 1, 16 * rank, 16 * tp, 4)
    source = TensorEntry("x", (rows, 16 * tp), F32, "parameter", tuple(fragments))
    whole = TensorEntry("x", source.shape, F32, "parameter", (Fragment(FileStore("o", 1 << 40), 0, 0, source.numel),))
    assert len(list(route(source, whole))) <= 3 * tp * dp


def test_transposed_matrices_are_few_fragments_and_moves() -> None:
    """A stack of experts whose input rows have a gate and an up column in turn, taken apart and put together otherwise."""
    experts, width, inner = 128, 2880, 2880
    store = FileStore("s", 1 << 50)
    stack = Fragment(store, 0, 0, experts * width * 2 * inner)
    gates: list[Fragment] = []
    for expert in range(experts):
        own = clip((stack,), expert * stack.numel // experts, (expert + 1) * stack.numel // experts, 2)
        turned = transpose_fragments(own, width, 2 * inner, 2)
        parts = [place(turned, Block(n * width, width, inner, 2 * width, 2 * width, 1), 0, width, 2) for n in (0, 1)]
        assert [len(part) for part in (own, turned, *parts)] == [1, 1, 1, 1]
        gates += [f for n, part in enumerate(parts) for f in shift(part, (2 * expert + n) * width * inner)]
    entry = TensorEntry("x", (experts, 2 * inner, width), BF16, "parameter", tuple(gates))
    whole = TensorEntry("x", entry.shape, BF16, "parameter", (Fragment(FileStore("d", 1 << 50), 0, 0, entry.numel),))
    moves = list(Plan((), [(entry, whole)]).moves())
    assert len(moves) == len(gates) == 2 * experts
    Claims([Claim("x", 0, 2, entry.fragments)])


def test_an_entry_is_checked_at_birth() -> None:
    store = FileStore("f", 100)
    with pytest.raises(IncompleteError) as incomplete:
        TensorEntry("x", (10,), F32, "parameter", (Fragment(store, 0, 0, 4), Fragment(store, 16, 6, 4)))
    assert incomplete.value.found.endswith("elements 4-5")
    with pytest.raises(CorruptError, match="ends before the end"):
        TensorEntry("x", (26,), F32, "parameter", (Fragment(store, 0, 0, 26),))
    with pytest.raises(InconsistentError, match="held twice"):
        TensorEntry("x", (6,), F32, "parameter", (Fragment(store, 0, 0, 4), Fragment(store, 0, 3, 3)))
    with pytest.raises(InconsistentError, match="more elements"):
        TensorEntry("x", (3,), F32, "parameter", (Fragment(store, 0, 0, 4),))
    with pytest.raises(CorruptError, match="impossible"):
        TensorEntry("x", (1 << 40, 1 << 40), F32, "parameter", ())
    for bad in ({"start": -1}, {"rows": 0}, {"rows": 2, "pitch": 1}, {"byte_offset": -4}):
        with pytest.raises(CorruptError):
            Fragment(**{"store": store, "byte_offset": 0, "start": 0, "count": 2, **bad})
    assert np.prod(TensorEntry("s", (), F32, "buffer", (Fragment(store, 0, 0, 1),)).shape) == 1
