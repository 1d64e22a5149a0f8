"""Provides collectives for a thread beside the training; the script's own process groups are left to the script.

For saves in the background. The group is gloo's, whatever the others are, and stands in no registry: it works until nobody holds
it any more, also when the script destroys its process groups meanwhile.
Source: torch 2.6 to 2.13, distributed/distributed_c10d.py `_new_process_group_helper`, csrc/distributed/c10d/init.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zckpt.team.meeting import WORK_S
from zckpt.team.rendezvous import own_connection


class OwnGroup:
    """Ranks that exchange host memory. Making it waits for all of them."""

    def __init__(self, name: str, rank: int, size: int, store: Any) -> None:
        from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]  # not in every build of torch

        self._store = store  # which this process may hold
        own = PrefixStore(f"zckpt/{name}", own_connection(store))
        self._group: Any = ProcessGroupGloo(own, rank, size, timedelta(seconds=WORK_S))

    def all_to_all(
        self, incoming: torch.Tensor, outgoing: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Any:
        """Exchanges parts of a vector with all ranks; returns the handle to wait for."""
        return self._group.alltoall_base(incoming, outgoing, list(received), list(sent))

    def maximum(self, numbers: torch.Tensor) -> None:
        """Replaces each number by the largest one of any rank."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._group.allreduce([numbers], options).wait()
