"""The reference engine of a scan: one request after another, with numpy. Slow and simple.

For `scan`, where the C++ engine was not built, and for tests, which hold that engine to it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from zckpt.base.errors import UnsupportedError
from zckpt.core.dtypes import BY_NAME, DType
from zckpt.engine.elements import read_elements
from zckpt.engine.rounding import cast, native, widen
from zckpt.engine.scan_requests import AGAINST, CRC_OTHER, CRC_SOURCE, NUMBERS, ScanBatch
from zckpt.engine.tensor_statistics import Relation, Spread, Statistics

_PART = 1 << 18
"""Elements looked at together."""


def scan_batch(
    batch: ScanBatch, descriptors: Sequence[tuple[int, int]], relation: Relation, *, spreads: bool
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, Statistics]], list[tuple[int, Spread]]]:
    """Scans a batch.

    Returns:
        Partial CRCs (range, CRC, offset, bytes), what was counted of tensors (tensor, statistics), and if `spreads` is true
        how far their numbers are apart (tensor, spread).
    """
    crcs: list[tuple[int, int, int, int]] = []
    found: list[tuple[int, Statistics]] = []
    apart: list[tuple[int, Spread]] = []

    def take_crcs(number: int, offset: int, data: bytes) -> None:
        for store, range_, start, nbytes in batch.ranges:
            low, high = max(offset, start), min(offset + len(data), start + nbytes)
            if store == number and low < high:
                crcs.append((range_, zlib.crc32(data[low - offset : high - offset]), low, high - low))

    def read(number: int, offset: int, count: int, step: int, dtype: DType, *, crc: int) -> bytes:
        store = batch.stores[number]
        data = read_elements(store, descriptors[number][0], offset, count, step, dtype.itemsize)
        if crc:
            take_crcs(number, offset, data)
        return native(data, dtype, store.byteorder)

    for (src, dst, move), how in zip(batch.moves, batch.flags, strict=True):
        a_dtype, b_dtype = move.src_dtype, move.dst_dtype
        for row in range(move.rows):
            for first in range(0, move.count, _PART):
                n = min(_PART, move.count - first)
                at = move.src_offset + row * move.src_pitch + first * move.src_step * a_dtype.itemsize
                a, b = read(src, at, n, move.src_step, a_dtype, crc=how & CRC_SOURCE), None
                if how & AGAINST:
                    at = move.dst_offset + row * move.dst_pitch + first * move.dst_step * b_dtype.itemsize
                    b = read(dst, at, n, move.dst_step, b_dtype, crc=how & CRC_OTHER)
                if how & (NUMBERS | AGAINST):
                    number = move.start + row * move.pitch + first
                    found.append((move.tensor, statistics_of(a, a_dtype, b, b_dtype, number, relation)))
                if b is not None and spreads and not relation.rounded:
                    spread = spread_of(a, a_dtype, b, b_dtype)
                    apart += [(move.tensor, spread)] if spread.counts else []
    return crcs, found, apart


def statistics_of(
    a: bytes, a_dtype: DType, b: bytes | None, b_dtype: DType, start: int = 0, relation: Relation | None = None
) -> Statistics:
    """The statistics of numbers, or of two arrays of them."""
    import numpy as np

    relation = relation or Relation()
    if a_dtype.kind == "complex":
        a_dtype, start = _real(a_dtype), 2 * start
        b_dtype = _real(b_dtype)
    with np.errstate(all="ignore"):
        x = widen(a, a_dtype).astype(np.float64)
        counts = (len(x), int(np.isnan(x).sum()), int(np.isinf(x).sum()), int((x != 0).sum()))
        if b is None:
            return Statistics(*counts)
        if (a_dtype.kind == "float") != (b_dtype.kind == "float"):
            raise UnsupportedError(
                "integers cannot be compared with floating-point numbers", found=f"{a_dtype} and {b_dtype}",
                remedy="Convert one of the two to the dtype of the other, then compare again.",
            )  # fmt: skip
        y = widen(b, b_dtype).astype(np.float64)
        if relation.rounded:
            x = widen(cast(a, a_dtype, b_dtype, "little", False)[0], b_dtype).astype(np.float64)
        differ = ~_same(a, a_dtype, x, b, b_dtype, y, relation)
        first = start + int(differ.argmax()) if differ.any() else None
        if relation.rounded:
            return Statistics(*counts, differ=int(differ.sum()), first=first)
        finite = np.isfinite(x) & np.isfinite(y)
        gap, larger = np.abs(x - y)[finite], np.maximum(np.abs(x), np.abs(y))[finite]
        apart = (~finite & (x != y) & ~(np.isnan(x) & np.isnan(y))).any()
        p, q = x[finite], y[finite]
        return Statistics(
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


def spread_of(a: bytes, a_dtype: DType, b: bytes, b_dtype: DType) -> Spread:
    """The distances between two arrays of numbers."""
    import numpy as np

    if a_dtype.kind == "complex":
        a_dtype, b_dtype = _real(a_dtype), _real(b_dtype)
    with np.errstate(all="ignore"):
        x, y = (widen(data, dtype).astype(np.float64) for data, dtype in ((a, a_dtype), (b, b_dtype)))
        gap = np.abs(x - y)[np.isfinite(x) & np.isfinite(y)]
        _, exponents = np.frexp(np.where(np.isinf(gap), np.finfo(np.float64).max, gap)[gap > 0])
    values, counts = np.unique(np.clip(exponents - 1, Spread.LEAST, Spread.LARGEST), return_counts=True)
    return Spread({int(e): int(n) for e, n in zip(values, counts, strict=True)})


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
