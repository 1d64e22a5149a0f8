"""Describes what a run has to save, in terms of the layouts: a catalog of what all ranks hold, and values beside it.

For saving. Nothing is copied: a `RankStore` stands for what each rank holds. Every rank makes the same description, except for
what is its own: its random generators and, at stage 3, its client state.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch

from zckpt.base.errors import UsageError
from zckpt.base.words import examples
from zckpt.containers import Placeholder
from zckpt.core.catalog import Catalog, Replica, Role, Source, TensorEntry
from zckpt.core.dtypes import BF16, F16, F32, F64, DType
from zckpt.core.evidence import LIVE
from zckpt.core.fragments import Fragment
from zckpt.layouts.run.training import ParameterGroup, Training, new_scaler
from zckpt.layouts.save.module_states import RESERVED
from zckpt.layouts.zero.torch_files import Inline
from zckpt.layouts.zero.write import ZeroTarget
from zckpt.live.plain_values import dtype_of, to_inert
from zckpt.runtime.saves.exchange import EVERY, RankStore
from zckpt.runtime.saves.run_state import ParameterPart, RunState, names_of_tensors
from zckpt.runtime.sharding.parameter import ShardedParameter
from zckpt.runtime.training_run import TrainingRun
from zckpt.runtime.world import elements_of

DEEPSPEED = "0.19.8"
"""The version of DeepSpeed that these files are from."""

OWN = "zckpt"
"""The key for data that DeepSpeed's files have no place for."""

_PRECISIONS = {"fp32": F32, "bf16": BF16, "fp16": F16}


Described = tuple[Catalog, dict[str, dict[str, TensorEntry]]]
"""The tensors of all ranks; from save to save only their numbers change. Weights in the order of the model's state dict, masters
as parameters, their module weights as replicas; and parameter -> state of the optimizer -> its elements.
"""


def signature(state: RunState) -> Hashable:
    """The facts that a description depends on."""
    parts = tuple(
        (one.name, one.group, one.weight.dtype, *((name, state.dtype) for name, state in one.states.items()))
        for one in state.parts
    )
    buffers = tuple((name, tuple(buffer.shape), buffer.dtype) for name, buffer in state.buffers.items())
    groups = tuple(group.names for group in state.groups)
    return parts, buffers, groups


def tensors_of(state: RunState) -> dict[Hashable, torch.Tensor]:
    """What this rank holds, as vectors, by the keys of a description, in the same order on every rank."""
    found: dict[Hashable, torch.Tensor] = {}
    for part in state.parts:
        found[part.name, ""] = part.weight.detach().reshape(-1)
        found |= {(part.name, name): tensor.detach().reshape(-1) for name, tensor in part.states.items()}
    return found | {(name, "buffer"): buffer.detach().reshape(-1) for name, buffer in state.buffers.items()}


def describe(state: RunState) -> Described:
    """The description of what all ranks hold."""
    size = state.run.sharded.size
    found: dict[str, TensorEntry] = {}
    states: dict[str, dict[str, TensorEntry]] = {}
    for part in state.parts:
        parameter = part.parameter
        if part.group is None:
            found[part.name] = _entry(parameter, size, dtype_of(part.weight.dtype), "frozen")
            continue
        dtype = dtype_of(parameter.dtype)
        module = F32 if dtype == F64 else dtype
        replicas = (Replica(module, _fragments(parameter, size, module)),)
        found[part.name] = replace(_entry(parameter, size, F32, "parameter"), replicas=replicas)
        states[part.name] = {
            name: _entry(parameter, size, dtype_of(tensor.dtype), "parameter", name)
            for name, tensor in part.states.items()
        }
    for name, buffer in state.buffers.items():
        dtype = dtype_of(buffer.dtype)
        store = RankStore(name, buffer.numel() * dtype.itemsize, rank=EVERY, key=(name, "buffer"))
        fragments = (Fragment(store, 0, 0, buffer.numel()),)
        found[name] = TensorEntry(name, tuple(buffer.shape), dtype, "buffer", fragments)
    ordered = {name: found[name] for name in names_of_tensors(state.run) if name in found}
    return Catalog(ordered, Source("live", "the run"), LIVE, state.aliases), states


def describe_training(
    state: RunState, states: Mapping[str, Mapping[str, TensorEntry]], client: Mapping[str, Any], *, copied: bool
) -> Training:
    """The data beside the weights. `copied` as for `to_inert`. Raises UsageError if the client state uses a name of the
    checkpoint's own, UnsupportedError if something in it cannot be written.
    """
    run = state.run
    config = run.settings.config
    taken = sorted(str(key) for key in client if key in RESERVED or key == OWN)
    if taken:
        raise UsageError(
            "client_state uses names that the checkpoint itself uses", found=examples(taken),
            remedy="Choose other names for these keys of client_state.",
        )  # fmt: skip
    parts = {part.name: part for part in state.parts}
    groups = []
    for number, group in enumerate(state.groups):
        members = [parts[name] for name in group.names]
        names = tuple(dict.fromkeys(name for part in members for name in part.states))
        scalars = {name: _number(value) for part in members[:1] for name, value in part.scalars.items()}
        settings = to_inert(group.settings, f"options of parameter group {number}", copied=copied)
        groups.append(ParameterGroup(group.names, settings, scalars, names))
    own = {
        "version": 1,
        "optimizer": None if run.basic_optimizer is None else type(run.basic_optimizer).__name__,
        "micro_steps": state.counters["micro_steps"],
        "pending_micro_steps": state.counters["pending_micro_steps"],
        "world_size": run.world_size,
        "differing_buffers": sorted(state.differing),
        "scaler": dict(state.scaler),
        "data": to_inert(state.data, "the loader's position", copied=copied),
        "scalars": _odd_scalars(state, parts),
        "groups": [list(group.names) for group in state.groups],
    }
    if "all" in state.rng:
        own["rngs"] = [to_inert(rng, "the random generators") for rng in state.rng["all"]]
    model = {
        "lr_scheduler": to_inert(state.scheduler, "the schedule", copied=copied),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": state.counters["skipped_steps"],
        "global_steps": state.counters["global_steps"],
        "global_samples": state.counters["global_samples"],
        "ds_config": to_inert(run.settings.raw, "the config"),
        "ds_version": DEEPSPEED,
        OWN: own,
        **to_inert(client, "client_state", copied=copied),
    }
    return Training(
        groups=tuple(groups),
        states=states,
        scaler=_scaler(state) | ({"clip_grad": config.gradient_clipping} if run.settings.zero.stage in (1, 2) else {}),
        model=model,
        precision=_PRECISIONS[config.precision],
        form="bf16" if _is_bf16_optimizer(run) else "zero",
        beside={} if "all" in state.rng else {OWN: {"rng": to_inert(state.rng, "the random generators")}},
    )


