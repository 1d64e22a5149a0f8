"""The forms of compressed-tensors that `zckpt quantize` writes, as a table, and how each has its scales.

For `quantise` and `jobs.quantize`. A block of elements is a group of columns of one row, or a row. Scales are those that
compressed-tensors computes: in the dtype of the weights, from the largest magnitude of a block.
Source: compressed-tensors 0.20, quantization/quant_scheme.py (presets W4A16, INT8, NVFP4A16, MXFP4A16, MXFP8A16) and
quantization/utils (`calculate_qparams`, `generate_gparam`, `generate_mx_scales`); vLLM 0.11,
quantization/compressed_tensors/schemes.

Scales of scales of tensors that share one are computed once, from whole tensors, which are read for it alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, F8_E4M3, F16, I8, I32, U8, DType
from zckpt.core.folds import MatrixBlocks, NumberGrid, read_numbers
from zckpt.quantized.coded import BlockScales

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Floats, Tools


_FP4_TOP, _FP8_TOP = 6.0, 448.0
_TO_E4M3 = 2.0**-120
"""From the least exponent of E4M3 to that of fp32."""


@dataclass(frozen=True, slots=True)
class Target:
    """A form of quantised weights that is written.

    Attributes:
        grid: of the numbers that codes stand for.
        bits: of a code.
        group: columns of a block; 0 for a whole row.
        form: compressed-tensors' name of it.
        codes: the dtype in which codes are stored, and the end of that tensor's name.
        scales: of a block: of what dtype, or None for that of the model.
        half_range: what the largest magnitude is divided by; 0 for powers of two.
        offset: for powers of two, the power of the grid's largest number.
        is_float: whether codes stand for floats.
        inputs: what the config says of activations.
    """

    grid: NumberGrid
    bits: int
    group: int
    form: str
    codes: tuple[DType, str]
    scales: DType | None = None
    half_range: float = 0
    offset: int = 0
    is_float: bool = True
    inputs: Literal["as they are", "by token"] = "as they are"

    @property
    def has_second(self) -> bool:
        """Whether the form has a scale of scales."""
        return self.scales == F8_E4M3

    def stored_columns(self, columns: int) -> int:
        """The elements of a row of codes as they are stored."""
        return -(-columns * self.bits // (8 * self.codes[0].itemsize))

    def scales_of(self, largest: Floats, weights: DType, second: float | None, stored: DType, tools: Tools) -> Floats:
        """The scales of blocks with these largest magnitudes as they are stored, as fp32. Quotients are rounded in the
        dtype of the weights; `second`: the scale of scales.
        """
        import numpy as np

        if not self.half_range:
            bits = largest.view(np.uint32) + np.uint32(1 << 21)
            powers = np.clip((bits >> np.uint32(23)).astype(np.int32) - self.offset, 0, 254)
            twos: Floats = np.ldexp(np.float32(1), powers - 127)
            return twos
        found = rounded_to(largest / np.float32(self.half_range), weights)
        if second is not None:
            found = np.minimum(found * np.float32(second), np.float32(_FP8_TOP))
            found = of_stored_bits(_in_e4m3(found, tools), F8_E4M3)
        else:
            found = rounded_to(found, stored)
        least = {F8_E4M3: 0.125, BF16: 2.0**-7, F16: 2.0**-10}.get(stored, 2.0**-23)
        return np.where(found == 0, np.float32(least), found)


def order_of(scheme: str) -> Literal["narrow first", "as aligned"]:
    """The order of tensors in files by which scales come soon after their codes, and from the same reading."""
    return "as aligned" if scheme == "int4" else "narrow first"


def second_of(largest: float) -> float:
    """The scale of scales of tensors with this largest magnitude, as `generate_gparam` computes it."""
    import numpy as np

    with np.errstate(all="ignore"):
        reciprocal = np.float32(1) / max(
            np.float32(largest), np.finfo(np.float32).tiny
        )  # as torch divides a number by a tensor
        found = reciprocal * np.float32(_FP8_TOP * _FP4_TOP)
    return float(found) if np.isfinite(found) else 1.0


def rounded_to(numbers: Floats, dtype: DType) -> Floats:
    """Positive numbers rounded to a dtype, to nearest even, as fp32."""
    import numpy as np

    if dtype == BF16:
        bits = numbers.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)
    if dtype == F16:
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).astype(np.float32)
    return numbers


def stored_bits(scales: Floats, dtype: DType) -> Array:
    """Scales in the dtype in which they are stored, which holds them exactly; dtypes that numpy lacks as unsigned integers."""
    import numpy as np

    if dtype == BF16:
        return (scales.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == F16:
        return scales.astype(np.float16)
    if dtype == U8:
        return (scales.view(np.uint32) >> 23).astype(np.uint8)
    if dtype == F8_E4M3:
        with np.errstate(under="ignore"):  # its bits, as a fraction of fp32 where exponents begin as low
            return ((scales * np.float32(_TO_E4M3)).view(np.uint32) >> 20).astype(np.uint8)
    return scales


def of_stored_bits(bits: Array, dtype: DType) -> Floats:
    """The other way."""
    import numpy as np

    found: Any = bits
    if dtype == BF16:
        found = (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif dtype == F16:
        found = found.view(np.float16).astype(np.float32)
    elif dtype == U8:
        found = np.ldexp(np.float32(1), found.astype(np.int32) - 127)
    elif dtype == F8_E4M3:
        found = (found.astype(np.uint32) << np.uint32(20)).view(np.float32) / np.float32(_TO_E4M3)
    return found  # type: ignore[no-any-return]


def _in_e4m3(numbers: Floats, tools: Tools) -> Any:
    import numpy as np

    found = np.empty(numbers.size, np.uint8)
    blocks = MatrixBlocks(1, numbers.size, 1, max(1, numbers.size))
    tools.kernels.to_codes(NumberGrid.E4M3, numbers.reshape(-1), blocks, np.ones(1, np.float32), found)
    return found.reshape(numbers.shape)


TARGETS: Mapping[str, Target] = {
    "nvfp4": Target(NumberGrid.E2M1, 4, 16, "nvfp4-pack-quantized", (U8, "_packed"), F8_E4M3, _FP4_TOP),
    "mxfp4": Target(NumberGrid.E2M1, 4, 32, "mxfp4-pack-quantized", (U8, "_packed"), U8, offset=2),
    "mxfp8": Target(NumberGrid.E4M3, 8, 32, "mxfp8-quantized", (F8_E4M3, ""), U8, offset=8),
    "int4": Target(NumberGrid.INT4, 4, 128, "pack-quantized", (I32, "_packed"), None, 7.5, is_float=False),
    "int8": Target(NumberGrid.INT8, 8, 0, "int-quantized", (I8, ""), None, 127.5, is_float=False, inputs="by token"),
}
"""Name -> form. Weights of int8 in groups would be another one of int8 (`pack-quantized`), which is not written."""


_AT_ONCE = 1 << 19
"""The most elements that are read together: a second-level cache has room for them."""


class Second:
    """A scale of scales that several tensors share, because servers of models join them.

    Args:
        entries: these tensors.
        powers: their powers of two, if all are of MXFP4; the scale of scales is then one too, and the largest scale 2^8.

    Attributes:
        following: the one that is probably asked for next; the disk reads its tensors while these ones are quantised.
    """

    def __init__(self, entries: tuple[TensorEntry, ...], powers: tuple[TensorEntry, ...] = ()) -> None:
        self.entries = entries
        self.powers = powers
        self.inputs = (*entries, *powers)
        self.following: Second | None = None
        self._lock = Lock()
        self._value: float | None = None

    def value(self, tools: Tools) -> float:
        """It. The tensors are read when it is asked for the first time."""
        with self._lock:
            if self._value is None:
                wholes = self._wholes
                parts = [(number, at) for number, entry in enumerate(wholes) for at in range(0, entry.numel, _AT_ONCE)]
                tops = tools.each(lambda part, tools: self._top_of(*part, tools), parts)
                top = next(filter(math.isnan, tops), max(tops, default=0.0))
                self._value = math.ldexp(1.0, min(127, 9 - math.frexp(top)[1])) if self.powers else second_of(top)
                if self.following is not None:
                    tools.expect(self.following._wholes)
            return self._value

    @property
    def _wholes(self) -> Sequence[TensorEntry]:
        return self.powers or self.entries

    def _top_of(self, number: int, at: int, tools: Tools) -> float:
        """The largest magnitude or power of a part of a tensor."""
        import numpy as np

        if self.powers:
            powers = self.powers[number]
            stop = min(at + _AT_ONCE, powers.numel)
            return float(BlockScales(powers).read(at, stop, tools, self.entries[number].name).max())
        entry, found = self.entries[number], np.zeros(1, np.float32)
        part = read_numbers(entry, at, min(at + _AT_ONCE, entry.numel), tools)
        tools.kernels.largest(part, MatrixBlocks(1, len(part), 1, len(part)), found)
        return float(found[0])
