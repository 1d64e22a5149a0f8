"""What a save costs a rank as ranks become more: planned for a model of 70 billion parameters on 8 to 4,096 of them.

    python benchmarks/exchange_scale.py

Ranks are simulated one after the other, each with a catalog of its own: the first two, some in the middle, the last. What a save
plans is what they plan here; no element moves. Writes results_exchange.md. Figures of time are CPU seconds of one process.
"""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zckpt.core.catalog import Catalog, Replica, Source, TensorEntry
from zckpt.core.dtypes import BF16, F32, DType
from zckpt.core.evidence import LIVE
from zckpt.core.fragments import Fragment
from zckpt.layouts.run.training import ParameterGroup, Training
from zckpt.layouts.zero.write import ZeroTarget, lay_out_rank
from zckpt.runtime.saves.exchange import EVERY, Exchange, RankStore, WantedMoves, rounds_of
from zckpt.runtime.saves.rounds import LIMIT_BYTES
from zckpt.runtime.world import elements_of

WORLDS = (8, 32, 128, 512, 1024, 4096)
LAYERS, WIDTH, INNER, KEYS, WORDS = 80, 8192, 28672, 1024, 32000
PAGE = Path(__file__).with_name("results_exchange.md")


def shapes() -> dict[str, tuple[int, ...]]:
    """Of Llama 2 70B."""
    found: dict[str, tuple[int, ...]] = {"embed": (WORDS, WIDTH)}
    for layer in range(LAYERS):
        found |= {f"{layer}.q": (WIDTH, WIDTH), f"{layer}.k": (KEYS, WIDTH), f"{layer}.v": (KEYS, WIDTH)}
        found |= {f"{layer}.o": (WIDTH, WIDTH), f"{layer}.gate": (INNER, WIDTH), f"{layer}.up": (INNER, WIDTH)}
        found |= {f"{layer}.down": (WIDTH, INNER), f"{layer}.norm": (WIDTH,), f"{layer}.norm2": (WIDTH,)}
    return found | {"norm": (WIDTH,), "head": (WORDS, WIDTH)}


@dataclass(frozen=True, slots=True)
class Planned:
    """What one rank has planned: CPU seconds, bytes of memory, and its streams."""

    seconds: float
    nbytes: int
    volumes: list[int]
    pieces: list[int]


def entry(name: str, shape: tuple[int, ...], dtype: DType, size: int, kind: str = "") -> TensorEntry:
    """A parameter or a state of it, as ranks hold it."""
    numel = math.prod(shape)
    store = RankStore(name, numel * dtype.itemsize, rank=EVERY, step=elements_of(shape, size, 0)[1], key=(name, kind))
    fragment = Fragment(store, 0, 0, numel)
    replicas = (Replica(BF16, (Fragment(RankStore(name, numel * 2, step=store.step, key=(name, "")), 0, 0, numel),)),)
    return TensorEntry(name, shape, dtype, "parameter", (fragment,), () if kind else replicas)


def planned(size: int, rank: int, stage: int) -> Planned:
    """Everything that a rank plans, from its description of the run on."""
    model = shapes()
    tracemalloc.start()
    began = time.process_time()
    states = ("exp_avg", "exp_avg_sq")
    catalog = Catalog(
        {name: entry(name, shape, F32, size) for name, shape in model.items()}, Source("live", "the run"), LIVE
    )
    training = Training(
        groups=(ParameterGroup(tuple(model), {"lr": 1e-3}, {}, states),),
        states={name: {one: entry(name, shape, F32, size, one) for one in states} for name, shape in model.items()},
        scaler={}, model={}, precision=BF16,
    )  # fmt: skip
    target = ZeroTarget("tag", stage, size, BF16, plain=True)
    keys = [(name, kind) for name in model for kind in ("", *states)]
    exchange = Exchange(rank, size, None, torch.device("cpu"), True, {}.__getitem__, keys)
    wanted = WantedMoves(exchange, lay_out_rank(catalog, training, target, rank).pairs)
    seconds = time.process_time() - began
    nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Planned(seconds, nbytes, wanted.volumes, wanted.pieces)


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Of the power law in the number of ranks that fits best."""
    xs, ys = [math.log(size) for size in sizes], [math.log(max(value, 1e-9)) for value in values]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def main() -> None:
    """All worlds."""
    lines = [
        "# A save on many ranks, planned", "", "70 billion parameters, bf16 with fp32 masters and Adam's states. Simulated by "
        "`benchmarks/exchange_scale.py`: the slowest of ranks 0, 1, one in the middle and the last. A round carries at most "
        f"{LIMIT_BYTES >> 20} MiB to a rank and from it.", "",
        "| stage | ranks | planning, CPU s | memory, MiB | rounds | bytes to the rank that gets most, GB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for stage in (1, 3):
        taken: list[tuple[float, float, int]] = []
        for size in WORLDS:
            several = [planned(size, rank, stage) for rank in sorted({0, 1, size // 2, size - 1})]
            volumes = [max(numbers) for numbers in zip(*(one.volumes for one in several), strict=True)]
            pieces = [max(numbers) for numbers in zip(*(one.pieces for one in several), strict=True)]
            rounds = sum(1 for _ in rounds_of(volumes, pieces, LIMIT_BYTES))
            seconds, nbytes = max(one.seconds for one in several), max(one.nbytes for one in several)
            most = max(sum(one.volumes) for one in several)
            taken.append((seconds, nbytes, max(1, rounds)))
            lines.append(
                f"| {stage} | {size:,} | {seconds:.2f} | {nbytes / 2**20:.0f} | {rounds:,} | {most / 1e9:.2f} |"
            )
            print(lines[-1], flush=True)
        fitted = [exponent(WORLDS, [one[number] for one in taken]) for number in range(3)]
        lines.append(f"| {stage} | exponent | {fitted[0]:.2f} | {fitted[1]:.2f} | {fitted[2]:.2f} | |")
        print(lines[-1], flush=True)
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
