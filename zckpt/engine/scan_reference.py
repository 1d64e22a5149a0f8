"""The reference engine of a scan: one look after another, with numpy. Slow, and obviously right.

For `scan`, where the C++ engine was not built, and for tests, which hold that engine to it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from zckpt.base.errors import UnsupportedError
from zckpt.core.dtypes import BY_NAME, DType
from zckpt.core.fragments import Store
from zckpt.core.plan import Move
from zckpt.engine.elements import native, read_elements
from zckpt.engine.reference import cast, widen
from zckpt.engine.tensor_statistics import Relation, Tally

_PART = 1 << 18
"""Elements looked at together."""

NUMBERS, AGAINST, SUM_SOURCE, SUM_OTHER = 1, 2, 4, 8


def scan_batch(
    stores: Sequence[Store],
    descriptors: Sequence[tuple[int, int]],
    moves: Sequence[tuple[int, int, Move]],
    looks: Sequence[int],
    ranges: Sequence[tuple[int, int, int, int]],
    relation: Relation,
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, Tally]]]:
    """Carries out a batch; returns partial CRCs (range, CRC, offset, bytes) and tallies (tensor, tally)."""
    crcs: list[tuple[int, int, int, int]] = []
    tallies: list[tuple[int, Tally]] = []

    def take_sums(number: int, offset: int, data: bytes) -> None:
        for store, range_, start, nbytes in ranges:
            low, high = max(offset, start), min(offset + len(data), start + nbytes)
            if store == number and low < high:
                crcs.append((range_, zlib.crc32(data[low - offset : high - offset]), low, high - low))

    for (src, dst, move), how in zip(moves, looks, strict=True):
        for row in range(move.rows):
            for first in range(0, move.count, _PART):
                n = min(_PART, move.count - first)
                at = move.src_offset + row * move.src_pitch + first * move.src_step * move.src_dtype.itemsize
                a = read_elements(stores[src], descriptors[src][0], at, n, move.src_step, move.src_dtype.itemsize)
                if how & SUM_SOURCE:
                    take_sums(src, at, a)
                if not how & (NUMBERS | AGAINST):
                    continue
                number = move.start + row * move.pitch + first
                b = b""
                if how & AGAINST:
                    at = move.dst_offset + row * move.dst_pitch + first * move.dst_step * move.dst_dtype.itemsize
                    b = read_elements(stores[dst], descriptors[dst][0], at, n, move.dst_step, move.dst_dtype.itemsize)
                    if how & SUM_OTHER:
                        take_sums(dst, at, b)
                    b = native(b, move.dst_dtype, stores[dst].byteorder)
                a = native(a, move.src_dtype, stores[src].byteorder)
                tally = tally_of(a, move.src_dtype, b if how & AGAINST else None, move.dst_dtype, number, relation)
                tallies.append((move.tensor, tally))
    return crcs, tallies


def tally_of(
    a: bytes, a_dtype: DType, b: bytes | None, b_dtype: DType, start: int = 0, relation: Relation | None = None
) -> Tally:
    """What there is to count of numbers, or of two arrays of them."""
    import numpy as np

    relation = relation or Relation()
    if a_dtype.kind == "complex":
        a_dtype, start = _real(a_dtype), 2 * start
        b_dtype = _real(b_dtype)
    with np.errstate(all="ignore"):
        x = widen(a, a_dtype).astype(np.float64)
        counts = (len(x), int(np.isnan(x).sum()), int(np.isinf(x).sum()), int((x != 0).sum()))
        if b is None:
            return Tally(*counts)
        if (a_dtype.kind == "float") != (b_dtype.kind == "float"):
            raise UnsupportedError("numbers that cannot be compared", found=f"{a_dtype} and {b_dtype}")
        y = widen(b, b_dtype).astype(np.float64)
        if relation.rounded:
            x = widen(cast(a, a_dtype, b_dtype, "little", False)[0], b_dtype).astype(np.float64)
        differ = ~_same(a, a_dtype, x, b, b_dtype, y, relation)
        first = start + int(differ.argmax()) if differ.any() else None
        if relation.rounded:
            return Tally(*counts, differ=int(differ.sum()), first=first)
        finite = np.isfinite(x) & np.isfinite(y)
        gap, larger = np.abs(x - y)[finite], np.maximum(np.abs(x), np.abs(y))[finite]
        apart = (~finite & (x != y) & ~(np.isnan(x) & np.isnan(y))).any()
        p, q = x[finite], y[finite]
        return Tally(
            *counts,
            int(np.isnan(y).sum()),
            int(np.isinf(y).sum()),
            int(differ.sum()),
            first,
            float("inf") if apart else float(gap.max(initial=0.0)),
            float("inf") if apart else float((gap / np.where(larger > 0, larger, 1)).max(initial=0.0)),
            float((p * q).sum()),
            float((p * p).sum()),
            float((q * q).sum()),
        )


def _real(dtype: DType) -> DType:
    return BY_NAME["F32" if dtype.name == "C64" else "F64"]


def _same(a: bytes, a_dtype: DType, x: Any, b: bytes, b_dtype: DType, y: Any, relation: Relation) -> Any:
    import numpy as np

    both_nan = np.isnan(x) & np.isnan(y)
    if relation.rounded:
        return (x == y) | both_nan
    if relation.is_tolerant:
        close = np.abs(x - y) <= (relation.atol or 0.0) + (relation.rtol or 0.0) * np.abs(y)
        return np.where(np.isfinite(x) & np.isfinite(y), close, (x == y) | both_nan)
    if a_dtype == b_dtype:
        kind = f"V{a_dtype.itemsize}"
        return np.frombuffer(a, kind) == np.frombuffer(b, kind)
    if a_dtype.kind != "float":
        p, q = (np.frombuffer(data, dtype.numpy).astype(object) for data, dtype in ((a, a_dtype), (b, b_dtype)))
        return (p == q).astype(bool)
    return (x.view(np.uint64) == y.view(np.uint64)) | both_nan
