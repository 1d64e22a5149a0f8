"""From a stage to `fully_shard`: what each rank holds of every parameter, and how gradients come to it.

For `engine` and `zero`.
[Note: stages]
3 gathers a unit for its forward and again for its backward; 2 keeps it gathered in between; 1 also keeps gradients whole until
the accumulation boundary; 0 does as 1, sharding over one rank and reducing over all. hpZ gathers for the backward from a
smaller group; MiCS shards over one. Offloading keeps the parts in host memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from zckpt.base.errors import UsageError
from zckpt.runtime.collectives import use_on_gloo
from zckpt.runtime.config_zero import Zero
from zckpt.runtime.deferred import Rows, rows_held_by
from zckpt.runtime.offload import home_of, offload_policy
from zckpt.runtime.sharded_parameter import ShardedParameter
from zckpt.runtime.units import Wrap, find_units, merged, parts_of
from zckpt.runtime.world import World, rows_of

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a run.

    Attributes:
        compute: of the computation; None leaves every parameter the dtype it has.
        reduce: of gradient reductions.
        train: masters are kept; without an optimizer, parameters are stored in the dtype of the computation.
    """

    compute: torch.dtype | None
    reduce: torch.dtype
    train: bool


@dataclass(frozen=True, slots=True)
class Sharded:
    """A model after `shard`.

    Attributes:
        held: its parameters, in the model's order, tied ones once.
        aliases: names of tied parameters, with the name that is kept.
        mesh: ranks as (replicate, shard).
    """

    held: tuple[ShardedParameter, ...]
    aliases: dict[str, str]
    mesh: DeviceMesh

    @property
    def shard_group(self) -> Any:
        """The ranks that hold different rows of the same parameters."""
        return self.mesh.get_group("shard")


