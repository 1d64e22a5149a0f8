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

from zckpt.base.errors import UsageError
from zckpt.runtime.config import read_config
from zckpt.runtime.config_zero import Zero
from zckpt.runtime.deferred import Recorder, cut, defer, gather_rows, rows_held_by
from zckpt.runtime.sharded_parameter import ShardedParameter, held_of
from zckpt.runtime.world import join_world, mesh_of

__all__ = ["GatheredParameters", "Init"]


class Init:
    """Builds a model of which every rank keeps its own rows only; see [Note: deferred parameters] in `deferred`.

    With the same seed the weights are those of the plain model. Where the seeds of the ranks differ, rank 0's is used
    inside. Hand the model to `initialize`, with the same config.

    Args:
        module: a model that exists, to be reduced to this rank's rows at once.
        config_dict_or_path: the config; MiCS shares parameters among fewer ranks.
        config: the same, by its other name.
        enabled: False does nothing.
        dtype: of the parameters, where it should not be what the model gives them.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        config_dict_or_path: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.enabled = enabled
        self._recorder: Recorder | None = None
        self._own_seed: torch.Tensor | None = None
        if not enabled:
            return
        asked = config_dict_or_path if config is None else config
        zero = Zero(stage=3) if asked is None else read_config(asked).zero
        world = join_world()
        group = mesh_of(zero, world).get_group("shard")
        if module is None:
            self._recorder = Recorder(group, dtype)
            return
        for parameter in list(module.parameters()):
            if rows_held_by(parameter) is None:
                defer(parameter, cut(parameter, group, dtype))

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
    """Gives the generator rank 0's state; its own, for later, where that was another."""
    mine = torch.get_rng_state()
    first = mine.clone()
    if dist.get_world_size() == 1:
        return None
    on_gpu = "nccl" in dist.get_backend()
    carrier = first.cuda() if on_gpu else first
    dist.broadcast(carrier, 0)
    first = carrier.cpu()
    torch.set_rng_state(first)
    return None if torch.equal(first, mine) else mine


class GatheredParameters:
    """Inside, parameters are whole; with `modifier_rank`, that rank's changes are kept.

    The whole parameters are plain tensors, of master weights in fp32: they are what the context manager gives, and what the
    modules hold inside (`model.head.weight`, `model.named_parameters()`). All ranks take part in entering and leaving.

    Args:
        params: parameters as the modules hold them, one or several; of a model before or after `initialize`.
        modifier_rank: the rank whose changes all ranks take over; None discards changes.
        fwd_module: taken for the sake of scripts that give it; not needed.
        enabled: False does nothing.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        several = [params] if isinstance(params, torch.Tensor) else list(params)
        self._params = list({id(p): p for p in several}.values()) if enabled else []
        self._modifier_rank = modifier_rank
        self._inside: list[tuple[nn.Parameter, Callable[[bool], None]]] = []

    @torch.no_grad()
    def __enter__(self) -> list[nn.Parameter]:
        self._inside = [_gather(parameter) for parameter in self._params]
        return [whole for whole, _ in self._inside]

    @torch.no_grad()
    def __exit__(self, *error: Any) -> None:
        keep = self._modifier_rank is not None and error[0] is None
        for whole, leave in self._inside:
            if keep and whole.numel():
                whole.data = whole.data.contiguous()
                dist.broadcast(whole.data.view(-1).view(torch.uint8), self._modifier_rank)
            leave(keep)
        self._inside = []


def _gather(parameter: torch.Tensor) -> tuple[nn.Parameter, Callable[[bool], None]]:
    """A parameter made whole, and how to leave: with True, what it then is is kept."""
    held = held_of(parameter)
    if held is not None:
        return _gather_held(held)
    if isinstance(parameter, DTensor) or not isinstance(parameter, nn.Parameter):
        raise UsageError(
            "a parameter of another engine",
            found=f"a {type(parameter).__name__} of shape {list(parameter.shape)}",
            expected="a parameter of a model, plain or sharded by zckpt.runtime",
        )
    rows = rows_held_by(parameter)
    if rows is None:
        return parameter, lambda keep: None
    place = nn.Parameter(rows.join(), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, place)

    def leave(keep: bool) -> None:
        if keep:
            rows.values = cut(parameter, rows.group).values
        torch.utils.swap_tensors(parameter, place)

    return parameter, leave


def _gather_held(held: ShardedParameter) -> tuple[nn.Parameter, Callable[[bool], None]]:
    weight, part = held.weight, held.local()
    if held.replicated:
        part = held.local() if held.master is None else held.master.data
        whole = nn.Parameter(part.clone(), requires_grad=held.trained)
        spec = None
    else:
        mesh = weight.device_mesh  # type: ignore[attr-defined]
        values = gather_rows(part.to(mesh.device_type), held.shape, mesh.get_group("shard"))
        whole, spec = nn.Parameter(values, requires_grad=held.trained), weight._spec  # type: ignore[attr-defined]
        # Whoever took the parameter from the module before finds all of it there too.
        weight._spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=spec.tensor_meta)  # type: ignore[attr-defined]
        weight._local_tensor = whole.data  # type: ignore[attr-defined]
    _register(held, whole)

    def leave(keep: bool) -> None:
        if keep:
            part.view(-1).copy_(whole.data.reshape(-1)[held.start : held.start + held.count])
        if spec is not None:
            weight._spec, weight._local_tensor = spec, part  # type: ignore[attr-defined]
        _register(held, weight)
        held.give_back()

    return whole, leave


def _register(held: ShardedParameter, parameter: nn.Parameter) -> None:
    for module, name in held.holders:
        module._parameters[name] = parameter
