"""Loops over blocks: both engines give the same bits, and E4M3 is torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from zckpt.core.folds import MatrixBlocks
from zckpt.engine.kernels import NativeKernels, ReferenceKernels

KERNELS = (NativeKernels(), ReferenceKernels())
CASES = [
    MatrixBlocks(300, 1000, 128, 128),
    MatrixBlocks(5, 7, 2, 3, 1),
    MatrixBlocks(64, 130, 128, 128, 64),
    MatrixBlocks(10, 33, 1, 33, 3),
    MatrixBlocks(10, 33, 100, 33),
    MatrixBlocks(0, 5, 2, 2),
]


def numbers(count: int) -> Any:
    """Random bits of fp32: of all magnitudes, with infinities and NaN; and every special one."""
    found = np.random.default_rng(0).integers(0, 2**32, count, np.uint32).view(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, 448.0, 464.0], np.float32)
    found[: len(special)] = special[: len(found)]
    return found


def count_of(blocks: MatrixBlocks) -> int:
    return -(-blocks.columns // blocks.block_columns) * -(-(blocks.first + blocks.rows) // blocks.block_rows)


@pytest.mark.parametrize("blocks", CASES)
@pytest.mark.parametrize("kind", ["bits", "weights"])
def test_both_give_the_same(blocks: MatrixBlocks, kind: str) -> None:
    count = blocks.rows * blocks.columns
    x = numbers(count) if kind == "bits" else np.random.default_rng(1).normal(size=count).astype(np.float32)
    results = []
    for kernels in KERNELS:
        largest = np.full(count_of(blocks), 7, np.float32)
        kernels.largest(x, blocks, largest)
        with np.errstate(all="ignore"):
            factors = np.where(np.isfinite(largest) & (largest > 0), largest, np.float32(448)) / np.float32(448)
        product, bits = x.copy(), np.empty(count, np.uint8)
        rounded = kernels.to_e4m3(x, blocks, factors, bits)
        kernels.multiply_blocks(product, blocks, factors)
        with np.errstate(all="ignore"):
            product = np.where(np.isnan(product), np.float32(0), product)
        results.append((largest.tobytes(), bits.tobytes(), product.tobytes(), repr(rounded)))
    assert results[0] == results[1]
    if kind == "weights" and count:
        assert largest.max() == np.abs(x).max() and rounded.saturated == 0 and 0 < rounded.error < 0.2


@pytest.mark.parametrize("kernels", KERNELS)
def test_e4m3_is_torchs(kernels: Any) -> None:
    """Every number that is near one of E4M3 or halfway between two, of both signs, and many others."""
    near = np.arange(256, dtype=np.uint8)
    steps = torch.from_numpy(near).view(torch.float8_e4m3fn).float()
    steps = np.sort(steps[torch.isfinite(steps)].numpy())
    exact = np.concatenate([steps, (steps[1:] + steps[:-1]) / 2, [464.0]]).astype(np.float32)
    bits = np.random.default_rng(0).integers(0, 0x43E80000, 200_000).astype(np.uint32)
    x = np.concatenate(
        [exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(1e3)), bits.view(np.float32)]
    )
    found = np.empty(len(x), np.uint8)
    rounded = kernels.to_e4m3(x, MatrixBlocks(1, len(x), 1, len(x)), np.ones(1, np.float32), found)
    expected = torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (found == expected).all()
    assert rounded.saturated == (np.abs(x) > 464).sum() == 1
    x, found = np.array([np.nan, -np.inf, 1e30], np.float32), np.empty(3, np.uint8)
    kernels.to_e4m3(x, MatrixBlocks(1, 3, 1, 3), np.ones(1, np.float32), found)
    assert list(found) == [0x7F, 0xFE, 0x7E]


def test_blocks_of_another_size_are_refused() -> None:
    for kernels in KERNELS:
        with pytest.raises(ValueError, match="numbers and"):
            kernels.largest(np.zeros(5, np.float32), MatrixBlocks(2, 3, 1, 1), np.zeros(6, np.float32))
