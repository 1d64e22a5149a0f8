"""Loops over matrices of fp8 with factors for blocks, in numpy: the reference that `csrc/kernels_fp8.cpp` must equal.

For `kernels`.
Source: OCP 8-bit floating point specification (OFP8), E4M3: bias 7, no infinities, largest number 448, NaN S.1111.111.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.core.folds import MatrixBlocks, Rounded

if TYPE_CHECKING:
    from zckpt.core.folds import Bytes, Floats

_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
_LEAST_NORMAL, _HALFWAY, _LARGEST = 0x3C800000, 0x43E80000, 0x43E00000
"""Bits in fp32 of 1/64; of 464, which is halfway to the next step behind the largest number; and of that, 448."""
_STEPS = 16384.0
"""fp32 has steps of 1/512 there, as E4M3 has below 1/64."""


def check(numbers: Floats, blocks: MatrixBlocks, of_blocks: Floats, out: Bytes | None = None) -> None:
    """Makes sure that arrays have the sizes that blocks say; raises ValueError."""
    across, down = _shape(blocks)
    if len(numbers) != blocks.rows * blocks.columns or len(of_blocks) < down * across:
        raise ValueError(f"{len(numbers)} numbers and {len(of_blocks)} blocks for {blocks}")
    if out is not None and len(out) != len(numbers):
        raise ValueError(f"{len(out)} bytes for {len(numbers)} numbers")


def largest(numbers: Floats, blocks: MatrixBlocks, found: Floats) -> None:
    """As `Kernels.largest`."""
    import numpy as np

    check(numbers, blocks, found)
    across, down = _shape(blocks)
    rows = numbers.reshape(blocks.rows, blocks.columns).view(np.uint32) & np.uint32(_MAGNITUDE)
    bits = found.view(np.uint32)
    bits[: down * across] = 0
    if rows.size:
        runs = np.maximum.reduceat(rows, np.arange(0, blocks.columns, blocks.block_columns), axis=1)
        np.maximum.at(bits[: down * across].reshape(down, across), _block_rows(blocks), runs)
    bits[bits > _INFINITY] = _NAN


def multiply_blocks(numbers: Floats, blocks: MatrixBlocks, factors: Floats) -> None:
    """As `Kernels.multiply_blocks`."""
    import numpy as np

    check(numbers, blocks, factors)
    with np.errstate(all="ignore"):
        numbers *= spread_scales(factors, blocks)


def to_e4m3(numbers: Floats, blocks: MatrixBlocks, factors: Floats, out: Bytes) -> Rounded:
    """As `Kernels.to_e4m3`."""
    import numpy as np

    check(numbers, blocks, factors, out)
    if not len(numbers):
        return Rounded(0, 0, 0.0)
    factor = spread_scales(factors, blocks)
    signs, size = numbers.view(np.uint32), np.abs(numbers)
    with np.errstate(all="ignore"):
        y = size / factor
        a = y.view(np.uint32) & np.uint32(_MAGNITUDE)
        over, none, small = a > _HALFWAY, a > _INFINITY, a < _LEAST_NORMAL
        steps = y + np.float32(_STEPS)
        near = (a + np.uint32(0x7FFFF) + ((a >> np.uint32(20)) & np.uint32(1))) & np.uint32(0xFFF00000)
        rounded = np.where(over, np.uint32(_LARGEST), near)
        value = np.where(small, steps - np.float32(_STEPS), rounded.view(np.float32))
        base = np.float32(_STEPS).view(np.uint32)
        number = np.where(small, steps.view(np.uint32) - base, (rounded >> np.uint32(20)) - np.uint32(960))
        off = (size - value * factor).view(np.uint32) & np.uint32(_MAGNITUDE)
    out[:] = np.where(none, np.uint32(0x7F), number) | (signs >> np.uint32(24) & np.uint32(0x80))
    error = np.where(none | (off > _INFINITY), np.uint32(_NAN), off).max().view(np.float32)
    return Rounded(int((over & ~none).sum()), int(((number == 0) & (size != 0)).sum()), float(error))


def _shape(blocks: MatrixBlocks) -> tuple[int, int]:
    """Blocks across, and blocks down from the matrix's first one to the last at hand."""
    return -(-blocks.columns // blocks.block_columns), -(-(blocks.first + blocks.rows) // blocks.block_rows)


def _block_rows(blocks: MatrixBlocks) -> Any:
    """For each row at hand, which row of blocks it is in."""
    import numpy as np

    return (blocks.first + np.arange(blocks.rows)) // blocks.block_rows


def spread_scales(factors: Floats, blocks: MatrixBlocks) -> Any:
    """The factor of each number."""
    import numpy as np

    across, down = _shape(blocks)
    rows = factors[: down * across].reshape(down, across)[_block_rows(blocks)]
    return np.repeat(rows, blocks.block_columns, axis=1)[:, : blocks.columns].reshape(-1)
