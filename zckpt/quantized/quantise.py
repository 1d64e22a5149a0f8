"""Making fp8: the scale of each block of a matrix, and its elements divided by it and rounded to E4M3.

For `jobs.to_fp8`, and for `verify`, which derives the same again. The source is read once where the elements are computed before
the scales, which are kept meanwhile (a few bytes for thousands of elements); a part whose scales are asked for alone is read
again. Where one scale is for a whole large matrix, the matrix is read twice.

[Note: numbers] In fp32: scale = max(largest magnitude, 1e-12) / 448; element = E4M3(x / scale), rounded once, to nearest even. So
a block of zeros has a scale, and nothing is larger than 448. Scales that are stored as bf16 are rounded to it before they divide.
Source: DeepSeek-V3's weights and SGLang's `per_block_cast_to_fp8` (the form and 448); compressed-tensors 0.20 (scales in the
dtype of the model).
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CastError
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, F8_E4M3, F32, DType
from zckpt.core.folds import NumberGrid, Rounded, Tools
from zckpt.core.recipes import derive_entry
from zckpt.quantized.grids import Grid

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Floats

_LEAST = 1e-12
_LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What quantising has done to a tensor.

    Attributes:
        elements: that were quantised here; fewer than the tensor has if an earlier run or another process made some.
        largest: their largest magnitude.
        error: the largest difference between an element and what it stands for now.
        saturated: elements that were cut off at the largest number of their block.
        underflowed: elements that became zero and were not.
    """

    elements: int = 0
    largest: float = 0.0
    error: float = 0.0
    saturated: int = 0
    underflowed: int = 0


class Quantiser:
    """One tensor's way to fp8; its two recipes, of scales and elements, share what they find.

    Args:
        entry: of floats, read as fp32.
        grid: the blocks.
        dtype: of the scales, F32 or BF16.
    """

    def __init__(self, entry: TensorEntry, grid: Grid, dtype: DType) -> None:
        self.entry = entry
        self.grid = grid
        self.dtype = dtype
        self.facts: tuple[object, ...] = ("E4M3", grid, dtype.name)
        self._lock = Lock()
        self._measuring = Lock()
        self._scales: Any = None
        self._given = 0
        self._seen = bytearray()
        self._measured = Measured()

    @property
    def measured(self) -> Measured:
        """What has been found so far."""
        return self._measured

    def scales(self, first: int, last: int, tools: Tools) -> Floats:
        """The scales of rows of blocks [first, last), one after the other."""
        grid = self.grid
        kept, is_known = self._kept(first, last)
        for band in range(first, last):
            if not is_known[band - first]:
                matrix, row = divmod(band, grid.down)
                start = matrix * grid.rows + row * grid.block_rows
                stop = min(start + grid.block_rows, (matrix + 1) * grid.rows)
                kept[band - first] = self._scales_of(self._largest(start, stop, tools))
        self._keep(first, kept)
        return kept.reshape(-1)  # type: ignore[no-any-return]

    def give(self, first: int, last: int, tools: Tools) -> Floats:
        """The same, for the output; when all have been given, they are kept no longer."""
        found = self.scales(first, last, tools)
        with self._lock:
            self._given += last - first
            if self._given >= self.grid.matrices * self.grid.down:
                self._scales, self._given = None, 0
        return found

    def elements(self, start: int, stop: int, tools: Tools) -> Array:
        """Rows [start, stop) of the stack, as the bits of E4M3."""
        import numpy as np

        grid = self.grid
        found = np.empty((stop - start) * grid.columns, np.uint8)
        at = 0
        for row, blocks, band in grid.chunks(start, stop):
            count = blocks.rows * grid.columns
            if grid.is_cut:
                with self._measuring:
                    factors = self.scales(band, band + 1, tools)
            part = tools.read_floats(self.entry, row * grid.columns, row * grid.columns + count)
            bands = -(-(blocks.first + blocks.rows) // grid.block_rows)
            largest = np.empty(bands * grid.across, np.float32)
            tools.kernels.largest(part, blocks, largest)
            if not grid.is_cut:
                factors = self._scales_of(largest).reshape(-1)
                self._keep(band, factors.reshape(bands, grid.across))
            rounded = tools.kernels.to_codes(NumberGrid.E4M3, part, blocks, factors, found[at : at + count])
            self._count(row, blocks.rows, float(largest.max(initial=0)), rounded)
            at += count
        return found

    def _kept(self, first: int, last: int) -> tuple[Any, Any]:
        """A copy of the scales of rows of blocks, and which of these rows are known."""
        import numpy as np

        with self._lock:
            if self._scales is None:
                shape = (self.grid.matrices * self.grid.down, self.grid.across)
                self._scales = np.zeros(shape, np.float32)  # no scale is zero
            kept = self._scales[first:last].copy()
        return kept, (kept > 0).all(axis=1)

    def _keep(self, first: int, scales: Any) -> None:
        self._kept(0, 0)
        with self._lock:
            if self._scales is not None:
                self._scales[first : first + len(scales)] = scales

    def _largest(self, start: int, stop: int, tools: Tools) -> Floats:
        """The largest magnitudes in the blocks of a row of blocks, rows [start, stop) of the stack."""
        import numpy as np

        grid = self.grid
        top = np.zeros(grid.across, np.float32)
        for row, blocks, _ in grid.chunks(start, stop):
            part = tools.read_floats(self.entry, row * grid.columns, (row + blocks.rows) * grid.columns)
            found = np.empty(grid.across, np.float32)
            tools.kernels.largest(part, blocks, found)
            np.maximum(top, found, out=top)  # a NaN stays
        return top

    def _scales_of(self, largest: Floats) -> Floats:
        """The scales of blocks with these largest magnitudes.

        Raises:
            CastError: one is infinite or NaN.
        """
        import numpy as np

        if not np.isfinite(largest).all():
            raise CastError(
                f"tensor {self.entry.name!r} holds NaN or infinity, which have no place in fp8",
                found=f"{int((~np.isfinite(largest)).sum()):,} of the blocks that were looked at hold one",
                expected="finite numbers",
                remedy="Look at it with `zckpt verify CKPT --deep`; --keep leaves a tensor in half precision.",
            )
        scales: Floats = (np.maximum(largest, np.float32(_LEAST)) / np.float32(_LARGEST)).astype(np.float32, copy=False)
        return _in_bf16(scales) if self.dtype == BF16 else scales

    def _count(self, row: int, rows: int, largest: float, rounded: Rounded) -> None:
        """Adds what became of rows, once for each."""
        with self._lock:
            if not self._seen:
                self._seen = bytearray(self.grid.matrices * self.grid.rows)
            if self._seen[row]:
                return
            self._seen[row : row + rows] = b"\1" * rows
            before = self._measured
            self._measured = Measured(
                before.elements + rows * self.grid.columns,
                max(before.largest, largest),
                max(before.error, rounded.error),
                before.saturated + rounded.saturated,
                before.underflowed + rounded.underflowed,
            )


def _in_bf16(numbers: Floats) -> Floats:
    """Positive numbers rounded to bf16, to nearest even, as fp32."""
    import numpy as np

    bits = numbers.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)


