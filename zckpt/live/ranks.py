"""Sends objects and elements between ranks that save together, by torch's collectives; with one process, does nothing.

For `export` and `delta`. The ranks first meet (`team.meeting`), so that an error names an absent rank. An error on one rank after
that is raised on every rank by the next `tell`, so that no rank waits for one that has stopped. No rank gets or sends more than
the others but by their number: what all have to say goes to rank 0 in pairs (`fold`), and comes back by a tree (`tell`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from zckpt.live.device import CPU, device_of_messages
from zckpt.team.meeting import ENTRY_S, Meetings

Value = TypeVar("Value")


class Ranks:
    """All ranks of the default process group; one, where there is none. Making it waits for all of them. `what`: they are about
    to do, for errors; `word`: what this rank says to the others, as JSON has it. Raises InconsistentError that names them if some
    ranks did not come.

    Attributes:
        rank: this process.
        size: all processes.
        alike: whether all said the same word.
    """

    _meetings: ClassVar[tuple[Any, Meetings] | None] = None
    _groups: ClassVar[int] = 0

    def __init__(self, what: str, word: Any = None) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1
        self.alike = True
        self._device = device_of_messages() if together else CPU
        if self.size > 1:
            self._meet(what, word)

    def _meet(self, what: str, word: Any) -> None:
        """Meets all ranks; each default process group has a series of meetings of its own."""
        known, group = Ranks._meetings, dist.group.WORLD
        if known is None or known[0] is not group:
            Ranks._groups += 1
            Ranks._meetings = known = group, Meetings(f"live {Ranks._groups}", self.rank, self.size)
        words = known[1].meet(what, word, within_s=ENTRY_S)
        self.alike = all(one == words[0] for one in words)

    def swap(self, values: Sequence[Any]) -> list[Any]:
        """Sends each rank its value of `values`; returns the values for this rank. None costs nothing."""
        if self.size == 1:
            return list(values)
        packed = [b"" if value is None else pickle.dumps(value) for value in values]
        sent = torch.tensor([len(one) for one in packed], device=self._device)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        lengths: list[int] = came.tolist()
        outgoing = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8) if any(packed) else torch.empty(0)
        incoming = torch.empty(sum(lengths), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(incoming, outgoing.to(incoming), lengths, sent.tolist())
        data = memoryview(incoming.cpu().numpy())  # type: ignore[arg-type]
        return [pickle.loads(data[a:b]) if a < b else None for a, b in pairwise(accumulate(lengths, initial=0))]

    def fold(self, value: Value, join: Callable[[Value, Value], Value]) -> Value | None:
        """Joins the values of all ranks in their order on rank 0; None on others. Every rank receives only a few. `join` makes
        one value of two; the first is of lower ranks.
        """
        step = 1
        while step < self.size:
            if self.rank & step:
                self.send_value(value, self.rank - step)
                return None
            if self.rank + step < self.size:
                value = join(value, self.receive_value(self.rank + step))
            step *= 2
        return value

    def tell(self, value: Value | Exception | None) -> Value:
        """Returns rank 0's value on every rank, or raises its error on all."""
        told: list[Any] = [value]
        if self.size > 1:
            dist.broadcast_object_list(told, src=0)
        if isinstance(told[0], Exception):
            raise told[0]
        found: Value = told[0]
        return found

    def send_value(self, value: Any, rank: int) -> None:
        """Sends an object to a rank."""
        packed = pickle.dumps(value)
        self.send(torch.tensor([len(packed)]).view(torch.uint8), rank)
        self.send(torch.frombuffer(bytearray(packed), dtype=torch.uint8), rank)

    def receive_value(self, rank: int) -> Any:
        """Receives an object from a rank."""
        nbytes = int(self.receive(8, rank).view(torch.int64))
        return pickle.loads(memoryview(self.receive(nbytes, rank).numpy()))  # type: ignore[arg-type]

    def send(self, data: torch.Tensor, rank: int = 0) -> None:
        """Sends bytes to a rank."""
        dist.send(data.to(self._device), rank)

    def receive(self, nbytes: int, rank: int) -> torch.Tensor:
        """Receives bytes from a rank, into CPU memory."""
        data = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        dist.recv(data, rank)
        return data.cpu()
