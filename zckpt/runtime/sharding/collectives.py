"""Gathers and reduces over gloo, faster than gloo itself: every rank sends to every other at once.

For `shard`, on CPUs. gloo gathers in a ring, of as many rounds as there are ranks, each as slow as the slowest; and it
reduces everything everywhere to keep a part. Measured in benchmarks/results_trainer.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zckpt.runtime.sharding.older_torch import communicate

_TAG = 0x7A63
"""The tag of messages that gather; a script's own messages in the same group have other tags."""


class _Buffers:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for one of the two ends."""
        return torch.empty(*size, dtype=dtype, device=device)


class SendToAll(_Buffers):
    """What `FSDPModule.set_custom_all_gather` takes: every rank sends its part to each other rank, right into its place."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        """Fills `output_tensor` with the `input_tensor` of all ranks, by rank."""
        rank, size = group.rank(), group.size()
        parts = output_tensor.chunk(size) if output_tensor.numel() else ()
        if parts and parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(input_tensor)
        others = [(rank + step) % size for step in range(1, size)] if parts else []
        works = [dist.irecv(parts[other], group=group, group_src=other, tag=_TAG) for other in reversed(others)]
        works += [dist.isend(input_tensor, group=group, group_dst=other, tag=_TAG) for other in others]
        for work in works:
            work.wait()  # type: ignore[union-attr]


class ExchangeAndAdd(_Buffers):
    """What `FSDPModule.set_custom_reduce_scatter` takes: every rank sends each other rank its part once, and adds up what
    it gets, in the order of ranks, half precision in fp32.
    """

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fills `output_tensor` with this rank's part of the sum, or mean, of all `input_tensor`."""
        got = torch.empty_like(input_tensor)
        dist.all_to_all_single(got, input_tensor, group=group)
        torch.sum(got.view(group.size(), -1), 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()


class InPlace:
    """Gathers and reduces on a rank that shares its parameters with no other: input and output are the same buffer."""

    _last: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for one end; the next call returns the same one for the other end."""
        buffer, self._last = self._last, None
        if buffer is None or buffer.shape != torch.Size(size) or buffer.dtype != dtype:
            buffer = self._last = torch.empty(*size, dtype=dtype, device=device)
        return buffer

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Copies the only part, if it is not there already."""
        output_tensor.copy_(input_tensor)


def use_on_gloo(model: nn.Module, group: Any) -> None:
    """Makes every unit of a model on CPUs gather and reduce in this way."""
    assert isinstance(model, FSDPModule)
    if group.size() == 1:
        communicate(model, None, InPlace)
    else:
        communicate(model, SendToAll, ExchangeAndAdd)
