"""Reads whatever is to be known of files that exist: CRCs of ranges, what the numbers are, whether two places hold the same.

For `verify` and `diff`, and for conversions that go on with files of an earlier run. A scan is a list of looks, in the
order of the files; it is streamed batch by batch like a plan, and memory does not grow with it. There are two engines, as
for moving: the native one (`zckpt._core`), at the speed of the disk, and a slow one (`scan_reference`) that it must equal.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from zckpt.base.errors import UnsupportedError, read_error
from zckpt.base.pace import engine_error, gives_back, thread_count
from zckpt.engine.batches import progress_after
from zckpt.engine.checksums import Partial
from zckpt.engine.prefetch import localized
from zckpt.engine.scan_reference import scan_batch as reference_batch
from zckpt.engine.scan_requests import Look, ScanBatch, Sum, look_batches, near
from zckpt.engine.tensor_statistics import Relation, Tally
from zckpt.storage.descriptors import OpenFiles

try:
    from zckpt._core import scan as native_scan
except ImportError:  # pragma: no cover - depends on the build
    native_scan = None  # type: ignore[assignment]

_LOOK = struct.Struct("=QQBB6x")


@dataclass(slots=True)
class ScanReport:
    """What a scan found.

    Attributes:
        tallies: number of the tensor -> what was counted.
        sums: for each `Sum`, the parts of it that were read.
        bytes_read: by all looks.
    """

    tallies: dict[int, Tally] = field(default_factory=dict[int, Tally])
    sums: dict[int, list[Partial]] = field(default_factory=dict[int, list[Partial]])
    bytes_read: int = 0


def scan(
    looks: Iterable[Look],
    sums: Sequence[Sum] = (),
    *,
    relation: Relation | None = None,
    threads: int | None = None,
    engine: Literal["auto", "native", "reference"] = "auto",
    keep_cache: bool | None = None,
    bytes_per_s: int | None = None,
    total_bytes: int = 0,
    progress: Callable[[int], None] | None = None,
) -> ScanReport:
    """Carries out looks.

    Args:
        looks: what to read. Those that count for CRCs must not overlap.
        sums: ranges whose CRCs are wanted.
        relation: how looks with `AGAINST` compare; by default bit for bit.
        threads: of the native engine; results do not depend on it.
        engine: "auto" takes the native one where it was built.
        keep_cache: whether the page cache keeps what is read; None: unless `total_bytes` is more than memory.
        bytes_per_s: at most so many are read.
        total_bytes: that will be read, as far as is known.
        progress: called with the bytes read so far.

    Raises:
        CorruptError: a file ends too early, or cannot be read. InconsistentError: it changed meanwhile.
        ResourceError: there is too little memory, or no thread starts. UsageError: so many threads cannot be.
    """
    if engine == "native" and native_scan is None:
        raise UnsupportedError("an engine that was not built", found="zckpt._core is missing")
    slow = engine == "reference" or native_scan is None
    if engine == "auto" and slow:
        warnings.warn("zckpt's C++ engine was not built: the slow Python one is used.", RuntimeWarning, stacklevel=2)
    count = thread_count(threads)
    report = ScanReport()
    give_back = gives_back(keep_cache, total_bytes)
    with OpenFiles(give_back=give_back) as files:
        for batch in localized(look_batches(looks, sums), near):
            told = progress_after(progress, report.bytes_read)
            fds = [files.of(store) for store in batch.stores]
            if slow:
                crcs, tallies = reference_batch(
                    batch.stores, fds, batch.moves, batch.looks, batch.ranges, relation or Relation()
                )
                if told:
                    told(batch.nbytes)
            else:
                crcs, tallies = _run_native(
                    batch, fds, relation or Relation(), count, give_back, bytes_per_s or 0, told
                )
            for number, crc, offset, length in crcs:
                of, begin = batch.places[number] if batch.places else (number, 0)
                report.sums.setdefault(of, []).append((begin + offset, length, crc))
            for tensor, tally in tallies:
                report.tallies[tensor] = report.tallies[tensor] + tally if tensor in report.tallies else tally
            report.bytes_read += batch.nbytes
        files.check_sources()
    return report


def _run_native(
    batch: ScanBatch,
    fds: Sequence[tuple[int, int]],
    relation: Relation,
    threads: int,
    give_back: bool,
    bytes_per_s: int,
    progress: Callable[[int], None] | None,
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, Tally]]]:
    stores, moves, _, ranges, _ = batch.packed(fds)
    looks = b"".join(
        _LOOK.pack(move.start, move.pitch, how, move.dst_dtype.swap(move.dst.byteorder))
        for how, (_, _, move) in zip(batch.looks, batch.moves, strict=True)
    )
    (kind, number, store, offset, text), crcs, tallies = native_scan(
        *(stores, moves, looks, ranges),
        rounded=relation.rounded,
        atol=relation.atol or 0.0 if relation.is_tolerant else -1.0,
        rtol=relation.rtol or 0.0,
        threads=threads,
        give_back=give_back,
        bytes_per_s=bytes_per_s,
        progress=progress,
    )
    if kind == "read":
        raise read_error(str(batch.stores[store]), number, offset)
    if kind and kind != "cast":
        raise engine_error(kind, text)
    if kind:
        raise UnsupportedError("numbers that cannot be compared", file=str(batch.stores[store]))
    return crcs, [(found[0], Tally(*found[1:])) for found in tallies]
