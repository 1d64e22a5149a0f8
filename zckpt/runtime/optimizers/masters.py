"""Makes the master weights that an optimizer gets from a sharded model's parameters.

For `start`. An optimizer sees this rank's rows of every master weight as a plain fp32 tensor. Parameters are known by the `id`
that they had before the model was sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zckpt.base.errors import UsageError
from zckpt.base.words import examples
from zckpt.runtime.config.read import Settings
from zckpt.runtime.optimizers.build import Groups, build_optimizer, check_elementwise
from zckpt.runtime.sharding.parameter import ShardedParameter


def groups_of(model: nn.Module, model_parameters: Iterable[Any] | None) -> Groups:
    """Parameter groups, each with its own settings: those given, or one of all parameters. Frozen parameters are left out."""
    given = list(model.parameters() if model_parameters is None else model_parameters)
    groups = [{**group} for group in given] if given and isinstance(given[0], dict) else [{"params": given}]
    for group in groups:
        several = [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
        several = [p[1] if isinstance(p, tuple) else p for p in several]
        group["params"] = [p for p in several if p.requires_grad and p.numel()]
    return [group for group in groups if group["params"]]


def chosen_of(model: nn.Module, groups: Groups, optimizer: object) -> set[nn.Parameter]:
    """The parameters that will be trained, of a model that is not sharded yet: those of an optimizer that was made over
    parameters, or else of the groups. Raises UsageError if some are not the model's.
    """
    if isinstance(optimizer, Optimizer):
        groups = optimizer.param_groups
    chosen = {p for group in groups for p in group["params"] if p.numel()}
    strange = [f"{tuple(p.shape)}" for p in chosen - set(model.parameters())]
    if strange:
        raise UsageError(
            "the optimizer has parameters that the model does not have",
            found=f"{len(strange):,} of them, of shapes {examples(strange)}",
            remedy="Make the optimizer over the parameters of the model that you pass to initialize.",
        )
    return chosen


def optimizer_on_masters(
    settings: Settings,
    given: Optimizer | Callable[[Any], Optimizer] | None,
    groups: Groups,
    masters: Mapping[int, ShardedParameter],
    *,
    is_cut: bool,
) -> Optimizer:
    """Makes the masters, and the optimizer on them: the given one, one by the given function, or the config's. `groups` are
    of the parameters as they were before the model was sharded, `masters` has what this rank holds of each by `id`; `is_cut`:
    they are rows of larger tensors. Raises UsageError if it cannot be made, or may look across elements where masters are
    cut.
    """
    if not masters:
        raise UsageError(
            "the model has no parameter to train", expected="parameters with requires_grad",
            remedy="Set requires_grad of some parameters, or for inference leave out the optimizer.",
        )  # fmt: skip
    for sharded in masters.values():
        sharded.make_master()
    if isinstance(given, Optimizer):
        built = _move_to_masters(given, masters)
    else:
        groups = [{**group, "params": [masters[id(p)].master for p in group["params"]]} for group in groups]
        if given is not None:
            built = given(groups)
        else:
            config, device = settings.config.optimizer, groups[0]["params"][0].device
            built = build_optimizer(config.type or "", config.params, groups, device)
    if is_cut:
        check_elementwise(built, allowed=settings.config.zero_allow_untested_optimizer)
    return built


def _move_to_masters(optimizer: Optimizer, masters: Mapping[int, ShardedParameter]) -> Optimizer:
    """An optimizer that was made over the plain model, moved to the masters with its states."""
    for group in optimizer.param_groups:
        before = [p for p in group["params"] if id(p) in masters]
        group["params"] = [masters[id(p)].master for p in before]
        for p in before:
            state, sharded = optimizer.state.pop(p, None), masters[id(p)]
            if state:
                rows = {name: _rows_of_state(value, sharded) for name, value in state.items()}
                optimizer.state[sharded.master] = rows  # type: ignore[index]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def _rows_of_state(value: Any, sharded: ShardedParameter) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != sharded.shape or not value.ndim:
        return value
    if value.is_meta:
        raise UsageError(
            "the optimizer has states for parameters that have no numbers yet",
            found=f"states of {sharded.name!r}, in a model made under zero.Init",
            remedy="Pass the optimizer as a function: initialize(optimizer=lambda params: Adagrad(params)).",
        )
    part = value.reshape(-1)[sharded.elements].view(sharded.part().shape)
    return part.to(sharded.part().device, copy=True)
