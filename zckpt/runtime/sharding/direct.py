"""Handles backwards that a script begins itself: `loss.backward()` instead of `engine.backward(loss)`.

For `engine`.
[Note: direct backwards]
What `engine.backward` does to the loss, a hook does here to each parameter's gradient: it divides by the number of micro
batches. A hook on the parameter sees every backward that reaches it, whatever the loss was computed from, and sees it once,
also where several outputs of one forward are in the loss. The loss scale of fp16 has to be in the loss before; without it the
hook raises an error, before anything is added to the gradients. A backward that an engine began is not touched: not by the
other engines either, through which its gradients may flow (a generator's through its discriminator).
Source: DeepSpeed 0.19.8, runtime/engine.py `_backward_prologue_per_tensor`, `_backward_post_hook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.variable import Variable

from zckpt.runtime.sharding.gradients import units_of
from zckpt.runtime.sharding.parameter import ShardedParameter


class _Now:
    """The backwards that run in this process: how many an engine has begun, and whether the loss of the one that a script
    has begun is multiplied by a loss scale.
    """

    of_engines = 0
    scaled = False


class DirectBackwards:
    """Follows the backwards that no engine began. `begin` is called when such a backward reaches the first parameter, and says
    by how much gradients are divided.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[ShardedParameter], begin: Callable[[bool], int]) -> None:
        self._begin = begin
        self._task = -1
        self._divisor = 1
        self._waiting: list[Any] = [one for unit in units_of(model) for one in unit.fsdp_params]
        for one in parameters:
            if one.trained:  # what `fully_shard` cuts gets a gradient from autograd only where it is used elsewhere
                one.weight.register_hook(self._received)
        self.attach()

    def attach(self) -> None:
        """Sets the hooks of parameters that have been gathered for the first time; `fully_shard` keeps the tensor after that."""
        left = []
        for one in self._waiting:
            whole = getattr(one, "_unsharded_param", None)
            if whole is None:
                left.append(one)
            elif whole.requires_grad:
                whole.register_hook(self._received)
        self._waiting = left

    def _received(self, grad: torch.Tensor) -> torch.Tensor:
        if _Now.of_engines:
            return grad
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._divisor = self._begin(_Now.scaled)
            self._task = task
        return grad if self._divisor == 1 else grad / self._divisor


@contextmanager
def of_engine() -> Iterator[None]:
    """Marks backwards inside the context as an engine's: their loss is divided and scaled already."""
    _Now.of_engines += 1
    try:
        yield
    finally:
        _Now.of_engines -= 1


def mark_scaled(loss: torch.Tensor) -> torch.Tensor:
    """Marks the backward of a loss as scaled."""

    def mark(grad: torch.Tensor) -> None:
        _Now.scaled = True
        Variable._execution_engine.queue_callback(forget_scaled)

    loss.register_hook(mark)
    return loss


def forget_scaled() -> None:
    """Clears the mark: no scaled backward runs now."""
    _Now.scaled = False
