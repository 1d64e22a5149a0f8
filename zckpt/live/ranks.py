"""Sends objects and elements between ranks that save together, by torch's collectives; with one process, does nothing.

For `export`. The ranks first meet (`team.meeting`), so that an error names an absent rank. An error on one rank after that is
raised on every rank at the next collective call, so that no rank waits for one that has stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from zckpt.live.device import CPU, device_of_messages
from zckpt.team.meeting import ENTRY_S, Meetings

Value = TypeVar("Value")


class Ranks:
    """All ranks of the default process group; one, where there is none. Making it waits for all of them.

    Args:
        what: they are about to do, for errors.

    Raises:
        InconsistentError: some ranks did not come; it names them.

    Attributes:
        rank: this process.
        size: all processes.
    """

    _meetings: ClassVar[tuple[Any, Meetings] | None] = None
    _groups: ClassVar[int] = 0

    def __init__(self, what: str) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1
        self._device = device_of_messages() if together else CPU
        if self.size > 1:
            self._meet(what)

    def _meet(self, what: str) -> None:
        """Meets all ranks; each default process group has a series of meetings of its own."""
        known, group = Ranks._meetings, dist.group.WORLD
        if known is None or known[0] is not group:
            Ranks._groups += 1
            Ranks._meetings = known = group, Meetings(f"live {Ranks._groups}", self.rank, self.size)
        known[1].meet(what, within_s=ENTRY_S)

    def gather(self, value: Value | Exception) -> list[Value | Exception]:
        """On rank 0 the values of all ranks, in their order; on other ranks an empty list."""
        if self.size == 1:
            return [value]
        out: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, out)
        return out or []

    def scatter(self, values: Sequence[Value] | Exception) -> Value:
        """On each rank its value of those that rank 0 gives; or rank 0's error, raised on all."""
        given: list[Any] = [values] * self.size if isinstance(values, Exception) else list(values)
        mine: list[Any] = given[:1] if self.size == 1 else [None]
        if self.size > 1:
            dist.scatter_object_list(mine, given if self.rank == 0 else None)
        if isinstance(mine[0], Exception):
            raise mine[0]
        found: Value = mine[0]
        return found

    def send(self, data: torch.Tensor, rank: int = 0) -> None:
        """Sends bytes to a rank."""
        dist.send(data.to(self._device), rank)

    def receive(self, nbytes: int, rank: int) -> torch.Tensor:
        """Receives bytes from a rank, into CPU memory."""
        data = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        dist.recv(data, rank)
        return data.cpu()
