"""What DeepSpeed scripts find under `deepspeed.zero`: `Init` and `GatheredParameters`.

with zero.Init(config_dict_or_path=config):       # no rank ever holds the whole model
    model = Model()
with zero.GatheredParameters(model.head.weight, modifier_rank=0) as (weight,):
    if rank == 0:
        weight.zero_()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from zckpt.live.device import device_of_messages
from zckpt.runtime.arguments import refuse_parallel, refuse_partial
from zckpt.runtime.config.read import read_config
from zckpt.runtime.config.sections import Zero
from zckpt.runtime.sharding.deferred import Recorder, defer, gather_rows, local_rows, rows_held_by
from zckpt.runtime.sharding.labels import label, show_plain
from zckpt.runtime.sharding.parameter import ShardedParameter, sharded_parameter_of
from zckpt.runtime.sharding.pretrained import take_over
from zckpt.runtime.world import join_world, mesh_of

Gathered = tuple[nn.Parameter, Callable[[bool], None]]


class Init:
    """Builds a model that no rank could hold whole: every rank keeps only its own rows of each parameter.

    Use it as a context manager around the model's constructor, and pass the model to `initialize` with the same config. With
    the same seed the weights are those that the plain constructor makes. If the seeds of the ranks differ, rank 0's is used
    inside.

    Args:
        module: a model that exists already; every rank keeps only its rows of it from now on.
        data_parallel_group, zero_param_parallel_group, sequence_data_parallel_group: the ranks that share parameters: all,
            since other groups are not built.
        mem_efficient_linear: for DeepSpeed's sake: gathered weights are never kept.
        remote_device: for DeepSpeed's sake: rows are where the model makes its parameters, until `initialize`.
        pin_memory: for DeepSpeed's sake: rows are page-locked by `initialize`, if the config asks for it.
        config_dict_or_path, config: the config: a path, a dict or JSON text. Under MiCS fewer ranks share a parameter.
        enabled: False does nothing: every rank builds the whole model.
        dtype: of the floating-point parameters, if it should not be the one that the model gives them.
        mpu: the script's parallelism; only data parallelism is built.
        zero_quantized_weights, zero_quantized_nontrainable_weights: refused: not built.
        param_swapper: for DeepSpeed's sake: offloading is what the config says.
        tensor_overrides: for DeepSpeed's sake: every initialisation is followed.

    Raises:
        UsageError: the config is wrong; see `read_config`.
        UnsupportedError: other ranks than all should share parameters, or parameters should be quantized.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: Any = None,
        pin_memory: bool = False,
        config_dict_or_path: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        refuse_parallel(mpu, None)
        groups = (data_parallel_group, zero_param_parallel_group, sequence_data_parallel_group)
        refuse_partial(groups, zero_quantized_weights or zero_quantized_nontrainable_weights)
        self.enabled = enabled
        self._recorder: Recorder | None = None
        self._own_seed: torch.Tensor | None = None
        if not enabled:
            return
        asked = config_dict_or_path if config is None else config
        zero = Zero(stage=3) if asked is None else read_config(asked, early=True).zero
        world = join_world()
        group = mesh_of(zero, world).get_group("shard")
        if module is None:
            self._recorder = Recorder(group, dtype, first=take_over)
            return
        for parameter in list(module.parameters()):
            if rows_held_by(parameter) is None:
                defer(parameter, local_rows(parameter, group, dtype))

    def __enter__(self) -> Init:
        if self._recorder is not None:
            self._own_seed = _follow_rank_0()
            self._recorder.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._recorder is not None:
            self._recorder.__exit__(*error)
        if self._own_seed is not None:
            torch.set_rng_state(self._own_seed)


def _follow_rank_0() -> torch.Tensor | None:
    """Gives the random generator rank 0's state. Returns its own state if that differed, so that it can be restored."""
    mine = torch.get_rng_state()
    first = mine.clone()
    if dist.get_world_size() == 1:
        return None
    carrier = first.to(device_of_messages())
    dist.broadcast(carrier, 0)
    first = carrier.cpu()
    torch.set_rng_state(first)
    return None if torch.equal(first, mine) else mine


