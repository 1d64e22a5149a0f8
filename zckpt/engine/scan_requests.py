"""What a scan reads and why, in parts of bounded size, with what is on other machines fetched.

For `scan`, and for its callers: `verify`, `diff` and `output`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from typing import NamedTuple

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import TensorEntry
from zckpt.core.claims import ByteSpan
from zckpt.core.dtypes import U8, DType
from zckpt.core.fragments import Fragment
from zckpt.core.plan import SLAB_BYTES, Move, route
from zckpt.core.stores import FileStore, Store
from zckpt.engine.batches import MOST_DISTANT_BYTES, MOST_MOVES, Batch
from zckpt.engine.prefetch import Bring, in_memory
from zckpt.storage.descriptors import MOST_STORES

NUMBERS, AGAINST, CRC_SOURCE, CRC_OTHER = 1, 2, 4, 8
"""What a request is for; the flags of `csrc/scan.h`."""

_MOST_BYTES = 8 << 30
"""The most bytes of one batch: each part has its own statistics until the batch ends."""


class ScanRequest(NamedTuple):
    """One move's source, to be read; with `AGAINST`, to be compared with its destination."""

    move: Move
    how: int


class CrcRange(NamedTuple):
    """Bytes of a file with a CRC-32 that is wanted."""

    store: FileStore
    start: int
    nbytes: int


def request_of(fragment: Fragment, dtype: DType, tensor: int, how: int = NUMBERS) -> ScanRequest:
    """A request for all elements of a fragment."""
    step = fragment.store_pitch * dtype.itemsize
    move = Move(
        *(fragment.store, fragment.byte_offset, fragment.store, fragment.byte_offset, fragment.count, dtype, dtype),
        tensor=tensor,
        rows=fragment.rows,
        src_pitch=step,
        dst_pitch=step,
        src_step=fragment.step,
        dst_step=fragment.step,
        start=fragment.start,
        pitch=fragment.pitch,
    )
    return ScanRequest(move, how)


def comparisons(a: TensorEntry, b: TensorEntry, tensor: int) -> Iterator[ScanRequest]:
    """Requests that compare all elements of two tensors of one shape."""
    return (ScanRequest(move, NUMBERS | AGAINST) for move in route(a, b, tensor))


def request_of_bytes(store: FileStore, start: int, nbytes: int) -> ScanRequest:
    """A request for bytes, for their CRC only."""
    return ScanRequest(Move(store, start, store, start, nbytes, U8, U8, 0), CRC_SOURCE)


@dataclass(slots=True)
class ScanBatch(Batch):
    """A batch, with what is done to each of its moves.

    Attributes:
        flags: of the requests, move by move.
        places: of a batch that was fetched, range by range: number of the CRC range, and the byte of the file at which its store
            begins.
        brought_bytes: those that are brought into memory.
    """

    flags: list[int] = field(default_factory=list[int])
    places: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    brought_bytes: int = 0

    def is_distant(self, store: Store) -> bool:
        """As in `Batch`; a scan computes nothing itself."""
        return not store.at_hand


def scan_batches(requests: Iterable[ScanRequest], crc_ranges: Sequence[CrcRange]) -> Iterator[ScanBatch]:
    """Requests in parts of bounded size."""
    by_path: dict[str, list[tuple[int, int, int]]] = {}
    for number, wanted in enumerate(crc_ranges):
        by_path.setdefault(wanted.store.path, []).append((number, wanted.start, wanted.nbytes))
    batch = ScanBatch()
    reach: dict[object, tuple[int, int]] = {}  # store that is not at hand -> its bytes that were named last
    for request in requests:
        for part in itertools.chain.from_iterable(map(_parts, _by_column(request))):
            for store in (part.move.src, part.move.dst):
                if id(store) not in batch.numbers:
                    ranges = by_path.get(str(store), ())
                    batch.ranges += [(batch.number(store), *numbers) for numbers in ranges]
            batch.add(part.move, _nbytes(part))
            batch.flags.append(part.how)
            for store, start, stop in _distant(part):  # requests that name the same bytes share them
                key = store.path if isinstance(store, FileStore) else store
                first, last = reach.get(key, (stop, stop))
                shared = max(0, min(stop, last) - max(start, first))
                batch.brought_bytes += stop - start - shared
                reach[key] = (min(first, start), max(last, stop)) if shared else (start, stop)
            if (
                len(batch.moves) >= MOST_MOVES
                or len(batch.stores) >= MOST_STORES - 1
                or batch.nbytes >= _MOST_BYTES
                or batch.brought_bytes >= MOST_DISTANT_BYTES
            ):
                yield batch
                batch, reach = ScanBatch(), {}
    if batch.moves:
        yield batch


