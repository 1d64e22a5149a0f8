"""How scales lie over matrices, each for a block of elements; and what matrices of fp8 stand for, in fp32.

For the recipes of this room. A tensor of more than two dimensions is a stack of matrices (experts), each with blocks of its own.
Source: DeepSeek-V3, `weight_scale_inv` (fp32, ceil(rows / 128) x ceil(columns / 128), by which a block is multiplied);
compressed-tensors 0.20, quantization/lifecycle/initialize.py (`weight_scale`: (1,) for a tensor, (rows, 1) for channels).

What they stand for: DeepSeek-V3, inference/kernel.py (`weight_dequant`); transformers 5.23, integrations/finegrained_fp8.py;
compressed-tensors 0.20, quantization/lifecycle/forward.py (`dequantize`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import DType
from zckpt.core.folds import MatrixBlocks, Tools
from zckpt.core.recipes import Formula, derive_entry

if TYPE_CHECKING:
    from zckpt.core.folds import Array


_MOST = 1 << 19
"""The most elements that are computed at once, so that a second-level cache has them; a larger row of blocks stays whole."""
_MOST_WHOLE = 1 << 21
"""The most elements of a row of blocks that stays whole whatever its rows are: 8 MiB of fp32."""
_FEW_ROWS = 256


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks over a stack of matrices.

    Attributes:
        matrices: in the stack; 1 for a matrix.
        rows, columns: of each matrix.
        block_rows, block_columns: of each block; the last ones of a matrix may have fewer.
    """

    matrices: int
    rows: int
    columns: int
    block_rows: int
    block_columns: int

    @property
    def down(self) -> int:
        """The number of blocks in a column of a matrix."""
        return -(-self.rows // self.block_rows)

    @property
    def across(self) -> int:
        """The number of blocks in a row of a matrix."""
        return -(-self.columns // self.block_columns)

    @property
    def is_cut(self) -> bool:
        """Whether blocks are too large to be in memory as a whole."""
        return self.block_rows > _FEW_ROWS and self.block_rows * self.columns > _MOST_WHOLE

    @property
    def unit(self) -> int:
        """The elements of a row of blocks; of a single row where blocks are cut."""
        if self.is_cut:
            return max(1, self.columns)
        evenly = self.matrices == 1 or self.rows % self.block_rows == 0
        return max(1, (self.block_rows if evenly else self.rows) * self.columns)

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, MatrixBlocks, int]]:
        """Rows [start, stop) of the stack in parts that fit in memory, each of one matrix; blocks stay whole unless they are cut.

        Yields:
            The part's first row in the stack; how blocks lie over it, counted from its first row of blocks; the number of that
            row of blocks in the stack.
        """
        most = max(1, _MOST // max(1, self.columns))
        while start < stop:
            matrix, row = divmod(start, self.rows)
            band, inside = divmod(row, self.block_rows)
            if self.is_cut:
                count = min(most, self.block_rows - inside)
            else:
                count = max(self.block_rows, most // self.block_rows * self.block_rows) - inside
            count = min(count, stop - start, self.rows - row)
            yield (
                start,
                MatrixBlocks(count, self.columns, self.block_rows, self.block_columns, inside),
                matrix * self.down + band,
            )
            start += count


def as_matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Matrices, rows and columns of a tensor; a vector is one row, and a number one of one."""
    rows, columns = (1, 1, *shape)[-2:]
    return math.prod(shape[:-2]), rows, columns


def blocks_of(shape: tuple[int, ...], block: tuple[int, int]) -> Grid:
    """Blocks of one size over a tensor."""
    matrices, rows, columns = as_matrices(shape)
    return Grid(matrices, rows, columns, *block)


def grid_of(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int], *, has_groups: bool = False
) -> Grid | None:
    """The grid of a tensor with scales of this shape; None if they cannot be its scales.

    Args:
        shape: of the tensor.
        scales: of its scales.
        block: rows and columns of a block, where there is one scale for each block.
        has_groups: whether there can be a scale for groups of columns, which are before blocks then.
    """
    matrices, rows, columns = as_matrices(shape)
    number, lead = math.prod(scales), shape[:-2]
    blocks = Grid(matrices, rows, columns, *block)
    if (
        len(shape) == 2 and len(scales) == 4 and scales[1] == scales[3] == 1
    ):  # as ModelOpt has them, with extents of 1 between
        scales = scales[::2]
    if number == matrices and (number == 1 or scales[: len(lead)] == lead):
        return Grid(matrices, rows, columns, max(rows, 1), max(columns, 1))
    is_by_rows = scales in ((*lead, rows, 1), (*lead, rows))
    if scales == (*lead, blocks.down, blocks.across) and not (has_groups and is_by_rows):
        return blocks
    if is_by_rows:
        return Grid(matrices, rows, columns, 1, max(columns, 1))
    if has_groups and scales[:-1] == (*lead, rows) and scales[-1] and columns % scales[-1] == 0:
        return Grid(matrices, rows, columns, 1, columns // scales[-1])
    return None


@dataclass(frozen=True, slots=True)
class Scaled:
    """A recipe: a tensor of fp8 times its scales, which are in the order of the blocks, in fp32."""

    entry: TensorEntry
    scales: TensorEntry
    grid: Grid

    @property
    def inputs(self) -> tuple[TensorEntry, TensorEntry]:
        return self.entry, self.scales

    @property
    def unit(self) -> int:
        return max(1, self.grid.columns)

    @property
    def facts(self) -> tuple[object, ...]:
        return ("dequantised", self.grid)

    def reads(self, start: int, stop: int) -> Iterable[tuple[TensorEntry, int, int]]:
        grid, scales = self.grid, self.scales
        yield self.entry, start, stop
        for _, blocks, band in grid.chunks(start // self.unit, stop // self.unit):
            bands = -(-(blocks.first + blocks.rows) // grid.block_rows)
            yield scales, band * grid.across, (band + bands) * grid.across

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        """As `Recipe.compute`; fp32. Raises CorruptError if a scale is NaN or infinite."""
        import numpy as np

        grid, numbers, scales = self.grid, self.entry, self.scales
        found = np.empty(stop - start, np.float32)
        at = 0
        for row, blocks, band in grid.chunks(start // self.unit, stop // self.unit):
            first = row * grid.columns
            count = blocks.rows * grid.columns
            bands = -(-(blocks.first + blocks.rows) // grid.block_rows)
            part = tools.read_floats(numbers, first, first + count)
            factors = tools.read_floats(scales, band * grid.across, (band + bands) * grid.across)
            if not np.isfinite(factors).all():
                raise CorruptError(
                    f"the scales of tensor {numbers.name!r} hold NaN or infinity", found=f"in {scales.name!r}",
                    expected="finite numbers", remedy=COPY_AGAIN,
                )  # fmt: skip
            tools.kernels.multiply_blocks(part, blocks, factors)
            found[at : at + count] = part
            at += count
        return found


NARROWED = "narrowed"
"""The first of the facts of `in_dtype`'s recipe."""


def in_dtype(entry: TensorEntry, dtype: DType, unit: int = 1) -> TensorEntry:
    """The tensor in another dtype, rounded once, or the entry itself if it has that dtype; `unit` is as in its recipe."""
    if entry.dtype == dtype:
        return entry

    def compute(start: int, stop: int, tools: Tools) -> Array:
        return tools.read(entry, start, stop, dtype)

    facts = (NARROWED, dtype.name)
    recipe = Formula((entry,), facts, compute, unit, lambda start, stop: [(entry, start, stop)])
    return derive_entry(entry.name, entry.shape, dtype, recipe, entry.role)