class GatheredParameters:
    """Makes parameters whole inside a `with` block; with `modifier_rank`, that rank's changes are kept.

    Inside, the parameters are plain tensors in fp32, the master weights; frozen ones keep their dtype. They are what the
    context manager returns, as a list, and what the modules hold (`model.head.weight`). A parameter that was taken from its
    module before, at stage 3, is read as a plain tensor too: in the dtype of the computation, as DeepSpeed's is, or with
    `modifier_rank` in fp32. Every rank has to enter and leave.

    Args:
        params: parameters as the modules hold them, one or several; of a model before or after `initialize`. As DeepSpeed
            does, it passes over all other tensors: they are not in the list.
        modifier_rank: the rank with the changes that all ranks take over on leaving; None discards changes.
        fwd_module: accepted for DeepSpeed's sake and not used.
        enabled: False does nothing, and returns an empty list.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        several = [params] if isinstance(params, torch.Tensor) else params
        self._params = list({id(p): p for p in several if _is_gatherable(p)}.values()) if enabled else []
        self._modifier_rank = modifier_rank
        self._inside: list[Gathered] = []

    @torch.no_grad()
    def __enter__(self) -> list[nn.Parameter]:
        order = sorted(range(len(self._params)), key=lambda place: _order(self._params[place]))
        gathered = {place: _gather(self._params[place], self._modifier_rank is not None) for place in order}
        self._inside = [gathered[place] for place in order]
        return [gathered[place][0] for place in range(len(self._params))]

    @torch.no_grad()
    def __exit__(self, *error: Any) -> None:
        keep = self._modifier_rank is not None and error[0] is None
        for whole, leave in self._inside:
            if keep and whole.numel():
                whole.data = whole.data.contiguous()
                dist.broadcast(whole.data.view(-1).view(torch.uint8), self._modifier_rank)
            leave(keep)
        self._inside = []


def _is_gatherable(tensor: torch.Tensor) -> bool:
    plain = isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor)
    return plain or sharded_parameter_of(tensor) is not None


def _order(parameter: torch.Tensor) -> tuple[int, str]:
    """A sort key that orders parameters alike on all ranks, even if they come out of a set."""
    rows = rows_held_by(parameter) if isinstance(parameter, nn.Parameter) else None
    sharded = sharded_parameter_of(parameter)
    return -1 if rows is None else rows.number, "" if sharded is None else sharded.name


def _gather(parameter: torch.Tensor, changes: bool) -> Gathered:
    """Gathers a parameter; returns it with a function that undoes this, and keeps the changes if called with True.

    Without `changes`, a parameter in parts shows its numbers in the dtype of the computation.
    """
    sharded = sharded_parameter_of(parameter)
    if sharded is not None:
        return _gather_sharded(sharded, changes)
    assert isinstance(parameter, nn.Parameter)
    rows = rows_held_by(parameter)
    if rows is None:
        return parameter, lambda keep: None
    place = nn.Parameter(rows.join(), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, place)

    def leave(keep: bool) -> None:
        if keep:
            rows.values = local_rows(parameter, rows.group).values
        torch.utils.swap_tensors(parameter, place)

    return parameter, leave


def _gather_sharded(sharded: ShardedParameter, changes: bool) -> Gathered:
    weight = sharded.weight
    part = sharded.part() if sharded.replicated else sharded.local()
    if sharded.whole is not None and sharded.is_whole:
        return _gather_held(sharded, sharded.whole, part)
    spec = None
    if sharded.replicated:
        whole = nn.Parameter(part.clone(), requires_grad=sharded.trained)
    else:
        mesh = weight.device_mesh  # type: ignore[attr-defined]
        values = gather_rows(part.to(mesh.device_type), sharded.shape, mesh.get_group("shard"))
        whole, spec = nn.Parameter(values, requires_grad=sharded.trained), weight._spec  # type: ignore[attr-defined]
        # Code that took the parameter from the module before finds all of it there too.
        weight._spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=spec.tensor_meta)  # type: ignore[attr-defined]
        weight._local_tensor = whole.data  # type: ignore[attr-defined]
        show_plain(weight, lambda: whole.data if changes else whole.data.to(sharded.dtype))
    is_labelled = hasattr(weight, "ds_id")
    for one in (weight, whole) if is_labelled else ():
        whole.ds_id = weight.ds_id  # type: ignore[attr-defined]
        label(one, sharded.shape, part, whole=True)
    _register(sharded, whole)

    def leave(keep: bool) -> None:
        if keep:
            part.view(-1).copy_(whole.data.reshape(-1)[sharded.elements])
        if spec is not None:
            weight._spec, weight._local_tensor = spec, part  # type: ignore[attr-defined]
            show_plain(weight, None)
        if is_labelled:
            label(weight, sharded.shape, part)
        _register(sharded, weight)
        sharded.give_back()

    return whole, leave


def _gather_held(sharded: ShardedParameter, held: nn.Parameter, part: torch.Tensor) -> Gathered:
    """As `_gather`, for a parameter that the modules hold whole: inside, its numbers are the masters'."""
    sharded.take_up()
    mesh, rounded = sharded.weight.device_mesh, held.data  # type: ignore[attr-defined]
    held.data = gather_rows(part.to(mesh.device_type), sharded.shape, mesh.get_group("shard"))

    def leave(keep: bool) -> None:
        if keep:
            part.view(-1).copy_(held.data.reshape(-1)[sharded.elements])
            rounded.copy_(held.data)
            sharded.settle()
        held.data = rounded

    return held, leave


def _register(sharded: ShardedParameter, parameter: nn.Parameter) -> None:
    for module, name in sharded.holders:
        module._parameters[name] = parameter
