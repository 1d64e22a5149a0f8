"""Everything a checkpoint of a run consists of, as plain values: who holds which elements of what.

For the checkpoint writer and reader. `capture` copies nothing: its tensors are the live ones, valid until the next step.
[Note: from parts to flat groups]
Every tensor is a run of elements [start, start + count) of a row-major parameter, held by this rank; masters and states of one
parameter are cut alike. A group's parameters, in the order of `StateGroup.names`, laid end to end make DeepSpeed's flat group;
which ranks of a partition an element goes to is arithmetic on (name, element), so writing is routing (layouts.partition).
A replicated part is the same on every rank, so are the parts of ranks with the same `shard_rank`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zckpt.base.errors import InconsistentError
from zckpt.base.words import examples
from zckpt.runtime.engine import Engine
from zckpt.runtime.generators import rng_state, set_rng_state
from zckpt.runtime.gradients import Gradients, taken
from zckpt.runtime.sharded_parameter import ShardedParameter


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """What this rank holds of one parameter.

    Attributes:
        name: as `named_parameters` gave it before sharding; of tied ones the first.
        shape: of the whole parameter.
        start: the first element held here, row-major.
        count: elements held here; 0 is possible.
        replicated: every rank holds all elements.
        dtype: that the parameter is computed with: that of its module weights.
        weight: `count` elements: the fp32 master, or of a frozen parameter the numbers in `dtype`.
        trained: whether it requires gradients.
        group: the number of its parameter group; None where no optimizer updates it.
        states: per-element states (`exp_avg`, ...), `count` elements each; none before the first step.
        scalars: states of one number (`step`).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    count: int
    replicated: bool
    dtype: torch.dtype
    weight: torch.Tensor
    trained: bool
    group: int | None
    states: dict[str, torch.Tensor]
    scalars: dict[str, float]


@dataclass(frozen=True, slots=True)
class StateGroup:
    """A parameter group.

    Attributes:
        names: its parameters in the optimizer's order.
        options: what else the optimizer keeps for it: rates, betas, decay.
    """

    names: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunState:
    """A run between two micro batches.

    Attributes:
        stage: ZeRO stage.
        precision: fp32, bf16 or fp16.
        rank: of this process.
        world_size: all processes.
        shard_rank: which part of each parameter is held here.
        shard_size: how many parts there are; less than the world size at stage 0 and under MiCS.
        parts: in the model's order, tied parameters once.
        groups: in the optimizer's order; none for inference.
        aliases: names of tied parameters, with the name that is kept.
        buffers: persistent buffers by name, whole.
        optimizer: class name; None for inference.
        counters: `global_steps`, `global_samples`, `micro_steps`, `pending_micro_steps`, `skipped_steps`.
        scaler: state of the loss scale.
        scheduler: state of the schedule, where there is one.
        data: position of the loader, where there is one.
        rng: states of the random generators of this rank: `python`, `torch`, `cuda`, `numpy` where it is in use.
        config: the JSON, with every "auto" filled in.
        accumulation: micro batches per step.
        gradients: of the micro batches since the last step; see `gradients.taken`.
        differing: the ranks whose buffers are others than rank 0's; nobody knows when the state is captured.
    """

    stage: int
    precision: str
    rank: int
    world_size: int
    shard_rank: int
    shard_size: int
    parts: tuple[ParameterPart, ...]
    groups: tuple[StateGroup, ...]
    aliases: dict[str, str]
    buffers: dict[str, torch.Tensor]
    optimizer: str | None
    counters: dict[str, int]
    scaler: dict[str, Any]
    scheduler: dict[str, Any] | None
    data: dict[str, Any] | None
    rng: dict[str, Any]
    config: dict[str, Any]
    accumulation: int
    gradients: Gradients
    differing: frozenset[int] = frozenset()


_ONE_NUMBER = frozenset(("step", "eta", "mu", "mu_product"))
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "pending_micro_steps", "skipped_steps")


@torch.no_grad()
def capture(engine: Engine) -> RunState:
    """The state of a run, between two micro batches. No collective is called; every rank sees its own parts."""
    groups = [] if engine.optimizer is None else engine.optimizer.param_groups
    number = {id(master): index for index, group in enumerate(groups) for master in group["params"]}
    names = {id(held.master): held.name for held in engine.sharded.held if held.master is not None}
    mesh = engine.sharded.mesh
    return RunState(
        stage=engine.zero_optimization_stage(),
        precision=engine.settings.config.precision,
        rank=engine.global_rank,
        world_size=engine.world_size,
        shard_rank=mesh.get_local_rank("shard"),
        shard_size=mesh["shard"].size(),
        parts=tuple(_part(engine, held, number) for held in engine.sharded.held),
        groups=tuple(
            StateGroup(
                tuple(names[id(master)] for master in group["params"]),
                {name: value for name, value in group.items() if name != "params"},
            )
            for group in groups
        ),
        aliases=dict(engine.sharded.aliases),
        buffers=buffers_of(engine),
        optimizer=None if engine.optimizer is None else type(engine.optimizer).__name__,
        counters={name: getattr(engine, name) for name in _COUNTERS},
        scaler=engine.scaler.state(),
        scheduler=None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        data=None if engine.loader is None else engine.loader.state_dict(),
        rng=rng_state(),
        config=dict(engine.settings.raw),
        accumulation=engine.gradient_accumulation_steps(),
        gradients=taken(engine.module, engine.sharded.held),
    )


