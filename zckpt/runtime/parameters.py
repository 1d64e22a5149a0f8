"""Reads and writes one parameter of a model that trains: fp32 weight, gradient, optimizer states; whole, or this rank's rows.

For scripts, under DeepSpeed's names in `utils`. A parameter is what the engine's module holds (`engine.module.head.weight`).
Every rank calls the functions of whole tensors, with the same parameters in the same order; those of local parts are each rank's
own. Local parts are flat: this rank's rows of dim 0, row-major.
Source: DeepSpeed 0.19.8, utils/tensor_fragment.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zckpt.base.errors import UsageError
from zckpt.base.words import join_words
from zckpt.runtime.sharding.deferred import gather_rows
from zckpt.runtime.sharding.parameter import ShardedParameter, sharded_parameter_of

_OPTIMIZER = "_zckpt_optimizer"


def remember_optimizer(parameters: Iterable[ShardedParameter], optimizer: Optimizer) -> None:
    """Lets the functions about states find the optimizer of these parameters."""
    reference = weakref.ref(optimizer)
    for one in parameters:
        setattr(one.weight, _OPTIMIZER, reference)


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """The whole fp32 weight, in new memory; None for a parameter that is not trained."""
    one = _sharded_of(param)
    return None if one is None else _gather_whole(one, one.part())


@torch.no_grad()
def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Gives every rank its rows of a whole fp32 weight, which all have. Raises UsageError if `value` has another shape."""
    if (one := _sharded_of(param)) is not None:
        _write_part(one.part(), _rows_of(one, value))
        one.give_back()
        if one.whole is not None and one.is_whole:
            one.whole.copy_(value)
            one.settle()


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """A whole optimizer state, such as `exp_avg`, in new memory; zeros before the first step, None without an
    optimizer. Raises UsageError if the optimizer has no such state.
    """
    part = _state(one := _sharded_of(param), optim_state_key)
    return None if one is None or part is None else _gather_whole(one, part) if part.ndim else part.clone()


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Gives every rank its rows of a whole optimizer state, which all ranks have. Raises UsageError if `value` has
    another shape, the optimizer has no such state, or has made no step yet.
    """
    if (one := _sharded_of(param)) is not None:
        _write_part(_stored_state(one, optim_state_key), _rows_of(one, value))


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The whole gradient of the step so far, between the last backward and the step; None where there is none.

    It is the mean over ranks, divided by the number of micro batches and multiplied by the loss scale, in fp32.
    """
    part = _gradient(one := _sharded_of(param))
    if one is None or part is None:
        return None
    if one.replicated and dist.is_initialized() and dist.get_world_size() > 1:  # each rank's own until the step
        part = part.clone()
        dist.all_reduce(part)
        return part / dist.get_world_size()
    return _gather_whole(one, part.float())


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Gives every rank its rows of a whole gradient, which all have; without one before, does nothing. Raises UsageError
    if `value` has another shape.
    """
    part = _gradient(one := _sharded_of(param))
    if one is not None and part is not None:
        _write_part(part, _rows_of(one, value))


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Replaces the gradient of each parameter by the result of a function of it and the parameter."""
    for param in param_list:
        if (grad := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's rows of the fp32 weight, flat, in new memory; None for a parameter that is not trained."""
    one = _sharded_of(param)
    return None if one is None else one.part().reshape(-1).clone()


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets this rank's rows of the fp32 weight."""
    if (one := _sharded_of(param)) is not None:
        _write_part(one.part(), value)
        one.give_back()
        one.drop()


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """This rank's rows of an optimizer state, flat, in new memory; otherwise as `safe_get_full_optimizer_state`."""
    part = _state(_sharded_of(param), optim_state_key)
    return None if part is None else part.reshape(-1).clone()


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets this rank's rows of an optimizer state."""
    if (one := _sharded_of(param)) is not None:
        _write_part(_stored_state(one, optim_state_key), value)


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's rows of the gradient, flat, in new memory; otherwise as `safe_get_full_grad`."""
    part = _gradient(_sharded_of(param))
    return None if part is None else part.float().reshape(-1).clone()


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets this rank's rows of the gradient; without one before, nothing happens."""
    if (part := _gradient(_sharded_of(param))) is not None:
        _write_part(part, value)


def _sharded_of(param: torch.Tensor) -> ShardedParameter | None:
    """This rank's part of a parameter; None if it is not trained. Raises UsageError if no engine's model has it."""
    one = sharded_parameter_of(param)
    if one is None:
        raise UsageError(
            "the parameter is not one of a model that initialize got", found=f"a {type(param).__name__}",
            remedy="Take it from the engine: engine.module.head.weight, or engine.module.named_parameters().",
        )  # fmt: skip
    one.take_up()
    return one if one.trained and one.master is not None else None


def _gather_whole(one: ShardedParameter, part: torch.Tensor) -> torch.Tensor:
    """The whole tensor, in new memory on the device of the computation."""
    if one.replicated or not isinstance(one.weight, DTensor):
        return part.clone().view(one.shape)
    mesh = one.weight.device_mesh
    rows = part.to(mesh.device_type).view(one.local().shape)
    return gather_rows(rows, one.shape, mesh.get_group("shard")) if mesh["shard"].size() > 1 else rows.clone()


def _rows_of(one: ShardedParameter, value: torch.Tensor) -> torch.Tensor:
    if value.shape != one.shape:
        raise UsageError(
            f"the new value of {one.name!r} has another shape", found=f"shape {list(value.shape)}",
            expected=f"shape {list(one.shape)}", remedy="Pass a tensor of the whole parameter's shape.",
        )  # fmt: skip
    return value.reshape(-1)[one.elements]


@torch.no_grad()
def _write_part(part: torch.Tensor, value: torch.Tensor) -> None:
    if value.numel() != part.numel():
        raise UsageError(
            "the new value has another number of elements than this rank's part", found=f"{value.numel():,} elements",
            expected=f"{part.numel():,}", remedy="Pass what the function safe_get_local_... gives, changed.",
        )  # fmt: skip
    part.copy_(value.reshape(part.shape))


def _gradient(one: ShardedParameter | None) -> torch.Tensor | None:
    """This rank's rows of the gradient, in its own memory; None if it is not reduced yet, or there is none."""
    if one is None or one.weight.grad is None:
        return None if one is None or one.master is None else one.master.grad
    grad = one.weight.grad
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def _states(one: ShardedParameter) -> dict[str, Any] | None:
    optimizer = getattr(one.weight, _OPTIMIZER, lambda: None)()
    return None if optimizer is None or one.master is None else optimizer.state.get(one.master, {})


def _state(one: ShardedParameter | None, key: str) -> torch.Tensor | None:
    if one is None or (states := _states(one)) is None:
        return None
    return _state_of(states, one, key) if states else torch.zeros_like(one.part())


def _stored_state(one: ShardedParameter, key: str) -> torch.Tensor:
    if states := _states(one):
        return _state_of(states, one, key)
    raise UsageError(f"the optimizer has no states of {one.name!r} yet", remedy="Set them after the first step.")


def _state_of(states: dict[str, Any], one: ShardedParameter, key: str) -> torch.Tensor:
    found = states.get(key)
    if not isinstance(found, torch.Tensor):
        raise UsageError(
            f"the optimizer has no state {key!r} of {one.name!r}",
            expected=join_words(
                [repr(name) for name, value in states.items() if isinstance(value, torch.Tensor)], "or"
            ),
            remedy="Ask for one of these.",
        )
    return found
