"""Codes and scales of quantised outputs a second time: in doubles, from sorted numbers and their middles.

For `verify`, which compares an output with these, and not with what `quantise` and the kernels made; nothing of those is used.
Source: compressed-tensors 0.20, quantization/utils/helpers.py; DeepSeek-V3 (blocks of 128 x 128); OCP Microscaling formats 1.0.

MLX's form of a tensor a second time: in doubles that are rounded to fp32 after each step, bit by bit.
Source: mlx 0.32.4, backend/metal/kernels/quantized.h `affine_quantize`, which is another text of the same arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, F8_E4M3, F16, F32, I8, I32, I64, U8, U32, DType
from zckpt.core.folds import Tools
from zckpt.core.recipes import derive_entry

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Tools


_FORMS: dict[str, tuple[str, tuple[int, int], float, DType, str]] = {
    "block128": ("fp8", (128, 128), 448, F8_E4M3, ""), "channel": ("fp8", (1, 0), 448, F8_E4M3, ""),
    "tensor": ("fp8", (0, 0), 448, F8_E4M3, ""), "nvfp4": ("fp4", (1, 16), 6, U8, "_packed"),
    "mxfp4": ("fp4", (1, 32), 0, U8, "_packed"), "mxfp8": ("fp8", (1, 32), 0, F8_E4M3, ""),
    "int4": ("int", (1, 128), 7.5, I32, "_packed"), "int8": ("int", (1, 0), 127.5, I8, ""),
}  # fmt: skip
"""Form -> the numbers, the rows and columns of a block (0 for all), the divisor of the largest one, and how codes are
stored.
"""
_AT_ONCE = 1 << 18
_SECOND = -1
"""The key of the scale of scales in the cache."""


def quantise_again(
    entry: TensorEntry,
    scheme: str,
    group: int | None,
    scales: DType,
    together: Sequence[TensorEntry],
    powers: Sequence[TensorEntry] = (),
) -> dict[str, TensorEntry]:
    """The tensors that an output has for one tensor: name -> tensor.

    Args:
        entry: the numbers.
        scheme: the form.
        group: columns of a block, where they are not as usual.
        scales: their dtype.
        together: the tensors that have a scale of scales with it.
        powers: of tensors of MXFP4, the powers of two of this one, and of all that are together.
    """
    kind, (tall, wide), top, dtype, end = _FORMS[scheme]
    *lead, rows, columns = entry.shape
    wide = group or wide or columns
    tall = tall or rows
    across, matrices = -(-columns // wide), math.prod(lead)
    down = 1 if scheme in ("tensor",) else -(-rows // tall)
    per_row = -(-columns // (8 * dtype.itemsize // (4 if end else 8)))
    shape = (1,) if scheme == "tensor" else (*lead, down, across)
    own = _Blocks(entry, scheme, kind, matrices, rows, columns, tall, wide, top, tuple(together), scales, tuple(powers))
    beside = entry.name + ("_scale_inv" if scheme == "block128" else "_scale")
    found = [
        derive_entry(entry.name + end, (*lead, rows, per_row), dtype, _Again(own, per_row, dtype)),
        derive_entry(beside, shape, scales, _Again(own, across, scales, is_scales=True)),
    ]
    if scheme == "nvfp4":
        found.append(derive_entry(entry.name + "_global_scale", (1,), F32, _Again(own, 1, F32, is_second=True)))
    if dtype == I32:
        found.append(derive_entry(entry.name + "_shape", (2,), I64, _Again(own, 2, I64)))
    return {one.name: one for one in found}


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A tensor, with the blocks over it."""

    entry: TensorEntry
    scheme: str
    kind: str
    matrices: int
    rows: int
    columns: int
    tall: int
    wide: int
    top: float
    together: tuple[TensorEntry, ...]
    scales: DType
    powers: tuple[TensorEntry, ...] = ()
    kept: dict[int, Any] = field(default_factory=dict[int, Any])

    def largest(self, band: int, tools: Tools) -> Any:
        """The largest magnitudes in a row of blocks; those of tall blocks are cached."""
        import numpy as np

        if band in self.kept:
            return self.kept[band]
        down = -(-self.rows // self.tall)
        first = band // down * self.rows + band % down * self.tall
        last = min(first + self.tall, (band // down + 1) * self.rows)
        found = np.zeros(-(-self.columns // self.wide))
        step = max(1, _AT_ONCE // self.columns)
        for row in range(first, last, step):
            held = abs(self.read(row, min(row + step, last), tools)).max(axis=0)
            found = np.maximum(found, np.maximum.reduceat(held, range(0, self.columns, self.wide)))
        self.kept[band] = found
        return found

    def scales_in(self, first: int, last: int, second: Any, tools: Tools) -> Any:
        """The scales of rows of blocks."""
        import numpy as np

        if self.powers:
            across = self.columns // 32
            held: Any = tools.read(self.powers[0], first * across, last * across)
            wide = np.repeat(held.astype(np.int64).reshape(-1, across) - 127, 2, axis=1)
            return np.ldexp(1.0, np.maximum(wide + round(math.log2(float(second))), -9))
        if self.tall > 1:
            return self.scales_of(np.stack([self.largest(band, tools) for band in range(first, last)]), second)
        held = abs(self.read(first, last, tools))
        return self.scales_of(np.maximum.reduceat(held, range(0, self.columns, self.wide), axis=1), second)

    def read(self, first: int, last: int, tools: Tools) -> Any:
        """Rows of the stack, as doubles."""
        import numpy as np

        wide = tools.read_floats(self.entry, first * self.columns, last * self.columns)
        return wide.astype(np.float64).reshape(-1, self.columns)

    def second(self, tools: Tools) -> Any:
        """The scale of scales."""
        import numpy as np

        if _SECOND in self.kept:
            return self.kept[_SECOND]
        if self.powers:
            tops: Any = [tools.read(one, 0, one.numel).max() for one in self.powers]
            self.kept[_SECOND] = np.float32(2.0 ** min(127, 135 - int(max(tops))))
            return self.kept[_SECOND]
        top = 0.0
        for entry in self.together:
            for at in range(0, entry.numel, _AT_ONCE):
                top = max(top, float(abs(tools.read_floats(entry, at, min(at + _AT_ONCE, entry.numel))).max()))
        with np.errstate(over="ignore"):
            found = np.float32(2688 * float(np.float32(1 / max(top, 2.0**-126))))
        self.kept[_SECOND] = found if np.isfinite(found) else np.float32(1)
        return self.kept[_SECOND]

    def scales_of(self, largest: Any, second: Any) -> Any:
        """The scales of blocks with these largest magnitudes, as they are stored."""
        import numpy as np

        if not self.top:
            share, power = np.frexp(largest)
            power += 126 - {"fp4": 2, "fp8": 8}[self.kind] + (share >= 0.875)
            return np.ldexp(1.0, np.clip(np.where(largest == 0, 0, power), 0, 254) - 127)
        if self.kind == "fp8":
            return _digits(np.float32(np.maximum(largest, np.float32(1e-12)) / self.top), self.scales)
        found: Any = _digits(np.float32(largest / self.top), self.entry.dtype)
        if second is not None:
            table = _numbers("fp8")
            found = table[_nearest(np.float32(np.float32(found) * second).astype(np.float64), table)]
        else:
            found = _digits(found, self.scales)
        return np.where(found == 0, {F8_E4M3: 0.125, BF16: 2.0**-7, F16: 2.0**-10}.get(self.scales, 2.0**-23), found)

    def codes(self, first: int, last: int, tools: Tools) -> Any:
        """The codes of rows of the stack, a byte each."""
        import numpy as np

        second = self.second(tools) if self.scheme == "nvfp4" else None
        row = np.arange(first, last)
        band = row // self.rows * -(-self.rows // self.tall) + row % self.rows // self.tall
        scales: Any = self.scales_in(int(band[0]), int(band[-1]) + 1, second, tools)[band - band[0]]
        if second is not None:
            scales = np.float32(np.float32(scales) / second).astype(np.float64)
        quotients = self.read(first, last, tools) / scales[:, np.arange(self.columns) // self.wide]
        if self.kind == "int":
            half = math.ceil(self.top)
            whole = np.clip(np.rint(quotients), -half, half - 1).astype(np.int64)
            return whole + (8 if self.scheme == "int4" else 0)
        return _nearest(abs(quotients), _numbers(self.kind)) | np.signbit(quotients) << (3 if self.kind == "fp4" else 7)


@dataclass(frozen=True, slots=True)
class _Again:
    """A recipe (`core.recipes`): codes, scales, the scale of scales or the shape of a tensor."""

    blocks: _Blocks
    across: int
    dtype: DType
    is_scales: bool = False
    is_second: bool = False

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        others = (*self.blocks.together, *self.blocks.powers)
        return (self.blocks.entry, *(one for one in others if one is not self.blocks.entry))

    @property
    def facts(self) -> tuple[object, ...]:
        return ("again", self.blocks.scheme, self.across, self.is_scales, self.is_second)

    @property
    def unit(self) -> int:
        return max(1, self.across)

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        blocks, first, last = self.blocks, start // self.unit, -(-stop // self.unit)
        if self.dtype == I64:
            return np.array(blocks.entry.shape, np.int64)
        if self.is_second:
            return np.array([blocks.second(tools)], np.float32)
        if self.is_scales:
            second = blocks.second(tools) if blocks.scheme == "nvfp4" else None
            bits: Array = _as_stored(blocks.scales_in(first, last, second, tools).reshape(-1), self.dtype)
            return bits
        codes = np.concatenate(
            [blocks.codes(row, min(row + 64, last), tools) for row in range(first, last, 64)]
        ).astype(np.uint8)
        if self.dtype in (U8, I32):  # two in a byte
            wide = np.zeros((len(codes), self.across * self.dtype.itemsize * 2), np.uint8)
            wide[:, : blocks.columns] = codes
            codes = wide[:, ::2] + 16 * wide[:, 1::2]
        packed: Array = codes.reshape(-1).view(f"<u{self.dtype.itemsize}")
        return packed


def _numbers(kind: str) -> Any:
    """The numbers from 0 on that the codes of a kind stand for, in order."""
    import numpy as np

    digits, powers = {"fp4": (1, range(-1, 3)), "fp8": (3, range(-7, 9))}[kind]
    found = [math.ldexp(n + (2**digits if power > powers[0] else 0), max(power, powers[1]) - digits)
             for power in powers for n in range(2**digits)]  # fmt: skip
    return np.array(found if kind == "fp4" else found[:-1])


def _nearest(numbers: Any, table: Any) -> Any:
    """The index of the nearest number of a table; of two equally near ones, the even index."""
    import numpy as np

    above = np.clip(np.searchsorted(table, numbers), 1, len(table) - 1)
    over, under = table[above] - numbers, numbers - table[above - 1]
    return np.where((over < under) | ((over == under) & (above % 2 == 0)), above, above - 1)


def _digits(numbers: Any, dtype: DType) -> Any:
    """Positive numbers rounded to the digits of a dtype."""
    import numpy as np

    digits, least = {BF16: (8, -133), F16: (11, -24)}.get(dtype, (24, -149))
    step = np.ldexp(1.0, np.maximum(np.frexp(numbers)[1] - digits, least))
    return np.rint(numbers.astype(np.float64) / step) * step


def _as_stored(scales: Any, dtype: DType) -> Any:
    """Scales as bits of a dtype that has them."""
    import numpy as np

    if dtype == U8:
        return np.asarray(np.frexp(scales)[1] + 126, np.uint8)
    if dtype == F8_E4M3:
        return np.searchsorted(_numbers("fp8"), scales).astype(np.uint8)
    if dtype == F16:
        return scales.astype(np.float16)
    wide = scales.astype(np.float32)
    return (wide.view(np.uint32) >> 16).astype(np.uint16) if dtype == BF16 else wide


@dataclass(frozen=True, slots=True)
class AffineAgain:
    """A recipe (`core.recipes`): one of the three tensors that a quantised tensor becomes.

    Attributes:
        inputs: the tensor.
        name: "weight", "scales" or "biases".
        group: columns of a group.
        bits: of a code.
        dtype: of the model.
    """

    inputs: tuple[TensorEntry]
    name: str
    group: int
    bits: int
    dtype: DType

    @property
    def facts(self) -> tuple[object, ...]:
        return ("affine again", self.name, self.group, self.bits, self.dtype.name)

    @property
    def unit(self) -> int:
        columns = self.inputs[0].shape[-1]
        return columns * self.bits // 32 if self.name == "weight" else columns // self.group

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        first, last, columns = start // self.unit, stop // self.unit, self.inputs[0].shape[-1]
        step = max(1, _AT_ONCE // columns)
        found = []
        for row in range(first, last, step):
            stop_row = min(row + step, last)
            wide = tools.read_floats(self.inputs[0], row * columns, stop_row * columns)
            found.append(self._part(_in_dtype(wide.astype(np.float64), self.dtype).reshape(-1, self.group)))
        whole: Array = np.concatenate(found)
        return whole

    def _part(self, x: Any) -> Any:
        """Computes the codes, scales or biases of groups of columns; `x` has a row of doubles for each group."""
        import numpy as np

        most = 2**self.bits - 1
        ends = np.sort(x, axis=1)[:, [0, -1]]
        is_low = -ends[:, 0] > abs(ends[:, 1])
        edge = np.where(is_low, ends[:, 0], ends[:, 1])
        least = float(np.float32(1e-7))
        size = np.maximum(_single(_single(ends[:, 1] - ends[:, 0]) / most), least)
        steps = np.rint(_single(edge / size)) * np.where(is_low, 1, -1)
        has_edge = steps != 0
        scale = np.where(has_edge, _single(edge / np.where(has_edge, steps, 1)), np.where(is_low, size, -size))
        bias = np.where(has_edge, edge, 0.0)
        if self.name != "weight":
            return _bits(scale if self.name == "scales" else bias, self.dtype)
        codes = np.rint(_single(_single(x - bias[:, None]) / scale[:, None])).clip(0, most).astype(np.int64)
        places = codes.reshape(-1, 32)[:, :, None] >> np.arange(self.bits) & 1
        weights = np.uint64(1) << np.arange(32, dtype=np.uint64)
        words = (places.reshape(-1, self.bits, 32).astype(np.uint64) * weights).sum(axis=2)
        return words.reshape(-1).astype(np.uint32)


def affine_again(entry: TensorEntry, group: int, bits: int, dtype: DType) -> dict[str, TensorEntry]:
    """The tensors that stand for a quantised one in an output: name -> tensor."""
    columns, stem = entry.shape[-1], entry.name[: -len("weight")]
    found: dict[str, TensorEntry] = {}
    beside = columns // group
    for name, width, of in (
        ("weight", columns * bits // 32, U32),
        ("scales", beside, dtype),
        ("biases", beside, dtype),
    ):
        recipe = AffineAgain((entry,), name, group, bits, dtype)
        found[stem + name] = derive_entry(stem + name, (*entry.shape[:-1], width), of, recipe, entry.role)
    return found


def _single(numbers: Any) -> Any:
    """Rounds doubles to fp32; returns doubles."""
    return numbers.astype("float32").astype("float64")


def _in_dtype(numbers: Any, dtype: DType) -> Any:
    """Rounds doubles to a dtype, to nearest even: to multiples of the step that its digits leave. Returns doubles."""
    import numpy as np

    if dtype == F32:
        return numbers
    digits, least = {BF16: (8, -133), F16: (11, -24)}[dtype]
    step = np.ldexp(1.0, np.maximum(np.frexp(numbers)[1] - digits, least))
    return np.rint(numbers / step) * step


def _bits(numbers: Any, dtype: DType) -> Any:
    """Converts doubles to a dtype; returns the elements as they are stored."""
    import numpy as np

    rounded = _in_dtype(numbers, dtype)
    if dtype == F16:
        return rounded.astype(np.float16)
    single = rounded.astype(np.float32)
    return (single.view(np.uint32) >> 16).astype(np.uint16) if dtype == BF16 else single