def _part(engine: Engine, held: ShardedParameter, number: Mapping[int, int]) -> ParameterPart:
    held.bind()
    states: dict[str, torch.Tensor] = {}
    scalars: dict[str, float] = {}
    if held.master is not None and engine.optimizer is not None:
        for name, value in engine.optimizer.state.get(held.master, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == held.master.shape and name not in _ONE_NUMBER:
                states[name] = value
            elif isinstance(value, torch.Tensor | int | float) and (
                not isinstance(value, torch.Tensor) or value.numel() == 1
            ):
                scalars[name] = float(value)
    return ParameterPart(
        name=held.name,
        shape=tuple(held.shape),
        start=held.start,
        count=held.count,
        replicated=held.replicated,
        dtype=held.dtype,
        weight=held.local() if held.master is None else held.master.data,
        trained=held.trained,
        group=number.get(id(held.master)),
        states=states,
        scalars=scalars,
    )


def buffers_of(engine: Engine) -> dict[str, torch.Tensor]:
    """The persistent buffers of the model, by name."""
    buffers: dict[str, torch.Tensor] = {}
    for prefix, module in engine.module.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return buffers


@torch.no_grad()
def restore(engine: Engine, state: RunState) -> None:
    """Puts a run back to where `capture` found it: bit by bit, on the same world, stage and model.

    The reader of checkpoints makes such a state for this world and stage first; `parts` may be fewer, `states` may be
    missing (an optimizer begins without). Nothing of `state` is kept.

    Raises:
        InconsistentError: parts that this rank does not hold. Nothing was changed.
    """
    held = {one.name: one for one in engine.sharded.held}
    wrong = [
        part.name
        for part in state.parts
        if part.name not in held
        or (part.start, part.count, tuple(part.shape))
        != (held[part.name].start, held[part.name].count, tuple(held[part.name].shape))
    ]
    if wrong:
        raise InconsistentError("parts of parameters that this rank does not hold", found=examples(wrong))
    for part in state.parts:
        put_part(engine, held[part.name], part.weight, part.states, part.scalars)
    buffers = buffers_of(engine)
    for name, value in state.buffers.items():
        buffers[name].copy_(value)
    if engine.optimizer is not None:
        for group, wanted in zip(engine.optimizer.param_groups, state.groups, strict=True):
            group.update(wanted.options)
    for name in _COUNTERS:
        setattr(engine, name, state.counters.get(name, 0))
    engine.scaler.load_state(state.scaler)
    if engine.lr_scheduler is not None and state.scheduler is not None:
        engine.lr_scheduler.load_state_dict(state.scheduler)
    if engine.loader is not None and state.data is not None:
        engine.loader.load_state_dict(state.data)
    set_rng_state(state.rng)


@torch.no_grad()
def put_part(
    engine: Engine,
    held: ShardedParameter,
    weight: torch.Tensor | None = None,
    states: Mapping[str, torch.Tensor] | None = None,
    scalars: Mapping[str, float] | None = None,
) -> None:
    """Sets this rank's part of one parameter.

    Args:
        engine: the engine.
        held: one of `engine.sharded.held`.
        weight: `count` elements for the master, or for the weight where there is no master.
        states: per-element states by name, `count` elements each.
        scalars: states of one number by name.
    """
    held.bind()
    target = held.local() if held.master is None else held.master.data
    if weight is not None:
        target.copy_(weight.view(target.shape))
        held.give_back()
    if engine.optimizer is None or held.master is None or (not states and not scalars):
        return
    own = engine.optimizer.state[held.master]
    for name, value in (states or {}).items():
        own[name] = value.to(held.master.device, torch.float32, copy=True).view(held.master.shape)
    group = next(g for g in engine.optimizer.param_groups if any(p is held.master for p in g["params"]))
    device = held.master.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    for name, number in (scalars or {}).items():
        like = own.get(name)
        if like is None or torch.is_tensor(like):
            own[name] = torch.full_like(like, number) if like is not None else torch.tensor(number, device=device)
        else:
            own[name] = type(like)(number)
