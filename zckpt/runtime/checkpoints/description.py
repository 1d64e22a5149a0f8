"""What a run has to save, in the words of the layouts: a catalog of what all ranks hold, and all that is beside it.

For saving. Nothing is copied: stores of a `RankStore` stand for what each rank holds, and every rank makes the same
description but for what is its own: its random generators and, under stage 3, its client state.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zckpt.base.errors import UsageError
from zckpt.base.words import examples
from zckpt.containers import Placeholder
from zckpt.core.catalog import Catalog, Replica, Role, Source, TensorEntry
from zckpt.core.dtypes import BF16, BY_TORCH_NAME, F16, F32, F64, DType
from zckpt.core.fragments import Fragment
from zckpt.layouts.run.training import ParameterGroup, Training, new_scaler
from zckpt.layouts.save.module_states import RESERVED
from zckpt.layouts.zero.torch_files import Inline
from zckpt.layouts.zero.write import ZeroTarget
from zckpt.runtime.engine import Engine
from zckpt.runtime.exchange import EVERY, RankStore
from zckpt.runtime.inert import to_inert
from zckpt.runtime.state import ParameterPart, RunState
from zckpt.runtime.world import rows_of

DEEPSPEED = "0.19.8"
"""The version of DeepSpeed whose files these are."""

OWN = "zckpt"
"""The key of what DeepSpeed's files have no place for."""

_PRECISIONS = {"fp32": F32, "bf16": BF16, "fp16": F16}


def dtype_of(dtype: torch.dtype) -> DType:
    """Of the layouts, of torch's."""
    return BY_TORCH_NAME[str(dtype).removeprefix("torch.")]


@dataclass(frozen=True, slots=True)
class Described:
    """What all ranks hold, which changes from save to save only in its numbers.

    Attributes:
        weights: in the order of the model's state dict: masters as parameters, their module weights as replicas.
        states: of the optimizer: parameter -> state -> its elements.
    """

    weights: Catalog
    states: Mapping[str, Mapping[str, TensorEntry]]


def signature(state: RunState) -> Hashable:
    """What a description depends on."""
    parts = tuple(
        (
            part.name,
            part.shape,
            part.group,
            part.weight.dtype,
            part.dtype,
            *((n, t.dtype) for n, t in part.states.items()),
        )
        for part in state.parts
    )
    buffers = tuple((name, tuple(buffer.shape), buffer.dtype) for name, buffer in state.buffers.items())
    groups = tuple(group.names for group in state.groups)
    return state.stage, state.precision, state.shard_size, parts, buffers, groups


def tensors_of(state: RunState) -> dict[Hashable, torch.Tensor]:
    """What this rank holds, as vectors, by the keys of a description."""
    found: dict[Hashable, torch.Tensor] = {}
    for part in state.parts:
        found[part.name, ""] = part.weight.detach().reshape(-1)
        found |= {(part.name, name): tensor.detach().reshape(-1) for name, tensor in part.states.items()}
    return found | {(name, "buffer"): buffer.detach().reshape(-1) for name, buffer in state.buffers.items()}


def describe(engine: Engine, state: RunState) -> Described:
    """What all ranks hold."""
    found: dict[str, TensorEntry] = {}
    states: dict[str, dict[str, TensorEntry]] = {}
    for part in state.parts:
        if part.group is None:
            found[part.name] = _entry(part, state, dtype_of(part.weight.dtype), "frozen")
            continue
        dtype = dtype_of(part.dtype)
        module = F32 if dtype == F64 else dtype
        replicas = (Replica(module, _fragments(part, state, module)),)
        found[part.name] = _entry(part, state, F32, "parameter", replicas=replicas)
        states[part.name] = {
            name: _entry(part, state, dtype_of(tensor.dtype), "parameter", name) for name, tensor in part.states.items()
        }
    for name, buffer in state.buffers.items():
        dtype = dtype_of(buffer.dtype)
        store = RankStore(name, buffer.numel() * dtype.itemsize, rank=EVERY, key=(name, "buffer"))
        fragments = (Fragment(store, 0, 0, buffer.numel()),)
        found[name] = TensorEntry(name, tuple(buffer.shape), dtype, "buffer", fragments)
    order = [name for name in _state_dict_names(engine) if name in found]
    return Described(Catalog({name: found[name] for name in order}, Source("live", "the run"), state.aliases), states)


