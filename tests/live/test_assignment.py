"""Ranks agree who contributes which elements, in threads of one process: every element once, replicas by all alike."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from queue import Queue
from typing import Any

import pytest
from hangs import HANG_S

from zckpt.base.errors import IncompleteError, InconsistentError, UsageError
from zckpt.core.catalog import TensorPart
from zckpt.core.dtypes import BF16, F32, DType
from zckpt.core.fragments import Fragment
from zckpt.core.stores import MemoryStore
from zckpt.live.assignment import assign
from zckpt.live.parts import Offer
from zckpt.live.ranks import Ranks

Assigned = tuple[dict[str, TensorPart], Any]


class Threads(Ranks):
    """A rank that is a thread; all share their letterboxes, by (sender, receiver)."""

    def __init__(self, rank: int, size: int, boxes: dict[tuple[int, int], Queue[Any]], *, alike: bool) -> None:
        self.rank, self.size, self.alike, self.boxes = rank, size, alike, boxes

    def swap(self, values: Sequence[Any]) -> list[Any]:
        for other, value in enumerate(values):
            self.send_value(value, other)
        return [self.receive_value(other) for other in range(self.size)]

    def send_value(self, value: Any, rank: int) -> None:
        self.boxes[self.rank, rank].put(value)

    def receive_value(self, rank: int) -> Any:
        return self.boxes[rank, self.rank].get(timeout=HANG_S)


def on_all(size: int, job: Callable[[Threads], Any], *, alike: bool = True) -> list[Any]:
    boxes: dict[tuple[int, int], Queue[Any]] = {(a, b): Queue() for a in range(size) for b in range(size)}
    found: list[Any] = [None] * size

    def work(rank: int) -> None:
        found[rank] = job(Threads(rank, size, boxes, alike=alike))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def offer(
    name: str, shape: tuple[int, ...], start: int, count: int, *, equal: bool = True, dtype: DType = F32
) -> Offer:
    fragments = (Fragment(MemoryStore(0, count * dtype.itemsize), 0, start, count),) if count else ()
    return Offer(TensorPart(name, shape, dtype, fragments), "parameter", equal)


def sharded(shapes: dict[str, int], rank: int, ways: int) -> list[Offer]:
    steps = {name: -(-numel // ways) for name, numel in shapes.items()}
    mine = rank % ways
    return [
        offer(name, (numel,), mine * steps[name], max(0, min(steps[name], numel - mine * steps[name])))
        for name, numel in shapes.items()
    ]


def contributed(several: Sequence[Assigned]) -> dict[str, list[int]]:
    """The elements that each rank contributes, of all ranks in order."""
    found: dict[str, list[int]] = {}
    for mine, _ in several:
        for name, part in mine.items():
            for fragment in part.fragments:
                found.setdefault(name, []).extend(range(fragment.start, fragment.start + fragment.count))
    return found


@pytest.mark.parametrize(("size", "ways"), [(1, 1), (3, 3), (8, 4), (8, 2), (7, 7)])
def test_every_element_is_contributed_once_and_replicas_by_all_alike(size: int, ways: int) -> None:
    shapes = {f"w{number}": 60 + 7 * (number % 3) for number in range(24)}
    several = on_all(size, lambda world: assign(world, sharded(shapes, world.rank, ways)))
    assert {name: sorted(elements) for name, elements in contributed(several).items()} == {
        name: list(range(numel)) for name, numel in shapes.items()
    }
    tensors = several[0][1]
    assert [(name, one.shape) for name, one in tensors.items()] == [(name, (n,)) for name, n in shapes.items()]
    assert all(tensors == {} for _, tensors in several[1:])
    loads = [sum(part.nbytes for part in mine.values()) for mine, _ in several]
    assert max(loads) <= 1.25 * sum(loads) / size


def test_copies_that_nothing_keeps_equal_come_from_the_lowest_rank() -> None:
    several = on_all(4, lambda world: assign(world, [offer(f"b{n}", (3,), 0, 3, equal=False) for n in range(9)]))
    assert [sum(len(part.fragments) for part in mine.values()) for mine, _ in several] == [9, 0, 0, 0]


def test_ranks_may_have_other_tensors() -> None:
    """Stages of a pipeline: the order is that of the first rank that has a tensor."""
    stages = [["a", "b", "tied"], ["tied", "c", "d"], ["d", "e", "tied"]]
    several = on_all(
        3, lambda world: assign(world, [offer(n, (2, 2), 0, 4, equal=False) for n in stages[world.rank]]), alike=False
    )
    assert list(several[0][1]) == ["a", "b", "tied", "c", "d", "e"]
    assert contributed(several) == {name: [0, 1, 2, 3] for name in ("a", "b", "tied", "c", "d", "e")}


def test_what_is_wrong_is_said_on_rank_0() -> None:
    def missing(world: Threads) -> Assigned:
        return assign(world, [offer("w", (9,), 3 * world.rank, 2 if world.rank == 1 else 3)])

    def other_shape(world: Threads) -> Assigned:
        return assign(world, [offer("w", (9 + world.rank // 2,), 3 * world.rank, 3)])

    def other_dtype(world: Threads) -> Assigned:
        return assign(world, [offer("w", (9,), 3 * world.rank, 3, dtype=BF16 if world.rank == 2 else F32)])

    def failed(world: Threads) -> Assigned:
        return assign(world, UsageError("no weights") if world.rank else [offer("w", (9,), 0, 3)])

    kinds = {
        missing: IncompleteError,
        other_shape: InconsistentError,
        other_dtype: InconsistentError,
        failed: UsageError,
    }
    for job, kind in kinds.items():
        found = on_all(3, job)[0][1]
        assert isinstance(found, kind), (job.__name__, found)
    several = on_all(3, lambda world: assign(world, [offer(f"w{n}", (9 + world.rank,), 0, 3) for n in range(5)]))
    assert "'w0' differs" in str(several[0][1])  # the first, whoever checks it
    assert "rank 2" in str(on_all(3, other_shape)[0][1])


@pytest.mark.parametrize("size", range(1, 10))
def test_all_ranks_words_come_to_rank_0_in_order_through_few(size: int) -> None:
    heard: dict[int, int] = {}

    def job(world: Threads) -> Any:
        receive = world.receive_value

        def counted(rank: int) -> Any:
            heard[world.rank] = heard.get(world.rank, 0) + 1
            return receive(rank)

        world.receive_value = counted  # type: ignore[method-assign]
        return world.fold([world.rank], lambda a, b: a + b)

    assert on_all(size, job) == [list(range(size)), *[None] * (size - 1)]
    assert max(heard.values(), default=0) <= math.ceil(math.log2(size)) if size > 1 else not heard
