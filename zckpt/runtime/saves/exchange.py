"""Elements on their way from the ranks that hold them to the ranks that want them: who has what, and in which rounds it travels.

For saving, and for loading from several nodes' disks; `rounds` carries them. A rank computes the places of what it wants itself,
and nobody else's: it asks the holders for the elements, round by round. So what it has to do and to remember does not grow with
the number of ranks.
[Note: rounds]
What comes from the rank's own host memory goes straight from there; everything else is *staged*: it comes over the process group
into a buffer. The elements that rank r has for rank r + d (modulo their number) are a *stream* of distance d, in the order of the
receiver's files. First the ranks agree on the longest stream of each distance (one all-reduce of as many numbers as ranks), from
which each computes the same rounds: a round gives *turns* of so many bytes to some distances, `rounds.LIMIT_BYTES` together. In a
distance every rank sends one stream and receives one, so no rank sends or receives more than that in a round, however the
elements are spread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CorruptError
from zckpt.core.dtypes import ALL
from zckpt.core.plan import Move, Pair, route
from zckpt.core.stores import FileStore
from zckpt.team.meeting import WORK_S
from zckpt.team.rendezvous import own_connection

MOST_PIECES = 1 << 16
"""The most pieces in one round, unless a single stream has more: each takes some bytes on its way and in memory."""

LARGEST_ITEM = 16
"""The most bytes by which a turn may end early, since no element is cut in two."""

_FEW = 4
"""The most ranks with the elements of a move that get one note each."""

EVERY = -1
"""The rank of elements that every rank holds."""

_BY_NUMBER = {dtype.number: dtype for dtype in ALL}


@dataclass(frozen=True, slots=True, eq=False)
class RankStore(FileStore):
    """A tensor that ranks hold in memory: stands for it where places are computed, as if all elements were in one place.

    Attributes:
        rank: of the group that exchanges; EVERY where all hold the same.
        step: elements that each rank holds, the first rank the first ones; 0 where `rank` holds all.
        key: by which a rank finds what it holds: a vector of elements, or with a path what is in that file. A path is what this
            rank calls the file: others have other paths at the same place.
    """

    rank: int = EVERY
    step: int = 0
    key: Hashable = None


class MovePart(NamedTuple):
    """Some of a move's elements, which one rank holds.

    Attributes:
        move: of the whole.
        first: how many of the move's elements are before them.
        count: how many they are.
        offset: bytes before them in what the rank holds.
    """

    move: Move
    first: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed
    offset: int

    @property
    def nbytes(self) -> int:
        """The bytes of the elements on their way, in the source's dtype."""
        return self.count * self.move.src_dtype.itemsize


class Request(NamedTuple):
    """A request of one rank to another.

    Attributes:
        number: of the key, in `Exchange.keys`.
        offset: bytes before the elements in what the rank holds.
        count: elements.
        dtype: number of the dtype in which they are wanted.
    """

    number: int
    offset: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed
    dtype: int

    @property
    def nbytes(self) -> int:
        """The bytes of the answer."""
        return self.count * _BY_NUMBER[self.dtype].itemsize


Counts = Sequence[int]
Turn = tuple[int, int]
"""A distance, and the bytes in a round for its streams."""


def rounds_of(longest: Counts, pieces: Counts, limit: int) -> Iterator[list[Turn]]:
    """The rounds that carry streams of all distances, `limit` bytes per round and rank; see [Note: rounds]. By distance:
    `longest`, the bytes of the longest stream, and `pieces`, the most pieces of one.
    """
    turns: list[Turn] = []
    left, room = limit, MOST_PIECES
    for distance, (nbytes, number) in enumerate(zip(longest, pieces, strict=True)):
        if turns and nbytes and number > room:
            yield turns
            turns, left, room = [], limit, MOST_PIECES
        while nbytes > 0:
            given = min(nbytes + LARGEST_ITEM, left)
            if given > LARGEST_ITEM:
                turns.append((distance, given))
                left -= given
                nbytes -= given - LARGEST_ITEM
            if nbytes > 0:
                yield turns
                turns, left, room = [], limit, MOST_PIECES
        room -= number
    if turns:
        yield turns


