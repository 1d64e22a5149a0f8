"""Reduce-scatter over gloo, faster than gloo's own.

For `sharding`, on CPUs. gloo reduces everything everywhere and keeps a part; here every rank sends each other rank its part
once and adds up what it gets, in the order of ranks, half precision in fp32. Measured in benchmarks/results_trainer.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


class ExchangeAndAdd:
    """What `FSDPModule.set_custom_reduce_scatter` takes."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for one of the two ends."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fills `output_tensor` with this rank's part of the sum, or mean, of all `input_tensor`."""
        got = torch.empty_like(input_tensor)
        dist.all_to_all_single(got, input_tensor, group=group)
        torch.sum(got.view(group.size(), -1), 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()


def use_on_gloo(model: nn.Module, group: Any) -> None:
    """Lets every unit of a model reduce so, where its ranks talk over gloo."""
    if group.size() > 1 and "nccl" not in dist.get_backend(group):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(ExchangeAndAdd())  # type: ignore[arg-type]
