"""Who asks whom for what when ranks exchange elements, with all ranks of a world at hand: nothing here is sent."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable

import pytest
import torch

from zckpt.core.catalog import TensorEntry, TensorPart
from zckpt.core.dtypes import BF16, F32, U8, DType
from zckpt.core.fragments import Fragment
from zckpt.core.plan import Pair
from zckpt.core.stores import FileStore
from zckpt.runtime.saves.exchange import EVERY, LARGEST_ITEM, Exchange, RankStore, WantedMoves, rounds_of
from zckpt.runtime.world import elements_of

Tensors = dict[Hashable, torch.Tensor]


def model(random: random.Random) -> dict[str, tuple[tuple[int, ...], DType, bool]]:
    """Shapes, dtypes, and whether every rank holds all."""
    rows = [1, 2, 3, 7, 16, 33, 100]
    return {
        f"{number}": (
            (random.choice(rows), random.choice([1, 3, 10])), random.choice([F32, BF16, U8]), random.random() < 0.2,
        )
        for number in range(random.randint(1, 12))
    }  # fmt: skip


def partition(shapes: dict[str, tuple[tuple[int, ...], DType, bool]], size: int, rank: int) -> list[Pair]:
    """What a rank wants: its part of all elements, end to end, as at stage 1; the first one all of them besides."""
    total = sum(math.prod(shape) for shape, _, _ in shapes.values())
    share = -(-total // size)
    pairs: list[Pair] = []
    for first, last in [(rank * share, (rank + 1) * share), *([(0, total)] if rank == 0 else [])]:
        at, file = 0, FileStore(f"{rank}", 1 << 40)
        for name, (shape, dtype, whole) in shapes.items():
            numel = math.prod(shape)
            low, high = max(first, at), min(last, at + numel)
            if low < high:
                step = 0 if whole or size == 1 else elements_of(shape, size, 0)[1]
                store = RankStore(name, numel * dtype.itemsize, rank=EVERY, step=step, key=name)
                source = TensorEntry(name, shape, dtype, "buffer", (Fragment(store, 0, 0, numel),))
                place = Fragment(file, (low - first) * 16, low - at, high - low)
                pairs.append((source, TensorPart(name, shape, dtype, (place,))))
            at += numel
    return pairs


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_every_element_comes_once_and_no_round_has_more_than_its_limit(seed: int, direct: bool) -> None:
    chance = random.Random(seed)
    size, limit = chance.choice([1, 2, 3, 5, 8, 13]), chance.choice([64, 100, 1000])
    shapes = model(chance)
    values = {
        name: torch.randint(0, 255, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
        for name, (shape, dtype, _) in shapes.items()
    }
    exchanges, wanted = [], []
    for rank in range(size):
        held: Tensors = {}
        for name, (shape, dtype, whole) in shapes.items():
            start, count = (0, math.prod(shape)) if whole or size == 1 else elements_of(shape, size, rank)
            part = values[name][start * dtype.itemsize : (start + count) * dtype.itemsize]
            held[name] = part.clone().view(getattr(torch, dtype.torch_name))
        one = Exchange(rank, size, None, torch.device("cpu"), direct, held.__getitem__, list(shapes))
        exchanges.append(one)
        wanted.append(WantedMoves(one, partition(shapes, size, rank)))
    longest, pieces = ([max(numbers) for numbers in zip(*several, strict=True)] for several in (
        [one.volumes for one in wanted], [one.pieces for one in wanted],
    ))  # fmt: skip
    found = {(rank, n): [] for rank in range(size) for n in range(2 * len(shapes))}

    def arrives(rank: int, piece: object, holder: int) -> int:
        move = piece.move  # type: ignore[attr-defined]
        dtype = move.src_dtype
        data = exchanges[holder].tensors(move.src.key).view(torch.uint8)
        first = piece.offset  # type: ignore[attr-defined]
        nbytes = piece.count * dtype.itemsize  # type: ignore[attr-defined]
        at = move.src_offset + piece.first * dtype.itemsize  # type: ignore[attr-defined]
        assert torch.equal(data[first : first + nbytes], values[move.src.key][at : at + nbytes])
        found[rank, move.tensor].append((at, nbytes))
        return int(nbytes)

    for rank in range(size):
        for piece in wanted[rank].here():
            arrives(rank, piece, rank)
    for turns in rounds_of(longest, pieces, limit):
        received, sent = [0] * size, [0] * size
        assert len({distance for distance, _ in turns}) == len(turns)
        for turn in turns:
            for rank in range(size):
                holder = (rank - turn[0]) % size
                for piece in wanted[rank].take(holder, turn[1]):
                    nbytes = arrives(rank, piece, holder)
                    received[rank] += nbytes
                    sent[holder] += nbytes
        assert max(received + sent) <= limit
    for rank in range(size):
        for number, (source, part) in enumerate(partition(shapes, size, rank)):
            [fragment] = part.fragments
            itemsize = source.dtype.itemsize
            at = fragment.start * itemsize
            for first, nbytes in sorted(found[rank, number]):
                assert first == at
                at += nbytes
            assert at == (fragment.start + fragment.count) * itemsize


@pytest.mark.parametrize("size", [2, 64, 4096])
def test_rounds_depend_on_what_comes_and_not_on_the_ranks(size: int) -> None:
    """Of the same bytes for each rank, whatever the number of ranks they come from."""
    total, limit = 1 << 30, 40 << 20
    rounds = list(rounds_of([total // size] * size, [1] * size, limit))
    least = -(-total // limit)
    assert least <= len(rounds) <= least + 1 + (size * LARGEST_ITEM) // limit
