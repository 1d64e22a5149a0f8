"""A plan in parts of bounded size, in the form both engines take: a plan of any size never lies in memory whole.

For `mover`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from zckpt.fragments import FileStore, Store
from zckpt.plan import Move, OutputFile, Plan
from zckpt.sums import element_ranges

MOST_MOVES = 16384
LEAST_BYTES = 64 << 20
"""A file that is complete ends its batch, and is on record from then on. Smaller ones share a batch, for its threads'
sake."""
MOST_STORES = 512
"""Every file of a batch is open while it runs."""

_STORE = struct.Struct("=qqQQ")
_MOVE = struct.Struct("=IIQQQQqqqqIBBBB")
_LITERAL = struct.Struct("=IIQQQ")
_RANGE = struct.Struct("=IIQQ")


@dataclass(slots=True)
class Batch:
    """Some moves and literals, with the stores they name; both engines take the same. `finished` are the files that are
    complete after it.
    """

    stores: list[Store] = field(default_factory=list[Store])
    moves: list[tuple[int, int, Move]] = field(default_factory=list[tuple[int, int, Move]])
    literals: list[tuple[int, int, bytes]] = field(default_factory=list[tuple[int, int, bytes]])
    ranges: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])
    nbytes: int = 0
    numbers: dict[int, int] = field(default_factory=dict[int, int])
    finished: list[tuple[OutputFile, FileStore]] = field(default_factory=list[tuple[OutputFile, FileStore]])

    def number(self, store: Store) -> int:
        """The store's number in this batch."""
        known = self.numbers.get(id(store))
        if known is None:
            known = self.numbers[id(store)] = len(self.stores)
            self.stores.append(store)
        return known

    def add(self, move: Move, nbytes: int) -> None:
        """One more move, which counts for so many bytes."""
        self.moves.append((self.number(move.src), self.number(move.dst), move))
        self.nbytes += nbytes

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


def _pack_store(store: Store, fds: tuple[int, int]) -> bytes:
    return _STORE.pack(*fds, 0 if isinstance(store, FileStore) else store.address, store.size)


def _pack_move(src: int, dst: int, m: Move) -> bytes:
    a, b = m.src_dtype, m.dst_dtype
    steps = (m.src_pitch, m.dst_pitch, m.src_step * a.itemsize, m.dst_step * b.itemsize)
    return _MOVE.pack(
        src,
        dst,
        m.src_offset,
        m.dst_offset,
        m.count,
        m.rows,
        *steps,
        m.tensor,
        a.number,
        b.number,
        a.swap(m.src.byteorder),
        0,
    )


def batches(plan: Plan, done: Collection[str] = (), *, literals: bool = True) -> Iterator[Batch]:
    """The plan in parts of bounded size; each file's literals come with its first moves.

    Args:
        plan: what goes where.
        done: paths of files that are there already: nothing goes into them.
        literals: whether they are to be written.
    """
    pending = {id(store): (output, store) for output, store in plan.files if output.path not in done}
    skipped = {id(store) for output, store in plan.files if output.path in done}
    missing = element_bytes(plan)
    by_store: dict[int, list[tuple[int, int, int]]] = {}
    for number, (store, start, nbytes) in enumerate(ranges(plan)):
        by_store.setdefault(id(store), []).append((number, start, nbytes))
    files = dict(pending)
    batch = Batch()

    def attend(store: Store) -> None:
        number = batch.number(store)
        batch.ranges += [(number, *numbers) for numbers in by_store.get(id(store), ())]
        if id(store) in pending:
            output, _ = pending.pop(id(store))
            for offset, data in output.literals if literals else ():
                batch.literals.append((number, offset, data))
                batch.nbytes += len(data)

    tensor = -1
    for move in plan.moves():
        if move is None:
            if batch.stores:
                yield batch
                batch = Batch()
            continue
        place = id(move.dst)
        if place in skipped:
            continue
        # A tensor is not torn apart without need: slices that interleave want to meet in one window.
        whole = move.tensor != tensor or len(batch.moves) >= 8 * MOST_MOVES
        is_full = len(batch.moves) >= MOST_MOVES or (batch.finished and batch.nbytes >= LEAST_BYTES)
        if (whole and is_full) or len(batch.stores) >= MOST_STORES - 1:
            yield batch
            batch = Batch()
        tensor = move.tensor
        if place not in batch.numbers:
            attend(move.dst)
        nbytes = move.count * move.rows * move.dst_dtype.itemsize
        batch.add(move, nbytes)
        if place in files:
            missing[place] -= nbytes
            if not missing[place]:
                batch.finished.append(files.pop(place))
    for output, store in list(pending.values()):
        if len(batch.stores) >= MOST_STORES:
            yield batch
            batch = Batch()
        attend(store)
        batch.finished.append((output, store))
    if batch.stores:
        yield batch


def progress_after(progress: Callable[[int], None] | None, base: int) -> Callable[[int], None] | None:
    """`progress`, told of `base` bytes more than it is called with."""
    return None if progress is None else lambda now: progress(base + now)


def element_bytes(plan: Plan) -> dict[int, int]:
    """Store -> bytes of elements that will go into it."""
    totals = {id(store): 0 for _, store in plan.files}
    for _, entry in plan.pairs:
        for fragment in entry.fragments:
            if id(fragment.store) in totals:
                totals[id(fragment.store)] += fragment.numel * entry.dtype.itemsize
    return totals


def ranges(plan: Plan) -> list[tuple[FileStore, int, int]]:
    """(store, start, bytes) of every run of elements whose CRC is taken, by number."""
    return [(store, *run) for output, store in plan.files for run in element_ranges(output)]
