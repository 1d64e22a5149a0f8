"""Lion as DeepSpeed names it. Source: DeepSpeed 0.19.8, ops/lion/fused_lion.py and cpu_lion.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zckpt.runtime.ops.adam import refuse_half_states
from zckpt.runtime.optimizers.lion_lamb import Lion

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(Lion):
    """`Lion` with DeepSpeed's arguments.

    Args:
        params: parameters or groups.
        lr: as for `Lion`, and so are those that follow.
        betas: likewise.
        weight_decay: likewise.
        set_grad_none: `zero_grad` drops gradients; False fills them with zeros.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, betas, weight_decay)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients, or fills them with zeros."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class DeepSpeedCPULion(FusedLion):
    """The same for master weights in host memory.

    Args:
        model_params: parameters or groups.
        lr: as for `Lion`, and so are those that follow.
        betas: likewise.
        weight_decay: likewise.
        fp32_optimizer_states: always; False is refused.

    Raises:
        UnsupportedError: `fp32_optimizer_states` is False.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_half_states(self, fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)
