"""Every loop over elements of the engine alone: one thread, in memory, beside a copy of the same bytes.

    python benchmarks/kernels.py [--results FILE] [--mib 64]

The rate is that of the larger side: the fp32 numbers, for a loop that rounds or decodes (of bf16, what these would take as
fp32). "Copy" is what numpy's copy moves of that side, in the same rounds: memory's rate, for one thread. A loop is as quick
as it can be where its rate is that of a copy, or 3 GB/s if that is less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from measure import machine
from numpy.typing import NDArray

from zckpt import _core
from zckpt.core.folds import MatrixBlocks, NumberGrid
from zckpt.deltas.decode import XorDecoder, difference
from zckpt.deltas.form import FRAME
from zckpt.deltas.pieces import PIECE_BYTES
from zckpt.engine.kernels import kernels_of
from zckpt.engine.kernels_ggml import TYPES
from zckpt.engine.kernels_to_ggml import KINDS

HEAD = """# Loops over elements

Written by `python benchmarks/kernels.py`: one thread, {mib} MiB of fp32 numbers in memory, the median of {rounds} rounds. The
rate is of the fp32 side (of bf16, what the numbers would take as fp32); "copy" is what a copy of it moves in the same
rounds. A LoRA merge of rank r takes 2 r operations a number, so that at rank 64 it is arithmetic that limits it, and not
memory. So it is for k-quants: of each number of Q4_K 21 scales are tried, with 9 operations each, or 11 where codes are cut
off, and 6 for the error, which nine trials of ten need; all in ggml's order, so none can be fused: 16 numbers take 330
operations with AVX-512, and two of them begin in a cycle. Rates of a difference are of one version's bytes; below `apply`,
which takes the difference apart itself, is what libzstd needs for that alone. {machine}. The load average was {load:.0f} when
it ended.

