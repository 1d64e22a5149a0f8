"""Reads whatever is to be known of files that exist: CRCs of ranges, what the numbers are, whether two places hold the same.

For `verify` and `diff`, and for conversions that go on with files of an earlier run. A scan is a list of looks, in the
order of the files; it is streamed batch by batch like a plan, and memory does not grow with it. There are two engines, as
for moving: the native one (`zckpt._core`), at the speed of the disk, and a slow one (`scan_reference`) that it must equal.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from zckpt.batches import MOST_MOVES, MOST_STORES, Batch, progress_after
from zckpt.catalog import Padding, TensorEntry
from zckpt.dtypes import U8, DType
from zckpt.errors import UnsupportedError, read_error
from zckpt.fragments import FileStore, Fragment
from zckpt.open_files import OpenFiles
from zckpt.plan import Move, route
from zckpt.scan_reference import scan_batch as reference_batch
from zckpt.sums import Partial
from zckpt.tally import Relation, Tally
from zckpt.tuning import THREADS, gives_back

try:
    from zckpt._core import scan as native_scan
except ImportError:  # pragma: no cover - depends on the build
    native_scan = None  # type: ignore[assignment]

NUMBERS, AGAINST, SUM_SOURCE, SUM_OTHER = 1, 2, 4, 8
"""What a look is for; the flags of `csrc/scan.h`."""

_MOST_BYTES = 8 << 30
"""Of one batch: every part of it has a tally until its end."""

_LOOK = struct.Struct("=QQBB6x")


class Look(NamedTuple):
    """One move's source, to be looked at; with `AGAINST`, to be compared with its destination."""

    move: Move
    how: int


class Sum(NamedTuple):
    """Bytes of a file whose CRC-32 is wanted."""

    store: FileStore
    start: int
    nbytes: int


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


def looks_at(entry: TensorEntry | Padding, tensor: int) -> Iterator[Look]:
    """Looks at all elements of a tensor."""
    for fragment in entry.fragments:
        if fragment.numel:
            yield look_at(fragment, entry.dtype, tensor)


def look_at(fragment: Fragment, dtype: DType, tensor: int, how: int = NUMBERS) -> Look:
    """A look at all elements of a fragment."""
    step = fragment.store_pitch * dtype.itemsize
    move = Move(
        *(fragment.store, fragment.byte_offset, fragment.store, fragment.byte_offset, fragment.count, dtype, dtype),
        tensor=tensor,
        rows=fragment.rows,
        src_pitch=step,
        dst_pitch=step,
        start=fragment.start,
        pitch=fragment.pitch,
    )
    return Look(move, how)


def looks_against(a: TensorEntry, b: TensorEntry, tensor: int) -> Iterator[Look]:
    """Comparisons of all elements of two tensors of one shape."""
    return (Look(move, NUMBERS | AGAINST) for move in route(a, b, tensor))


def looks_at_bytes(store: FileStore, start: int, nbytes: int) -> Look:
    """Reads bytes for their CRC only."""
    return Look(Move(store, start, store, start, nbytes, U8, U8, 0), SUM_SOURCE)


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
    """
    if engine == "native" and native_scan is None:
        raise UnsupportedError("an engine that was not built", found="zckpt._core is missing")
    slow = engine == "reference" or native_scan is None
    report = ScanReport()
    give_back = gives_back(keep_cache, total_bytes)
    with OpenFiles(give_back=give_back) as files:
        for batch in _batches(looks, sums):
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
                    batch, fds, relation or Relation(), threads or THREADS, give_back, bytes_per_s or 0, told
                )
            for number, crc, offset, length in crcs:
                report.sums.setdefault(number, []).append((offset, length, crc))
            for tensor, tally in tallies:
                report.tallies[tensor] = report.tallies[tensor] + tally if tensor in report.tallies else tally
            report.bytes_read += batch.nbytes
        files.check_sources()
    return report


@dataclass(slots=True)
class _ScanBatch(Batch):
    """A batch, with what is to be done to each of its moves."""

    looks: list[int] = field(default_factory=list[int])


def _batches(looks: Iterable[Look], sums: Sequence[Sum]) -> Iterator[_ScanBatch]:
    """Looks in parts of bounded size."""
    by_path: dict[str, list[tuple[int, int, int]]] = {}
    for number, wanted in enumerate(sums):
        by_path.setdefault(wanted.store.path, []).append((number, wanted.start, wanted.nbytes))
    batch = _ScanBatch()
    for look in looks:
        for part in _parts(look):
            for store in (part.move.src, part.move.dst):
                if id(store) not in batch.numbers:
                    ranges = by_path.get(str(store), ())
                    batch.ranges += [(batch.number(store), *numbers) for numbers in ranges]
            batch.add(part.move, _nbytes(part))
            batch.looks.append(part.how)
            if len(batch.moves) >= MOST_MOVES or len(batch.stores) >= MOST_STORES - 1 or batch.nbytes >= _MOST_BYTES:
                yield batch
                batch = _ScanBatch()
    if batch.moves:
        yield batch


def _nbytes(look: Look) -> int:
    numel = look.move.count * look.move.rows
    return numel * look.move.src_dtype.itemsize + (numel * look.move.dst_dtype.itemsize if look.how & AGAINST else 0)


def _parts(look: Look) -> Iterator[Look]:
    """A look, cut where it alone would be too large for a batch; only those of one row ever are."""
    move = look.move
    most = _MOST_BYTES // max(move.src_dtype.itemsize, move.dst_dtype.itemsize)
    if move.rows > 1 or move.count <= most:
        yield look
        return
    for first in range(0, move.count, most):
        a, b = first * move.src_step * move.src_dtype.itemsize, first * move.dst_step * move.dst_dtype.itemsize
        part = move._replace(
            src_offset=move.src_offset + a,
            dst_offset=move.dst_offset + b,
            count=min(most, move.count - first),
            start=move.start + first,
        )
        yield Look(part, look.how)


def _run_native(
    batch: _ScanBatch,
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
    (kind, number, store, offset), crcs, tallies = native_scan(
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
    if kind:
        raise UnsupportedError("numbers that cannot be compared", file=str(batch.stores[store]))
    return crcs, [(found[0], Tally(*found[1:])) for found in tallies]
