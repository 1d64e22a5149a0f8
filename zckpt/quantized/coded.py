"""Packed codes as the numbers that they stand for: (number of a table - zero point) * scale, each step rounded to fp32.

For `unpack`, which knows what each form packs where. [Note: packing] Codes of `bits` bits lie one behind the other in a stream of
bits, least significant first; each row begins a stream. Where they are packed downwards, an element holds codes of several
rows of one column; where a row is stored as a column, the tensor is turned before (`turn`).
Source: compressed-tensors 0.20, compressors/pack_quantized/helpers.py; AutoAWQ 0.2.9, awq/utils/packing_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError, UnsupportedError
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F8_E5M2, I8, U8, DType
from zckpt.core.folds import Tools
from zckpt.core.overlaps import shift, split_at
from zckpt.core.views import transpose_fragments
from zckpt.quantized.grids import Grid

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Bytes, Floats


@dataclass(frozen=True, slots=True)
class Codes:
    """A tensor of codes; see [Note: packing].

    Attributes:
        entry: the tensor.
        bits: of a code.
        rows, columns: of codes, in each matrix of a stack.
        pitch: elements of the tensor that a row has; packed downwards, that several rows have.
        downwards: whether an element holds codes of several rows.
        order: of codes that are packed downwards, the row of each among those of its element; empty for one after the other.
        high_first: whether the second code of a byte comes first; of 4 bits alone.
    """

    entry: TensorEntry
    bits: int
    rows: int
    columns: int
    pitch: int
    downwards: bool = False
    order: tuple[int, ...] = ()
    high_first: bool = False

    @property
    def facts(self) -> tuple[object, ...]:
        return (self.bits, self.rows, self.columns, self.pitch, self.downwards, self.order, self.high_first)

    @property
    def together(self) -> int:
        """The number of rows that share elements."""
        return self._word * 8 // math.gcd(self._word * 8, self.bits) if self.downwards else 1

    @property
    def _word(self) -> int:
        return self.entry.dtype.itemsize

    def read(self, row: int, count: int, tools: Tools) -> Bytes:
        """The codes of rows of one matrix, one row behind the other; rows are numbered through the stack."""
        import numpy as np

        if self.downwards:
            return self._read_downwards(row, count, tools)
        stop = min((row + count) * self.pitch, self.entry.numel)
        raw = tools.read(self.entry, row * self.pitch, stop).view(np.uint8)
        if len(raw) < count * self.pitch * self._word:  # the last row of a tensor without rows
            raw = np.concatenate([raw, np.zeros(count * self.pitch * self._word - len(raw), np.uint8)])
        codes = np.empty((count, self.columns), np.uint8)
        tools.kernels.split_codes(raw, self.bits, codes, high_first=self.high_first)
        return codes.reshape(-1)

    def _read_downwards(self, row: int, count: int, tools: Tools) -> Bytes:
        import numpy as np

        wide = self._word * 8
        matrix, inside = divmod(row, self.rows)
        before = matrix * -(-self.rows * self.bits // wide)
        at = inside // self.together * self.together * self.bits // wide
        stop = -(-(inside + count) * self.bits // wide)
        raw = tools.read(self.entry, (before + at) * self.pitch, (before + stop) * self.pitch)
        words = raw.view(f"<u{self._word}").reshape(stop - at, self.pitch)
        skipped = inside - at * wide // self.bits
        if wide % self.bits:  # codes cross elements
            split = np.empty((self.pitch, skipped + count), np.uint8)
            turned = np.ascontiguousarray(words.T).view(np.uint8).reshape(-1)
            tools.kernels.split_codes(turned, self.bits, split, high_first=False)
            return np.ascontiguousarray(split[:, skipped:].T).reshape(-1)
        shifts = [0] * (wide // self.bits)
        for number, place in enumerate(self.order or range(len(shifts))):
            shifts[place] = self.bits * number
        codes = np.empty((count, self.pitch), np.uint8)
        tools.kernels.split_down(words, self.bits, tuple(shifts), skipped, codes)
        return codes.reshape(-1)


@dataclass(frozen=True, slots=True)
class Nested:
    """The way in which scales are quantised themselves, as bitsandbytes does it: (number of a table * scale) + offset.

    Attributes:
        table: of 256 numbers.
        scales: one for so many scales.
        size: so many.
        offset: that is added.
    """

    table: TensorEntry
    scales: TensorEntry
    size: int
    offset: float


@dataclass(frozen=True, slots=True)
class BlockScales:
    """The scales of blocks.

    Attributes:
        entry: one for each block, in the order of blocks; whole numbers are powers of two (E8M0), if they are not nested.
        second: a scale of scales, one for each matrix or for all; None for none.
        divides: whether the scales are divided by it, instead of multiplied.
        nested: how they are quantised themselves; None if they are not.
    """

    entry: TensorEntry
    second: TensorEntry | None = None
    divides: bool = False
    nested: Nested | None = None

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        nested = () if self.nested is None else (self.nested.table, self.nested.scales)
        return (self.entry, *nested, *(() if self.second is None else (self.second,)))

    @property
    def facts(self) -> tuple[object, ...]:
        return (self.divides, self.nested and (self.nested.size, self.nested.offset))

    def read(self, first: int, last: int, tools: Tools, of: str) -> Floats:
        """The scales [first, last) of a tensor. Raises CorruptError if one is NaN or infinite."""
        import numpy as np

        if self.nested is not None:
            nested = self.nested
            low, high = first // nested.size, -(-last // nested.size)
            scales = tools.read_floats(nested.scales, low, high)
            codes = tools.read(self.entry, first, last).view(np.uint8)
            spread = scales[np.arange(first, last) // nested.size - low]
            found = tools.read_floats(nested.table, 0, nested.table.numel)[codes] * spread + np.float32(nested.offset)
        elif self.entry.dtype == U8:
            found = powers_of_two(tools.read(self.entry, first, last))
        else:
            found = tools.read_floats(self.entry, first, last)
        if self.second is not None:
            second = tools.read_floats(self.second, 0, self.second.numel)
            check_finite(second, of, self.second)
            each = second[np.arange(first, last) // (self.entry.numel // len(second))] if len(second) > 1 else second
            with np.errstate(all="ignore"):
                found = found / each if self.divides else found * each
        check_finite(found, of, self.entry)
        return found


def powers_of_two(exponents: Array) -> Floats:
    """E8M0 as fp32: 2 to the (byte - 127); 255 is NaN."""
    import numpy as np

    wide = exponents.astype(np.uint32)
    return (
        np.where(wide == 255, 0x7FC00000, np.where(wide == 0, 0x00400000, wide << 23))
        .astype(np.uint32)
        .view(np.float32)
    )


def file_of(entry: TensorEntry) -> str | None:
    """The file in which a tensor begins."""
    return str(entry.fragments[0].store) if entry.fragments else None


def check_finite(scales: Floats, of: str, entry: TensorEntry) -> None:
    """Checks that scales are finite numbers; raises CorruptError."""
    import numpy as np

    if not np.isfinite(scales).all():
        raise CorruptError(
            f"the scales of tensor {of!r} hold NaN or infinity", file=file_of(entry), found=f"in {entry.name!r}",
            expected="finite numbers", remedy=COPY_AGAIN,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Zeros:
    """Zero points of blocks.

    Attributes:
        codes: one for each block.
        offset: what is added to each.
        is_signed: whether a code of 8 bits is a signed number.
        refused: a code without an agreed meaning; -1 for none.
        middle: what they are if all codes are this or all are 1 less, where nothing says which is stored; 0 where `offset` holds.
    """

    codes: Codes
    offset: int
    is_signed: bool = False
    refused: int = -1
    middle: int = 0

    def read(self, row: int, count: int, tools: Tools, of: str) -> Floats:
        """The zero points of rows of blocks. Raises CorruptError if one is a code without an agreed meaning,
        UnsupportedError if nothing says what they mean.
        """
        import numpy as np

        codes = self.codes.read(row, count, tools)
        if self.middle:
            first = self.codes.read(0, 1, tools)[:1]
            if (codes != first).any() or not np.isin(first, (self.middle - 1, self.middle)).all():
                raise UnsupportedError(
                    f"nothing says what the zero points of tensor {of!r} mean", file=file_of(self.codes.entry),
                    found=f"no checkpoint_format in a config, and numbers in {self.codes.entry.name!r} that are not all "
                    f"{self.middle} or all {self.middle - 1}",
                    expected='"gptq" (they are stored less 1) or "gptq_v2" (as they are)',
                    remedy="Copy the model's config.json or quantize_config.json to it, which has quant_method and "
                    "checkpoint_format.",
                )  # fmt: skip
            return np.full(len(codes), self.middle, np.float32)
        if self.refused >= 0 and (codes == self.refused).any():
            raise CorruptError(
                f"a zero point of tensor {of!r} has no agreed meaning", file=file_of(self.codes.entry),
                found=f"{self.refused} in {self.codes.entry.name!r}, and programs make {self.refused + 1} or 0",
                expected="smaller numbers", remedy="Dequantise the model with the program that wrote it, and convert that.",
            )  # fmt: skip
        return (codes.view(np.int8) if self.is_signed else codes).astype(np.float32) + np.float32(self.offset)


@dataclass(frozen=True, slots=True)
class Coded:
    """A recipe (`core.recipes`): a tensor that is packed, as fp32.

    Attributes:
        name, shape: of the tensor.
        codes: where its codes are.
        table: what codes stand for; or the tensor that says it.
        grid: how blocks lie over it.
        factors: the scale of each block.
        zeros: the zero point of each block; None for none.
        order: the group of each column, where groups are not one behind the other; None where they are.
        groups: of columns, where `order` names them.
        may_lack_order: whether groups follow each other where `order` is -1 everywhere.
        last: what the product is multiplied by, in a step of its own.
        biases: what is added to the product, for each block of a row; None for nothing.
    """

    name: str
    shape: tuple[int, ...]
    codes: Codes
    table: tuple[float, ...] | TensorEntry
    grid: Grid
    factors: BlockScales
    zeros: Zeros | None = None
    order: TensorEntry | None = None
    groups: int = 0
    last: float = 1.0
    biases: TensorEntry | None = None
    may_lack_order: bool = False

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        more = (self.table if isinstance(self.table, TensorEntry) else None, self.order, self.biases)
        zeros = () if self.zeros is None else (self.zeros.codes.entry,)
        return (self.codes.entry, *self.factors.inputs, *zeros, *(one for one in more if one is not None))

    @property
    def facts(self) -> tuple[object, ...]:
        zeros = self.zeros and (self.zeros.codes.facts, self.zeros.offset, self.zeros.is_signed, self.zeros.middle)
        table = () if isinstance(self.table, TensorEntry) else self.table
        return ("coded", self.codes.facts, table, self.grid, self.factors.facts, zeros, self.groups, self.last)

    @property
    def unit(self) -> int:
        return math.lcm(self.grid.unit, self.codes.together * max(1, self.grid.columns))

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        """As `Recipe.compute`; fp32. Raises CorruptError if a scale is NaN or infinite, or a zero point or a group is
        none.
        """
        import numpy as np

        grid, found, at = self.grid, np.empty(stop - start, np.float32), 0
        columns = max(1, grid.columns)
        table = np.zeros(256, np.float32)
        known = tools.read_floats(self.table, 0, 16) if isinstance(self.table, TensorEntry) else self.table
        table[: len(known)] = known
        if isinstance(self.table, TensorEntry):
            check_finite(table, self.name, self.table)
        order = self._read_order(tools)
        for row, blocks, band in grid.chunks(start // columns, -(-stop // columns)):
            bands = -(-(blocks.first + blocks.rows) // grid.block_rows)
            across = self.groups if order is not None else grid.across
            factors = self.factors.read(band * across, (band + bands) * across, tools, self.name)
            zeros = None if self.zeros is None else self.zeros.read(band, bands, tools, self.name)
            if order is not None:
                factors = np.ascontiguousarray(factors.reshape(bands, across)[:, order]).reshape(-1)
                zeros = (
                    None if zeros is None else np.ascontiguousarray(zeros.reshape(bands, across)[:, order]).reshape(-1)
                )
            codes = self.codes.read(row, blocks.rows, tools)
            count = min(len(codes), len(found) - at)  # the last row of a tensor without rows may be shorter
            numbers = found[at : at + count] if count == len(codes) else np.empty(len(codes), np.float32)
            tools.kernels.of_codes(codes, table, blocks, zeros, factors, numbers)
            if self.biases is not None:
                more = tools.read_floats(self.biases, band * across, (band + bands) * across)
                check_finite(more, self.name, self.biases)
                numbers.reshape(len(more), -1)[...] += more[:, None]
            if count < len(codes):
                found[at:] = numbers[:count]
            at += count
        if self.last != 1.0:
            found *= np.float32(self.last)
        return found

    def _read_order(self, tools: Tools) -> Any:
        import numpy as np

        if self.order is None:
            return None
        order: Any = tools.read(self.order, 0, self.order.numel)
        if self.may_lack_order and (order == -1).all():
            return np.arange(len(order)) * self.groups // max(1, len(order))
        if len(order) and not 0 <= int(order.min()) <= int(order.max()) < self.groups:
            raise CorruptError(
                f"tensor {self.name!r} names groups that it does not have", file=file_of(self.order),
                found=f"{int(order.min())} to {int(order.max())} in {self.order.name!r}",
                expected=f"0 to {self.groups - 1}", remedy=COPY_AGAIN,
            )  # fmt: skip
        if len(order) and -(-len(order) // (most := int(np.bincount(order).max()))) != self.groups:
            raise CorruptError(
                f"the groups of tensor {self.name!r} are not of one size", file=file_of(self.order),
                found=f"{most:,} of {len(order):,} columns in one of {self.groups:,} groups, by {self.order.name!r}",
                expected=f"about {len(order) // self.groups:,}, as programs that quantise write it", remedy=COPY_AGAIN,
            )  # fmt: skip
        return order


def turn(entry: TensorEntry, matrices: int, rows: int, columns: int) -> TensorEntry:
    """A stack of matrices, each of them transposed."""
    each, size = rows * columns, entry.dtype.itemsize
    pieces = split_at(entry.fragments, range(0, entry.numel + 1, each), size) if each else ()
    fragments = tuple(
        f
        for number, own in enumerate(pieces)
        for f in shift(transpose_fragments(own, rows, columns, size), number * each)
    )
    return TensorEntry(entry.name, (matrices, columns, rows), entry.dtype, entry.role, fragments)


def signed_codes(bits: int) -> tuple[float, ...]:
    """The table of codes that are whole numbers in two's complement."""
    return (*map(float, range(1 << bits - 1)), *map(float, range(-(1 << bits - 1), 0)))


