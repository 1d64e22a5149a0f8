"""Drops, reduces, saves and restores gradients of micro batches, wherever they are until the step that uses them.

For `training_run` and `saves`.
[Note: gradients between micro batches]
*rows*: this rank's rows, on the weight; stages 2 and 3 reduce after every micro batch, and every stage after the last one.
*whole*: of this rank alone, on the parameter as the computation sees it or beside it in the dtype of reductions; stages 0 and 1
before the last micro batch. *masters*: of replicated parameters, on the master. *units*: this rank's rows of all parameters of a
unit, reduced among the ranks that share it but not yet over the groups of ranks (MiCS).
Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py `post_backward`, _fsdp_param.py; checked by
tests/runtime/test_checkpoints.py and tests/distributed/test_matrix.py.

[Note: direct backwards] A script may begin one itself: `loss.backward()` instead of `engine.backward(loss)`. What
`engine.backward` does to the loss, a hook does here to each parameter's gradient: it divides by the number of micro batches. A
hook on the parameter sees every backward that reaches it, whatever the loss was computed from, and sees it once, also where
several outputs of one forward are in the loss. The loss scale of fp16 has to be in the loss before; without it the hook raises an
error, before anything is added to the gradients. A backward that an engine began is not touched: not by the other engines either,
through which its gradients may flow (a generator's through its discriminator).
Source: DeepSpeed 0.19.8, runtime/engine.py `_backward_prologue_per_tensor`, `_backward_post_hook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.variable import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from zckpt.runtime.sharding.older_torch import groups_of
from zckpt.runtime.sharding.parameter import ShardedParameter

Given = Mapping[str, Mapping[str, torch.Tensor]]
Gradients = dict[str, dict[str, torch.Tensor]]
"""Kind -> name of a parameter, or number of a unit -> gradient; see [Note: gradients between micro batches]."""

_UNUSED = "reduce_scatter_unused_params"
_SWITCHES = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", _UNUSED)
"""Settings of a unit for the gradients of its next backward."""


@torch.no_grad()
def forget(model: nn.Module, parameters: Sequence[ShardedParameter]) -> None:
    """Drops all gradients of a model."""
    for one in parameters:
        one.weight.grad = None
        if one.master is not None:
            one.master.grad = None
    for unit in units_of(model):
        unit._partial_reduce_output = None
        for parameter in unit.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
                unsharded.grad = None


@torch.no_grad()
def reduce_pending(model: nn.Module) -> None:
    """Reduces the gradients that are still whole, of backwards that were not the last of a step. Every rank calls it.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_state.py `_root_post_backward_final_callback`.
    """
    units = list(units_of(model))
    for unit in units:
        switches = [name for name in _SWITCHES if hasattr(unit, name)]
        before = {name: getattr(unit, name) for name in switches}
        unused = unit._partial_reduce_output is not None  # zeros carry it to the other groups of ranks
        wanted = {"reshard_after_backward": False, _UNUSED: unused or before.get(_UNUSED)}
        for name in switches:
            setattr(unit, name, wanted.get(name, True))
        unit.post_backward()
        for name, value in before.items():
            setattr(unit, name, value)
    for unit in units:
        unit.finalize_backward()
        unit._training_state = TrainingState.IDLE
        several = getattr(unit.comm_ctx, "reduce_scatter_states", None)
        for state in [unit.comm_ctx.reduce_scatter_state] if several is None else several:
            if state is not None and state.event is not None:
                unit.device_handle.current_stream().wait_event(state.event)
        if several is None:  # before torch 2.13
            unit.comm_ctx.reduce_scatter_state = None
        else:
            several.clear()


@torch.no_grad()
def take_gradients(model: nn.Module, parameters: Sequence[ShardedParameter]) -> Gradients:
    """All gradients of a model as they are, without a copy; a kind that has no gradient has no key."""
    found: Gradients = {"rows": {}, "whole": {}, "masters": {}, "units": {}}
    for one in parameters:
        if (grad := one.weight.grad) is not None:
            found["rows"][one.name] = grad._local_tensor if isinstance(grad, DTensor) else grad
        if one.master is not None and one.master.grad is not None:
            found["masters"][one.name] = one.master.grad
    names = names_of_places(parameters)
    for number, unit in enumerate(units_of(model)):
        if unit._partial_reduce_output is not None:
            found["units"][str(number)] = unit._partial_reduce_output
        for parameter in unit.fsdp_params:
            grad = parameter.unsharded_accumulated_grad
            fresh = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            if grad is None or fresh is None:
                grad = fresh if grad is None else grad
            else:
                grad = grad + fresh
            if grad is not None:
                found["whole"][names[place_of(parameter)]] = grad
    return {kind: grads for kind, grads in found.items() if grads}


def fits(model: nn.Module, parameters: Sequence[ShardedParameter], gradients: Given) -> bool:
    """Whether these gradients have the names and shapes of this rank's."""
    by_name = {one.name: one for one in parameters}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "rows": {name: tuple(one.local().shape) for name, one in by_name.items()},
        "whole": {name: tuple(one.shape) for name, one in by_name.items()},
        "masters": {name: tuple(one.master.shape) for name, one in by_name.items() if one.master is not None},
    }
    count = sum(1 for _ in units_of(model))
    return all(number.isdecimal() and int(number) < count for number in gradients.get("units", ())) and all(
        shapes[kind].get(name) == tuple(grad.shape) for kind in shapes for name, grad in gradients.get(kind, {}).items()
    )


