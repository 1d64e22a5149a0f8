"""The reference engine: one row after another with `pread`, numpy and `pwrite`. Slow and simple.

For `move`, where the C++ engine was not built, and for tests, which hold that engine to it byte by byte.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

from zckpt.core.dtypes import BF16, F16, F32, F64, DType
from zckpt.core.fragments import DerivedStore, FileStore, MemoryStore, Store
from zckpt.core.plan import Move
from zckpt.engine.elements import native, read_elements
from zckpt.engine.prefetch import in_memory
from zckpt.engine.rounding import MANTISSA, narrowed, ones
from zckpt.storage.descriptors import write_all

_PART = 1 << 20
"""Elements handled at once: memory stays bounded."""

Follow = Callable[[DerivedStore, int, int], tuple[Any, int]]
"""Computes bytes of a store by its recipe, as `core.recipes.followed`."""


def run_batch(
    stores: Sequence[Store],
    descriptors: Sequence[tuple[int, int]],
    moves: Sequence[tuple[int, int, Move]],
    literals: Sequence[tuple[int, int, bytes]],
    clamp: bool,
    spend: Callable[[int], None],
    follow: Follow,
) -> list[tuple[int, int, float]]:
    """Runs a batch; returns (tensor, count, largest) for casts that overflowed. `spend` is called with the bytes moved,
    `follow` with elements that a recipe computes.

    Raises:
        CorruptError: a source ends too early.
        OSError: a destination cannot be written.
    """
    overflows: list[tuple[int, int, float]] = []
    for number, offset, data in literals:
        _write(stores[number], descriptors[number][0], data, offset)
    for src, dst, move in moves:
        for row in range(move.rows):
            for first in range(0, move.count, _PART):
                count = min(_PART, move.count - first)
                source, target = move.src_dtype.itemsize, move.dst_dtype.itemsize
                at = move.src_offset + row * move.src_pitch + first * move.src_step * source
                store = stores[src]
                if isinstance(store, DerivedStore):
                    block, begin = follow(store, at, at + ((count - 1) * move.src_step + 1) * source)
                    store, at = in_memory(block, store), at - begin
                data = read_elements(store, descriptors[src][0], at, count, move.src_step, source)
                spend(count * (source + target))
                data, lost, largest = cast(data, move.src_dtype, move.dst_dtype, store.byteorder, clamp)
                if lost:
                    overflows.append((move.tensor, lost, largest))
                to = move.dst_offset + row * move.dst_pitch + first * move.dst_step * target
                if move.dst_step == 1:
                    _write(stores[dst], descriptors[dst][0], data, to)
                else:
                    for i in range(count):
                        element = data[i * target : (i + 1) * target]
                        _write(stores[dst], descriptors[dst][0], element, to + i * move.dst_step * target)
    return overflows


def _write(store: Store, fd: int, data: bytes, offset: int) -> None:
    if isinstance(store, FileStore):
        write_all(fd, data, offset)
    elif isinstance(store, MemoryStore):
        ctypes.memmove(store.address + offset, data, len(data))
    else:
        raise TypeError("nothing can be written there")


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
        result = bits if bits.dtype.itemsize == size else _narrowed(bits, target)
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


def _narrowed(bits: Any, target: DType) -> Any:
    """The bits of float32 or float64 numbers, as unsigned arrays, in a narrower form."""
    import numpy as np

    width, size = 8 * bits.dtype.itemsize, 8 * target.itemsize
    magnitude = narrowed(
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
