"""A plan in parts of bounded size, in the form both engines take: a plan of any size is never in memory whole."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import count, starmap
from operator import itemgetter

from zckpt.base.dataclass import dataclass
from zckpt.core.fragments import ComputedStore
from zckpt.core.plan import Move, OutputFile, Plan
from zckpt.core.recipes import DerivedStore
from zckpt.core.stores import FileStore, MemoryStore, Store
from zckpt.engine.checksums import element_ranges
from zckpt.storage.descriptors import MOST_STORES

MOST_MOVES = 16384
LEAST_BYTES = 256 << 20
"""A file that is complete ends its batch, and is reported then. Smaller files share a batch: the disk has nothing to do at
its end, while files become durable."""
MOST_DISTANT_BYTES = 8 << 20
"""Bytes of sources that are not at hand, in one batch: they are in memory while it runs."""

Ranges = Mapping[int, Sequence[tuple[int, int, int]]]
"""Id of a store -> (number, start, bytes) of each of its runs of elements with a CRC that is taken; no number is used twice."""

_STORE = struct.Struct("=qqQQ")
_MOVE = struct.Struct("=IIQQQQqqqqIBBBB")
_LITERAL = struct.Struct("=IIQQQ")
_RANGE = struct.Struct("=IIQQ")
_TERM = struct.Struct("=IIIIddQQII")
_PIECE = struct.Struct("=IBBHQQQ")
_FOLDED = -2


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
    distant_bytes: int = 0
    numbers: dict[int, int] = field(default_factory=dict[int, int])
    finished: list[tuple[OutputFile, FileStore]] = field(default_factory=list[tuple[OutputFile, FileStore]])

    def number(self, store: Store) -> int:
        """The number of a store in this batch, which the first call gives it."""
        known = self.numbers.get(id(store))
        if known is None:
            known = self.numbers[id(store)] = len(self.stores)
            self.stores.append(store)
        return known

    def add(self, move: Move, nbytes: int) -> None:
        """Adds a move, which counts for `nbytes`."""
        src = move.src
        self.moves.append((self.number(src), self.number(move.dst), move))
        self.nbytes += nbytes
        if type(src) is FileStore and not src.is_remote:
            return
        if self.is_distant(src):
            self.distant_bytes += span_bytes(move)
        elif isinstance(src, DerivedStore):
            for entry in src.recipe.inputs:
                for fragment in entry.fragments:
                    self.number(fragment.store)

    def is_distant(self, store: Store) -> bool:
        """Whether a store's bytes must be brought into memory first; what engines compute while they read need not."""
        return not store.at_hand and not (isinstance(store, DerivedStore) and store.steps)

    def packed(self, descriptors: Sequence[tuple[int, int]]) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]:
        """The structs of `csrc/mover.h`: stores, moves, literals, ranges, the literals' bytes, terms and pieces."""
        terms: list[bytes] = []
        pieces: list[bytes] = []
        stores = b"".join(
            _pack_fold(store, self.numbers, terms, pieces)
            if isinstance(store, DerivedStore)
            else packed_store(store, fds)
            for store, fds in zip(self.stores, descriptors, strict=True)
        )
        moves = b"".join(starmap(_pack_move, self.moves))
        literals, data = bytearray(), bytearray()
        for number, offset, part in self.literals:
            literals += _LITERAL.pack(number, 0, offset, len(part), len(data))
            data += part
        ranges = packed_ranges(self.ranges)
        return stores, moves, bytes(literals), ranges, bytes(data), b"".join(terms), b"".join(pieces)


def _pack_fold(store: DerivedStore, numbers: Mapping[int, int], terms: list[bytes], pieces: list[bytes]) -> bytes:
    """The struct of a store that an engine computes while it reads; its terms, and where their elements lie, are added.
    `numbers`: id of a store -> its number in the batch.
    """
    first, inputs = len(terms), store.recipe.inputs
    for entry, (how, a, b, product) in zip(inputs, store.steps, strict=True):
        begin, dtype = len(pieces), entry.dtype
        for f in entry.fragments:
            if f.count:
                number, swap = numbers[id(f.store)], dtype.swap(f.store.byteorder)
                pieces.append(_PIECE.pack(number, dtype.number, swap, 0, f.start, f.count, f.byte_offset))
        rank, *shape = product
        terms.append(_TERM.pack(how, rank, begin, len(pieces) - begin, a, b, *shape))
    return _STORE.pack(_FOLDED, -1, first, len(inputs))


def span_bytes(move: Move) -> int:
    """Bytes of the source from a move's first element to its last."""
    size = move.src_dtype.itemsize
    return (move.rows - 1) * move.src_pitch + (move.count - 1) * move.src_step * size + size


def stores_of(move: Move) -> int:
    """The most stores that a batch may have to name for a move."""
    if not isinstance(move.src, DerivedStore) or not move.src.steps:
        return 2
    return min(2 + sum(len(entry.fragments) for entry in move.src.recipe.inputs), MOST_STORES)


def packed_store(store: Store, fds: tuple[int, int]) -> bytes:
    """A store with its file open, as `Store` of `csrc/mover.h`."""
    return _STORE.pack(*fds, store.address if isinstance(store, MemoryStore | ComputedStore) else 0, store.size)


