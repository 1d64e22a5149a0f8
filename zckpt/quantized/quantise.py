"""Quantising: the scale of each block of a matrix, and its elements divided by it and rounded to the numbers of a grid.

For `jobs.quantize`. The source is read once where the elements are computed before the scales, which are kept meanwhile
where they are few; a part is read again where its scales are asked for alone. Where one scale is for a whole large
matrix, the matrix is read twice.

[Note: numbers] Of fp8 in blocks, rows and tensors: scale = max(largest magnitude, 1e-12) / 448 in fp32; element = E4M3(x / scale)
rounded once, to nearest even. So a block of zeros has a scale, and nothing is larger than 448. Scales that are stored as bf16 are
rounded to it before they divide.
Source: DeepSeek-V3's weights and SGLang's `per_block_cast_to_fp8` (the form and 448); compressed-tensors 0.20 (scales in the
dtype of the model).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CastError
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, F8_E4M3, F16, F32, I32, I64, U8, DType
from zckpt.core.folds import MatrixBlocks, NumberGrid, Rounded, Tools, read_numbers
from zckpt.core.recipes import DerivedStore, Formula, derive_entry
from zckpt.quantized.coded import BlockScales, Coded, Codes, e2m1, turn
from zckpt.quantized.grids import NARROWED, Grid, Scaled
from zckpt.quantized.packed import Packed
from zckpt.quantized.targets import Second, Target, of_stored_bits, rounded_to, stored_bits

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Floats

_LEAST = 1e-12
_LARGEST = 448.0
_MOST_KEPT = 16 << 20
"""The most bytes of a tensor's scales that are kept, if one row of it is enough for some."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Counts what quantising did to a tensor.

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
    """The quantisation of one tensor; the recipes of its scales and of its elements share what they find.

    Args:
        entry: of floats, read as fp32.
        grid: the blocks.
        dtype: of the scales.
        target: the form; None for fp8 as [Note: numbers] has it.
        second: its scale of scales, where the form has one.
        powers: of a tensor of MXFP4 with such a scale of scales, its powers.
    """

    def __init__(
        self, entry: TensorEntry, grid: Grid, dtype: DType, target: Target | None = None, second: Second | None = None,
        powers: TensorEntry | None = None,
    ) -> None:  # fmt: skip
        self.entry = entry
        self.grid = grid
        self.dtype = dtype
        self.target = target
        self.second = second
        self.powers = powers
        own = ("E4M3",) if target is None else (target.form, target.bits, second and len(second.entries))
        self.facts: tuple[object, ...] = (*own, grid, dtype.name, *(("powers",) if powers is not None else ()))
        self._lock = Lock()
        self._measuring = Lock()
        self._scales: Any = None
        self._known: Any = None
        self._given = 0
        self._seen = bytearray()
        self._measured = Measured()
        nbytes = grid.matrices * grid.down * grid.across * dtype.itemsize
        self._is_too_many = grid.block_rows == 1 and nbytes > _MOST_KEPT

    @property
    def measured(self) -> Measured:
        """The counts so far."""
        return self._measured

    def scales(self, first: int, last: int, tools: Tools) -> Floats:
        """The scales of rows of blocks [first, last), one after the other."""
        import numpy as np

        grid = self.grid
        if self.powers is not None and self.second is not None:
            across = grid.across // 2
            twos = BlockScales(self.powers).read(first * across, last * across, tools, self.entry.name)
            with np.errstate(under="ignore"):
                twos = np.maximum(twos * np.float32(self.second.value(tools)), np.float32(2**-9))
            return np.repeat(twos, 2)
        kept, is_known = self._kept(first, last)
        if grid.block_rows == 1 and not is_known.all():
            at = 0
            for row, blocks, _ in grid.chunks(first, last):
                part = read_numbers(self.entry, row * grid.columns, (row + blocks.rows) * grid.columns, tools)
                found = np.empty(blocks.rows * grid.across, np.float32)
                tools.kernels.largest(part, blocks, found)
                kept[at : at + blocks.rows] = self._scales_of(found, tools).reshape(-1, grid.across)
                at += blocks.rows
            self._keep(first, kept)
            return kept.reshape(-1)  # type: ignore[no-any-return]
        for band in range(first, last):
            if not is_known[band - first]:
                matrix, row = divmod(band, grid.down)
                start = matrix * grid.rows + row * grid.block_rows
                stop = min(start + grid.block_rows, (matrix + 1) * grid.rows)
                kept[band - first] = self._scales_of(self._largest(start, stop, tools), tools)
        self._keep(first, kept)
        return kept.reshape(-1)  # type: ignore[no-any-return]

    def give(self, first: int, last: int, tools: Tools) -> Array:
        """The scales of rows of blocks [first, last) as they are stored; when all have been given, they are freed."""
        with self._lock:
            is_known = self._known is not None and self._known[first:last].all()
            found = self._scales[first:last].reshape(-1).copy() if is_known else None
        if found is None:
            found = stored_bits(self.scales(first, last, tools), self.dtype)
        with self._lock:
            self._given += last - first
            if self._given >= self.grid.matrices * self.grid.down:
                self._scales, self._known, self._given = None, None, 0
        return found

    def elements(self, start: int, stop: int, tools: Tools) -> Array:
        """Rows [start, stop) of the stack, as codes of a byte each."""
        import numpy as np

        grid = self.grid
        number_grid = NumberGrid.E4M3 if self.target is None else self.target.grid
        found = np.empty((stop - start) * grid.columns, np.uint8)
        at = 0
        for row, blocks, band in grid.chunks(start, stop):
            count = blocks.rows * grid.columns
            if grid.is_cut:
                with self._measuring:
                    factors = self.scales(band, band + 1, tools)
            part = read_numbers(self.entry, row * grid.columns, row * grid.columns + count, tools)
            bands = -(-(blocks.first + blocks.rows) // grid.block_rows)
            largest = np.empty(bands * grid.across, np.float32)
            tools.kernels.largest(part, blocks, largest)
            if self.powers is not None:
                factors = self.scales(band, band + bands, tools)
            elif not grid.is_cut:
                factors = self._scales_of(largest, tools).reshape(-1)
                self._keep(band, factors.reshape(bands, grid.across))
            if self.second is not None:
                factors = factors / np.float32(self.second.value(tools))
            rounded = tools.kernels.to_codes(number_grid, part, blocks, factors, found[at : at + count])
            self._count(row, blocks.rows, float(largest.max(initial=0)), rounded)
            at += count
        return found

    def _kept(self, first: int, last: int) -> tuple[Any, Any]:
        """The scales of rows of blocks, as an array that may be changed, and which of these rows are known."""
        import numpy as np

        if self._is_too_many:
            return np.zeros((last - first, self.grid.across), np.float32), np.zeros(last - first, bool)
        with self._lock:
            self._make_room()
            bits, known = self._scales[first:last].copy(), self._known[first:last].copy()
        return of_stored_bits(bits, self.dtype), known

    def _keep(self, first: int, scales: Any) -> None:
        if self._is_too_many:
            return
        bits = stored_bits(scales, self.dtype)
        with self._lock:
            self._make_room()
            self._scales[first : first + len(bits)] = bits
            self._known[first : first + len(bits)] = True

    def _make_room(self) -> None:
        import numpy as np

        if self._scales is None:
            bands = self.grid.matrices * self.grid.down
            size = self.dtype.itemsize
            self._scales = np.zeros((bands, self.grid.across), np.float32 if size == F32.itemsize else f"u{size}")
            self._known = np.zeros(bands, bool)

    def _largest(self, start: int, stop: int, tools: Tools) -> Floats:
        """The largest magnitudes in the blocks of a row of blocks, rows [start, stop) of the stack."""
        import numpy as np

        grid = self.grid

        def look(chunk: tuple[int, MatrixBlocks, int], tools: Tools) -> Floats:
            row, blocks, _ = chunk
            part = read_numbers(self.entry, row * grid.columns, (row + blocks.rows) * grid.columns, tools)
            found = np.empty(grid.across, np.float32)
            tools.kernels.largest(part, blocks, found)
            return found

        top = np.zeros(grid.across, np.float32)
        for found in tools.each(look, grid.chunks(start, stop)):
            np.maximum(top, found, out=top)  # a NaN stays
        return top

    def _scales_of(self, largest: Floats, tools: Tools) -> Floats:
        """The scales of blocks with these largest magnitudes. Raises CastError if one is infinite or NaN."""
        import numpy as np

        if not np.isfinite(largest).all():
            raise CastError(
                f"tensor {self.entry.name!r} holds NaN or infinity, which have no place in "
                + ("fp8" if self.target is None else self.target.form),
                found=f"{int((~np.isfinite(largest)).sum()):,} of the blocks that were looked at hold one",
                expected="finite numbers",
                remedy="Look at it with `zckpt verify CKPT --deep`; --keep (of quantize, --exclude) leaves a tensor as it is.",
            )
        if self.target is not None:
            weights = self.entry.dtype if self.entry.dtype in (BF16, F16) else F32
            second = None if self.second is None else self.second.value(tools)
            return self.target.scales_of(largest, weights, second, self.dtype, tools)
        scales: Floats = (np.maximum(largest, np.float32(_LEAST)) / np.float32(_LARGEST)).astype(np.float32, copy=False)
        return rounded_to(scales, self.dtype)

    def _count(self, row: int, rows: int, largest: float, rounded: Rounded) -> None:
        """Counts the effect on rows, once for each."""
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


def elements_of(quantiser: Quantiser) -> Formula:
    """The recipe of a quantised tensor's elements."""
    columns, target = max(1, quantiser.grid.columns), quantiser.target
    across = columns if target is None else target.stored_columns(columns)  # as they are stored

    def compute(start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        codes = quantiser.elements(start // across, stop // across, tools)
        if target is None or target.bits == 8:
            return codes
        size = target.codes[0].itemsize
        packed = np.empty(((stop - start) // across, across * size), np.uint8)
        tools.kernels.join_codes(codes.reshape(len(packed), -1), 0, packed)
        return packed.reshape(-1).view(f"<u{size}")

    unit = quantiser.grid.unit // columns * across
    return Formula(_inputs_of(quantiser), ("elements", *quantiser.facts), compute, unit)


def scales_of(quantiser: Quantiser) -> Formula:
    """The recipe of a quantised tensor's scales."""
    across = max(1, quantiser.grid.across)

    def compute(start: int, stop: int, tools: Tools) -> Array:
        return quantiser.give(start // across, stop // across, tools)

    return Formula(_inputs_of(quantiser), ("scales", *quantiser.facts), compute, across, is_byproduct=True)


def _inputs_of(quantiser: Quantiser) -> tuple[TensorEntry, ...]:
    """The tensor, with those that share its scale of scales."""
    second = () if quantiser.second is None else quantiser.second.inputs
    return (quantiser.entry, *(entry for entry in second if entry is not quantiser.entry))


def scale_of_scales(second: Second) -> Formula:
    """The recipe of a scale of scales."""

    def compute(start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        return np.full(stop - start, second.value(tools), np.float32)

    return Formula(second.inputs, ("scale of scales",), compute)


def _inverse(entry: TensorEntry) -> Formula:
    """The recipe of 1 divided by each number of a tensor, rounded to fp32."""
    return Formula((entry,), ("inverse",), lambda start, stop, tools: 1 / tools.read_floats(entry, start, stop))


def _shape_entry(entry: TensorEntry) -> TensorEntry:
    """The tensor with the shape of a matrix: words of codes may be longer than rows."""

    def compute(start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        return np.array(entry.shape, np.int64)[start:stop]

    return derive_entry(f"{entry.name}_shape", (2,), I64, Formula((entry,), ("shape",), compute, 2))


def quantise_entry(entry: TensorEntry, quantiser: Quantiser) -> TensorEntry:
    """The elements of a quantised tensor."""
    return derive_entry(entry.name, entry.shape, F8_E4M3, elements_of(quantiser), entry.role)


def target_entries(quantiser: Quantiser, target: Target) -> dict[str, TensorEntry]:
    """The tensors for one tensor in a form of compressed-tensors: codes, scales and what else the form has."""
    entry, grid, (dtype, end) = quantiser.entry, quantiser.grid, target.codes
    *lead, columns = entry.shape
    stored = (*lead, target.stored_columns(columns))
    found = [
        derive_entry(entry.name + end, stored, dtype, elements_of(quantiser), entry.role),
        derive_entry(f"{entry.name}_scale", (*lead, grid.across), quantiser.dtype, scales_of(quantiser)),
    ]
    if quantiser.second is not None:
        found.append(derive_entry(f"{entry.name}_global_scale", (1,), F32, scale_of_scales(quantiser.second)))
    if target.codes[0] == I32:
        found.append(_shape_entry(entry))
    return {one.name: one for one in found}


def powers_of(entry: TensorEntry) -> tuple[TensorEntry, TensorEntry] | None:
    """The numbers of a tensor of MXFP4 that becomes NVFP4, with a row of blocks for each row of a matrix, and its powers, one
    for 32 elements (E8M0), which are scales of halves of these blocks; None for another tensor. Stacks of gpt-oss are turned,
    as their blocks lie; of other stacks nothing is kept.
    """
    recipe = _recipe_of(entry)
    if not isinstance(recipe, Coded) or recipe.factors.entry.dtype != U8 or recipe.table != e2m1():
        return None
    codes, scales = recipe.codes.entry, recipe.factors.entry
    if recipe.factors.second is not None or recipe.factors.nested is not None:
        return None
    if not recipe.codes.downwards:
        return (entry, scales) if len(entry.shape) == 2 else None
    (*lead, columns, rows), matrices = entry.shape, recipe.grid.matrices
    codes, scales = (turn(one, matrices, columns // each, rows) for one, each in ((codes, 2), (scales, 32)))
    across = entry.numel // 32
    packing, grid = Codes(codes, 4, across, 32, 16), Grid(1, across, 32, 1, 32)
    shape = (math.prod(lead) * rows, columns)
    again = Coded(entry.name, shape, packing, e2m1(), grid, BlockScales(scales))
    return derive_entry(entry.name, shape, F32, again, entry.role), scales


def as_stack(made: Mapping[str, TensorEntry], entry: TensorEntry) -> dict[str, TensorEntry]:
    """The tensors of NVFP4 of the matrices of a stack, one below the other, as ModelOpt stores a turned stack.

    Source: nvidia-modelopt 0.47, torch/export/unified_export_hf.py (experts of gpt-oss and Llama 4).
    """
    *lead, columns, rows = entry.shape
    found: dict[str, TensorEntry] = {}
    for end, to, each in (("_packed", "", 2), ("_scale", "_weight_scale", 16)):
        turned = turn(made[entry.name + end], math.prod(lead), rows, columns // each)
        found[entry.name + to] = replace(turned, name=entry.name + to, shape=(*lead, columns // each, rows))
    second, name = made[f"{entry.name}_global_scale"], f"{entry.name}_weight_scale_2"
    found[name] = derive_entry(name, (), F32, _inverse(second))
    return found


def carried_entries(entry: TensorEntry, target: Target) -> dict[str, TensorEntry] | None:
    """The tensors that a source stores for a tensor in this very form, under the form's names; None if it has another
    form.

    Numbers quantised again have other scales: the largest one of a block of int4 is 7 / 7.5 of what it was made from.
    """
    recipe = _recipe_of(entry)
    if (
        not isinstance(recipe, Coded)
        or recipe.zeros
        or recipe.order
        or recipe.last != 1
        or recipe.factors.nested
        or recipe.biases
    ):
        return None
    codes, factors, grid, (dtype, end) = recipe.codes, recipe.factors, recipe.grid, target.codes
    *lead, columns = entry.shape
    group = target.group or columns
    table = e2m1() if target.grid == NumberGrid.E2M1 else recipe.table
    is_same = (
        codes.entry.dtype.itemsize == dtype.itemsize
        and (codes.entry.dtype == dtype or not target.is_float)
        and (codes.bits, grid.block_rows, grid.block_columns) == (target.bits, 1, group)
        and not (codes.downwards or codes.high_first)
        and recipe.table == table
        and factors.divides == target.has_second
        and (factors.second is not None) == target.has_second
        and (factors.entry.dtype == target.scales if target.scales is not None else factors.entry.dtype.itemsize > 1)
    )
    if not is_same:
        return None
    whole = (*lead, target.stored_columns(columns))
    found = [
        replace(codes.entry, name=entry.name + end, shape=whole, dtype=dtype),
        replace(factors.entry, name=f"{entry.name}_scale", shape=(*lead, columns // group)),
    ]
    if factors.second is not None:
        found.append(replace(factors.second, name=f"{entry.name}_global_scale", shape=(1,)))
    if target.codes[0] == I32:
        found.append(_shape_entry(entry))
    return {one.name: one for one in found}


_OWN = {
    "nvfp4": ("nvfp4", "nvfp4, divided"), "mxfp4": ("mxfp4", "gpt-oss"), "mxfp8": ("mxfp8",), "int4": ("packed integers",),
    "int8": ("int8",),
}  # fmt: skip
"""Form -> the readers of `unpack` that read what its own libraries write."""


def is_in_form(
    packed: Packed | None, scaled: Mapping[str, Scaled], grids: Mapping[str, Grid], scheme: str, group: int
) -> bool:
    """Whether all quantised tensors of a checkpoint, packed ones and those of fp8, have a form already, with so many
    columns in a block (`group`), whichever library wrote them. `grids`: the grid that the form has for those of fp8; empty
    for any.
    """
    parts = () if packed is None else packed.parts
    if scheme not in _OWN:
        same = (one.entry.dtype == F8_E4M3 and grids.get(name, one.grid) == one.grid for name, one in scaled.items())
        return bool(scaled) and not parts and all(same)
    for part in parts:
        codes, scales = part.codes.shape, part.beside[0].shape if part.beside else ()
        if part.form.read not in _OWN[scheme]:
            return False
        if scheme == "int4" and (len(scales) < 2 or -(-scales[-1] * group // 8) != codes[-1]):
            return False
        if scheme == "int8" and scales != (*codes[:-1], 1):
            return False
    return bool(parts) and not scaled


def carried_fp8(entry: TensorEntry, grid: Grid, dtype: DType) -> tuple[TensorEntry, TensorEntry] | None:
    """The elements and scales of a source that has a tensor in fp8 with these blocks; None if it does not."""
    recipe = _recipe_of(entry)
    if not isinstance(recipe, Scaled) or recipe.grid != grid or recipe.entry.dtype != F8_E4M3:
        return None
    return recipe.inputs if recipe.scales.dtype == dtype else None


def _recipe_of(entry: TensorEntry) -> object:
    """The recipe of a tensor as a whole, before it was rounded to a dtype; None if it is not computed."""
    if len(entry.fragments) != 1:
        return None
    fragment = entry.fragments[0]
    if not isinstance(fragment.store, DerivedStore) or (fragment.byte_offset, fragment.start, fragment.count) != (
        0,
        0,
        entry.numel,
    ):
        return None
    recipe = fragment.store.recipe
    return _recipe_of(recipe.inputs[0]) if recipe.facts[:1] == (NARROWED,) else recipe


def scales(name: str, shape: tuple[int, ...], quantiser: Quantiser) -> TensorEntry:
    """The tensor's scales, under a name and in a shape."""
    return derive_entry(name, shape, F32 if quantiser.dtype == F32 else BF16, scales_of(quantiser))
