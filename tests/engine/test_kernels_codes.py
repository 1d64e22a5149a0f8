"""Loops over blocks and codes: both engines give the same bits, E4M3 is torch's, and each code is the nearest one."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from zckpt._core import use_vector_paths
from zckpt.core.folds import MatrixBlocks, NumberGrid
from zckpt.engine.kernels import NativeKernels, ReferenceKernels

KERNELS = (NativeKernels(), ReferenceKernels())
CASES = [
    MatrixBlocks(300, 1000, 128, 128),
    MatrixBlocks(5, 7, 2, 3, 1),
    MatrixBlocks(64, 130, 128, 128, 64),
    MatrixBlocks(10, 33, 1, 33, 3),
    MatrixBlocks(10, 33, 100, 33),
    MatrixBlocks(9, 96, 1, 16),
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


@pytest.fixture(params=["any processor", "AVX2", "AVX-512"], autouse=True)
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Which instructions the C++ loops use, as far as this processor has them."""
    use_vector_paths(request.param != "any processor", request.param == "AVX-512")
    yield
    use_vector_paths(True)


@pytest.mark.parametrize("blocks", CASES)
@pytest.mark.parametrize("kind", ["bits", "weights", "bits of bf16", "weights of bf16"])
def test_both_give_the_same(blocks: MatrixBlocks, kind: str) -> None:
    count = blocks.rows * blocks.columns
    x = numbers(count) if "bits" in kind else np.random.default_rng(1).normal(size=count).astype(np.float32)
    whole = x
    if "bf16" in kind:
        x = (x.view(np.uint32) >> 16).astype(np.uint16)
        whole = (x.astype(np.uint32) << 16).view(np.float32)
    results = []
    for kernels in KERNELS:
        largest = np.full(count_of(blocks), 7, np.float32)
        kernels.largest(x, blocks, largest)
        with np.errstate(all="ignore"):
            factors = np.where(np.isfinite(largest) & (largest > 0), largest, np.float32(448)) / np.float32(448)
        product, bits = whole.copy(), {grid: np.empty(count, np.uint8) for grid in NumberGrid}
        rounded = {grid: kernels.to_codes(grid, x, blocks, factors, bits[grid]) for grid in NumberGrid}
        kernels.multiply_blocks(product, blocks, factors)
        with np.errstate(all="ignore"):
            product = np.where(np.isnan(product), np.float32(0), product)
        results.append((largest.tobytes(), [one.tobytes() for one in bits.values()], product.tobytes(), repr(rounded)))
    assert results[0] == results[1]
    if "weights" in kind and count:
        own = rounded[NumberGrid.E4M3]
        assert largest.max() == np.abs(whole).max() and own.saturated == 0 and 0 < own.error < 0.2


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
    rounded = kernels.to_codes(NumberGrid.E4M3, x, MatrixBlocks(1, len(x), 1, len(x)), np.ones(1, np.float32), found)
    expected = torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (found == expected).all()
    assert rounded.saturated == (np.abs(x) > 464).sum() == 1
    x, found = np.array([np.nan, -np.inf, 1e30], np.float32), np.empty(3, np.uint8)
    kernels.to_codes(NumberGrid.E4M3, x, MatrixBlocks(1, 3, 1, 3), np.ones(1, np.float32), found)
    assert list(found) == [0x7F, 0xFE, 0x7E]


def test_blocks_of_another_size_are_refused() -> None:
    for kernels in KERNELS:
        with pytest.raises(ValueError, match="numbers and"):
            kernels.largest(np.zeros(5, np.float32), MatrixBlocks(2, 3, 1, 1), np.zeros(6, np.float32))


