"""Optimizers as DeepSpeed names them: torch's fused kernels do the work, or the trainer's own where torch has none.

For scripts that make their own optimizer. Source: DeepSpeed 0.19.8, ops/adam/fused_adam.py and cpu_adam.py,
ops/adagrad/cpu_adagrad.py, ops/lamb/fused_lamb.py, ops/lion/fused_lion.py and cpu_lion.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zckpt.runtime.optimizers.lion_lamb import Lamb, Lion, call_closure, refuse_argument, with_states


class FusedAdam(torch.optim.AdamW):
    """Adam with decoupled weight decay, or without: states `exp_avg`, `exp_avg_sq`. Raises UnsupportedError for `amsgrad`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_argument(self, "amsgrad" * amsgrad, "Use torch.optim.AdamW(amsgrad=True).")
        self.adam_w_mode, self.set_grad_none = int(adam_w_mode), set_grad_none
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.defaults.update(bias_correction=bias_correction, fused=True, foreach=None)
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)
            group["fused"] = True  # not passed to torch: it would refuse the parameters of a model made under zero.Init

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients, or fills them with zeros."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; a closure is called first."""
        loss = call_closure(closure)
        decays = [group["weight_decay"] for group in self.param_groups]
        sizes = {id(group): group["params"] for group in self.param_groups}
        try:
            for group in self.param_groups:
                if not self.adam_w_mode and group["weight_decay"]:
                    params = [p for p in group["params"] if p.grad is not None]
                    torch._foreach_add_([p.grad for p in params], params, alpha=group["weight_decay"])
                    group["weight_decay"] = 0.0
                if not group.get("bias_correction", True):
                    self._without_correction(group)
                    group["params"] = []
            super().step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"], group["params"] = decay, sizes[id(group)]
        return loss

    def _without_correction(self, group: dict[str, Any]) -> None:
        """A step with averages taken as they are."""
        params, grads, first, second = with_states(self, group, ("exp_avg", "exp_avg_sq"))
        if not params:
            return
        (beta1, beta2), rate = group["betas"], float(group["lr"])
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        roots = torch._foreach_add(torch._foreach_sqrt(second), group["eps"])
        torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_addcdiv_(params, first, roots, -rate)


class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam` for master weights in host memory; raises UnsupportedError for `amsgrad`, and for states not in fp32."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_argument(self, "" if fp32_optimizer_states else "fp32_optimizer_states set to false", _HALF)
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


_HALF = "Leave that argument out: master weights and optimizer states are always fp32."


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """torch's Adagrad with DeepSpeed's arguments; raises UnsupportedError for `amsgrad`, and for states that are not fp32."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_argument(self, "" if fp32_optimizer_states else "fp32_optimizer_states set to false", _HALF)
        refuse_argument(self, "amsgrad" * amsgrad, "Leave amsgrad out.")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


FusedLamb = Lamb


class FusedLion(Lion):
    """`Lion` with DeepSpeed's arguments; `set_grad_none`: `zero_grad` drops gradients, False fills them with zeros."""

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
    """`FusedLion` for master weights in host memory; raises UnsupportedError for states that are not fp32."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_argument(self, "" if fp32_optimizer_states else "fp32_optimizer_states set to false", _HALF)
        super().__init__(model_params, lr, betas, weight_decay)
