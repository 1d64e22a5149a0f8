"""The reference engine: one row after another with `pread`, numpy and `pwrite`. Slow, and obviously right.

For `mover`, where the C++ engine was not built, and for tests, which hold that engine to it byte by byte.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from zckpt.dtypes import BF16, F16, F32, DType
from zckpt.errors import read_error
from zckpt.fragments import FileStore, Store
from zckpt.plan import Move

_PART = 1 << 20
"""Elements handled at once: memory stays bounded."""


def run_batch(
    stores: Sequence[Store],
    descriptors: Sequence[tuple[int, int]],
    moves: Sequence[tuple[int, int, Move]],
    literals: Sequence[tuple[int, int, bytes]],
    clamp: bool,
    spend: Callable[[int], None],
) -> list[tuple[int, int, float]]:
    """Runs a batch; returns (tensor, count, largest) for casts that overflowed. `spend` is told of bytes moved.

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
                data = read_elements(stores[src], descriptors[src][0], at, count, move.src_step, source)
                spend(count * (source + target))
                data, lost, largest = cast(data, move.src_dtype, move.dst_dtype, stores[src].byteorder, clamp)
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


def read_elements(store: Store, fd: int, offset: int, count: int, step: int, itemsize: int) -> bytes:
    """Elements `step` elements apart, as they lie there; `fd` is for files of this machine.

    Raises:
        CorruptError: the file ends too early, or cannot be read.
    """
    if step != 1:
        return b"".join(read_elements(store, fd, offset + i * step * itemsize, 1, 1, itemsize) for i in range(count))
    nbytes = count * itemsize
    if not isinstance(store, FileStore):
        return ctypes.string_at(store.address + offset, nbytes)
    parts: list[bytes] = []
    while nbytes:
        try:
            part = os.pread(fd, nbytes, offset)
        except OSError as error:
            raise read_error(store.path, error.errno or 0, offset) from error
        if not part:
            raise read_error(store.path, -1, offset)
        parts.append(part)
        offset, nbytes = offset + len(part), nbytes - len(part)
    return b"".join(parts)


def _write(store: Store, fd: int, data: bytes, offset: int) -> None:
    if not isinstance(store, FileStore):
        ctypes.memmove(store.address + offset, data, len(data))
        return
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def cast(data: bytes, source: DType, target: DType, byteorder: str, clamp: bool) -> tuple[bytes, int, float]:
    """Elements in another dtype, to nearest even: (bytes, finite numbers that became infinite, the largest of them)."""
    import numpy as np

    if byteorder != sys.byteorder and source.component > 1:
        data = np.frombuffer(data, f"u{min(source.component, 8)}").byteswap().tobytes()
    if source == target:
        return data, 0, 0.0
    with np.errstate(all="ignore"):
        wide = widen(data, source)
        single = wide.astype(np.float32)
        result: Any
        if target == F32:
            result, infinite = single, np.isinf(single)
        elif target == F16:
            result = single.astype(np.float16)
            infinite = np.isinf(result)
            nan = np.isnan(single)
            payload = single.view(np.uint32)[nan]
            quiet = (payload >> 16 & 0x8000) | 0x7E00 | (payload >> 13 & 0x3FF)
            result.view(np.uint16)[nan] = quiet.astype(np.uint16)
        else:
            bits = single.view(np.uint32)
            result = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
            infinite = (result & 0x7FFF) == 0x7F80
            result[np.isnan(single)] = 0x7FC0
        lost = infinite & np.isfinite(wide)
        count = int(lost.sum())
        largest = float(np.abs(wide[lost]).max()) if count else 0.0
        if count and clamp:
            most = {F32: 0x7F7FFFFF, F16: 0x7BFF, BF16: 0x7F7F}[target]
            unsigned = result.view(np.uint32 if target == F32 else np.uint16)
            sign = np.array(0x80000000 if target == F32 else 0x8000, unsigned.dtype)
            unsigned[lost] = (unsigned[lost] & sign) | np.array(most, unsigned.dtype)
    return result.tobytes(), count, largest


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
