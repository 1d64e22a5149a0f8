"""Binary floats in a narrower form: rounded once and to nearest even.

For `reference` (arrays) and `replicas` (single numbers). It computes with whole numbers, since a host process may have set the
processor to round otherwise, or to flush subnormal numbers to zero.
The C++ engine has a function of its own (`csrc/cast.cpp`), which tests hold to this one.
"""

from __future__ import annotations

import array
import math
import struct
from typing import Any, TypeVar

from zckpt.core.dtypes import BF16, F16, F32, F64, DType

MANTISSA = {F64: 52, F32: 23, F16: 10, BF16: 7}
"""Stored mantissa bits of the dtypes that this module knows."""

Bits = TypeVar("Bits")


def ones(count: int) -> int:
    """The number with ones in its `count` lowest bits."""
    return (1 << count) - 1


def narrow_bits(magnitude: Bits, source: DType, target: DType) -> Bits:
    """Bits without their sign, in a form with fewer bits of mantissa.

    Args:
        magnitude: of a number in `source`, as an int, or as an array of int64.
        source: of more bits of mantissa than `target`.
        target: what is too large for it becomes infinite; NaN becomes quiet and keeps the bits of its payload that fit.

    Returns:
        Bits without their sign in `target`, as the magnitude is given.
    """
    kept, dropped = MANTISSA[target], MANTISSA[source]
    bias, most = ones(8 * source.itemsize - 2 - dropped), ones(8 * target.itemsize - 2 - kept)
    bits: Any = magnitude  # comparisons are bools or arrays of them: both are 0 or 1
    exponent, fraction = bits >> dropped, bits & ones(dropped)
    mantissa = fraction + (exponent > 0) * (1 << dropped)
    # The number is mantissa * 2 ** (power - dropped), and the last bit that stays is worth 2 ** (unit - kept).
    power = exponent + (exponent == 0) - bias
    unit = power + (1 - most - power) * (power < 1 - most)
    away = dropped - kept + unit - power
    away = away + (dropped + 2 - away) * (away > dropped + 2)  # bits that go; so many are less than half of a unit
    rest, half = mantissa & ((1 << away) - 1), 1 << (away - 1)
    whole = mantissa >> away
    whole = whole + ((rest > half) | ((rest == half) & (whole % 2 == 1)))
    # A mantissa that became 2 ** (kept + 1) carries into the exponent by itself.
    infinity = (2 * most + 1) << kept
    result = whole + ((unit - 1 + most) << kept)
    result = result + (infinity - result) * (result > infinity)
    nan = (1 << (kept - 1)) | (fraction >> (dropped - kept))
    special = infinity | nan * (fraction > 0)
    return result + (special - result) * (exponent == 2 * bias + 1)  # type: ignore[no-any-return]


def number(bits: int, dtype: DType) -> float:
    """The number that bits mean."""
    stored, width = MANTISSA[dtype], 8 * dtype.itemsize
    if dtype == F64:
        return float(struct.unpack("<d", struct.pack("<Q", bits))[0])
    exponent, fraction = (bits & ones(width - 1)) >> stored, bits & ones(stored)
    bias = ones(width - 2 - stored)
    if exponent == 2 * bias + 1:
        magnitude = math.nan if fraction else math.inf
    else:
        magnitude = math.ldexp(fraction + (1 << stored if exponent else 0), max(exponent, 1) - bias - stored)
    return -magnitude if bits >> (width - 1) else magnitude


def rounded_bits(value: float, dtype: DType) -> int:
    """The bits of a number in a dtype, rounded once; what is too large becomes infinite."""
    bits: int = struct.unpack("<Q", struct.pack("<d", value))[0]
    return bits if dtype == F64 else _narrow_number(bits, F64, dtype)


def _narrow_number(bits: int, source: DType, target: DType) -> int:
    """`narrow_bits` with the sign; `source` must have the exponents of `target`."""
    width = 8 * source.itemsize - 1
    return narrow_bits(bits & ones(width), source, target) | (bits >> width) << (8 * target.itemsize - 1)


