"""From the ranks that hold elements to the ranks that want them: in rounds of bounded size, and on into the mover.

For saving, and for loading from several nodes' disks. Every rank knows what every rank holds and what every rank wants, so
nobody asks: each computes the same rounds.
[Note: rounds]
What a rank wants is taken in the order of its files' bytes. What comes from the rank's own host memory goes straight from
there; everything else is *staged*: it comes over the process group into a buffer. A round is a run of what is wanted of which
at most `limit` bytes are staged. In round k everybody sends to everybody what their k-th rounds need, all in one all-to-all, and
the mover takes over while round k + 1 is on its way. Two buffers for receiving and two for sending, of `limit` bytes per rank
at most, are all the memory that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zckpt.dtypes import BY_TORCH_NAME
from zckpt.errors import CorruptError
from zckpt.fragments import FileStore, MemoryStore, Store
from zckpt.layouts.torch_files import Pair
from zckpt.plan import Move, Plan, route

BUDGET_BYTES = 160 << 20
"""Of all buffers of the rounds together; the mover and the indexes of the files take the rest of 256 MiB."""

EVERY = -1
"""The rank of what every rank holds."""

MEMORY = MemoryStore(0, 1 << 62)
"""All memory of this process: places in it are addresses. One store, however many tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class RankStore(FileStore):
    """Elements that a rank holds in memory: stands for it where places are computed.

    Attributes:
        rank: of the group that exchanges; EVERY where all hold the same.
        key: by which the rank finds its tensor, a vector of elements.
        file: the elements lie in the file `path` of that rank instead.
    """

    rank: int = EVERY
    key: Hashable = None
    file: bool = False