@torch.no_grad()
def put_gradients(model: nn.Module, parameters: Sequence[ShardedParameter], gradients: Given) -> None:
    """Restores what `take_gradients` returned, in a model without gradients. The tensors themselves are used."""
    names = names_of_places(parameters)
    rows, whole, masters, units = (gradients.get(kind, {}) for kind in ("rows", "whole", "masters", "units"))
    for number, unit in enumerate(units_of(model)):
        if (partial := units.get(str(number))) is not None:
            unit._partial_reduce_output = partial.to(unit.device)
        for parameter in unit.fsdp_params:
            if (grad := whole.get(names[place_of(parameter)])) is not None:
                parameter.unsharded_accumulated_grad = grad.to(unit.device)
    for one in parameters:
        if (grad := rows.get(one.name)) is not None:
            weight, local = one.weight, one.local()
            grad = grad.to(local.device)
            if isinstance(weight, DTensor):
                mesh, placements = weight.device_mesh, weight.placements
                shape, stride = weight.shape, weight.stride()
                grad = DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride)
            weight.grad = grad
        if one.master is not None and (grad := masters.get(one.name)) is not None:
            one.master.grad = grad.to(one.master.device)


def units_of(model: nn.Module) -> Iterator[Any]:
    """The state that `fully_shard` keeps of each unit, once for modules that share one."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for unit in groups_of(module):
                if id(unit) not in seen:
                    seen.add(id(unit))
                    yield unit


def place_of(parameter: Any) -> tuple[int, str]:
    """The place where a parameter of `fully_shard` is registered: the module's `id`, and the name there."""
    return id(parameter._module_info.module), parameter._module_info.param_name


def names_of_places(parameters: Sequence[ShardedParameter]) -> dict[tuple[int, str], str]:
    """Place of registration -> name of the parameter."""
    return {(id(module), name): one.name for one in parameters for module, name in one.holders}


class DirectBackwards:
    """Follows the backwards that no engine began. `begin` is called when such a backward reaches the first parameter, and says
    by how much gradients are divided.

    Attributes:
        of_engines: how many backwards that run in this process an engine has begun.
        scaled: the loss of the one that a script has begun is multiplied by a loss scale.
    """

    of_engines: ClassVar[int] = 0
    scaled: ClassVar[bool] = False

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
        if DirectBackwards.of_engines:
            return grad
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._divisor = self._begin(DirectBackwards.scaled)
            self._task = task
        return grad if self._divisor == 1 else grad / self._divisor


@contextmanager
def of_engine() -> Iterator[None]:
    """Marks backwards inside the context as an engine's: their loss is divided and scaled already."""
    DirectBackwards.of_engines += 1
    try:
        yield
    finally:
        DirectBackwards.of_engines -= 1


def mark_scaled(loss: torch.Tensor) -> torch.Tensor:
    """Marks the backward of a loss as scaled."""

    def mark(grad: torch.Tensor) -> None:
        DirectBackwards.scaled = True
        Variable._execution_engine.queue_callback(forget_scaled)

    loss.register_hook(mark)
    return loss


def forget_scaled() -> None:
    """Clears the mark: no scaled backward runs now."""
    DirectBackwards.scaled = False