| loop | GB/s | copy, GB/s | part |
| --- | --- | --- | --- |
"""
ROUNDS, COLUMNS = 7, 4096
KERNELS = kernels_of("native")


def loops(numel: int) -> dict[str, Callable[[], object]]:
    """Each loop by its name, on arrays of so many fp32 numbers."""
    random = np.random.default_rng(0)
    x, y = (random.standard_normal(numel, np.float32) for _ in range(2))
    rows, bf16 = numel // COLUMNS, (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    found: dict[str, Callable[[], object]] = {
        "accumulate (weighted sums)": partial(KERNELS.accumulate, y, x, 0.25),
        "approach (running means)": partial(KERNELS.approach, y, x, 3.0),
        "blend (moving averages, slerp)": partial(KERNELS.blend, y, x, 0.5, 0.5),
        "products (slerp's angle)": partial(KERNELS.products, x, y),
    }
    for rank in (8, 16, 64):
        left, right = (random.standard_normal(side * rank, np.float32) for side in (rows, COLUMNS))
        found[f"add_low_rank (LoRA merge), rank {rank}"] = partial(KERNELS.add_low_rank, y, left, right, rank, 0.5)
    codes = random.integers(0, 16, numel).astype(np.uint8)
    table = np.zeros(256, np.float32)
    table[:16] = range(16)
    for high, wide in ((128, 128), (1, 32), (1, 16)):
        blocks, label = MatrixBlocks(rows, COLUMNS, high, wide), f"blocks of {high} x {wide}"
        scales = np.ones(-(-rows // high) * -(-COLUMNS // wide), np.float32)
        found[f"largest (scales), {label}"] = partial(KERNELS.largest, x, blocks, scales.copy())
        found[f"largest (scales) of bf16, {label}"] = partial(KERNELS.largest, bf16, blocks, scales.copy())
        found[f"multiply_blocks, {label}"] = partial(KERNELS.multiply_blocks, y, blocks, scales)
        found[f"of_codes (4 bits), {label}"] = partial(KERNELS.of_codes, codes, table, blocks, None, scales, y)
        for grid in NumberGrid:
            into = np.empty(numel, np.uint8)
            found[f"to_codes ({grid.name}), {label}"] = partial(KERNELS.to_codes, grid, x, blocks, scales, into)
            found[f"to_codes ({grid.name}) of bf16, {label}"] = partial(
                KERNELS.to_codes, grid, bf16, blocks, scales, into
            )
    for bits in (3, 4, 8):
        into, both = np.empty(numel * bits // 8, np.uint8), np.empty((2, numel // 64), np.float32)
        found[f"to_affine ({bits} bits of MLX), groups of 64"] = partial(KERNELS.to_affine, x, 64, bits, into, *both)
    for part in (0.03, 0.17, 0.6):
        changed = random.random(2 * numel, np.float32) < part  # of bf16 numbers, in their lowest bits
        after = x.view(np.uint16) ^ np.where(changed, random.geometric(0.5, 2 * numel).clip(1, 127), 0).astype(
            np.uint16
        )
        label = f"{part:.0%} of bf16 numbers changed"
        found[f"difference (deltas), {label}"] = partial(_difference, x, after)
        frame = FRAME + x.nbytes.to_bytes(8, "little") + b"".join(_difference(x, after))
        found[f"apply (deltas), {label}"] = partial(_apply, x.copy().view(np.uint8), frame)
        found[f"libzstd alone, {label}"] = partial(_zstd, x.nbytes, frame)
    matter = random.random(COLUMNS, np.float32)
    for kind, (size, each, _) in TYPES.items():
        packed = np.zeros(numel // each * size, np.uint8)
        if kind in KINDS:
            found[f"to_ggml ({kind})"] = partial(KERNELS.to_ggml, kind, x, COLUMNS, None, packed)
        if kind in KINDS and kind != "MXFP4":
            found[f"to_ggml ({kind}), importance matrix"] = partial(KERNELS.to_ggml, kind, x, COLUMNS, matter, packed)
        found[f"of_ggml ({kind})"] = partial(KERNELS.of_ggml, kind, packed, y)
    packed = np.empty(numel // 32 * 34, np.uint8)
    found["to_q8_0"] = partial(KERNELS.to_q8_0, x, packed)
    found["to_q8_0 of bf16"] = partial(KERNELS.to_q8_0, bf16, packed)
    found["of_q8_0"] = partial(KERNELS.of_q8_0, packed, y)
    return found


def _difference(before: NDArray[np.float32], after: NDArray[np.uint16]) -> list[bytes]:
    """The blocks of each piece, as `deltas` makes them."""
    (old, new), last = (side.view(np.uint8) for side in (before, after)), before.nbytes - PIECE_BYTES
    return [
        _core.difference(old[at:].ctypes.data, new[at:].ctypes.data, PIECE_BYTES, 2, ends=at == last)[0]
        for at in range(0, len(old), PIECE_BYTES)
    ]


def _apply(data: NDArray[np.uint8], frame: bytes) -> None:
    decoder = XorDecoder(len(data), lambda count, at: frame[at : at + count], "delta", "w")
    for at in range(0, len(data), PIECE_BYTES):
        decoder.renew(data[at : at + PIECE_BYTES])
    decoder.end()


def _zstd(nbytes: int, frame: bytes) -> None:
    decompressor = difference(lambda count, at: frame[at : at + count], "delta", "w")
    for _ in range(0, nbytes, PIECE_BYTES):
        decompressor.take(PIECE_BYTES)


def main() -> None:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results_kernels.md"))
    parser.add_argument("--mib", type=int, default=64)
    asked = parser.parse_args()
    numel = asked.mib << 18
    source, target = np.ones(numel, np.float32), np.empty(numel, np.float32)
    lines = []
    for name, loop in loops(numel).items():
        taken, copied = [], []
        loop()
        for _ in range(ROUNDS):
            began = time.thread_time()
            loop()
            middle = time.thread_time()
            np.copyto(target, source)
            taken.append(middle - began)
            copied.append(time.thread_time() - middle)
        rate, copy = (4e-9 * numel / statistics.median(seconds) for seconds in (taken, copied))
        lines.append(f"| {name} | {rate:.1f} | {copy:.1f} | {rate / copy:.0%} |")
        print(lines[-1], flush=True)
    head = HEAD.format(mib=asked.mib, rounds=ROUNDS, machine=machine(), load=os.getloadavg()[0])
    asked.results.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
