"""Loops over matrices with factors for blocks, in numpy: the reference that `csrc/kernels_blocks.cpp` must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.core.folds import MatrixBlocks

if TYPE_CHECKING:
    from zckpt.core.folds import Bytes, Floats, Halves

_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000


def check(numbers: Floats | Halves, blocks: MatrixBlocks, of_blocks: Floats, out: Bytes | None = None) -> None:
    """Makes sure that arrays have the sizes that blocks say; raises ValueError."""
    across, down = _shape(blocks)
    if len(numbers) != blocks.rows * blocks.columns or len(of_blocks) < down * across:
        raise ValueError(f"{len(numbers)} numbers and {len(of_blocks)} blocks for {blocks}")
    if out is not None and len(out) != len(numbers):
        raise ValueError(f"{len(out)} bytes for {len(numbers)} numbers")


def as_floats(numbers: Floats | Halves) -> Floats:
    """As fp32: whole numbers of 16 bits are those of bf16."""
    import numpy as np

    is_bf16 = numbers.dtype.itemsize == 2
    return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32) if is_bf16 else numbers  # type: ignore[return-value]


def largest(numbers: Floats | Halves, blocks: MatrixBlocks, found: Floats) -> None:
    import numpy as np

    check(numbers, blocks, found)
    across, down = _shape(blocks)
    rows = as_floats(numbers).reshape(blocks.rows, blocks.columns).view(np.uint32) & np.uint32(_MAGNITUDE)
    bits = found.view(np.uint32)
    bits[: down * across] = 0
    if rows.size:
        runs = np.maximum.reduceat(rows, np.arange(0, blocks.columns, blocks.block_columns), axis=1)
        np.maximum.at(bits[: down * across].reshape(down, across), _block_rows(blocks), runs)
    bits[bits > _INFINITY] = _NAN


def multiply_blocks(numbers: Floats, blocks: MatrixBlocks, factors: Floats) -> None:
    import numpy as np

    check(numbers, blocks, factors)
    with np.errstate(all="ignore"):
        numbers *= spread_scales(factors, blocks)


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
