"""What a load costs a rank as ranks become more, and what a live save costs rank 0: for a model of 70 billion parameters.

    python benchmarks/load_scale.py

Loads: a save of stage 3 of so many ranks is loaded by three quarters as many, by as many, and by 8. Counted are the reads of one
rank in the middle, for one tensor of each parameter (masters and Adam's two states are three), and the files that they touch.
Live saves: rank 0 gets every rank's offers and gives each its contributions. Figures of time are CPU seconds of one process; no
element moves. Writes results_load_scale.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

from exchange_scale import exponent, shapes

from zckpt.core.catalog import TensorPart
from zckpt.core.dtypes import BF16, F32
from zckpt.core.fragments import FileStore, Fragment, MemoryStore
from zckpt.core.overlaps import clip
from zckpt.live.assignment import ElementPlace, assign, contributions
from zckpt.live.parts import Offer
from zckpt.runtime.world import elements_of

SAVED = (8, 32, 128, 512, 1024, 4096)
LIVE = (8, 32, 128, 512)
PAGE = Path(__file__).with_name("results_load_scale.md")


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


def live(size: int) -> float:
    """CPU seconds of rank 0 for a live save of so many ranks."""
    offered: list[list[Offer]] = []
    for rank in range(size):
        mine = []
        for name, shape in shapes().items():
            start, count = elements_of(shape, size, rank)
            fragments = (Fragment(MemoryStore(0, count * 4), 0, start, count),) if count else ()
            mine.append(Offer(TensorPart(name, shape, F32, fragments), "parameter", True))
        offered.append(mine)
    began = time.process_time()
    tensors = assign(offered)
    contributions(tensors, {name: ElementPlace(0, 0, BF16) for name in tensors}, size)
    return time.process_time() - began


def main() -> None:
    """All worlds."""
    lines = [
        "# A load on many ranks, and rank 0 of a live save", "", "70 billion parameters, simulated by "
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
    lines += ["", "| ranks of a live save | CPU s of rank 0 |", "| --- | --- |"]
    taken = [live(size) for size in LIVE]
    lines += [f"| {size:,} | {seconds:.2f} |" for size, seconds in zip(LIVE, taken, strict=True)]
    lines.append(f"| exponent | {exponent(LIVE, taken):.2f} |")
    print("\n".join(lines[-len(LIVE) - 1 :]), flush=True)
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
