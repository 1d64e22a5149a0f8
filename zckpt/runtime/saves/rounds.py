"""The rounds of an exchange between ranks, as moves for the engine.

In a round every rank asks the holders of its turns for pieces, then all pieces go in one all-to-all, and the engine writes them
while the next round is on its way. Two buffers for receiving and two for sending are all the memory that it takes.
[Note: failures] A rank that left in the middle of the rounds would leave the others waiting for ever. So the buffers are
allocated before the first round (by `Rounds`), and ranks agree that all have theirs; a rank that fails after that goes on with
the remaining rounds (`Rounds.carry_out`): it asks for nothing, sends whatever is in its buffers, and raises its error when they
are over. Ranks agree once more after the rounds, and throw away what they received if anyone failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError, add_note
from zckpt.base.words import size
from zckpt.core.dtypes import BY_TORCH_NAME
from zckpt.core.plan import Move, Plan, Streamed
from zckpt.core.stores import MemoryStore
from zckpt.engine.move import run
from zckpt.runtime.saves.exchange import (
    LARGEST_ITEM,
    Exchange,
    MovePart,
    RankStore,
    Request,
    Turn,
    WantedMoves,
    rounds_of,
)
from zckpt.runtime.swapping.files import place_of
from zckpt.team.meeting import Attempt

LIMIT_BYTES = 40 << 20
"""The most bytes that a rank receives in a round, and sends: a quarter of all buffers. The engine and the indexes of
the files take the rest of 256 MiB.
"""

_MEMORY = MemoryStore(0, 1 << 62)
"""All memory of this process: places in it are addresses. One store, however many tensors."""


class Rounds:
    """The rounds of one rank: they carry out a plan with sources that other ranks hold. Raises OutputError if there is no memory
    for the buffers.
    """

    def __init__(self, exchange: Exchange, plan: Plan) -> None:
        self._exchange, self._plan = exchange, plan
        self._wanted = WantedMoves(exchange, plan.pairs)
        self._numbers = {key: number for number, key in enumerate(exchange.keys)}
        self._turns: Iterator[list[Turn]] | None = None
        self._number = 0  # of the next round
        self._under_way: list[_Coming] = []
        buffer = LIMIT_BYTES if exchange.size > 1 else min(LIMIT_BYTES, sum(self._wanted.volumes) + LARGEST_ITEM)
        try:
            self._incoming = [torch.empty(buffer, dtype=torch.uint8, device=exchange.device) for _ in range(2)]
            self._outgoing = [torch.empty(buffer, dtype=torch.uint8, device=exchange.device) for _ in range(2)]
        except RuntimeError as error:
            raise OutputError(
                "there is no memory for the exchange between ranks", found=str(error).splitlines()[0],
                expected=f"{size(4 * buffer)} on {exchange.device}",
                remedy="Free memory on this rank.",
            ) from error  # fmt: skip

    def carry_out(self, directory: str) -> None:
        """Writes the plan's files into a directory, and sends the others what theirs need; no other collective may be called
        meanwhile. Raises OutputError if a file cannot be written; the exchange was carried to its end, see [Note: failures].
        """
        try:
            run(Streamed(self._plan.files, self._plan.pairs, self._every_move()), directory, overflow="inf")
        except Exception as error:
            try:
                for coming in self._under_way:
                    coming.wait()
                while (left := self._start(failed=True)) is not None:
                    left.wait()
            except RuntimeError as lost:
                add_note(error, f"The exchange between ranks was broken off: {str(lost).splitlines()[0]}")
            raise

    def _every_move(self) -> Iterator[Move | None]:
        """Each round's moves after its elements have come, then None: by the next request they are carried out."""
        coming = self._start()
        for piece in self._wanted.here():
            yield self._from_here(piece)
        yield None
        while coming is not None:
            after = self._start()
            yield from self._moves(coming)
            coming = after

    def _start(self, *, failed: bool = False) -> _Coming | None:
        """Requests what comes in the next round, sends what others request, and begins to receive; None after the last
        round.

        An error in this rank's own part is raised when the round is under way: the others need it.
        """
        if self._turns is None:
            self._turns = self._agreed()
        turns = next(self._turns, None)
        if turns is None:
            return None
        exchange, number = self._exchange, self._number % 2
        self._number += 1
        pieces: dict[int, list[MovePart]] = {}
        with Attempt() as asking:
            if not failed:
                holders = [(exchange.rank - distance) % exchange.size for distance, _ in turns]
                pieces = {one: self._wanted.take(one, turn[1]) for one, turn in zip(holders, turns, strict=True)}
        asked = self._ask(pieces)
        sent = [sum(request.nbytes for request in requests) for requests in asked]
        received = [sum(piece.nbytes for piece in pieces.get(rank, ())) for rank in range(exchange.size)]
        incoming, outgoing = self._incoming[number][: sum(received)], self._outgoing[number][: sum(sent)]
        with Attempt() as sending:
            at = 0
            for request in (request for requests in asked for request in requests if not failed):
                outgoing[at : at + request.nbytes].copy_(exchange.bytes_of(request))
                at += request.nbytes
        coming = _Coming(pieces, incoming, exchange.all_to_all(incoming, outgoing, received, sent))
        self._under_way.append(coming)
        if (error := asking.error or sending.error) is not None:
            raise error
        return coming

    def _agreed(self) -> Iterator[list[Turn]]:
        """The rounds; all ranks first exchange the lengths of their streams."""
        exchange, wanted = self._exchange, self._wanted
        longest = torch.tensor([wanted.volumes, wanted.pieces], dtype=torch.int64, device=exchange.device)
        exchange.maximum(longest)
        nbytes, pieces = longest.tolist()
        return rounds_of(nbytes, pieces, LIMIT_BYTES)

    def _ask(self, pieces: Mapping[int, Sequence[MovePart]]) -> list[list[Request]]:
        """Requests pieces of each holder; returns what each rank requests of this one."""
        exchange, ranks = self._exchange, range(self._exchange.size)
        mine = [
            (self._numbers[p.move.src.key], p.offset, p.count, p.move.src_dtype.number)  # type: ignore[attr-defined]
            for rank in ranks
            for p in pieces.get(rank, ())
        ]
        width = len(Request._fields)
        numbers = [len(pieces.get(rank, ())) for rank in ranks]
        theirs = self._passed(numbers, [1] * exchange.size, [1] * exchange.size)
        flat = [field for request in mine for field in request]
        found = self._passed(flat, [width * n for n in theirs], [width * n for n in numbers])
        asked = (Request(*found[at : at + width]) for at in range(0, len(found), width))
        return [[next(asked) for _ in range(number)] for number in theirs]

    def _passed(self, numbers: Sequence[int], received: Sequence[int], sent: Sequence[int]) -> list[int]:
        """Sends whole numbers to every rank, and returns those of every rank."""
        exchange = self._exchange
        outgoing = torch.tensor(numbers, dtype=torch.int64, device=exchange.device)
        incoming = torch.empty(sum(received), dtype=torch.int64, device=exchange.device)
        work = exchange.all_to_all(incoming, outgoing, received, sent)
        if work is not None:
            work.wait()
        found: list[int] = incoming.tolist()
        return found

    def _moves(self, coming: _Coming) -> Iterator[Move | None]:
        """The moves of a round; its buffers are not written to before they are carried out."""
        coming.wait()
        self._under_way.remove(coming)
        received = coming.incoming.cpu()
        placed: list[tuple[MovePart, int]] = []
        address = received.data_ptr()
        for holder in sorted(coming.pieces):
            for piece in coming.pieces[holder]:
                placed.append((piece, address))
                address += piece.nbytes
        placed.sort(key=lambda one: (one[0].move.tensor, one[0].move.dst_offset, one[0].first))
        for piece, address in placed:
            yield self._to_here(piece.move, piece.first, piece.count)._replace(src=_MEMORY, src_offset=address)
        yield None

    def _from_here(self, piece: Move | MovePart) -> Move:
        """A move of elements that this rank has itself; the engine casts those in another dtype."""
        if isinstance(piece, Move):
            return self._to_here(piece, 0, piece.count)
        move, store = piece.move, piece.move.src
        assert isinstance(store, RankStore)
        elements = self._exchange.tensors(store.key)
        first = piece.offset // move.src_dtype.itemsize
        swapped = place_of(elements)
        home, at = (_MEMORY, elements.data_ptr()) if swapped is None else swapped
        dtype = BY_TORCH_NAME[str(elements.dtype).removeprefix("torch.")]
        move = self._to_here(move, piece.first, piece.count)
        return move._replace(src=home, src_offset=at + first * dtype.itemsize, src_dtype=dtype)

    def _to_here(self, move: Move, first: int, count: int) -> Move:
        """Some elements of a move, with a destination that the engine knows."""
        if not isinstance(move.src, RankStore):
            at = move.dst_offset
        else:
            at, move = move.dst_offset + first * move.dst_dtype.itemsize, move._replace(count=count)
        if isinstance(move.dst, RankStore):
            return move._replace(dst=_MEMORY, dst_offset=self._exchange.tensors(move.dst.key).data_ptr() + at)
        return move._replace(dst_offset=at)


@dataclass(frozen=True, slots=True, eq=False)
class _Coming:
    """A round on its way: the pieces from each rank, and the places of their bytes, by rank."""

    pieces: Mapping[int, Sequence[MovePart]]
    incoming: torch.Tensor
    work: Any

    def wait(self) -> None:
        """Waits until the elements have arrived, and those that this rank sends have gone."""
        if self.work is not None:
            self.work.wait()
