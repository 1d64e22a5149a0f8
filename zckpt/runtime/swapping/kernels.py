"""Runs an optimizer step on rows in memory by the C++ kernel: fused Adam, AdamW, Adagrad, and Lion, bit for bit as torch.

For `stepping`, which takes the optimizer's own step for everything that `kernel_of` has no kernel for, and everywhere if the
C++ engine was not built. That step is also the reference that the kernel must equal: `kernel_of` tries both on some numbers,
since another version of torch, or another processor, may round elsewhere.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.optim import Adagrad, Adam, AdamW, Optimizer

from zckpt.base.dataclass import dataclass
from zckpt.runtime.optimizers.lion_lamb import Lion

try:
    from zckpt._core import step as native_step
except ImportError:  # built without a compiler
    native_step = None  # type: ignore[assignment]

_SAMPLE = 1037
"""The number of elements in the test of a kernel: whole vectors and a rest."""

_UNUSUAL = ("amsgrad", "maximize", "capturable", "differentiable")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A rule that the C++ engine knows, by its number in csrc/optimizers.h, with the names of its states in its order."""

    number: int
    states: tuple[str, ...]


_ADAM = Kernel(0, ("exp_avg", "exp_avg_sq"))
_KERNELS: dict[type[Optimizer], Kernel] = {
    Adam: _ADAM,
    AdamW: _ADAM,
    Adagrad: Kernel(1, ("sum",)),
    Lion: Kernel(2, ("exp_avg",)),
}


def kernel_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Kernel | None:
    """The kernel for an optimizer's group; None if there is none."""
    kernel = _KERNELS.get(type(optimizer))
    if native_step is None or kernel is None or any(group.get(name) for name in _UNUSUAL):
        return None
    if not group.get("fused", isinstance(optimizer, Lion)):
        return None
    if not all(isinstance(number, int | float) for number in (group.get("lr"), *group.get("betas", ()))):
        return None
    adds_decay = bool(group["weight_decay"]) and not _is_decoupled(optimizer, group)
    cls: Any = type(optimizer)
    return kernel if _equals_torch(cls, adds_decay) else None


def _is_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    return isinstance(optimizer, Lion) or bool(group.get("decoupled_weight_decay"))


@cache
def _equals_torch(cls: Any, adds_decay: bool) -> bool:
    """Whether kernel and optimizer give the same bits, in two steps on some numbers."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(_SAMPLE, generator=generator))
    own: dict[str, Any] = {} if cls is Lion else {"fused": True}
    optimizer = cls([weight], weight_decay=0.1 if adds_decay or cls is not Adam else 0.0, **own)
    kernel, group = _KERNELS[cls], optimizer.param_groups[0]
    mine = [weight.detach().clone(), *(torch.zeros(_SAMPLE) for _ in kernel.states)]
    for number in (1, 2):
        weight.grad = torch.randn(_SAMPLE, generator=generator)
        optimizer.step()
        step(kernel, rates(optimizer, group, number), mine[0], weight.grad, mine[1:], threads=1)
    theirs = [weight.detach(), *(optimizer.state[weight][name] for name in kernel.states)]
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def rates(optimizer: Optimizer, group: Mapping[str, Any], step: float) -> bytes:
    """The factors of a step, as `Rates` of csrc/optimizers.h."""
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    rate, root, eps = lr, 1.0, float(group.get("eps", 0.0))
    if isinstance(optimizer, Adam):
        rate, root = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    elif isinstance(optimizer, Adagrad):
        rate = lr / (1 + (step - 1) * group["lr_decay"])
    shrink, decay = (1 - lr * weight_decay, 0.0) if _is_decoupled(optimizer, group) else (1.0, weight_decay)
    return struct.pack("<9f", rate, shrink, decay, beta1, 1 - beta1, beta2, 1 - beta2, root, eps)


def step(
    kernel: Kernel,
    factors: bytes,
    weights: torch.Tensor,
    gradients: torch.Tensor,
    states: Sequence[torch.Tensor],
    threads: int,
) -> None:
    """Updates weights and states in place: contiguous fp32 vectors of one length in host memory."""
    first, second = (*(state.data_ptr() for state in states), 0)[:2]
    weight, gradient = weights.data_ptr(), gradients.data_ptr()
    native_step(kernel.number, factors, weight, gradient, first, second, weights.numel(), threads)