def target_of(run: TrainingRun, place: str, *, no_frozen: bool = False) -> ZeroTarget:
    """The save that DeepSpeed's engine would write from the same config, in a directory of the name `place`; `no_frozen`:
    without frozen parameters.
    """
    zero = run.settings.zero
    return ZeroTarget(
        tag=place,
        stage=zero.stage,
        world_size=run.sharded.size,
        precision=_PRECISIONS[run.settings.config.precision],
        form="bf16" if _is_bf16_optimizer(run) else "zero",
        round_robin=zero.round_robin_gradients,
        align=zero.parameter_alignment,
        sub_group_size=max(1, zero.sub_group_size),
        plain=True,
        copies=run.world_size // run.sharded.size,
        no_frozen=no_frozen,
    )


def _is_bf16_optimizer(run: TrainingRun) -> bool:
    """Whether DeepSpeed would use its bf16 optimizer. Source: 0.19.8, runtime/engine.py `_do_optimizer_sanity_check`."""
    config, zero = run.settings.config, run.settings.zero
    offloads = zero.offload_optimizer is not None and zero.offload_optimizer.device != "none"
    fp32 = config.data_types.grad_accum_dtype == "fp32"
    return config.precision == "bf16" and zero.stage == 1 and fp32 and not offloads


def _entry(parameter: ShardedParameter, size: int, dtype: DType, role: Role, kind: str = "") -> TensorEntry:
    fragments = _fragments(parameter, size, dtype, kind)
    return TensorEntry(parameter.name, tuple(parameter.shape), dtype, role, fragments)


def _fragments(parameter: ShardedParameter, size: int, dtype: DType, kind: str = "") -> tuple[Fragment, ...]:
    """All elements, in the store that stands for what `size` ranks hold."""
    numel = parameter.shape.numel()
    step = 0 if parameter.replicated or size == 1 else elements_of(parameter.shape, size, 0)[1]
    title = f"{parameter.name} {kind}".rstrip()
    store = RankStore(title, numel * dtype.itemsize, rank=EVERY, step=step, key=(parameter.name, kind))
    return (Fragment(store, 0, 0, numel),)


def _number(value: float) -> Inline:
    return Inline(F32, (), struct.pack("<f", value))


def _odd_scalars(state: RunState, parts: Mapping[str, ParameterPart]) -> dict[str, dict[str, float]]:
    """States of one number, for parameters that differ from others of their group."""
    odd: dict[str, dict[str, float]] = {}
    for group in state.groups:
        first = parts[group.names[0]].scalars
        odd |= {name: dict(parts[name].scalars) for name in group.names if parts[name].scalars != first}
    exact = {name for part in state.parts for name, value in part.scalars.items() if _round_to_fp32(value) != value}
    if exact:  # numbers that fp32 does not hold
        odd |= {part.name: dict(part.scalars) for part in state.parts if exact & part.scalars.keys()}
    return odd


def _round_to_fp32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _scaler(state: RunState) -> dict[str, object]:
    """The loss scaler, as DeepSpeed's own class where its loader needs one: for fp16, and at stage 3."""
    if _is_bf16_optimizer(state.run):
        return {}
    config, stage = state.run.settings.config, state.run.settings.zero.stage
    if stage == 0:
        return _plain_scaler(state)
    scaler: dict[str, object] = {"dynamic_loss_scale": "cur_iter" in state.scaler, "overflow": False}
    if config.precision != "fp16" and stage < 3:
        return scaler
    dynamic = config.precision == "fp16" and "cur_iter" in state.scaler
    made = new_scaler(F16 if dynamic else F32)
    kept = made.state if isinstance(made.state, dict) else {}
    values: dict[str, object] = {**kept, **state.scaler}
    if dynamic:
        values |= config.fp16.arguments_of_scaler()
    return {"loss_scaler": Placeholder(made.module, made.name, (), values, called=True, new=True), **scaler}


def _plain_scaler(state: RunState) -> dict[str, object]:
    """The loss scale in the form of the optimizers without ZeRO."""
    if "cur_iter" not in state.scaler:
        steps = state.counters["global_steps"]
        return {"dynamic_loss_scale": False, "cur_scale": state.scaler["cur_scale"], "cur_iter": steps}
    return {
        "dynamic_loss_scale": True,
        **{name: state.scaler[name] for name in ("cur_scale", "cur_iter", "last_overflow_iter")},
        "scale_factor": 2.0,
        "scale_window": state.run.settings.config.fp16.loss_scale_window,
    }
