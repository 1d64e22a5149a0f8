"""Adagrad as DeepSpeed names it: torch's. Source: DeepSpeed 0.19.8, ops/adagrad/cpu_adagrad.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zckpt.base.errors import UnsupportedError
from zckpt.runtime.ops.adam import refuse_half_states

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """torch's Adagrad with DeepSpeed's arguments.

    Args:
        model_params: parameters or groups.
        lr: learning rate.
        eps: added to the root.
        weight_decay: added to the gradient.
        amsgrad: refused, as Adagrad has none.
        fp32_optimizer_states: always; False is refused.

    Raises:
        UnsupportedError: `amsgrad` is set, or `fp32_optimizer_states` is not.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_half_states(self, fp32_optimizer_states)
        if amsgrad:
            raise UnsupportedError("DeepSpeedCPUAdagrad with amsgrad is not built", remedy="Leave amsgrad out.")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
