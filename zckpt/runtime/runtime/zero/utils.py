"""`deepspeed.runtime.zero.utils`."""

from __future__ import annotations

import torch

from zckpt.base.errors import UnsupportedError as ZeRORuntimeException
from zckpt.runtime.optimizers.build import ELEMENTWISE

__all__ = ["ZeRORuntimeException", "is_zero_param", "is_zero_supported_optimizer"]


def is_zero_param(parameter: torch.Tensor) -> bool:
    """Whether a parameter is sharded at stage 3."""
    return hasattr(parameter, "ds_id")


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to treat each element by itself, so that it may see shards."""
    return type(optimizer).__name__ in ELEMENTWISE
