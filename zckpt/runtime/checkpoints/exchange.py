"""Elements on their way from the ranks that hold them to the ranks that want them, in rounds of bounded size.

For saving, and for loading from several nodes' disks. Every rank knows what every rank holds and what every rank wants, so
each computes the same rounds without asking.
[Note: rounds]
What a rank wants is taken in the order of its files' bytes. What comes from the rank's own host memory goes straight from
there; everything else is *staged*: it comes over the process group into a buffer. A round is a run of what is wanted of which
at most `limit` bytes are staged. In round k every rank sends every other what its k-th round needs, all in one all-to-all, and
the engine writes them while round k + 1 is on its way. Two buffers for receiving and two for sending, of `limit` bytes per rank
at most, are all the memory that it takes.
[Note: failures] A rank that left in the middle of the rounds would leave the others waiting for ever. So the buffers are
allocated before the first round (by `Rounds`), and ranks agree that all have theirs; a rank that fails after that carries
on with the remaining rounds, whatever is in its buffers (`Rounds.__exit__`), and raises its error when they are over. Ranks
agree once more after the rounds, and throw away what they received if anyone failed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zckpt.base.errors import CorruptError, OutputError, add_note
from zckpt.base.words import size
from zckpt.core.dtypes import BY_TORCH_NAME
from zckpt.core.fragments import FileStore, MemoryStore, Store
from zckpt.core.plan import Move, Plan, route
from zckpt.layouts.zero.torch_files import Pair
from zckpt.runtime.swap.files import place_of

BUDGET_BYTES = 160 << 20
"""Of all buffers of the rounds together; the engine and the indexes of the files take the rest of 256 MiB."""

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
        file: the elements are in the file `path` of that rank instead.
    """

    rank: int = EVERY
    key: Hashable = None
    file: bool = False


class MovePart(NamedTuple):
    """A move, or a part of one."""

    move: Move
    first: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the way: of the source's dtype."""
        return self.count * self.move.src_dtype.itemsize


@dataclass(slots=True)
class RoundPlan:
    """What this rank sends and receives in one round.

    Attributes:
        sent: receiver -> pieces, in the receiver's order.
        coming: sender -> staged bytes that come from it.
        busy: whether any rank stages anything: otherwise no rank calls the collective.
    """

    sent: dict[int, list[MovePart]] = field(default_factory=dict)
    coming: dict[int, int] = field(default_factory=dict)
    busy: bool = False

    def bytes_to(self, rank: int) -> int:
        """How many bytes a rank gets from this one."""
        return sum(piece.nbytes for piece in self.sent.get(rank, ()))


