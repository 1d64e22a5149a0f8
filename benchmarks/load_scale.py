"""What a load and the plan of a live save cost a rank as ranks become more: for a model of 70 billion parameters.

    python benchmarks/load_scale.py

Loads: a save of stage 3 of so many ranks is loaded by three quarters as many, by as many, and by 8. Counted are the reads of one
rank in the middle, for one tensor of each parameter (masters and Adam's two states are three), and the files that they touch.
Live saves: ranks agree who contributes what, and rank 0 lays out bf16 weights. The first two ranks, one in the middle and the
last are carried out, from the offers as they come to checking them and laying out; what other ranks send them is made before, and
is unpacked as it is in a save. Figures of time are CPU seconds of one process; no element moves. Writes results_load_scale.md.
"""

from __future__ import annotations

import math
import pickle
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exchange_scale import exponent, shapes

from zckpt.core.catalog import TensorPart
from zckpt.core.dtypes import BF16, F32
from zckpt.core.fragments import Fragment
from zckpt.core.overlaps import clip
from zckpt.core.stores import FileStore, MemoryStore
from zckpt.layouts.plain import write as plain
from zckpt.live.assignment import ElementPlace, _pack_offer, assign, contributions
from zckpt.live.parts import Offer
from zckpt.live.ranks import Ranks
from zckpt.runtime.world import elements_of

SAVED = (8, 32, 128, 512, 1024, 4096)
PAGE = Path(__file__).with_name("results_load_scale.md")
MODEL = list(shapes().items())


def pieces(numel: int, stores: list[FileStore]) -> Iterator[Fragment]:
    """A parameter as stage 3 lays it out: equal runs, one in each rank's file."""
    step = -(-numel // len(stores))
    for rank, store in enumerate(stores):
        count = min(step, numel - rank * step)
        if count > 0:
            yield Fragment(store, 0, rank * step, count)


def loads(saved: int, loading: int) -> tuple[int, int, float]:
    """Reads of the rank in the middle, files, and the CPU seconds that finding them takes."""
    stores = [FileStore(f"{rank}", 1 << 50) for rank in range(saved)]
    reads, touched, seconds = 0, set(), 0.0
    for shape in shapes().values():
        fragments = tuple(pieces(math.prod(shape), stores))
        start, count = elements_of(shape, loading, loading // 2)
        began = time.process_time()
        mine = clip(fragments, start, start + count, F32.itemsize)
        seconds += time.process_time() - began
        reads += len(mine)
        touched |= {id(one.store) for one in mine}
    return reads, len(touched), seconds


def offered(size: int, rank: int, number: int) -> Offer:
    """What a rank under `fully_shard` has of a parameter."""
    name, shape = MODEL[number]
    start, count = elements_of(shape, size, rank)
    fragments = (Fragment(MemoryStore(0, count * 4), 0, start, count),) if count else ()
    return Offer(TensorPart(name, shape, F32, fragments), "parameter", True)


class OneOfMany(Ranks):
    """One rank, which finds prepared what the others send it. Attributes: bytes that it has got and sent."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.alike = rank, size, True
        self.got = self.sent = 0
        mine = range(size - 1 - rank, len(MODEL), size)
        packed = [[_pack_offer(number, offered(size, other, number)) for number in mine] for other in range(size)]
        answers: list[Any] = []
        for checker in range(size):
            numbers = range(size - 1 - checker, len(MODEL), size)
            known = [((0, number), (*MODEL[number], F32, "parameter")) for number in numbers]
            chosen = [[0] if offered(size, rank, number).part.fragments else [] for number in numbers]
            answers.append((chosen, [] if rank else known) if chosen else None)
        self._coming = [[pickle.dumps(one) if one else b"" for one in several] for several in (answers, packed)]

    def swap(self, values: Sequence[Any]) -> list[Any]:
        """As `Ranks`, but for the way."""
        self.sent += sum(len(pickle.dumps(value)) for value in values if value is not None)
        came = self._coming.pop()
        self.got += sum(map(len, came))
        return [pickle.loads(one) if one else None for one in came]


@dataclass(frozen=True, slots=True)
class LivePlan:
    """What a rank's part in the plan of a live save costs it."""

    seconds: float
    nbytes: int
    got: int
    sent: int


def live(size: int, rank: int) -> LivePlan:
    """Everything that a rank does before the first element moves."""
    offers = [offered(size, rank, number) for number in range(len(MODEL))]
    seconds = []
    for traced in (False, True):
        world = OneOfMany(rank, size)
        if traced:
            tracemalloc.start()
        began = time.process_time()
        assigned = assign(world, offers)
        places = {name: ElementPlace(0, 0, BF16) for name, _ in MODEL}
        if rank == 0:
            assert isinstance(assigned.tensors, dict)
            laid = plain.lay_out(
                [(one, BF16) for one in assigned.tensors.values()], {}, plain.WeightsTarget("safetensors")
            )
            world.sent += len(pickle.dumps(places)) * (size - 1).bit_length()  # by a tree
            assert len(laid.entries) == len(MODEL)
        assert len(contributions(assigned.mine, places)) == sum(1 for one in offers if one.part.fragments)
        seconds.append(time.process_time() - began)
    nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return LivePlan(seconds[0], nbytes, world.got, world.sent)


def main() -> None:
    """All worlds."""
    lines = [
        "# A load and the plan of a live save on many ranks", "", "70 billion parameters, simulated by "
        "`benchmarks/load_scale.py`: what one rank in the middle reads of a save of stage 3.", "",
        "| saved by | loaded by | reads | files | CPU s |", "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for what, of in (("three quarters", lambda n: 3 * n // 4), ("as many", lambda n: n), ("8", lambda n: 8)):
        found = [loads(saved, of(saved)) for saved in SAVED]
        for saved, (reads, files, seconds) in zip(SAVED, found, strict=True):
            lines.append(f"| {saved:,} | {of(saved):,} | {reads:,} | {files:,} | {seconds:.3f} |")
        fitted = [exponent(SAVED, [one[number] for one in found]) for number in range(3)]
        lines.append(f"| exponent | {what} | {fitted[0]:.2f} | {fitted[1]:.2f} | {fitted[2]:.2f} |")
        print("\n".join(lines[-len(SAVED) - 1 :]), flush=True)
    lines += [
        "", "The plan of a live save. Two exchanges of all with all, one word from rank 0 to all; with more ranks than tensors "
        f"({len(MODEL)}) a rank that checks a tensor hears of it from all of them.", "",
        "| ranks | rank 0, CPU s | memory, MiB | got, KB | sent, KB | any other rank, CPU s | memory, MiB | got, KB | sent, KB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    rows: list[list[float]] = []
    live(8, 0)  # what is imported, is imported
    for size in SAVED:
        first, *others = (live(size, rank) for rank in sorted({0, 1, size // 2, size - 1}))
        columns = ([first], others)
        rows.append(
            [
                figure
                for several in columns
                for figure in (
                    max(one.seconds for one in several), max(one.nbytes for one in several) / 2**20,
                    max(one.got for one in several) / 1e3, max(one.sent for one in several) / 1e3,
                )
            ]
        )  # fmt: skip
        lines.append(
            f"| {size:,} | " + " | ".join(f"{one:.2f}" if one < 10 else f"{one:,.0f}" for one in rows[-1]) + " |"
        )
        print(lines[-1], flush=True)
    fitted = [exponent(SAVED, list(column)) for column in zip(*rows, strict=True)]
    lines.append("| exponent | " + " | ".join(f"{one:.2f}" for one in fitted) + " |")
    print(lines[-1], flush=True)
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
