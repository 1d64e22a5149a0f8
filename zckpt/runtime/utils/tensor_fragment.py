"""`deepspeed.utils.tensor_fragment`: functions of `zckpt.runtime.parameters`, and DeepSpeed's older names of three of them."""

from __future__ import annotations

import torch

from zckpt.runtime.parameters import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

__all__ = [
    "get_full_hp_grad",
    "get_full_hp_param",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "set_full_hp_param",
]


def get_full_hp_param(self: torch.Tensor, optim_state_key: str | None = None) -> torch.Tensor | None:
    """The whole fp32 weight of a parameter, or with a key one of its optimizer states."""
    if optim_state_key is None:
        return safe_get_full_fp32_param(self)
    return safe_get_full_optimizer_state(self, optim_state_key)


def set_full_hp_param(self: torch.Tensor, value: torch.Tensor, optim_state_key: str | None = None) -> None:
    """Sets what `get_full_hp_param` gives."""
    if optim_state_key is None:
        safe_set_full_fp32_param(self, value)
    else:
        safe_set_full_optimizer_state(self, value, optim_state_key)


def get_full_hp_grad(self: torch.Tensor) -> torch.Tensor | None:
    """The whole gradient of a parameter; see `safe_get_full_grad`."""
    return safe_get_full_grad(self)