def packed_ranges(ranges: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Ranges of stores with CRCs that are wanted, in order: (number of the store, of the range, start, bytes)."""
    ordered = sorted(ranges, key=itemgetter(0, 2))
    return b"".join(starmap(_RANGE.pack, ordered))


def _pack_move(src: int, dst: int, m: Move) -> bytes:
    store, at, _, to, count, a, b, tensor, rows, src_pitch, dst_pitch, src_step, dst_step, _, _ = m
    steps = (src_pitch, dst_pitch, src_step * a.itemsize, dst_step * b.itemsize)
    return _MOVE.pack(src, dst, at, to, count, rows, *steps, tensor, a.number, b.number, a.swap(store.byteorder), 0)


def batches(
    plan: Plan, done: Collection[str] = (), ranges: Ranges | None = None, *, bare: bool = False
) -> Iterator[Batch]:
    """The plan in parts of bounded size; a file's literals come in order among its moves.

    Args:
        plan: what goes where.
        done: paths of files that exist already: nothing goes into them.
        ranges: runs of elements with CRCs that are wanted; None for none.
        bare: leave out the literals.
    """
    cutter = _Cutter(plan, done, ranges or {}, bare=bare)
    for move in plan.moves():
        if move is None or cutter.ends_before(move):
            yield from cutter.cut()
        if move is not None:
            cutter.add(move)
    for _, store in list(cutter.unfinished.values()):
        if len(cutter.batch.stores) >= MOST_STORES:
            yield from cutter.cut()
        cutter.finish(store)
    yield from cutter.cut()


class _Cutter:
    """A plan that is cut into batches while its moves pass by.

    Attributes:
        batch: that is being filled.
        unfinished: id of a store -> the file; elements or literals of it are still to come.
    """

    def __init__(self, plan: Plan, done: Collection[str], ranges: Ranges, *, bare: bool) -> None:
        self.batch = Batch()
        self.unfinished: dict[int, tuple[OutputFile, FileStore]] = {}
        self._skipped: set[int] = set()
        self._literals: dict[int, deque[tuple[int, bytes]]] = {}
        for output, store in plan.files:
            if output.path in done:
                self._skipped.add(id(store))
            else:
                self.unfinished[id(store)] = output, store
                self._literals[id(store)] = deque(() if bare else sorted(output.literals))
        self._missing = element_bytes(plan)
        self._ranges = ranges
        self._tensor, self._reach = -1, 0  # of the last move
        self._last: Store | None = None

    def cut(self) -> Iterator[Batch]:
        """Yields the batch, if it is not empty, and begins the next one."""
        if self.batch.stores:
            yield self.batch
            self.batch = Batch()

    def ends_before(self, move: Move) -> bool:
        """Whether the batch is large enough, and can end here."""
        batch = self.batch
        known = len(batch.stores)
        few = known + 2 <= MOST_STORES and not isinstance(move.src, DerivedStore)
        too_many = not few and known + stores_of(move) > MOST_STORES
        is_full = (
            len(batch.moves) >= MOST_MOVES
            or batch.distant_bytes >= MOST_DISTANT_BYTES
            or (batch.finished and batch.nbytes >= LEAST_BYTES)
        )
        if not (too_many or is_full) or id(move.dst) in self._skipped:
            return False
        # Nothing is torn apart without need: slices that interleave want to meet in one window.
        apart = move.tensor != self._tensor or (move.dst is self._last and move.dst_offset >= self._reach)
        return too_many or apart or len(batch.moves) >= 8 * MOST_MOVES

    def add(self, move: Move) -> None:
        """Adds a move; its file is finished if the move is its last."""
        place = id(move.dst)
        if place in self._skipped:
            return
        nbytes = move.count * move.rows * move.dst_dtype.itemsize
        end = move.dst_offset + nbytes if move.rows == move.dst_step == 1 else _end(move)
        self._reach = end if move.dst is not self._last or end > self._reach else self._reach
        self._tensor, self._last = move.tensor, move.dst
        if self._literals or place not in self.batch.numbers:
            self._attend(move.dst, move.dst_offset)
        self.batch.add(move, nbytes)
        if place in self.unfinished:
            self._missing[place] -= nbytes
            if not self._missing[place]:
                self.finish(move.dst)

    def finish(self, store: Store) -> None:
        """Finishes a file with this batch."""
        self._attend(store, store.size)
        self.batch.finished.append(self.unfinished.pop(id(store)))

    def _attend(self, store: Store, stop: int) -> None:
        """Adds the file to the batch, with its literals before byte `stop`."""
        number = self.batch.numbers.get(id(store))
        if number is None:
            number = self.batch.number(store)
            self.batch.ranges += [(number, *numbers) for numbers in self._ranges.get(id(store), ())]
        pending = self._literals.get(id(store))
        while pending and pending[0][0] < stop:
            offset, data = pending.popleft()
            self.batch.literals.append((number, offset, data))
            self.batch.nbytes += len(data)


def _end(move: Move) -> int:
    """One past the last byte of the destination that a move writes."""
    size = move.dst_dtype.itemsize
    return move.dst_offset + (move.rows - 1) * move.dst_pitch + (move.count - 1) * move.dst_step * size + size


def progress_after(progress: Callable[[int], None] | None, base: int) -> Callable[[int], None] | None:
    """Returns a function that calls `progress` with `base` bytes more than it is called with."""
    return None if progress is None else lambda now: progress(base + now)


def element_bytes(plan: Plan) -> dict[int, int]:
    """Store -> bytes of elements that will go into it."""
    totals = {id(store): 0 for _, store in plan.files}
    for _, entry in plan.pairs if totals else ():
        for fragment in entry.fragments:
            if id(fragment.store) in totals:
                totals[id(fragment.store)] += fragment.numel * entry.dtype.itemsize
    return totals


def ranges_of(plan: Plan) -> Ranges:
    """All runs of elements in the files of a plan."""
    numbers = count()
    return {id(store): [(next(numbers), *run) for run in element_ranges(output)] for output, store in plan.files}
