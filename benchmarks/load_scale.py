"""What a load and the plan of a live save cost a rank as ranks become more: for a model of 70 billion parameters.

    python benchmarks/load_scale.py

Loads: a save of stage 3 of so many ranks is loaded by three quarters as many, by as many, and by 8. Counted are the reads of one
rank in the middle, for one tensor of each parameter (masters and Adam's two states are three), and the files that they touch.
Live saves: ranks agree who contributes what, and rank 0 lays out bf16 weights. The first two ranks, one in the middle and the
last are carried out, from the offers as they come to checking them and laying out; what other ranks send them is made before, and
is unpacked as it is in a save. Figures of time are CPU seconds of one process; no element moves. Writes results_load_scale.md.
Small models: `save_checkpoint` and `load_checkpoint` beside DeepSpeed's, whole, on two ranks that hold both engines, which take
turns; a first load is that of a process that has saved nothing, with the engine that comes first there. Each save has a tag of
its own, as in a run: DeepSpeed's writes a save of the same tag over in place, for a third of the processor's time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
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


SMALL = {"72": (8, 1), "1.7 M": (128, 100), "25 M": (350, 202)}
"""Parameters -> width and number of the model's layers, each of which has a weight and a bias."""
ENGINES = ("zckpt", "deepspeed")


def small(stage: int, numel: str) -> list[str]:
    """Rows of one model."""
    took: dict[str, list[float]] = {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    with tempfile.TemporaryDirectory() as home:
        for what, order in (("save", ENGINES), ("load", ENGINES[::-1]), ("load", ENGINES)):
            command = [*launcher, "--worker", json.dumps([home, stage, numel, what, order])]
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            found = json.loads(Path(home, "found.json").read_text())
            took |= {f"{what} {name}": found[name] for name in (order if what == "save" else order[:1])}
    lines = []
    for what in ("save", "load"):
        (ours, theirs), (first, other) = zip(
            *((statistics.median(took[f"{what} {name}"][1:]), took[f"{what} {name}"][0]) for name in ENGINES),
            strict=True,
        )
        figures = (f"{1e3 * one:.1f}" for one in (first, other, ours, theirs))
        lines.append(
            f"| {numel} | {stage} | {what} | {' | '.join(figures)} | {first / other:.2f} | {ours / theirs:.2f} |"
        )
    return lines


def work(home: str, stage: int, numel: str, what: str, order: list[str]) -> None:
    """One rank: CPU seconds of each call, those of the rank with more."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from checkpoints import make

    from zckpt import runtime

    deepspeed.init_distributed("gloo")
    known = {"zckpt": runtime.initialize, "deepspeed": deepspeed.initialize}
    engines = {name: make(known[name], stage, "bf16", *SMALL[numel]) for name in order}
    found: dict[str, list[float]] = {}
    for number in range(6):
        for name, engine in engines.items():
            dist.barrier()
            began = time.process_time()
            if what == "save":
                engine.save_checkpoint(f"{home}/{name}", tag=f"t{number}")
            else:
                engine.load_checkpoint(f"{home}/{name}", tag="t0")
            seconds = torch.tensor(time.process_time() - began)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            found.setdefault(name, []).append(seconds.item())
    if dist.get_rank() == 0:
        Path(home, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """All worlds, or the small models alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="print the rows of small models alone")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*json.loads(options.worker))
        return
    beside = [
        "", "Small models beside DeepSpeed 0.19.8: CPU ms of a call on the slower of two ranks, bf16.", "",
        "| parameters | stage | | first, zckpt | DeepSpeed | then, zckpt | DeepSpeed | first, ratio | then, ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    beside += [row for numel in SMALL for stage in (2, 3) for row in small(stage, numel)]
    print("\n".join(beside), flush=True)
    if options.small:
        return
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
    PAGE.write_text("\n".join(lines + beside) + "\n")


if __name__ == "__main__":
    main()