def is_rounded(master: int, dtype: DType, copy: int, narrow: DType) -> bool:
    """Whether the copy is the rounded master. Bits are compared, for a host process may flush small numbers to zero."""
    if dtype == narrow:
        wanted = master
    elif dtype in (F32, F64) and MANTISSA[narrow] < MANTISSA[dtype]:
        wanted = _narrow_number(master, dtype, narrow)
    else:
        wanted = rounded_bits(number(master, dtype), narrow)
    if wanted == copy:
        return True
    a, b = (bits & ones(8 * narrow.itemsize - 1) for bits in (wanted, copy))
    infinity = ones(8 * narrow.itemsize - 1) - ones(MANTISSA[narrow])
    return (a == b == 0) or (a > infinity and b > infinity)  # zeros of both signs, and all NaNs


def native(data: bytes, dtype: DType, byteorder: str) -> bytes:
    """Elements in the machine's byte order."""
    width = dtype.swap(byteorder)
    if not width:
        return data
    numbers = array.array({2: "H", 4: "I", 8: "Q"}[width], data)
    numbers.byteswap()
    return numbers.tobytes()


def cast(data: bytes, source: DType, target: DType, byteorder: str, clamp: bool) -> tuple[bytes, int, float]:
    """Elements in another dtype, rounded once and to nearest even: (bytes, finite numbers that became infinite, the
    largest of them). No setting of the processor changes it.
    """
    import numpy as np

    data = native(data, source, byteorder)
    if source == target:
        return data, 0, 0.0
    with np.errstate(all="ignore"):
        wide = widen(data, source)
        size = target.itemsize
        bits = wide.view(np.uint64 if wide.dtype.itemsize == 8 else np.uint32)
        result = bits if bits.dtype.itemsize == size else _narrowed_array(bits, target)
        if target == BF16:
            result[np.isnan(wide)] = 0x7FC0
        sign = 1 << (8 * size - 1)
        infinity = ones(8 * size - 1) - ones(MANTISSA[target])
        lost = ((result & (sign - 1)) == infinity) & np.isfinite(wide)
        count = int(lost.sum())
        largest = float(np.abs(wide[lost]).max()) if count else 0.0
        if count and clamp:
            result[lost] = (result[lost] & sign) | (infinity - 1)
    return result.astype(f"u{size}").tobytes(), count, largest


def _narrowed_array(bits: Any, target: DType) -> Any:
    """The bits of float32 or float64 numbers, as unsigned arrays, narrowed to `target`."""
    import numpy as np

    width, size = 8 * bits.dtype.itemsize, 8 * target.itemsize
    magnitude = narrow_bits(
        (bits & bits.dtype.type(ones(width - 1))).astype(np.int64), F64 if width == 64 else F32, target
    )
    sign = (bits >> bits.dtype.type(width - 1)).astype(np.uint64) << np.uint64(size - 1)
    return (magnitude.astype(np.uint64) | sign).astype(f"u{target.itemsize}")


def widen(data: bytes, source: DType) -> Any:
    """Elements as float32, or in their own dtype where numpy has it and it is not half precision."""
    import numpy as np

    if source == BF16:
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if source.numpy:
        numbers = np.frombuffer(data, source.numpy)
        if source != F16:
            return numbers
        single = numbers.astype(np.float32)
        nan = np.isnan(single)
        single.view(np.uint32)[nan] |= 0x400000
        return single
    table = np.array([_float8(byte, source.name) for byte in range(256)], np.float32)
    return table[np.frombuffer(data, np.uint8)]


def _float8(byte: int, name: str) -> float:
    if name == "F8_E8M0":
        return math.nan if byte == 255 else math.ldexp(1.0, byte - 127)
    exponent_bits, bias = {
        "F8_E4M3": (4, 7), "F8_E5M2": (5, 15), "F8_E4M3FNUZ": (4, 8), "F8_E5M2FNUZ": (5, 16)
    }[name]  # fmt: skip
    mantissa_bits = 7 - exponent_bits
    exponent, mantissa = (byte & 127) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    sign = -1.0 if byte & 128 else 1.0
    if name.endswith("FNUZ"):
        if byte == 128:
            return math.nan
    elif name == "F8_E5M2" and exponent == 31:
        return math.copysign(math.nan if mantissa else math.inf, sign)
    elif name == "F8_E4M3" and byte & 127 == 127:
        return math.copysign(math.nan, sign)
    return sign * math.ldexp((1 << mantissa_bits if exponent else 0) + mantissa, (exponent or 1) - bias - mantissa_bits)