def shard(
    model: nn.Module,
    zero: Zero,
    precision: Precision,
    mesh: DeviceMesh,
    world: World,
    wrap: Wrap | Iterable[Wrap] | None = None,
) -> Sharded:
    """Shards a model in place.

    Every rank begins with rank 0's numbers. Units are moved to the device, shared out and freed one after another.

    Args:
        model: the model, whole on every rank or made under `zero.Init`.
        zero: the stage and its options.
        precision: dtypes.
        mesh: of `mesh_of`.
        world: all ranks.
        wrap: units, see `find_units`; the config's where not given.
    """
    names, aliases = _names(model)
    originals = {names[id(p)]: p for p in model.parameters()}
    shapes = {name: p.shape for name, p in originals.items()}
    deferred = {name: rows for name, p in originals.items() if (rows := rows_held_by(p)) is not None}
    dtypes = {name: _dtype(p, precision) for name, p in originals.items()}
    replicated = {name for name, p in originals.items() if not p.ndim or not p.numel()}
    asked = zero.wrap if wrap is None else wrap
    single = find_units(model, asked)
    if len({dtypes[name] for name, p in originals.items() if p.requires_grad and name not in replicated}) > 1:
        single, odd = _one_dtype_each([*single, model], names, dtypes, replicated)
        replicated |= odd
        units = [[unit] for unit in single]
    else:
        merge = asked is None and world.device.type == "cpu"
        bucket = _bucket(model, zero) if merge else 0
        units = [*(merged(single, model, bucket) if bucket else ([unit] for unit in single)), [model]]
    ignored = {originals[name] for name in replicated}
    exact: dict[str, torch.Tensor] = {}
    for unit, part in zip(units, parts_of(units), strict=True):
        for parameter in part:
            name = names[id(parameter)]
            first = _prepare(parameter, dtypes[name], name in replicated, precision, world)
            if first is not None:
                exact[name] = first
        trained = [dtypes[names[id(p)]] for p in part if p.requires_grad and p not in ignored]
        fully_shard(
            unit[0] if len(unit) == 1 else unit,
            mesh=mesh,
            reshard_after_forward=_reshard_after_forward(zero, is_root=unit[0] is model),
            mp_policy=MixedPrecisionPolicy(
                trained[0] if trained else precision.compute, precision.reduce, cast_forward_inputs=False
            ),
            offload_policy=offload_policy(zero),
            ignored_params=ignored,
        )
        for parameter in part:
            if parameter not in ignored:  # an optimizer may still hold it
                parameter.data = parameter.data.new_empty(0)
    registered = dict(model.named_parameters())
    for name, rows in deferred.items():
        registered[name] = _materialise(model, registered[name], rows, dtypes[name], zero, world)
        if name in replicated:
            exact[name] = rows.values.to(world.device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(world.device)
    rank, size = mesh.get_local_rank("shard"), mesh["shard"].size()
    holders = _holders(model)
    held = []
    for name, shape in shapes.items():
        start, count = 0, shape.numel()
        if name not in replicated:
            rows_here = rows_of(shape[0], size, rank)
            width = count // shape[0]
            start, count = rows_here.start * width, len(rows_here) * width
        held.append(
            ShardedParameter(
                name=name,
                shape=shape,
                start=start,
                count=count,
                replicated=name in replicated,
                dtype=dtypes[name],
                weight=registered[name],
                holders=tuple(holders[id(registered[name])]),
                exact=exact.get(name),
            )
        )
    use_on_gloo(model, mesh.get_group("shard"))
    model.set_reduce_scatter_unused_params(zero.ignore_unused_parameters)  # type: ignore[operator]
    return Sharded(tuple(held), aliases, mesh)


def _names(model: nn.Module) -> tuple[dict[int, str], dict[str, str]]:
    """The name of each parameter, and the further names of tied ones."""
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            aliases[name] = names[id(parameter)]
        else:
            names[id(parameter)] = name
    return names, aliases


def _dtype(parameter: nn.Parameter, precision: Precision) -> torch.dtype:
    return precision.compute if precision.compute and parameter.is_floating_point() else parameter.dtype


def _bucket(model: nn.Module, zero: Zero) -> int:
    """Parameters of a collective on a device that cannot compute while it communicates; 0 for those of one unit.

    At stages 0 and 1 parameters and gradients are whole anyway, and one collective for all costs least. At stage 2 the
    gradients of a collective are whole until it reduces them.
    """
    everything = sum(parameter.numel() for parameter in model.parameters())
    return {2: zero.reduce_bucket_size, 3: 0}.get(zero.stage, everything)


def _one_dtype_each(
    units: list[nn.Module], names: dict[int, str], dtypes: dict[str, torch.dtype], replicated: set[str]
) -> tuple[list[nn.Module], set[str]]:
    """Units whose trained parameters have one dtype, as `fully_shard` needs.

    Modules of another dtype than most of their unit become units of their own. Where a single module mixes dtypes, the
    parameters of the rarer one are left out.

    Returns:
        The units, inner ones first, and the names that are left out.
    """
    out: list[nn.Module] = []
    odd: set[str] = set()
    for unit, part in zip(units, parts_of([[unit] for unit in units]), strict=True):
        mine = {id(p): p for p in part if p.requires_grad and names[id(p)] not in replicated}
        sizes: Counter[torch.dtype] = Counter()
        for p in mine.values():
            sizes[dtypes[names[id(p)]]] += p.numel()
        usual = sizes.most_common(1)[0][0] if sizes else None
        strange = {key for key, p in mine.items() if dtypes[names[key]] != usual}
        for module in unit.modules():
            own = {id(p) for p in module._parameters.values() if p is not None}
            alone = module is not unit and not any(True for _ in module.children()) and own <= strange
            if own and alone and len({dtypes[names[key]] for key in own}) == 1 and not _is_tied(module, unit):
                out.append(module)
                strange -= own
        odd |= {names[key] for key in strange}
        out.append(unit)
    return out, odd


def _is_tied(module: nn.Module, unit: nn.Module) -> bool:
    own = {id(p) for p in module._parameters.values()}
    others = (p for m in unit.modules() if m is not module for p in m._parameters.values())
    return any(id(p) in own for p in others if p is not None)


@torch.no_grad()
def _prepare(
    parameter: nn.Parameter, dtype: torch.dtype, replicated: bool, precision: Precision, world: World
) -> torch.Tensor | None:
    """Gives a parameter rank 0's numbers, in the dtype that is stored; what a replicated one was before is returned."""
    stored = torch.float32 if parameter.requires_grad and precision.train and not replicated else dtype
    if parameter.is_meta:
        parameter.data = parameter.data.to(stored)
        return None
    data = parameter.data.to(world.device).contiguous()
    if world.size > 1 and data.numel():
        dist.broadcast(data.view(-1).view(torch.uint8), 0)
    parameter.data = data.to(stored)
    return data.clone() if replicated and parameter.requires_grad else None


def _reshard_after_forward(zero: Zero, *, is_root: bool) -> bool | int | None:
    if zero.stage < 3:
        return False
    if zero.zero_hpz_partition_size > 1:
        return zero.zero_hpz_partition_size
    return None if is_root else True


@torch.no_grad()
def _materialise(
    model: nn.Module, meta: nn.Parameter, rows: Rows, dtype: torch.dtype, zero: Zero, world: World
) -> nn.Parameter:
    """Puts a parameter with numbers where a deferred one is registered."""
    if isinstance(meta, DTensor):
        size = meta.device_mesh.size(-1)
        if size != rows.size:
            raise UsageError(
                "a model made under zero.Init for another number of ranks",
                found=f"its parameters are shared by {rows.size}",
                expected=f"{size}, as the config says",
                remedy="Give zero.Init the config that initialize gets.",
            )
        local = rows.values.to(home_of(zero, world.device), meta.dtype)
        placed = DTensor.from_local(
            local, meta.device_mesh, meta.placements, run_check=False, shape=meta.shape, stride=meta.stride()
        )
        weight = nn.Parameter(placed, requires_grad=meta.requires_grad)
    else:
        weight = nn.Parameter(rows.values.to(world.device, dtype), requires_grad=meta.requires_grad)
        if world.size > 1 and weight.numel():
            dist.broadcast(weight.data.view(-1).view(torch.uint8), 0)
    for module, name in _holders(model)[id(meta)]:
        module._parameters[name] = weight
    return weight


def _holders(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules that a parameter is registered in, and its names there."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module, name))
    return holders