def describe_training(
    state: RunState, described: Described, client_state: Mapping[str, Any], clip_grad: float
) -> Training:
    """All that is beside the weights.

    Raises:
        UsageError: the client state uses a name that is taken.
        UnsupportedError: something in it cannot be written.
    """
    taken = sorted(str(key) for key in client_state if key in RESERVED or key == OWN)
    if taken:
        raise UsageError(
            "a client state that uses names of the checkpoint's own",
            found=examples(taken),
            remedy="Choose other names.",
        )
    parts = {part.name: part for part in state.parts}
    groups = []
    for number, group in enumerate(state.groups):
        members = [parts[name] for name in group.names]
        names = tuple(dict.fromkeys(name for part in members for name in part.states))
        scalars = {name: _number(value) for part in members[:1] for name, value in part.scalars.items()}
        groups.append(
            ParameterGroup(group.names, to_inert(group.options, f"options of parameter group {number}"), scalars, names)
        )
    own = {
        "version": 1,
        "optimizer": state.optimizer,
        "micro_steps": state.counters["micro_steps"],
        "pending_micro_steps": state.counters["pending_micro_steps"],
        "world_size": state.world_size,
        "differing_buffers": sorted(state.differing),
        "scaler": dict(state.scaler),
        "data": to_inert(state.data, "the loader's position"),
        "scalars": _odd_scalars(state, parts),
        "groups": [list(group.names) for group in state.groups],
    }
    if "all" in state.rng:
        own["rngs"] = [_rng(rng) for rng in state.rng["all"]]
    model = {
        "lr_scheduler": to_inert(state.scheduler, "the schedule"),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": state.counters["skipped_steps"],
        "global_steps": state.counters["global_steps"],
        "global_samples": state.counters["global_samples"],
        "ds_config": to_inert(state.config, "the config"),
        "ds_version": DEEPSPEED,
        OWN: own,
        **to_inert(client_state, "client_state"),
    }
    return Training(
        groups=tuple(groups),
        states=described.states,
        scaler=_scaler(state) | ({"clip_grad": clip_grad} if state.stage in (1, 2) else {}),
        model=model,
        precision=_PRECISIONS[state.precision],
        form="bf16" if _is_bf16_optimizer(state) else "zero",
        beside={} if "all" in state.rng else {OWN: {"rng": _rng(state.rng)}},
    )


def target_of(state: RunState, place: str) -> ZeroTarget:
    """The save that DeepSpeed's engine would write from the same config, in a directory of this name."""
    zero = state.config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    return ZeroTarget(
        tag=place,
        stage=state.stage,
        world_size=state.shard_size,
        precision=_PRECISIONS[state.precision],
        form="bf16" if _is_bf16_optimizer(state) else "zero",
        round_robin=zero.get("round_robin_gradients") is True,
        align=zero.get("parameter_alignment") is True,
        sub_group_size=max(1, int(zero.get("sub_group_size", 1e9))),
        plain=True,
        copies=state.world_size // state.shard_size,
    )


def _is_bf16_optimizer(state: RunState) -> bool:
    """Whether DeepSpeed would take its bf16 optimizer. Source: 0.19.8, runtime/engine.py `_do_optimizer_sanity_check`."""
    zero, types = state.config.get("zero_optimization"), state.config.get("data_types")
    offload = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    offloads = isinstance(offload, Mapping) and offload.get("device", "none") != "none"
    fp32 = isinstance(types, Mapping) and types.get("grad_accum_dtype") == "fp32"
    return state.precision == "bf16" and state.stage == 1 and fp32 and not offloads


def _entry(
    part: ParameterPart, state: RunState, dtype: DType, role: Role, kind: str = "", replicas: tuple[Replica, ...] = ()
) -> TensorEntry:
    return TensorEntry(part.name, part.shape, dtype, role, _fragments(part, state, dtype, kind), replicas)