HALVES = (Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3), Fraction(4), Fraction(6))
NUMBERS = {
    NumberGrid.E2M1: {n: Fraction(x) for n, x in enumerate((0, *HALVES, 0, *(-h for h in HALVES)))},
    NumberGrid.INT8: {n % 256: Fraction(n) for n in range(-128, 128)},
    NumberGrid.INT4: {n: Fraction(n - 8) for n in range(16)},
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("grid", NUMBERS)
def test_each_code_is_the_nearest(kernels: Any, grid: NumberGrid) -> None:
    """By fractions: no other number is nearer, and of two as near it is the even one. Most quotients are almost halfway."""
    dice, known = np.random.default_rng(int(grid)), NUMBERS[grid]
    order = sorted(set(known.values()))
    middles = np.array([float(a + b) / 2 for a, b in pairwise(order)])
    for size in (1e-38, 1e-20, 1.0, 1e25):
        factors = (dice.random(12) * size + size / 3).astype(np.float32)
        x = (factors[:, None].astype(np.float64) * dice.choice(middles, (12, 8))).astype(np.float32)
        x[::2] = np.nextafter(x[::2], dice.choice([-1e30, 1e30], x[::2].shape).astype(np.float32))
        x[-1] = (dice.random(8) - 0.5) * 300 * factors[-1]
        codes = np.empty(x.size, np.uint8)
        kernels.to_codes(grid, x.reshape(-1), MatrixBlocks(12, 8, 1, 8), factors, codes)
        for number, code, factor in zip(x.reshape(-1).tolist(), codes.tolist(), factors.repeat(8).tolist()):
            wanted = Fraction(number) / Fraction(factor)
            off = abs(known[code] - wanted)
            place = order.index(known[code])
            others = [abs(one - wanted) for one in order[max(0, place - 1) : place + 2] if one != known[code]]
            assert off < min(others) or (off == min(others) and code % 2 == 0)


@pytest.mark.parametrize(
    ("rows", "columns", "bits"), [(1, 1, 1), (3, 33, 4), (5, 64, 4), (4, 7, 3), (2, 100, 5), (9, 40, 8), (2, 11, 6)]
)
def test_codes_are_split_and_joined(rows: int, columns: int, bits: int) -> None:
    dice = np.random.default_rng(columns)
    pitch = -(-columns * bits // 8) + 2
    raw = dice.integers(0, 256, (rows, pitch), np.uint8)
    table = np.zeros(256, np.float32)
    table[: 1 << bits] = dice.normal(size=1 << bits)
    for high_first in (False, True) if bits == 4 else (False,):
        found: list[Any] = []
        for kernels in KERNELS:
            codes = np.empty((rows, columns), np.uint8)
            kernels.split_codes(raw.reshape(-1), bits, codes, high_first=high_first)
            stream = int.from_bytes(raw[-1].tobytes(), "little")
            if not high_first:
                assert [stream >> bits * n & (1 << bits) - 1 for n in range(columns)] == codes[-1].tolist()
            numbers = [np.empty(rows * columns, np.float32) for _ in range(3)]
            blocks = MatrixBlocks(rows, columns, 1, max(1, columns // 2))
            factors, zeros = (dice.normal(size=count_of(blocks)).astype(np.float32) for _ in range(2))
            dice = np.random.default_rng(columns + 1)
            single = MatrixBlocks(rows, columns, rows, 1)
            kernels.of_codes(codes.reshape(-1), table, blocks, None, factors, numbers[0])
            kernels.of_codes(codes.reshape(-1), table, blocks, zeros, factors, numbers[1])
            of_columns = dice.normal(size=columns).astype(np.float32)
            kernels.of_codes(codes.reshape(-1), table, single, of_columns, of_columns, numbers[2])
            dice = np.random.default_rng(columns)
            found.append([codes.tolist(), *(one.tobytes() for one in numbers)])
        assert found[0][0] == found[1][0]
    joined = [np.empty((rows, pitch + columns), np.uint8) for _ in KERNELS]
    for kernels, out in zip(KERNELS, joined):
        kernels.join_codes(codes & 15, 0x88, out)
        again = np.empty((rows, columns), np.uint8)
        kernels.split_codes(out.reshape(-1), 4, again, high_first=False)
        assert (again == codes & 15).all() and (out[:, -(-columns // 2) :] == 0x88).all()
    assert (joined[0] == joined[1]).all()


@pytest.mark.parametrize(("word", "bits"), [("<u1", 4), ("<u4", 4), ("<u4", 2), ("<u8", 8), ("<u2", 8)])
def test_codes_of_several_rows_in_an_element(word: str, bits: int) -> None:
    dice = np.random.default_rng(bits)
    words = dice.integers(0, 256, (3, 21 * np.dtype(word).itemsize), np.uint8).view(word)
    shifts = tuple(dice.permutation(words.itemsize * 8 // bits) * bits)
    for first in (0, 1, len(shifts)):
        found = []
        for kernels in KERNELS:
            codes = np.empty((3 * len(shifts) - first, 21), np.uint8)
            kernels.split_down(words, bits, tuple(map(int, shifts)), first, codes)
            found.append(codes)
        assert (found[0] == found[1]).all()
        row, column = len(found[0]) - 1, 20
        place = first + row
        assert (
            found[0][row, column]
            == int(words[place // len(shifts), column]) >> int(shifts[place % len(shifts)]) & (1 << bits) - 1
        )
