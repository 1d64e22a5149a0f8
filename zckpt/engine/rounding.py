"""Binary floats in a narrower form: rounded once and to nearest even.

For `reference` (arrays) and `replicas` (single numbers). It computes with whole numbers, since a host process may have set the
processor to round otherwise, or to flush subnormal numbers to zero.
The C++ engine has a function of its own (`csrc/cast.cpp`), which tests hold to this one.
"""

from __future__ import annotations

import math
import struct
from typing import Any, TypeVar

from zckpt.core.dtypes import BF16, F16, F32, F64, DType

MANTISSA = {F64: 52, F32: 23, F16: 10, BF16: 7}
"""Bits of it that are stored; those are the dtypes that this module knows."""

Bits = TypeVar("Bits")


def ones(count: int) -> int:
    """So many lowest bits."""
    return (1 << count) - 1


def narrowed(magnitude: Bits, source: DType, target: DType) -> Bits:
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
    if dtype == F64:
        return bits
    return narrowed(bits & ones(63), F64, dtype) | (bits >> 63) << (8 * dtype.itemsize - 1)


def rounded(value: float, dtype: DType) -> float:
    """A number rounded to a dtype, once and to nearest even; what is too large becomes infinite."""
    return number(rounded_bits(value, dtype), dtype)
