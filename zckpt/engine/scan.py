"""Reads files that exist: CRCs of ranges, what the numbers are, whether two places hold the same.

For `verify` and `diff`, and for conversions that resume with files of an earlier run. A scan is a list of requests, in the
order of the files; it is streamed batch by batch like a plan, and memory does not grow with it. There are two engines, as
for moving: the native one (`zckpt._core`), at the speed of the disk, and a slow one (`scan_reference`) that it must equal.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Literal

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError, read_error
from zckpt.base.pace import engine_error, gives_back, pace, thread_count
from zckpt.engine.batches import progress_after
from zckpt.engine.bringing import Bringer, ranges_of_spans
from zckpt.engine.checksums import Partial
from zckpt.engine.choice import choose
from zckpt.engine.prefetch import with_local_sources
from zckpt.engine.scan_reference import scan_batch as reference_batch
from zckpt.engine.scan_requests import CrcRange, ScanBatch, ScanRequest, distant_spans, near, scan_batches
from zckpt.engine.tensor_statistics import Relation, Spread, Statistics
from zckpt.storage.descriptors import OpenFiles

try:
    from zckpt._core import scan as native_scan
except ImportError:  # pragma: no cover - depends on the build
    native_scan = None  # type: ignore[assignment]

_REQUEST = struct.Struct("=QQBB6x")


@dataclass(slots=True)
class ScanReport:
    """What a scan found.

    Attributes:
        statistics: number of the tensor -> what was counted.
        crcs: number of the `CrcRange` -> the parts of it that were read.
        spreads: number of the tensor -> how far its numbers are apart, where that was wanted and some are.
        bytes_read: by all requests.
    """

    statistics: dict[int, Statistics] = field(default_factory=dict[int, Statistics])
    crcs: dict[int, list[Partial]] = field(default_factory=dict[int, list[Partial]])
    spreads: dict[int, Spread] = field(default_factory=dict[int, Spread])
    bytes_read: int = 0

    def of(self, number: int) -> Statistics:
        """The statistics of a tensor; zeros for one that nothing was read of."""
        return self.statistics.get(number, Statistics())


def scan(
    requests: Iterable[ScanRequest],
    crc_ranges: Sequence[CrcRange] = (),
    *,
    relation: Relation | None = None,
    spreads: bool = False,
    threads: int | None = None,
    engine: Literal["auto", "native", "reference"] = "auto",
    keep_cache: bool | None = None,
    bytes_per_s: int | None = None,
    total_bytes: int = 0,
    progress: Callable[[int], None] | None = None,
) -> ScanReport:
    """Reads what is requested, and counts, compares and checksums it.

    Args:
        requests: what to read. Those that count for CRCs must not overlap.
        crc_ranges: ranges with CRCs that are wanted.
        relation: how requests with `AGAINST` compare; by default bit for bit.
        spreads: whether to count how far numbers are apart that are compared, and not by `Relation.rounded`.
        threads: of the native engine; results do not depend on it.
        engine: "auto" uses the native one where it was built.
        keep_cache: whether the page cache keeps what is read; None: unless `total_bytes` is more than memory.
        bytes_per_s: the most that is read.
        total_bytes: that will be read, as far as is known.
        progress: called with the bytes read so far.

    Raises:
        CorruptError: a file ends too early, or cannot be read. InconsistentError: it changed meanwhile.
        ResourceError: there is too little memory, or no thread starts.
        UsageError: the number of threads is impossible. UnsupportedError: the engine was not built.
    """
    slow = choose(engine, built=native_scan is not None) == "reference"
    count, relation = thread_count(threads), relation or Relation()
    report = ScanReport()
    give_back = gives_back(keep_cache, total_bytes)
    spend = pace(bytes_per_s)
    bringer = Bringer("reference" if slow else "native", count, give_back=give_back, spend=spend)
    with bringer, OpenFiles(give_back=give_back) as files:
        for batch in with_local_sources(
            scan_batches(requests, crc_ranges),
            lambda batch: ranges_of_spans(distant_spans(batch)),
            lambda batch, fetched: near(batch, lambda spans: bringer.bring(spans, fetched)),
        ):
            watch = progress_after(progress, report.bytes_read)
            descriptors = [files.of(store) for store in batch.stores]
            if slow:
                crcs, found, apart = reference_batch(batch, descriptors, relation, spreads=spreads)
                if watch:
                    watch(batch.nbytes)
            else:
                crcs, found, apart = _run_native(
                    batch, descriptors, relation, spreads, count, give_back, bytes_per_s or 0, watch
                )
            for number, crc, offset, length in crcs:
                of, begin = batch.places[number] if batch.places else (number, 0)
                report.crcs.setdefault(of, []).append((begin + offset, length, crc))
            for tensor, one in found:
                report.statistics[tensor] = report.of(tensor) + one
            for tensor, spread in apart:
                report.spreads[tensor] = report.spreads.get(tensor, Spread()) + spread
            report.bytes_read += batch.nbytes
        files.check_sources()
        bringer.check_sources()
    return report


def _run_native(
    batch: ScanBatch,
    fds: Sequence[tuple[int, int]],
    relation: Relation,
    spreads: bool,
    threads: int,
    give_back: bool,
    bytes_per_s: int,
    progress: Callable[[int], None] | None,
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, Statistics]], list[tuple[int, Spread]]]:
    stores, moves, _, ranges, *_ = batch.packed(fds)
    requests = b"".join(
        _REQUEST.pack(move.start, move.pitch, how, move.dst_dtype.swap(move.dst.byteorder))
        for how, (_, _, move) in zip(batch.flags, batch.moves, strict=True)
    )
    (kind, number, store, offset, text), crcs, found, apart = native_scan(
        *(stores, moves, requests, ranges),
        rounded=relation.rounded,
        atol=relation.atol or 0.0 if relation.is_tolerant else -1.0,
        rtol=relation.rtol or 0.0,
        spreads=spreads,
        threads=threads,
        give_back=give_back,
        bytes_per_s=bytes_per_s,
        progress=progress,
    )
    if kind == "read":
        raise read_error(str(batch.stores[store]), number, offset)
    if kind == "cast":
        raise UnsupportedError(
            "integers cannot be compared with floating-point numbers", file=str(batch.stores[store]),
            remedy="Convert one of the two to the dtype of the other, then compare again.",
        )  # fmt: skip
    if kind:
        raise engine_error(kind, text)
    return (
        crcs,
        [(one[0], Statistics(*one[1:])) for one in found],
        [(tensor, Spread(dict(counts))) for tensor, counts in apart],
    )
