"""Loops over codes that stand for numbers of a table, in numpy: the reference that `csrc/codes.cpp` must equal.

For `kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.core.folds import MatrixBlocks
from zckpt.engine.kernels_fp8 import check, multiply_blocks, spread_scales

if TYPE_CHECKING:
    from zckpt.core.folds import Bytes, Floats


def check_codes(codes: Bytes, blocks: MatrixBlocks, zeros: Floats | None, factors: Floats, numbers: Floats) -> None:
    """Makes sure that arrays have the sizes that blocks say; raises ValueError."""
    check(numbers, blocks, factors, codes)
    if zeros is not None:
        check(numbers, blocks, zeros)


def of_codes(
    codes: Bytes, table: Floats, blocks: MatrixBlocks, zeros: Floats | None, factors: Floats, numbers: Floats
) -> None:
    """As `Kernels.of_codes`."""
    import numpy as np

    check_codes(codes, blocks, zeros, factors, numbers)
    np.take(table, codes, out=numbers, mode="clip")
    with np.errstate(all="ignore"):
        if zeros is not None:
            numbers -= spread_scales(zeros, blocks)
    multiply_blocks(numbers, blocks, factors)
