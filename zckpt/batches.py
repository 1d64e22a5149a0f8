"""A plan in parts of bounded size, in the form both engines take: a plan of any size never lies in memory whole.

For `mover`.
"""

from __future__ import annotations

import struct
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from zckpt import files
from zckpt.fragments import FileStore, Fragment, Store
from zckpt.plan import Move, Plan, route

_MOST_MOVES = 16384
MOST_STORES = 512
"""Every file of a batch is open while it runs."""

MOST_REMOTE_BYTES = 32 << 20
"""Bytes of sources on other machines that a batch names: they lie in memory while it runs."""

_SLAB_BYTES = 8 << 20

_STORE = struct.Struct("=qqQQ")
_MOVE = struct.Struct("=IIQQQQqqqqIBBBB")
_LITERAL = struct.Struct("=IIQQQ")
_RANGE = struct.Struct("=IIQQ")


@dataclass(slots=True)
class Batch:
    """Some moves and literals, with the stores they name; both engines take the same."""

    stores: list[Store] = field(default_factory=list[Store])
    moves: list[tuple[int, int, Move]] = field(default_factory=list[tuple[int, int, Move]])
    literals: list[tuple[int, int, bytes]] = field(default_factory=list[tuple[int, int, bytes]])
    ranges: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])
    nbytes: int = 0
    remote_bytes: int = 0
    numbers: dict[int, int] = field(default_factory=dict[int, int])

    def number(self, store: Store) -> int:
        """The store's number in this batch."""
        known = self.numbers.get(id(store))
        if known is None:
            known = self.numbers[id(store)] = len(self.stores)
            self.stores.append(store)
        return known

    def add(self, move: Move) -> None:
        """One more move."""
        self.moves.append((self.number(move.src), self.number(move.dst), move))
        self.nbytes += move.count * move.rows * move.dst_dtype.itemsize
        if is_remote(move.src):
            self.remote_bytes += span_bytes(move)

    def packed(self, descriptors: Sequence[tuple[int, int]]) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        """The structs of `csrc/mover.h`: stores, moves, literals, ranges, and the literals' bytes."""
        stores = b"".join(_pack_store(store, fds) for store, fds in zip(self.stores, descriptors, strict=True))
        return stores, b"".join(_pack_move(*move) for move in self.moves), *self._packed_literals()

    def _packed_literals(self) -> tuple[bytes, bytes, bytes]:
        packed, at = [], 0
        for number, offset, data in self.literals:
            packed.append(_LITERAL.pack(number, 0, offset, len(data), at))
            at += len(data)
        ranges = b"".join(_RANGE.pack(*numbers) for numbers in sorted(self.ranges, key=lambda r: (r[0], r[2])))
        return b"".join(packed), ranges, b"".join(data for _, _, data in self.literals)


def is_remote(store: Store) -> bool:
    """Whether a source lies on another machine."""
    return isinstance(store, FileStore) and files.is_remote(store.path)


def span_bytes(move: Move) -> int:
    """Bytes of the source from a move's first element to its last."""
    size = move.src_dtype.itemsize
    return (move.rows - 1) * move.src_pitch + (move.count - 1) * move.src_step * size + size


def _moves(plan: Plan) -> Iterator[Move]:
    """The plan's moves; a tensor that lies on other machines is carried slab by slab of the destination."""
    for number, (source, destination) in enumerate(plan.pairs):
        if any(is_remote(fragment.store) for fragment in source.fragments):
            most = max(1, _SLAB_BYTES // source.dtype.itemsize)
            slabs = tuple(s for f in destination.fragments for s in _slabs(f, most, destination.dtype.itemsize))
            destination = replace(destination, fragments=slabs)
        yield from route(source, destination, number)


def _slabs(fragment: Fragment, most: int, itemsize: int) -> Iterator[Fragment]:
    """A fragment in parts of at most `most` elements, or of one row where a row has more."""
    if fragment.rows == 1:
        for first in range(0, fragment.count, most):
            at, count = fragment.byte_offset + first * itemsize, min(most, fragment.count - first)
            yield replace(fragment, byte_offset=at, start=fragment.start + first, count=count)
        return
    rows = max(1, most // fragment.count)
    for row in range(0, fragment.rows, rows):
        at, start = fragment.byte_offset + row * fragment.store_pitch * itemsize, fragment.start + row * fragment.pitch
        yield replace(fragment, byte_offset=at, start=start, rows=min(rows, fragment.rows - row))


def _pack_store(store: Store, fds: tuple[int, int]) -> bytes:
    return _STORE.pack(*fds, 0 if isinstance(store, FileStore) else store.address, store.size)


def _pack_move(src: int, dst: int, m: Move) -> bytes:
    a, b = m.src_dtype, m.dst_dtype
    swap = a.component if m.src.byteorder != sys.byteorder and a.component > 1 else 0
    steps = (m.src_pitch, m.dst_pitch, m.src_step * a.itemsize, m.dst_step * b.itemsize)
    return _MOVE.pack(
        src, dst, m.src_offset, m.dst_offset, m.count, m.rows, *steps, m.tensor, a.number, b.number, swap, 0
    )


def batches(plan: Plan) -> Iterator[Batch]:
    """The plan in parts of bounded size; a file's literals come in order among its moves."""
    literals = {id(store): deque(sorted(output.literals)) for output, store in plan.files}
    by_store: dict[int, list[tuple[int, int, int]]] = {}
    for number, (store, start, nbytes) in enumerate(_ranges(plan)):
        by_store.setdefault(id(store), []).append((number, start, nbytes))
    batch = Batch()

    def attend(store: Store, stop: int) -> None:
        """The file takes part in the batch, with its literals before byte `stop`."""
        if id(store) not in batch.numbers:
            batch.ranges += [(batch.number(store), *numbers) for numbers in by_store.get(id(store), ())]
        pending = literals.get(id(store))
        while pending and pending[0][0] < stop:
            offset, data = pending.popleft()
            batch.literals.append((batch.number(store), offset, data))
            batch.nbytes += len(data)

    last: Store | None = None
    reach = 0
    for move in _moves(plan):
        if last is not None and last is not move.dst:
            attend(last, last.size)
        # Nothing is torn apart without need: slices that interleave want to meet in one window.
        whole = last is not move.dst or move.dst_offset >= reach or len(batch.moves) >= 8 * _MOST_MOVES
        full = len(batch.moves) >= _MOST_MOVES or batch.remote_bytes >= MOST_REMOTE_BYTES
        if (whole and full) or len(batch.stores) >= MOST_STORES - 1:
            yield batch
            batch = Batch()
        reach = max(_end(move), 0 if last is not move.dst else reach)
        last = move.dst
        attend(last, move.dst_offset)
        batch.add(move)
    for _, store in plan.files:
        if not literals[id(store)]:
            continue
        if len(batch.stores) >= MOST_STORES:
            yield batch
            batch = Batch()
        attend(store, store.size)
    if batch.stores:
        yield batch


def _end(move: Move) -> int:
    """One past the last byte of the destination that a move writes."""
    size = move.dst_dtype.itemsize
    return move.dst_offset + (move.rows - 1) * move.dst_pitch + (move.count - 1) * move.dst_step * size + size


def _ranges(plan: Plan) -> list[tuple[FileStore, int, int]]:
    return [(store, sum_.start, sum_.nbytes) for output, store in plan.files for sum_ in output.checksums]
