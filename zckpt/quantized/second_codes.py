"""Codes and scales of quantised outputs a second time: in doubles, from sorted numbers and their middles.

For `verify`, which compares an output with these, and not with what `quantise` and the kernels made; nothing of those is used.
Source: compressed-tensors 0.20, quantization/utils/helpers.py; DeepSeek-V3 (blocks of 128 x 128); OCP Microscaling formats 1.0.

MLX's form of a tensor a second time: in doubles that are rounded to fp32 after each step, bit by bit.
Source: mlx 0.32.4, backend/metal/kernels/quantized.h `affine_quantize`, which is another text of the same arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, F8_E4M3, F16, F32, I8, I32, I64, U8, U32, DType
from zckpt.core.folds import Tools
from zckpt.core.recipes import Formula, derive_entry

if TYPE_CHECKING:
    from zckpt.core.folds import Array


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
    inputs = entry, *(one for one in (*together, *powers) if one is not entry)

    def derived(
        end: str, shape: tuple[int, ...], of: DType, width: int, compute: Callable[[int, int, Tools], Array]
    ) -> TensorEntry:
        """A tensor of rows of `width` elements, which `compute` gives by their numbers."""

        def of_elements(start: int, stop: int, tools: Tools) -> Array:
            return compute(start // width, -(-stop // width), tools)

        return derive_entry(entry.name + end, shape, of, Formula(inputs, ("again", scheme, end), of_elements, width))

    def codes(first: int, last: int, tools: Tools) -> Array:
        return own.packed(first, last, tools, per_row, dtype)

    beside = "_scale_inv" if scheme == "block128" else "_scale"
    found = [
        derived(end, (*lead, rows, per_row), dtype, max(1, per_row), codes),
        derived(beside, shape, scales, max(1, across), own.stored_scales),
    ]
    if scheme == "nvfp4":
        found.append(derived("_global_scale", (1,), F32, 1, lambda first, last, tools: own.second(tools).reshape(1)))
    if dtype == I32:
        found.append(derived("_shape", (2,), I64, 2, lambda *_: _as_array(entry.shape)))
    return {one.name: one for one in found}


def _as_array(shape: tuple[int, ...]) -> Array:
    import numpy as np

    return np.array(shape, np.int64)


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

    def packed(self, first: int, last: int, tools: Tools, across: int, dtype: DType) -> Array:
        """The codes of rows of the stack as they are stored: `across` elements of a dtype in a row."""
        import numpy as np

        parts = [self.codes(row, min(row + 64, last), tools) for row in range(first, last, 64)]
        codes = np.concatenate(parts).astype(np.uint8)
        if dtype in (U8, I32):  # two in a byte
            wide = np.zeros((len(codes), across * dtype.itemsize * 2), np.uint8)
            wide[:, : self.columns] = codes
            codes = wide[:, ::2] + 16 * wide[:, 1::2]
        found: Array = codes.reshape(-1).view(f"<u{dtype.itemsize}")
        return found

    def stored_scales(self, first: int, last: int, tools: Tools) -> Array:
        """The scales of rows of blocks as they are stored."""
        second = self.second(tools) if self.scheme == "nvfp4" else None
        found: Array = _as_stored(self.scales_in(first, last, second, tools).reshape(-1), self.scales)
        return found


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
    """Numbers rounded to the digits of a dtype: to nearest even, as multiples of the step that these leave; doubles."""
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


def affine_again(entry: TensorEntry, group: int, bits: int, dtype: DType) -> dict[str, TensorEntry]:
    """The tensors that stand for a quantised one in an output: name -> tensor."""
    columns, stem = entry.shape[-1], entry.name[: -len("weight")]
    found: dict[str, TensorEntry] = {}
    for name, width, of in (
        ("weight", columns * bits // 32, U32), ("scales", columns // group, dtype), ("biases", columns // group, dtype),
    ):  # fmt: skip

        def compute(start: int, stop: int, tools: Tools, name: str = name, width: int = width) -> Array:
            import numpy as np

            last, step, parts = stop // width, max(1, _AT_ONCE // columns), list[Any]()
            for row in range(start // width, last, step):
                wide = tools.read_floats(entry, row * columns, min(row + step, last) * columns).astype(np.float64)
                parts.append(_affine_part(name, _in_dtype(wide, dtype).reshape(-1, group), bits, dtype))
            whole: Array = np.concatenate(parts)
            return whole

        recipe = Formula((entry,), ("affine again", name, group, bits, dtype.name), compute, width)
        found[stem + name] = derive_entry(stem + name, (*entry.shape[:-1], width), of, recipe, entry.role)
    return found


def _affine_part(name: str, x: Any, bits: int, dtype: DType) -> Any:
    """The codes ("weight"), scales or biases of groups of columns; `x` has a row of doubles for each group."""
    import numpy as np

    most = 2**bits - 1
    ends = np.sort(x, axis=1)[:, [0, -1]]
    is_low = -ends[:, 0] > abs(ends[:, 1])
    edge = np.where(is_low, ends[:, 0], ends[:, 1])
    least = float(np.float32(1e-7))
    size = np.maximum(_single(_single(ends[:, 1] - ends[:, 0]) / most), least)
    steps = np.rint(_single(edge / size)) * np.where(is_low, 1, -1)
    has_edge = steps != 0
    scale = np.where(has_edge, _single(edge / np.where(has_edge, steps, 1)), np.where(is_low, size, -size))
    bias = np.where(has_edge, edge, 0.0)
    if name != "weight":
        return _as_stored(_in_dtype(scale if name == "scales" else bias, dtype), dtype)
    codes = np.rint(_single(_single(x - bias[:, None]) / scale[:, None])).clip(0, most).astype(np.int64)
    places = codes.reshape(-1, 32)[:, :, None] >> np.arange(bits) & 1
    weights = np.uint64(1) << np.arange(32, dtype=np.uint64)
    words = (places.reshape(-1, bits, 32).astype(np.uint64) * weights).sum(axis=2)
    return words.reshape(-1).astype(np.uint32)


def _single(numbers: Any) -> Any:
    """Rounds doubles to fp32; returns doubles."""
    return numbers.astype("float32").astype("float64")


def _in_dtype(numbers: Any, dtype: DType) -> Any:
    """Doubles rounded to a dtype."""
    return numbers if dtype == F32 else _digits(numbers, dtype)
