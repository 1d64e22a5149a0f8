"""From the ranks that hold elements to the ranks that write them: in rounds of bounded size, and on into the mover.

For saving. Every rank knows what every rank holds and what every file wants, so nobody asks: each computes the same rounds.
[Note: rounds]
A rank's files are filled in the order of their bytes. What comes from the rank's own host memory goes straight from there;
everything else is *staged*: it comes over the process group into a buffer. A round is a run of the file's fillings of which
at most `limit` bytes are staged. In round k everybody sends to everybody what their k-th rounds need, all in one
all-to-all, and the mover takes over while round k + 1 is on its way. Two buffers for receiving and two for sending, of
`limit` bytes per rank at most, are all the memory that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zckpt.dtypes import BY_TORCH_NAME
from zckpt.errors import CorruptError
from zckpt.fragments import FileStore, MemoryStore, Store
from zckpt.layouts.torch_files import Pair
from zckpt.plan import Move, Plan, route
from zckpt.runtime.held import Held
from zckpt.runtime.sharding import Sharded
from zckpt.runtime.world import rows_of

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
        get: gives the elements on the rank that holds them, as a dense vector.
        file: the elements lie in the file `path` of that rank instead.
    """

    rank: int = EVERY
    get: Callable[[], torch.Tensor] = torch.Tensor
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
class Exchange:
    """Who takes part, and how.

    Attributes:
        rank: of this process in the group.
        size: of the group.
        group: of processes; None for a group of one.
        device: of the group's communication.
        direct: whether what a rank holds is host memory that the mover can read.
    """

    rank: int
    size: int
    group: Any
    device: torch.device
    direct: bool

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
        """The rounds of a rank's files; see [Note: rounds]."""
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

    def holder(self, piece: Piece, rank: int) -> int:
        """Who sends a staged piece to a rank."""
        store = piece.move.src
        assert isinstance(store, RankStore)
        return rank if store.rank == EVERY else store.rank

    def stream(self, pairs_by_rank: Sequence[Sequence[Pair]]) -> Iterator[Move | None]:
        """The moves that fill this rank's files, each round's after its elements have come.

        Args:
            pairs_by_rank: what fills the files of each rank of the group.
        """
        rounds = zip_longest(*(self.rounds_of(pairs, r) for r, pairs in enumerate(pairs_by_rank)), fillvalue=())
        coming = self._start(next(rounds, None))
        while coming is not None:
            after = self._start(next(rounds, None))
            yield from self._finish(coming)
            coming = after

    def drain(self, stream: Iterator[Move | None]) -> None:
        """Goes on exchanging after this rank has failed, so that the others do not wait for it for ever."""
        for _ in stream:
            pass

    def _start(self, pieces_by_rank: Sequence[Sequence[Piece]] | None) -> _Coming | None:
        """Sends what others need in a round, and begins to receive."""
        if pieces_by_rank is None:
            return None
        sizes = [0] * self.size  # bytes that each rank sends here
        for piece in pieces_by_rank[self.rank]:
            if self.is_staged(piece.move.src, self.rank):
                sizes[self.holder(piece, self.rank)] += piece.nbytes
        sent = [
            [
                piece
                for piece in pieces
                if self.is_staged(piece.move.src, rank) and self.holder(piece, rank) == self.rank
            ]
            for rank, pieces in enumerate(pieces_by_rank)
        ]
        lengths = [sum(piece.nbytes for piece in pieces) for pieces in sent]
        outgoing = torch.empty(sum(lengths), dtype=torch.uint8, device=self.device)
        at = 0
        for piece in (piece for pieces in sent for piece in pieces):
            outgoing[at : at + piece.nbytes].copy_(_bytes_of(piece))
            at += piece.nbytes
        if self.size == 1 or not self._is_any_staged(pieces_by_rank):
            return _Coming(pieces_by_rank[self.rank], outgoing, outgoing, sizes, None)
        incoming = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        work = dist.all_to_all_single(incoming, outgoing, sizes, lengths, group=self.group, async_op=True)
        return _Coming(pieces_by_rank[self.rank], incoming, outgoing, sizes, work)

    def _is_any_staged(self, pieces_by_rank: Sequence[Sequence[Piece]]) -> bool:
        return any(
            self.is_staged(piece.move.src, rank) for rank, pieces in enumerate(pieces_by_rank) for piece in pieces
        )

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
                kept.append(target := move.dst.get())
                move = move._replace(dst=MEMORY, dst_offset=target.data_ptr() + move.dst_offset)
            if not isinstance(store, RankStore):
                yield move
                continue
            dtype = move.src_dtype
            if self.is_staged(store, self.rank):
                holder = self.holder(piece, self.rank)
                address, places[holder] = places[holder], places[holder] + piece.nbytes
            else:  # the mover casts what is held in another dtype
                kept.append(elements := store.get())
                address = elements[move.src_offset // dtype.itemsize + piece.first :].data_ptr()
                dtype = BY_TORCH_NAME[str(elements.dtype).removeprefix("torch.")]
            to = move.dst_offset + piece.first * move.dst_dtype.itemsize
            yield move._replace(src=MEMORY, src_offset=address, dst_offset=to, count=piece.count, src_dtype=dtype)
        yield None


class _Coming(NamedTuple):
    """A round on its way."""

    pieces: Sequence[Piece]
    incoming: torch.Tensor
    outgoing: torch.Tensor
    sizes: Sequence[int]
    work: Any


def part_of_rank(sharded: Sharded, held: Held, rank: int) -> tuple[int, int]:
    """The elements of a parameter that a rank of the world holds: the first, and how many."""
    size = sharded.mesh["shard"].size()
    if held.replicated or size == 1:
        return 0, held.shape.numel()
    rows, width = rows_of(held.shape[0], size, rank % size), held.shape.numel() // held.shape[0]
    return rows.start * width, len(rows) * width


def _bytes_of(piece: Piece) -> torch.Tensor:
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
    return store.get()[first : first + piece.count].to(getattr(torch, dtype.torch_name)).view(torch.uint8)


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