def unsigned_codes(bits: int, offset: int = 0) -> tuple[float, ...]:
    """The table of codes that are whole numbers from 0 on, less an offset."""
    return tuple(float(code - offset) for code in range(1 << bits))


def e2m1(*, has_minus_zero: bool = True) -> tuple[float, ...]:
    """The table of E2M1, the 4 bits of NVFP4 and MXFP4."""
    half: Sequence[float] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    return (*half, -0.0 if has_minus_zero else 0.0, *(-x for x in half[1:]))


def floats_of_8_bits(dtype: DType) -> tuple[float, ...]:
    """The table of E4M3 or E5M2; for I8, of whole numbers."""
    if dtype == I8:
        return signed_codes(8)
    if dtype == F8_E5M2:
        return tuple(_float_of(code, 2, 15, code & 0x7F > 0x7C, code & 0x7F == 0x7C) for code in range(256))
    return tuple(_float_of(code, 3, 7, code & 0x7F == 0x7F, is_infinite=False) for code in range(256))


def _float_of(code: int, digits: int, bias: int, is_nan: bool, is_infinite: bool) -> float:
    power, rest = (code & 0x7F) >> digits, code & (1 << digits) - 1
    size = math.ldexp(rest + (1 << digits if power else 0), max(power, 1) - bias - digits)
    return math.copysign(math.nan if is_nan else math.inf if is_infinite else size, 0.5 - (code >> 7))