def make_group(name: str, rank: int, size: int, store: Any) -> Any:
    """A group of ranks that exchange host memory in a thread beside the training; making it waits for all of them.

    The group is gloo's, whatever the others are, and stands in no registry: it works until nobody holds it any more, also when
    the script destroys its process groups meanwhile. Who holds it holds the store too, which may have its server here.
    Source: torch 2.6 to 2.13, distributed/distributed_c10d.py `_new_process_group_helper`, csrc/distributed/c10d/init.cpp.
    """
    from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]  # not in every build of torch

    own = PrefixStore(f"zckpt/{name}", own_connection(store))
    return ProcessGroupGloo(own, rank, size, timedelta(seconds=WORK_S))


@dataclass(frozen=True, slots=True)
class Exchange:
    """Who takes part, and how.

    Attributes:
        rank: of this process in the group.
        size: of the group.
        group: of processes; None for all; one of `make_group` for a thread beside the training.
        device: of the group's communication.
        direct: whether what a rank holds is host memory that the engine can read.
        tensors: by the key of a `RankStore`, what this rank holds.
        keys: of all that any rank holds, in the same order on every rank.
    """

    rank: int
    size: int
    group: Any
    device: torch.device
    direct: bool
    tensors: Callable[[Hashable], torch.Tensor]
    keys: Sequence[Hashable]

    def is_here(self, holder: int) -> bool:
        """Whether elements of `holder` are moved directly from this rank's memory."""
        return self.direct and holder == self.rank

    def holders(self, move: Move) -> range:
        """The ranks that hold a move's elements, of those that all hold this one."""
        store = move.src
        assert isinstance(store, RankStore)
        if not store.step:
            rank = self.rank if store.rank == EVERY else store.rank
            return range(rank, rank + 1)
        first = move.src_offset // move.src_dtype.itemsize
        return range(first // store.step, (first + move.count - 1) // store.step + 1)

    def part_of(self, move: Move, holder: int) -> MovePart:
        """The elements of a move that one of its holders has."""
        store, itemsize = move.src, move.src_dtype.itemsize
        assert isinstance(store, RankStore)
        if not store.step:
            return MovePart(move, 0, move.count, move.src_offset)
        first = move.src_offset // itemsize
        low, high = max(first, holder * store.step), min(first + move.count, (holder + 1) * store.step)
        return MovePart(move, low - first, high - low, (low - holder * store.step) * itemsize)

    def all_to_all(self, incoming: torch.Tensor, outgoing: torch.Tensor, received: Counts, sent: Counts) -> Any:
        """Exchanges parts of a vector with all ranks; returns the handle to wait for, None if it is done."""
        if self.size == 1:
            incoming.copy_(outgoing)
            return None
        group: Any = self.group or dist.group.WORLD
        return group.alltoall_base(incoming, outgoing, list(received), list(sent))

    def maximum(self, numbers: torch.Tensor) -> None:
        """Replaces each number by the largest one of any rank."""
        if self.size > 1:
            group: Any = self.group or dist.group.WORLD
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
            group.allreduce([numbers], options).wait()

    def bytes_of(self, request: Request) -> torch.Tensor:
        """The requested elements, as they travel. Raises CorruptError if the file that has them ends too early."""
        key, dtype = self.keys[request.number], _BY_NUMBER[request.dtype]
        if isinstance(key, Path):
            data = bytearray(request.nbytes)
            with key.open("rb", buffering=0) as file:
                file.seek(request.offset)
                if file.readinto(data) != len(data):
                    raise CorruptError("ends too early", file=str(key), remedy="Copy it again from where it is whole.")
            return torch.frombuffer(data, dtype=torch.uint8)
        first = request.offset // dtype.itemsize
        elements = self.tensors(key)[first : first + request.count]
        return elements.to(getattr(torch, dtype.torch_name)).view(torch.uint8)


class WantedMoves:
    """The moves that this rank wants, with the ranks that hold their elements. `pairs` are in the order of its files. By
    distance, `volumes` are the bytes of the stream that comes from there, and `pieces` says how many pieces that is.
    """

    def __init__(self, exchange: Exchange, pairs: Sequence[Pair]) -> None:
        self._exchange, self._pairs = exchange, pairs
        self._noted: dict[int, list[tuple[int, Move]]] = {}
        self._spread: list[tuple[int, Move]] = []
        self._streams: dict[int, tuple[MovePart | None, Iterator[MovePart]]] = {}
        nbytes, pieces = ([0] * (exchange.size + 1) for _ in range(2))
        for number, move in enumerate(self._staged()):
            holders = exchange.holders(move)
            if len(holders) <= _FEW:
                for holder in holders:
                    self._noted.setdefault(holder, []).append((number, move))
            else:
                self._spread.append((number, move))
            self._count(nbytes, move, holders)
            pieces[holders.start] += 1
            pieces[holders.stop] -= 1
        self.volumes = self._by_distance(list(accumulate(nbytes)))
        self.pieces = self._by_distance(list(accumulate(pieces)))

    def _moves(self) -> Iterator[Move]:
        for number, (source, destination) in enumerate(self._pairs):
            yield from route(source, destination, number)

    def _staged(self) -> Iterator[Move]:
        """The moves of elements that other ranks have, or that go through a buffer."""
        for move in self._moves():
            if isinstance(move.src, RankStore) and not all(map(self._exchange.is_here, self._exchange.holders(move))):
                yield move

    def _count(self, nbytes: list[int], move: Move, holders: range) -> None:
        """Counts the bytes that each of a move's holders has, as differences from one rank to the next."""

        def add(first: int, stop: int, more: int) -> None:
            nbytes[first] += more
            nbytes[stop] -= more

        ends = {holders[0], holders[-1]}
        for holder in ends:
            add(holder, holder + 1, self._exchange.part_of(move, holder).nbytes)
        if len(holders) > len(ends):
            add(holders[1], holders[-1], self._exchange.part_of(move, holders[1]).nbytes)

    def _by_distance(self, by_holder: Counts) -> list[int]:
        exchange = self._exchange
        found = [by_holder[(exchange.rank - distance) % exchange.size] for distance in range(exchange.size)]
        return [0, *found[1:]] if exchange.direct else found

    def here(self) -> Iterator[Move | MovePart]:
        """The moves from this rank's memory or from files, in the order of the rank's files."""
        exchange = self._exchange
        for move in self._moves():
            if not isinstance(move.src, RankStore):
                yield move
            elif exchange.direct and exchange.rank in exchange.holders(move):
                yield exchange.part_of(move, exchange.rank)

    def take(self, holder: int, nbytes: int) -> list[MovePart]:
        """The next pieces from another rank, in the order of this rank's files: at most `nbytes` bytes together. The last one may
        be a part of a piece, and the rest of it is the next.
        """
        if holder not in self._streams:
            stream = self._stream(holder)
            self._streams[holder] = next(stream, None), stream
        piece, stream = self._streams[holder]
        taken: list[MovePart] = []
        while piece is not None:
            count = min(piece.count, nbytes // piece.move.src_dtype.itemsize)
            first = piece._replace(count=count)
            nbytes -= first.nbytes
            if count:
                taken.append(first)
            if count < piece.count:
                piece = MovePart(piece.move, piece.first + count, piece.count - count, piece.offset + first.nbytes)
                break
            piece = next(stream, None)
        self._streams[holder] = piece, stream
        return taken

    def _stream(self, holder: int) -> Iterator[MovePart]:
        noted = self._noted.get(holder, ())
        spread = ((n, move) for n, move in self._spread if holder in self._exchange.holders(move))
        moves = heapq.merge(noted, spread, key=lambda one: one[0])
        return (self._exchange.part_of(move, holder) for _, move in moves)
