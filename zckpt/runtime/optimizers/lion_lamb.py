"""Two optimizers that DeepSpeed has and torch does not have.

For `build` and `engine`. Both treat each element of a master weight by itself, but for Lamb's norms of whole tensors: the engine
gives Lamb a function that sums over shards.
Source: DeepSpeed 0.19.8, ops/lamb/fused_lamb.py, ops/lion/fused_lion.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zckpt.base.errors import UnsupportedError


class Lion(Optimizer):
    """The sign of an average of gradients: one state, `exp_avg`.

    An element with a gradient and an average of zero stays where it is, as in the paper (arXiv 2302.06675).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; a closure is called first."""
        loss = call_closure(closure)
        for group in self.param_groups:
            params, grads, averages = with_states(self, group, ("exp_avg",))
            if not params:
                continue
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            updates = torch._foreach_mul(averages, beta1)
            torch._foreach_add_(updates, grads, alpha=1 - beta1)
            updates = torch._foreach_sign(updates)
            torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-lr)
            torch._foreach_mul_(averages, beta2)
            torch._foreach_add_(averages, grads, alpha=1 - beta2)
        return loss


class Lamb(Optimizer):
    """Adam with a step for each tensor as long as the tensor, within limits: states `exp_avg`, `exp_avg_sq`. The limits
    are `min_coeff` and `max_coeff`, of the ratio of weight norm to update norm; `weight_decay` is added to the update.
    `sum_over_shards` adds up sums of squares, shape (2, parameters), over the ranks that hold rows of the same tensors.
    Raises UnsupportedError for `amsgrad` and `max_grad_norm`: the config's `gradient_clipping` clips.
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
        remedy = "Leave that argument out; gradient_clipping in the config clips the norm of all gradients."
        refuse_argument(self, "amsgrad" if amsgrad else "max_grad_norm" * bool(max_grad_norm), remedy)
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay, "max_coeff": max_coeff, "min_coeff": min_coeff,
        }  # fmt: skip
        self.sum_over_shards: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor] = lambda sums, params: sums
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; a closure is called first."""
        loss = call_closure(closure)
        for group in self.param_groups:
            params, grads, first, second = with_states(self, group, ("exp_avg", "exp_avg_sq"))
            if not params:
                continue
            (beta1, beta2), eps = group["betas"], group["eps"]
            torch._foreach_mul_(first, beta1)
            torch._foreach_add_(first, grads, alpha=1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
            if group["eps_inside_sqrt"]:
                roots = torch._foreach_sqrt(torch._foreach_add(second, eps))
            else:
                roots = torch._foreach_add(torch._foreach_sqrt(second), eps)
            updates = torch._foreach_div(first, roots)
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
            ratios = self._ratios(params, updates, group)
            rate = float(group["lr"])
            if group["bias_correction"]:
                step = float(self.state[params[0]]["step"])
                rate *= (1 - beta2**step) ** 0.5 / (1 - beta1**step)
            torch._foreach_mul_(updates, (ratios * -rate).tolist())
            torch._foreach_add_(params, updates)
        return loss

    def _ratios(
        self, params: list[torch.Tensor], updates: Sequence[torch.Tensor], group: Mapping[str, Any]
    ) -> torch.Tensor:
        squares = [torch.stack(torch._foreach_norm(list(ts))).square() for ts in (params, updates)]
        weights, steps = self.sum_over_shards(torch.stack(squares), params).sqrt()
        ratios = (weights / steps).clamp(group["min_coeff"], group["max_coeff"])
        return torch.where((weights != 0) & (steps != 0), ratios, torch.ones_like(ratios))


def with_states(optimizer: Optimizer, group: Mapping[str, Any], names: tuple[str, ...]) -> list[list[torch.Tensor]]:
    """Parameters with a gradient, their gradients, and the states of these names; counts the step."""
    params = [p for p in group["params"] if p.grad is not None]
    for p in params:
        state = optimizer.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state.update({name: torch.zeros_like(p) for name in names})
        state["step"] += 1
    return [params, [p.grad for p in params], *([optimizer.state[p][name] for p in params] for name in names)]


def refuse_argument(optimizer: Optimizer, what: str, remedy: str) -> None:
    """Raises UnsupportedError for an argument of an optimizer, if there is a `what`."""
    if what:
        raise UnsupportedError(f"{type(optimizer).__name__} with {what} is not built", remedy=remedy)


def call_closure(closure: Callable[[], float] | None) -> float | None:
    """The loss that a closure returns, computed with gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