@dataclass(frozen=True, slots=True)
class Exchange:
    """Who takes part, and how.

    Attributes:
        rank: of this process in the group.
        size: of the group.
        group: of processes; None for all.
        device: of the group's communication.
        direct: whether what a rank holds is host memory that the engine can read.
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

    def rounds_of(self, pairs: Sequence[Pair], rank: int) -> Iterator[list[MovePart]]:
        """The rounds of what a rank wants; see [Note: rounds]."""
        pieces: list[MovePart] = []
        left = self.limit
        for number, (source, destination) in enumerate(pairs):
            for move in route(source, destination, number):
                if not self.is_staged(move.src, rank):
                    pieces.append(MovePart(move, 0, move.count))
                    continue
                first = 0
                while first < move.count:
                    count = min(move.count - first, left // move.src_dtype.itemsize)
                    if count:
                        pieces.append(MovePart(move, first, count))
                        first += count
                        left -= count * move.src_dtype.itemsize
                    if first < move.count:
                        yield pieces
                        pieces, left = [], self.limit
        if pieces:
            yield pieces

    def plan_rounds(self, pairs_by_rank: Iterable[Sequence[Pair]]) -> list[RoundPlan]:
        """What this rank sends and receives, given what every rank of the group wants."""
        plans: list[RoundPlan] = []
        for rank, pairs in enumerate(pairs_by_rank):
            for number, pieces in enumerate(self.rounds_of(pairs, rank)):
                if number == len(plans):
                    plans.append(RoundPlan())
                plan = plans[number]
                staged = [piece for piece in pieces if self.is_staged(piece.move.src, rank)]
                plan.busy |= bool(staged)
                mine = [piece for piece in staged if self.holder(piece, rank) == self.rank]
                if mine:
                    plan.sent[rank] = mine
                for piece in staged if rank == self.rank else ():
                    holder = self.holder(piece, rank)
                    plan.coming[holder] = plan.coming.get(holder, 0) + piece.nbytes
        return plans

    def holder(self, piece: MovePart, rank: int) -> int:
        """Who sends a staged piece to a rank."""
        store = piece.move.src
        assert isinstance(store, RankStore)
        return rank if store.rank == EVERY else store.rank

    def bytes_of(self, piece: MovePart) -> torch.Tensor:
        """The elements of a piece as they travel."""
        store, dtype = piece.move.src, piece.move.src_dtype
        assert isinstance(store, RankStore)
        if store.file:
            data = bytearray(piece.nbytes)
            with open(store.path, "rb", buffering=0) as file:
                file.seek(piece.move.src_offset + piece.first * dtype.itemsize)
                if file.readinto(data) != len(data):
                    raise CorruptError(
                        "ends too early", file=store.path, remedy="Copy this file again from where it is whole."
                    )
            return torch.frombuffer(data, dtype=torch.uint8)
        first = piece.move.src_offset // dtype.itemsize + piece.first
        elements = self.tensors(store.key)[first : first + piece.count]
        return elements.to(getattr(torch, dtype.torch_name)).view(torch.uint8)


class Rounds:
    """The rounds of one rank, as moves for the engine. Use as a context manager; see [Note: failures].

    Iterating gives each round's moves after its elements have come, then None: by the next request they are carried out.

    Args:
        exchange: who takes part.
        pairs: what this rank wants.
        plans: what it sends and receives, round by round.

    Raises:
        OutputError: there is no memory for the buffers.
    """

    def __init__(self, exchange: Exchange, pairs: Sequence[Pair], plans: Sequence[RoundPlan]) -> None:
        self._exchange, self._plans = exchange, plans
        self._own = exchange.rounds_of(pairs, exchange.rank)
        self._number = 0  # of the next round
        self._under_way: list[_Coming] = []
        ranks = range(exchange.size)
        received = max((sum(plan.coming.values()) for plan in plans), default=0)
        sent = max((sum(map(plan.bytes_to, ranks)) for plan in plans), default=0)
        try:
            self._incoming = [torch.empty(received, dtype=torch.uint8, device=exchange.device) for _ in range(2)]
            self._outgoing = [torch.empty(sent, dtype=torch.uint8, device=exchange.device) for _ in range(2)]
        except RuntimeError as error:
            raise OutputError(
                "there is no memory for the exchange between ranks", found=str(error).splitlines()[0],
                expected=f"{size(2 * (received + sent))} on {exchange.device}",
                remedy="Free memory on this rank, or use more ranks.",
            ) from error  # fmt: skip

    def __iter__(self) -> Iterator[Move | None]:
        coming = self._start()
        while coming is not None:
            after = self._start()
            yield from self._moves(coming)
            coming = after

    def __enter__(self) -> Rounds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        try:
            for coming in self._under_way:
                coming.wait()
            while self._number < len(self._plans):
                self._call(()).wait()
        except RuntimeError as lost:
            add_note(error, f"The exchange between ranks was broken off: {str(lost).splitlines()[0]}")

    def _start(self) -> _Coming | None:
        """Sends what others need in the next round, and begins to receive; None after the last one."""
        pieces = next(self._own, None)
        if pieces is None and self._number >= len(self._plans):
            return None
        plan = self._plan()
        at, outgoing = 0, self._outgoing[self._number % 2]
        for rank in range(self._exchange.size):
            for piece in plan.sent.get(rank, ()):
                outgoing[at : at + piece.nbytes].copy_(self._exchange.bytes_of(piece))
                at += piece.nbytes
        return self._call(pieces or ())

    def _plan(self) -> RoundPlan:
        """Of the next round; after the last plan this rank may still have moves of its own memory."""
        return self._plans[self._number] if self._number < len(self._plans) else RoundPlan()

    def _call(self, pieces: Sequence[MovePart]) -> _Coming:
        """The collective of the next round, whatever is in the buffers; in a round in which nothing is staged there is none."""
        number, exchange, plan = self._number, self._exchange, self._plan()
        self._number += 1
        if not plan.busy:
            return _Coming(pieces, (), torch.empty(0, dtype=torch.uint8), None)
        sizes = [plan.coming.get(rank, 0) for rank in range(exchange.size)]
        lengths = [plan.bytes_to(rank) for rank in range(exchange.size)]
        incoming = self._incoming[number % 2][: sum(sizes)]
        outgoing = self._outgoing[number % 2][: sum(lengths)]
        if exchange.size == 1:
            return _Coming(pieces, sizes, outgoing, None)
        work = dist.all_to_all_single(incoming, outgoing, sizes, lengths, group=exchange.group, async_op=True)
        coming = _Coming(pieces, sizes, incoming, work)
        self._under_way.append(coming)
        return coming

    def _moves(self, coming: _Coming) -> Iterator[Move | None]:
        """The moves of a round; its buffers are not written to before they are carried out."""
        coming.wait()
        if coming in self._under_way:
            self._under_way.remove(coming)
        exchange, received = self._exchange, coming.incoming.cpu()
        kept: list[torch.Tensor] = []
        places = [received.data_ptr() + sum(coming.sizes[:rank]) for rank in range(len(coming.sizes))]
        for piece in coming.pieces:
            move, store = piece.move, piece.move.src
            if isinstance(move.dst, RankStore):
                kept.append(target := exchange.tensors(move.dst.key))
                move = move._replace(dst=MEMORY, dst_offset=target.data_ptr() + move.dst_offset)
            if not isinstance(store, RankStore):
                yield move
                continue
            dtype, swapped = move.src_dtype, None
            if exchange.is_staged(store, exchange.rank):
                holder = exchange.holder(piece, exchange.rank)
                address, places[holder] = places[holder], places[holder] + piece.nbytes
            else:  # the engine casts what is held in another dtype
                kept.append(elements := exchange.tensors(store.key))
                swapped = place_of(elements)
                address = elements[move.src_offset // dtype.itemsize + piece.first :].data_ptr()
                dtype = BY_TORCH_NAME[str(elements.dtype).removeprefix("torch.")]
            to = move.dst_offset + piece.first * move.dst_dtype.itemsize
            source, at = (
                (MEMORY, address) if swapped is None else (swapped[0], swapped[1] + address - elements.data_ptr())
            )
            yield move._replace(src=source, src_offset=at, dst_offset=to, count=piece.count, src_dtype=dtype)
        yield None


@dataclass(frozen=True, slots=True, eq=False)
class _Coming:
    """A round on its way: bytes from each rank, and where they come to."""

    pieces: Sequence[MovePart]
    sizes: Sequence[int]
    incoming: torch.Tensor
    work: Any

    def wait(self) -> None:
        """Waits until its elements have come, and those that this rank sends have gone."""
        if self.work is not None:
            self.work.wait()


@dataclass(frozen=True, slots=True)
class Streamed(Plan):
    """A plan whose sources fill up while it is carried out.

    Attributes:
        source: of its moves; it can be read once.
    """

    source: Iterable[Move | None]

    def moves(self) -> Iterator[Move | None]:
        """The moves, this once."""
        return iter(self.source)