@dataclass(frozen=True, slots=True)
class Elements:
    """The recipe of a quantised tensor's elements."""

    quantiser: Quantiser

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        """The tensor."""
        return (self.quantiser.entry,)

    @property
    def facts(self) -> tuple[object, ...]:
        """The blocks, and the dtype of scales."""
        return ("elements", *self.quantiser.facts)

    @property
    def unit(self) -> int:
        """Whole rows of blocks."""
        return self.quantiser.grid.unit

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        """As `Recipe.compute`; the bits of E4M3."""
        columns = max(1, self.quantiser.grid.columns)
        return self.quantiser.elements(start // columns, stop // columns, tools)


@dataclass(frozen=True, slots=True)
class Scales:
    """The recipe of its scales."""

    quantiser: Quantiser

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        """The tensor."""
        return (self.quantiser.entry,)

    @property
    def facts(self) -> tuple[object, ...]:
        """The blocks, and the dtype of scales."""
        return ("scales", *self.quantiser.facts)

    @property
    def unit(self) -> int:
        """A row of blocks."""
        return max(1, self.quantiser.grid.across)

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        """As `Recipe.compute`; fp32, or the bits of bf16."""
        import numpy as np

        across = max(1, self.quantiser.grid.across)
        found = self.quantiser.give(start // across, stop // across, tools)
        return (found.view(np.uint32) >> 16).astype(np.uint16) if self.quantiser.dtype == BF16 else found


def quantise_entry(entry: TensorEntry, quantiser: Quantiser) -> TensorEntry:
    """The tensor's elements."""
    return derive_entry(entry.name, entry.shape, F8_E4M3, Elements(quantiser), entry.role)


def scales(name: str, shape: tuple[int, ...], quantiser: Quantiser) -> TensorEntry:
    """The tensor's scales, under a name and in a shape."""
    return derive_entry(name, shape, F32 if quantiser.dtype == F32 else BF16, Scales(quantiser))