def _fragments(part: ParameterPart, state: RunState, dtype: DType, kind: str = "") -> tuple[Fragment, ...]:
    """Which rank holds which elements."""
    key = (part.name, kind)
    return tuple(
        Fragment(
            RankStore(f"{part.name} {kind} of rank {rank}", count * dtype.itemsize, rank=rank, key=key), 0, start, count
        )
        for rank, start, count in _holders(part, state)
    )


def _holders(part: ParameterPart, state: RunState) -> Iterator[tuple[int, int, int]]:
    if part.replicated or state.shard_size == 1:
        yield EVERY, 0, math.prod(part.shape)
        return
    for rank in range(state.shard_size):
        start, count = part_of_rank(part.shape, state.shard_size, rank)
        if count:
            yield rank, start, count


def part_of_rank(shape: Sequence[int], size: int, rank: int) -> tuple[int, int]:
    """The elements of a parameter that one of `size` ranks holds: the first, and how many."""
    rows, width = rows_of(shape[0], size, rank), math.prod(shape[1:])
    return rows.start * width, len(rows) * width


def _state_dict_names(engine: Engine) -> Iterator[str]:
    for prefix, module in engine.module.named_modules():
        for name in (*module._parameters, *module._buffers):
            yield f"{prefix}.{name}" if prefix else name


def _number(value: float) -> Inline:
    return Inline(F32, (), struct.pack("<f", value))


def _odd_scalars(state: RunState, parts: Mapping[str, ParameterPart]) -> dict[str, dict[str, float]]:
    """States of one number of the parameters that do not share those of their group."""
    odd: dict[str, dict[str, float]] = {}
    for group in state.groups:
        first = parts[group.names[0]].scalars
        odd |= {name: dict(parts[name].scalars) for name in group.names if parts[name].scalars != first}
    exact = {name for part in state.parts for name, value in part.scalars.items() if _rounded(value) != value}
    if exact:  # numbers that fp32 does not hold
        odd |= {part.name: dict(part.scalars) for part in state.parts if exact & part.scalars.keys()}
    return odd


def _rounded(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _scaler(state: RunState) -> dict[str, object]:
    """The loss scaler, in DeepSpeed's own class where its loader needs it: for fp16, and at stage 3."""
    if _is_bf16_optimizer(state):
        return {}
    if state.stage == 0:
        return _plain_scaler(state)
    scaler: dict[str, object] = {"dynamic_loss_scale": "cur_iter" in state.scaler, "overflow": False}
    if state.precision != "fp16" and state.stage < 3:
        return scaler
    dynamic = state.precision == "fp16" and "cur_iter" in state.scaler
    made = new_scaler(F16 if dynamic else F32)
    kept = made.state if isinstance(made.state, dict) else {}
    values: dict[str, object] = {**kept, **state.scaler}
    if dynamic:
        fp16 = state.config.get("fp16") or {}
        values |= {
            "scale_window": fp16.get("loss_scale_window", 1000),
            "min_scale": fp16.get("min_loss_scale", 1),
            "delayed_shift": fp16.get("hysteresis", 2),
            "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
        }
    return {"loss_scaler": Placeholder(made.module, made.name, (), values, called=True, new=True), **scaler}


def _plain_scaler(state: RunState) -> dict[str, object]:
    """The loss scale as the optimizers without ZeRO keep it."""
    steps = state.counters["global_steps"]
    if "cur_iter" not in state.scaler:
        return {"dynamic_loss_scale": False, "cur_scale": state.scaler["cur_scale"], "cur_iter": steps}
    fp16 = state.config.get("fp16") or {}
    return {
        "dynamic_loss_scale": True,
        "cur_scale": state.scaler["cur_scale"],
        "cur_iter": state.scaler["cur_iter"],
        "last_overflow_iter": state.scaler["last_overflow_iter"],
        "scale_factor": 2.0,
        "scale_window": fp16.get("loss_scale_window", 1000),
    }


def _rng(rng: Mapping[str, Any]) -> dict[str, Any]:
    """Random generators without any class of numpy's."""
    kept = dict(rng)
    if "numpy" in kept:
        state = dict(kept["numpy"]["state"])
        state = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in state.items()}
        kept["numpy"] = {**kept["numpy"], "state": state}
    return dict(to_inert(kept, "the random generators"))