class Piece(NamedTuple):
    """A move, or a part of one."""

    move: Move
    first: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the way: of the source's dtype."""
        return self.count * self.move.src_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Sends:
    """What this rank sends, round by round.

    Attributes:
        pieces: receiver -> pieces, in the receiver's order.
        busy: whether anything is staged by anybody: otherwise nobody calls the collective.
    """

    pieces: Sequence[dict[int, list[Piece]]]
    busy: Sequence[bool]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Who takes part, and how.

    Attributes:
        rank: of this process in the group.
        size: of the group.
        group: of processes; None for all.
        device: of the group's communication.
        direct: whether what a rank holds is host memory that the mover can read.
        tensors: by the key of a `RankStore`, what this rank holds.
    """

    rank: int
    size: int
    group: Any
    device: torch.device
    direct: bool
    tensors: Callable[[Hashable], torch.Tensor]

    @property
    def limit(self) -> int:
        """Staged bytes per round and rank."""
        return BUDGET_BYTES // (2 * (self.size + 1))

    def is_staged(self, store: Store, rank: int) -> bool:
        """Whether elements go through a buffer on their way to a rank."""
        if not isinstance(store, RankStore):
            return False
        return not self.direct or store.rank not in (rank, EVERY)

    def rounds_of(self, pairs: Sequence[Pair], rank: int) -> Iterator[list[Piece]]:
        """The rounds of what a rank wants; see [Note: rounds]."""
        pieces: list[Piece] = []
        left = self.limit
        for number, (source, destination) in enumerate(pairs):
            for move in route(source, destination, number):
                if not self.is_staged(move.src, rank):
                    pieces.append(Piece(move, 0, move.count))
                    continue
                first = 0
                while first < move.count:
                    count = min(move.count - first, left // move.src_dtype.itemsize)
                    if count:
                        pieces.append(Piece(move, first, count))
                        first += count
                        left -= count * move.src_dtype.itemsize
                    if first < move.count:
                        yield pieces
                        pieces, left = [], self.limit
        if pieces:
            yield pieces

    def sends(self, pairs_by_rank: Iterable[Sequence[Pair]]) -> Sends:
        """What this rank sends, given what every rank of the group wants."""
        rounds: list[dict[int, list[Piece]]] = []
        busy: list[bool] = []
        for rank, pairs in enumerate(pairs_by_rank):
            for number, pieces in enumerate(self.rounds_of(pairs, rank)):
                if number == len(rounds):
                    rounds.append({})
                    busy.append(False)
                staged = [piece for piece in pieces if self.is_staged(piece.move.src, rank)]
                busy[number] |= bool(staged)
                mine = [piece for piece in staged if self._holder(piece, rank) == self.rank]
                if mine:
                    rounds[number][rank] = mine
        return Sends(rounds, busy)

    def stream(self, pairs: Sequence[Pair], sends: Sends) -> Iterator[Move | None]:
        """The moves that give this rank what it wants, each round's after its elements have come."""
        own = self.rounds_of(pairs, self.rank)
        coming = self._start(0, next(own, ()), sends)
        number = 0
        while coming is not None:
            number += 1
            after = self._start(number, next(own, ()), sends)
            yield from self._finish(coming)
            coming = after

    def drain(self, stream: Iterator[Move | None]) -> None:
        """Goes on exchanging after this rank has failed, so that the others do not wait for it for ever."""
        for _ in stream:
            pass

    def _holder(self, piece: Piece, rank: int) -> int:
        """Who sends a staged piece to a rank."""
        store = piece.move.src
        assert isinstance(store, RankStore)
        return rank if store.rank == EVERY else store.rank

    def _start(self, number: int, pieces: Sequence[Piece], sends: Sends) -> _Coming | None:
        """Sends what others need in a round, and begins to receive; None after the last one."""
        if not pieces and number >= len(sends.pieces):
            return None
        sizes = [0] * self.size  # bytes that each rank sends here
        for piece in pieces:
            if self.is_staged(piece.move.src, self.rank):
                sizes[self._holder(piece, self.rank)] += piece.nbytes
        if number >= len(sends.busy) or not sends.busy[number]:
            nothing = torch.empty(0, dtype=torch.uint8)
            return _Coming(pieces, nothing, nothing, sizes, None)
        sent = [sends.pieces[number].get(rank, []) for rank in range(self.size)]
        lengths = [sum(piece.nbytes for piece in one) for one in sent]
        outgoing = torch.empty(sum(lengths), dtype=torch.uint8, device=self.device)
        at = 0
        for piece in (piece for one in sent for piece in one):
            outgoing[at : at + piece.nbytes].copy_(self._bytes_of(piece))
            at += piece.nbytes
        if self.size == 1:
            return _Coming(pieces, outgoing, outgoing, sizes, None)
        incoming = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        work = dist.all_to_all_single(incoming, outgoing, sizes, lengths, group=self.group, async_op=True)
        return _Coming(pieces, incoming, outgoing, sizes, work)

    def _finish(self, coming: _Coming) -> Iterator[Move | None]:
        """The moves of a round; its buffers live until they are carried out."""
        if coming.work is not None:
            coming.work.wait()
        received = coming.incoming.cpu()
        kept: list[torch.Tensor] = []
        places = [received.data_ptr() + sum(coming.sizes[:rank]) for rank in range(self.size)]
        for piece in coming.pieces:
            move, store = piece.move, piece.move.src
            if isinstance(move.dst, RankStore):
                kept.append(target := self.tensors(move.dst.key))
                move = move._replace(dst=MEMORY, dst_offset=target.data_ptr() + move.dst_offset)
            if not isinstance(store, RankStore):
                yield move
                continue
            dtype = move.src_dtype
            if self.is_staged(store, self.rank):
                holder = self._holder(piece, self.rank)
                address, places[holder] = places[holder], places[holder] + piece.nbytes
            else:  # the mover casts what is held in another dtype
                kept.append(elements := self.tensors(store.key))
                address = elements[move.src_offset // dtype.itemsize + piece.first :].data_ptr()
                dtype = BY_TORCH_NAME[str(elements.dtype).removeprefix("torch.")]
            to = move.dst_offset + piece.first * move.dst_dtype.itemsize
            yield move._replace(src=MEMORY, src_offset=address, dst_offset=to, count=piece.count, src_dtype=dtype)
        yield None

    def _bytes_of(self, piece: Piece) -> torch.Tensor:
        """The elements of a piece as they travel."""
        store, dtype = piece.move.src, piece.move.src_dtype
        assert isinstance(store, RankStore)
        if store.file:
            data = bytearray(piece.nbytes)
            with open(store.path, "rb", buffering=0) as file:
                file.seek(piece.move.src_offset + piece.first * dtype.itemsize)
                if file.readinto(data) != len(data):
                    raise CorruptError("a file that ends too early", file=store.path, remedy="It was cut short.")
            return torch.frombuffer(data, dtype=torch.uint8)
        first = piece.move.src_offset // dtype.itemsize + piece.first
        elements = self.tensors(store.key)[first : first + piece.count]
        return elements.to(getattr(torch, dtype.torch_name)).view(torch.uint8)


class _Coming(NamedTuple):
    """A round on its way."""

    pieces: Sequence[Piece]
    incoming: torch.Tensor
    outgoing: torch.Tensor
    sizes: Sequence[int]
    work: Any


@dataclass(frozen=True, slots=True)
class Streamed(Plan):
    """A plan whose sources fill up while it is carried out.

    Attributes:
        source: of its moves; it can be read once.
    """

    source: Iterator[Move | None]

    def moves(self) -> Iterator[Move | None]:
        """The moves, this once."""
        return self.source
