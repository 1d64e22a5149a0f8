"""What matrices of fp8 stand for: each element times its block's scale, in fp32.

For `plain`. Source: DeepSeek-V3, inference/kernel.py (`weight_dequant`); transformers 5.23, integrations/finegrained_fp8.py;
compressed-tensors 0.20, quantization/lifecycle/forward.py (`dequantize`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import DType
from zckpt.core.folds import Tools
from zckpt.quantized.grids import Grid

if TYPE_CHECKING:
    from zckpt.core.folds import Array


@dataclass(frozen=True, slots=True)
class Dequantised:
    """A tensor times its scales, in fp32.

    Attributes:
        inputs: the tensor of fp8, and its scales in the order of the blocks.
        grid: how they lie over it.
    """

    inputs: tuple[TensorEntry, TensorEntry]
    grid: Grid

    @property
    def unit(self) -> int:
        return max(1, self.grid.columns)

    @property
    def facts(self) -> tuple[object, ...]:
        return ("dequantised", self.grid)

    def reads(self, start: int, stop: int) -> Iterable[tuple[TensorEntry, int, int]]:
        grid, (numbers, scales) = self.grid, self.inputs
        yield numbers, start, stop
        for _, blocks, band in grid.chunks(start // self.unit, stop // self.unit):
            bands = -(-(blocks.first + blocks.rows) // grid.block_rows)
            yield scales, band * grid.across, (band + bands) * grid.across

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        """As `Recipe.compute`; fp32. Raises CorruptError if a scale is NaN or infinite."""
        import numpy as np

        grid, (numbers, scales) = self.grid, self.inputs
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


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A tensor in another dtype, with each number rounded once.

    Attributes:
        inputs: the tensor.
        dtype: of the result.
        unit: as in the tensor's own recipe.
    """

    inputs: tuple[TensorEntry]
    dtype: DType
    unit: int = 1

    @property
    def facts(self) -> tuple[object, ...]:
        return ("narrowed", self.dtype.name)

    def reads(self, start: int, stop: int) -> Iterable[tuple[TensorEntry, int, int]]:
        return [(self.inputs[0], start, stop)]

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        return tools.read(self.inputs[0], start, stop, self.dtype)