def _by_column(request: ScanRequest) -> Iterator[ScanRequest]:
    """A request; of a transposed matrix, one for each row of its source, which is read in its order then."""
    move, against = request.move, request.how & AGAINST
    if move.rows == 1 or move.count == 1 or (move.src_step <= 1 and (move.dst_step <= 1 or not against)):
        yield request
        return
    a, b = move.src_step * move.src_dtype.itemsize, move.dst_step * move.dst_dtype.itemsize
    single = move._replace(count=1, src_step=1, dst_step=1)
    for n in range(move.count):
        column = single._replace(
            src_offset=move.src_offset + n * a, dst_offset=move.dst_offset + n * b, start=move.start + n
        )
        yield request._replace(move=column)


def _nbytes(request: ScanRequest) -> int:
    numel = request.move.count * request.move.rows
    return numel * request.move.src_dtype.itemsize + (
        numel * request.move.dst_dtype.itemsize if request.how & AGAINST else 0
    )


def _distant(request: ScanRequest) -> Iterator[ByteSpan]:
    """What a request reads of stores that are not at hand: its source, then the other side."""
    move = request.move
    sides = [(move.src, move.src_offset, move.src_pitch, move.src_step, move.src_dtype)]
    if request.how & AGAINST:
        sides.append((move.dst, move.dst_offset, move.dst_pitch, move.dst_step, move.dst_dtype))
    for store, offset, pitch, step, dtype in sides:
        if not store.at_hand:
            yield ByteSpan(
                store, offset, offset + (move.rows - 1) * pitch + ((move.count - 1) * step + 1) * dtype.itemsize
            )


def _parts(request: ScanRequest) -> Iterator[ScanRequest]:
    """A request, halved until it is not too large for a batch, nor for memory where its bytes come from another machine."""
    move = request.move
    spans = [stop - start for _, start, stop in _distant(request)]
    most = max(move.src_dtype.itemsize, move.dst_dtype.itemsize) * move.count
    if (most <= _MOST_BYTES or move.rows > 1) and (
        not spans or max(spans) <= SLAB_BYTES or move.count * move.rows == 1
    ):
        yield request
        return
    if move.rows > 1:
        first, step = move.rows // 2, move.pitch
        parts = move._replace(rows=first), move._replace(rows=move.rows - first)
        a, b = move.src_pitch, move.dst_pitch
    else:
        first, step = move.count // 2, 1
        parts = move._replace(count=first), move._replace(count=move.count - first)
        a, b = move.src_step * move.src_dtype.itemsize, move.dst_step * move.dst_dtype.itemsize
    yield from _parts(ScanRequest(parts[0], request.how))
    second = parts[1]._replace(
        src_offset=move.src_offset + first * a, dst_offset=move.dst_offset + first * b, start=move.start + first * step
    )
    yield from _parts(ScanRequest(second, request.how))


def distant_spans(batch: ScanBatch) -> list[ByteSpan]:
    """What a batch reads of stores that are not at hand, in order."""
    return [span for request in _requests_of(batch) for span in _distant(request)]


def _requests_of(batch: ScanBatch) -> list[ScanRequest]:
    return [ScanRequest(move, how) for how, (_, _, move) in zip(batch.flags, batch.moves, strict=True)]


def near(batch: ScanBatch, bring: Bring) -> ScanBatch:
    """A batch with what is not at hand in memory; errors as for `bring`."""
    requests = _requests_of(batch)
    brought = iter(bring(distant_spans(batch)))
    found = ScanBatch()
    wanted: dict[str, list[tuple[int, int, int]]] = {}
    for path, start, stop, of in sorted(
        {(str(batch.stores[n]), start, start + m, of) for n, of, start, m in batch.ranges}
    ):
        wanted.setdefault(path, []).append((start, stop, of))

    def want_crcs(path: str, store: Store, begin: int, size: int) -> None:
        """Notes that the CRCs of bytes of a file are wanted; the store holds `size` of them, from `begin` on."""
        own = wanted.get(path, [])
        for start, stop, of in own[max(0, bisect_right(own, (begin,)) - 1) :]:
            if start >= begin + size:
                break
            if stop > begin:
                low = max(start, begin)
                found.ranges.append(
                    (found.number(store), len(found.places), low - begin, min(stop, begin + size) - low)
                )
                found.places.append((of, begin))

    memory: dict[tuple[int, str], Store] = {}

    def taken(store: Store) -> tuple[Store, int]:
        """The store that now holds the bytes of a file, and the byte of the file at which that begins."""
        held, begin = store, 0
        if not store.at_hand:
            block, begin = next(brought)
            key = id(block), store.byteorder
            held = memory.get(key) or memory.setdefault(key, in_memory(block, store))
        if id(held) not in found.numbers and isinstance(store, FileStore):
            want_crcs(str(store), held, begin, held.size)
        return held, begin

    for move, how in requests:
        src, a = taken(move.src)
        dst, b = taken(move.dst) if how & AGAINST else (src, a)
        near_by = move._replace(src=src, src_offset=move.src_offset - a, dst=dst, dst_offset=move.dst_offset - b)
        found.add(near_by, _nbytes(ScanRequest(move, how)))
        found.flags.append(how)
    return found
