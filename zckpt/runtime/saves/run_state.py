"""The state of a run as plain values: which rank holds which elements of what a checkpoint consists of.

For saving. `capture` copies nothing: its tensors are the live ones, valid until the next step.
[Note: from parts to flat groups]
Every tensor is a run of elements [start, start + count) of a row-major parameter, held by this rank; masters and states of one
parameter are cut alike. A group's parameters, in the order of its `names`, laid end to end make DeepSpeed's flat group;
which ranks of a partition an element goes to is arithmetic on (name, element), so writing is routing (`layouts.zero.partition`).
A replicated part is the same on every rank, so are the parts of ranks with the same `shard_rank`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zckpt.base.dataclass import dataclass
from zckpt.layouts.run.training import ParameterGroup
from zckpt.runtime.loader import rng_state
from zckpt.runtime.sharding.gradients import Gradients, take_gradients
from zckpt.runtime.sharding.parameter import ShardedParameter
from zckpt.runtime.swapping.stepping import ONE_NUMBER
from zckpt.runtime.training_run import TrainingRun


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """What this rank holds of one parameter and of its states.

    Attributes:
        parameter: its name, shape, and which elements are held here.
        weight: `count` elements: the fp32 master, or of a frozen parameter the numbers in its dtype.
        group: the number of its parameter group; None if no optimizer updates it.
        states: per-element states (`exp_avg`, ...), `count` elements each; empty before the first step.
        scalars: states of one number (`step`).
    """

    parameter: ShardedParameter
    weight: torch.Tensor
    group: int | None
    states: dict[str, torch.Tensor]
    scalars: dict[str, float]

    @property
    def name(self) -> str:
        """The name as `named_parameters` gave it before the model was sharded; for tied parameters the first one."""
        return self.parameter.name


@dataclass(frozen=True, slots=True)
class RunState:
    """A run between two micro batches.

    Attributes:
        run: for what does not change: config, ranks, optimizer.
        parts: in the model's order, tied parameters once.
        groups: in the optimizer's order, with what it keeps for them: rates, betas, decay; empty for inference.
        aliases: names of tied parameters, with the name that is kept.
        buffers: persistent buffers by name, whole.
        counters: `global_steps`, `global_samples`, `micro_steps`, `pending_micro_steps`, `skipped_steps`.
        scaler: state of the loss scale.
        scheduler: state of the schedule; None without one.
        data: position of the loader; None without one.
        rng: states of the random generators of this rank: `python`, `torch`, `cuda` or another kind of accelerator, `numpy`.
        gradients: of the micro batches since the last step; see `gradients.take_gradients`.
        differing: the ranks with buffers that differ from rank 0's; empty until the ranks have compared them.
    """

    run: TrainingRun
    parts: tuple[ParameterPart, ...]
    groups: tuple[ParameterGroup, ...]
    aliases: dict[str, str]
    buffers: dict[str, torch.Tensor]
    counters: dict[str, int]
    scaler: dict[str, Any]
    scheduler: dict[str, Any] | None
    data: dict[str, Any] | None
    rng: dict[str, Any]
    gradients: Gradients
    differing: frozenset[int] = frozenset()


_COUNTERS = ("global_steps", "global_samples", "micro_steps", "pending_micro_steps", "skipped_steps")


@torch.no_grad()
def capture(run: TrainingRun) -> RunState:
    """The state of a run, between two micro batches. No collective is called; every rank sees its own parts."""
    run.copies.give_back()
    if run.whole is not None:
        run.whole.take_up()
    group_of = {id(master): number for number, group in enumerate(run.groups) for master in group["params"]}
    return RunState(
        run=run,
        parts=tuple(_part(run, parameter, group_of) for parameter in run.sharded.parameters),
        groups=tuple(
            ParameterGroup(
                tuple(one.name for one in members), {key: group[key] for key in group if key != "params"}, {}, ()
            )
            for members, group in zip(group_members(run), run.groups, strict=True)
        ),
        aliases=dict(run.sharded.aliases),
        buffers=buffers_of(run),
        counters={name: getattr(run, name) for name in _COUNTERS},
        scaler=run.scaler.state(),
        scheduler=None if run.lr_scheduler is None else run.lr_scheduler.state_dict(),
        data=None if run.training_dataloader is None else run.training_dataloader.state_dict(),
        rng=rng_state(),
        gradients=take_gradients(run.module, run.sharded.parameters),
    )


def _part(run: TrainingRun, parameter: ShardedParameter, group_of: Mapping[int, int]) -> ParameterPart:
    parameter.bind()
    master = parameter.master
    states: dict[str, torch.Tensor] = {}
    scalars: dict[str, float] = {}
    if master is not None and run.optimizer is not None:
        for name, value in run.optimizer.state.get(master, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == master.shape and name not in ONE_NUMBER:
                states[name] = value
            elif isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                scalars[name] = float(value)
    return ParameterPart(parameter, parameter.part(), group_of.get(id(master)), states, scalars)


def group_members(run: TrainingRun) -> list[list[ShardedParameter]]:
    """The parts that this rank holds of the parameters in each of the optimizer's groups."""
    by_master = {id(one.master): one for one in run.sharded.parameters if one.master is not None}
    return [[by_master[id(master)] for master in group["params"]] for group in run.groups]


def buffers_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    """The persistent buffers of the model, by name."""
    found: dict[str, torch.Tensor] = {}
    for module, key, name in _places(run):
        buffer = module._buffers.get(key)
        if buffer is not None and key not in module._non_persistent_buffers_set:
            found[name] = buffer
    return found


def names_of_tensors(run: TrainingRun) -> list[str]:
    """The names of parameters and buffers in the order of the model's state dict, tied ones under each name."""
    return [name for _, _, name in _places(run)]


def _places(run: TrainingRun) -> Iterator[tuple[nn.Module, str, str]]:
    """The places where parameters and buffers are registered: the module, the name there, and the name in the model."""
    for prefix, module in run.module.named_modules():
        for key in (*module._parameters, *module._buffers):
            yield module, key, f"{prefix}.{key}" if prefix else key
