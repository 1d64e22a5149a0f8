"""Lamb as DeepSpeed names it. Source: DeepSpeed 0.19.8, ops/lamb/fused_lamb.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zckpt.base.errors import UnsupportedError
from zckpt.runtime.optimizers.lion_lamb import Lamb
from zckpt.runtime.unbuilt import unbuilt

__all__ = ["FusedLamb", "OnebitLamb"]

OnebitLamb = unbuilt("OnebitLamb")


class FusedLamb(Lamb):
    """`Lamb` with DeepSpeed's arguments.

    Args:
        params: parameters or groups.
        lr: as for `Lamb`, and so are those that follow.
        bias_correction: likewise.
        betas: likewise.
        eps: likewise.
        eps_inside_sqrt: likewise.
        weight_decay: likewise.
        max_grad_norm: refused; the config's `gradient_clipping` clips.
        max_coeff: likewise.
        min_coeff: likewise.
        amsgrad: refused, as in DeepSpeed.

    Raises:
        UnsupportedError: `amsgrad` or `max_grad_norm` is set.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad or max_grad_norm:
            what = "amsgrad" if amsgrad else "max_grad_norm"
            remedy = "Leave that argument out; gradient_clipping in the config clips the norm of all gradients."
            raise UnsupportedError(f"FusedLamb with {what} is not built", remedy=remedy)
        super().__init__(params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff, min_coeff)
