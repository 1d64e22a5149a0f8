"""Optimizers: those of the config, built on the master weights, and those that are handed in, moved onto them.

For `engine`. An optimizer sees this rank's rows of every master weight as a plain fp32 tensor, and nothing of sharding. That
is right for every optimizer that treats each element by itself, which is why others are refused where there are shards;
Lamb, which needs the norm of whole tensors, is told how to sum over shards.
Source: DeepSpeed 0.19.8, runtime/engine.py `_configure_basic_optimizer`, ops/lamb/fused_lamb.py, ops/lion/fused_lion.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.base.words import examples

Groups = list[dict[str, Any]]

ELEMENTWISE = frozenset(
    (
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "Lion",
        "Lamb",
    )
)
"""Optimizers that may see shards, by the names of their classes; Lamb by its own means."""

_NOT_BUILT = frozenset(("muon", "muadam", "muadamw", "musgd", "onebitadam", "onebitlamb", "zerooneadam"))
_ADAM = frozenset(("adam", "adamw"))


class Lion(Optimizer):
    """The sign of an average of gradients: one state, `exp_avg`.

    An element whose gradient and average are both zero stays where it is, as in the paper (arXiv 2302.06675).

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: weight of the average in the update, and in the next average.
        weight_decay: decoupled.
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params, grads, averages = _with_states(self, group, ("exp_avg",))
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
    """Adam whose step for each tensor is as long as the tensor, within limits: states `exp_avg`, `exp_avg_sq`.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: of the step size, for the first steps.
        betas: of the two averages.
        eps: added to the root.
        eps_inside_sqrt: added below the root instead.
        weight_decay: added to the update.
        max_coeff: largest ratio of weight norm to update norm.
        min_coeff: smallest.

    Attributes:
        sum_over_shards: adds up sums of squares, shape (2, parameters), over the ranks that hold rows of the same tensors.
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
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        self.sum_over_shards: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor] = lambda sums, params: sums
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; a closure is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params, grads, first, second = _with_states(self, group, ("exp_avg", "exp_avg_sq"))
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


def _with_states(optimizer: Optimizer, group: Mapping[str, Any], names: tuple[str, ...]) -> list[list[torch.Tensor]]:
    """Parameters that have a gradient, their gradients, and the states of these names; counts the step."""
    params = [p for p in group["params"] if p.grad is not None]
    for p in params:
        state = optimizer.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state.update({name: torch.zeros_like(p) for name in names})
        state["step"] += 1
    return [params, [p.grad for p in params], *([optimizer.state[p][name] for p in params] for name in names)]


def build_optimizer(kind: str, params: Mapping[str, Any], groups: Groups, device: torch.device) -> Optimizer:
    """The optimizer that a config asks for, with torch's fused kernels where torch has them for the device.

    Args:
        kind: `optimizer.type`; upper and lower case are the same for DeepSpeed's own names.
        params: `optimizer.params`.
        groups: parameter groups of master weights.
        device: where the master weights are.

    Raises:
        UsageError: no such optimizer, or an argument that it does not have or does not take.
        UnsupportedError: one of DeepSpeed's that is not built.
    """
    kwargs: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in params.items()
    }
    cls: Any
    cls, name = _class_of(kind), kind.lower()
    if name in _ADAM:
        cls, kwargs = _adam(name, kwargs)
    accepted = inspect.signature(cls).parameters
    unknown = [key for key in kwargs if key not in accepted]
    if unknown:
        raise UsageError(
            f"arguments that {kind} does not take",
            found=f"optimizer.params: {examples(unknown)}",
            expected=examples([key for key in accepted if key != "params"], 20),
        )
    if "fused" in accepted and kwargs.get("fused") is None and not kwargs.get("foreach"):
        kwargs["fused"] = device.type == "cpu" or (device.type == "cuda" and cls is not torch.optim.Adagrad)
    try:
        if not isinstance(kwargs.get("lr", 0.0), int | float):
            raise TypeError(f"lr is {kwargs['lr']!r}")
        built: Optimizer = cls(groups, **kwargs)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"arguments that {kind} refuses", found=f"optimizer.params {dict(params)}: {error}",
            remedy="Correct the value; its groups may have values of their own, in model_parameters.",
        ) from error  # fmt: skip
    return built


def _class_of(kind: str) -> type[Optimizer]:
    own = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
    known: dict[str, type[Optimizer]] = {**own, "lion": Lion, "lamb": Lamb}
    if kind.lower() in known:
        return known[kind.lower()]
    if kind.lower() in _NOT_BUILT:
        raise UnsupportedError(
            "an optimizer that is not built",
            found=f"optimizer.type {kind!r}",
            expected="Adam, AdamW, Adagrad, Lion, SGD, Lamb, or a class of torch.optim",
        )
    found = getattr(torch.optim, kind, None)
    if not (isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer):
        raise UsageError(
            "an optimizer of unknown type",
            found=f"optimizer.type {kind!r}",
            expected="Adam, AdamW, Adagrad, Lion, SGD, Lamb, or a class of torch.optim",
        )
    return found


def _adam(name: str, kwargs: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    """DeepSpeed's rules: "Adam" decouples weight decay unless `adam_w_mode` is false; no decay unless asked for."""
    decoupled = kwargs.pop("adam_w_mode", True) or name == "adamw"
    if not kwargs.pop("torch_adam", False):
        kwargs.setdefault("weight_decay", 0.0)  # torch's own AdamW has 0.01
    for key in ("fp32_optimizer_states", "bias_correction"):
        if not kwargs.pop(key, True):
            raise UnsupportedError(f"Adam with {key} false", remedy="Remove it from optimizer.params.")
    kwargs.pop("set_grad_none", None)
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), kwargs


def check_elementwise(optimizer: Optimizer, *, allowed: bool) -> None:
    """Raises for an optimizer that may look across elements, unless allowed.

    Raises:
        UsageError: its class is none of those known to treat each element by itself.
    """
    if allowed or type(optimizer).__name__ in ELEMENTWISE:
        return
    raise UsageError(
        "an optimizer of unknown kind under sharding",
        found=type(optimizer).__name__,
        expected=f"one of those that treat each element by itself: {', '.join(sorted(ELEMENTWISE))}",
        remedy="It would see this rank's rows only. If it is one of that kind, say zero_allow_untested_optimizer: true; "
        "otherwise train at stage 0, where it sees whole tensors.",
    )
