"""Shards a model for a stage: what each rank holds of every parameter, and how gradients come to it.

For `engine` and `init_context`.
[Note: stages]
3 gathers a unit for its forward and again for its backward; 2 keeps it gathered in between; 1 also keeps gradients whole until
the accumulation boundary; 0 does as 1, sharding over one rank and reducing over all. hpZ gathers for the backward from a
smaller group; MiCS shards over one.
[Note: offloading] One part is kept per parameter, its fp32 master, so `offload_optimizer` and `offload_param` ask for the same:
the part, its gradient and the optimizer's states in host memory, and the optimizer's arithmetic there. On the device is what
the stage gathers. For device nvme that is host memory too, mapped from a file: see `swapping`.

Buffers keep the dtypes they have, whatever the parameters are computed in, unless the config says otherwise
(`data_types.buffer_dtype`, `data_types.keep_in_fp32_modules`).
Source: DeepSpeed 0.19.8, runtime/engine.py `_cast_module_mixed_precision`, runtime/keep_in_fp32.py.

Over gloo, on CPUs, every rank sends to every other at once, which is faster than gloo itself: that gathers in a ring, of as many
rounds as there are ranks, each as slow as the slowest; and it reduces everything everywhere to keep a part. Measured in
benchmarks/results_trainer.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.live.device import pins
from zckpt.runtime.config.attributes import DTYPES
from zckpt.runtime.config.read import Settings
from zckpt.runtime.config.sections import Zero
from zckpt.runtime.sharding.deferred import Rows, rows_held_by
from zckpt.runtime.sharding.gradients import names_of_places, place_of, units_of
from zckpt.runtime.sharding.labels import label
from zckpt.runtime.sharding.older_torch import allow_frozen_dtypes, communicate, reduce_unused, shard_unit
from zckpt.runtime.sharding.parameter import ShardedParameter
from zckpt.runtime.sharding.units import Wrap, find_units, holders_of, merge_units, parts_of
from zckpt.runtime.world import World, elements_of

_TAG = 0x7A63
"""The tag of messages that gather; a script's own messages in the same group have other tags."""


class Collective:
    """What `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter` take. `function`: of output, input, group, and the
    operation of a reduction; `in_place`: output and input are the same buffer.
    """

    def __init__(
        self, function: Callable[[torch.Tensor, torch.Tensor, Any, Any], object], *, in_place: bool = False
    ) -> None:
        self._function, self._in_place = function, in_place
        self._last: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for one of the two ends; in place, the next call returns the same one for the other end."""
        buffer, self._last = self._last, None
        if buffer is None or buffer.shape != torch.Size(size) or buffer.dtype != dtype:
            buffer = torch.empty(*size, dtype=dtype, device=device)
            self._last = buffer if self._in_place else None
        return buffer

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any = None,
        async_op: bool = False,
    ) -> None:
        """Calls the function."""
        self._function(output_tensor, input_tensor, group, op)


def send_to_all(output: torch.Tensor, part: torch.Tensor, group: Any, _: object) -> None:
    """Fills a tensor with the parts of all ranks, by rank: every rank sends its part to each other rank, right into its place."""
    rank, size = group.rank(), group.size()
    parts = output.chunk(size) if output.numel() else ()
    if parts and parts[rank].data_ptr() != part.data_ptr():
        parts[rank].copy_(part)
    others = [(rank + step) % size for step in range(1, size)] if parts else []
    works = [dist.irecv(parts[other], group=group, group_src=other, tag=_TAG) for other in reversed(others)]
    works += [dist.isend(part, group=group, group_dst=other, tag=_TAG) for other in others]
    for work in works:
        work.wait()  # type: ignore[union-attr]


def exchange_and_add(output: torch.Tensor, whole: torch.Tensor, group: Any, op: object) -> None:
    """Fills a tensor with this rank's part of the sum, or mean, of all ranks' tensors: every rank sends each other rank its part
    once, and adds up what it gets, in the order of ranks, half precision in fp32.
    """
    got = torch.empty_like(whole)
    dist.all_to_all_single(got, whole, group=group)
    torch.sum(got.view(group.size(), -1), 0, out=output)
    if op == dist.ReduceOp.AVG:
        output /= group.size()


def use_on_gloo(model: nn.Module, group: Any) -> None:
    """Makes every unit of a model on CPUs gather and reduce in this way."""
    assert isinstance(model, FSDPModule)
    if group.size() == 1:  # the only part is there already
        communicate(model, None, partial(Collective, lambda output, part, *_: output.copy_(part), in_place=True))
    else:
        communicate(model, partial(Collective, send_to_all), partial(Collective, exchange_and_add))


@dataclass(frozen=True, slots=True)
class Sharded:
    """A model after `shard`: the parameters in its order, tied ones once; further names of tied ones, with the name that is
    kept; ranks as (replicate, shard).
    """

    parameters: tuple[ShardedParameter, ...]
    aliases: dict[str, str]
    mesh: DeviceMesh

    @property
    def group(self) -> Any:
        """The ranks that hold different rows of the same parameters."""
        return self.mesh.get_group("shard")

    @property
    def size(self) -> int:
        """The number of ranks that hold different rows; fewer than all at stage 0 and under MiCS."""
        return self.mesh["shard"].size()

    @property
    def rank(self) -> int:
        """The number of this process among these."""
        return self.mesh.get_local_rank("shard")


@dataclass(slots=True, eq=False)
class _Original:
    """A parameter of the model before it is sharded.

    Attributes:
        name: the first of its names in the model.
        parameter: as the model has it; it is emptied when it is sharded.
        shape: of the whole parameter.
        rows: this rank's rows, of a model made under `zero.Init`.
        dtype: that it will be computed with.
        replicated: it stays whole on every rank, outside of `fully_shard`.
        exact: the numbers of a replicated one before they are rounded to `dtype`.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    rows: Rows | None
    dtype: torch.dtype
    replicated: bool
    exact: torch.Tensor | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it is trained and sharded: such parameters of one unit have one dtype."""
        return self.parameter.requires_grad and not self.replicated


def shard(
    model: nn.Module,
    zero: Zero,
    precision: MixedPrecisionPolicy,
    mesh: DeviceMesh,
    world: World,
    wrap: Wrap | Iterable[Wrap] | None = None,
    *,
    trains: bool,
) -> Sharded:
    """Shards a model in place, which is whole on every rank or made under `zero.Init`. `precision`: a `param_dtype` of None
    leaves every parameter the dtype it has; `wrap`: units, see `find_units`; the config's if not given; `trains`: masters are
    kept; without an optimizer, parameters are stored in the dtype of the computation.

    Every rank begins with rank 0's numbers. Units are moved to the device, shared out and freed one after another.
    """
    originals, aliases = _originals(model, precision.param_dtype)
    units = _units(model, originals, zero, world, zero.wrap if wrap is None else wrap)
    ignored = {one.parameter for one in originals.values() if one.replicated}
    for unit, part in zip(units, parts_of(units), strict=True):
        inside = [originals[id(parameter)] for parameter in part]
        for one in inside:
            _prepare(one, world, trains=trains)
        compute = next((one.dtype for one in inside if one.is_cut), precision.param_dtype)
        shard_unit(
            unit,
            ignored,
            _reshard_after_forward(zero, is_root=unit[0] is model),
            mesh=mesh,
            mp_policy=replace(precision, param_dtype=compute),
            offload_policy=_offload_policy(zero),
        )
        for one in inside:
            if not one.replicated:  # an optimizer may still hold it
                one.parameter.data = one.parameter.data.new_empty(0)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(world.device)
    parameters = _sharded_parameters(model, originals, zero, mesh, world)
    if zero.stage == 3:
        for found in parameters:
            if not found.replicated:
                label(found.weight, found.shape, found.local(), dtype=found.dtype)
        _label_gathered(model, parameters)
    if world.device.type == "cpu":
        use_on_gloo(model, mesh.get_group("shard"))
    allow_frozen_dtypes(model)  # type: ignore[arg-type]
    reduce_unused(model, zero.ignore_unused_parameters)  # type: ignore[arg-type]
    return Sharded(parameters, aliases, mesh)


def _label_gathered(model: nn.Module, parameters: Sequence[ShardedParameter]) -> None:
    """Makes scripts find DeepSpeed's attributes in a forward too: on the whole parameter, when it is first gathered."""
    names, by_name = names_of_places(parameters), {one.name: one for one in parameters}

    def init(one: Any, sharded: ShardedParameter, init_whole: Callable[[], None]) -> None:
        init_whole()
        if not hasattr(one._unsharded_param, "ds_id"):
            one._unsharded_param.ds_id = sharded.weight.ds_id  # type: ignore[attr-defined]
            label(one._unsharded_param, sharded.shape, sharded.local(), whole=True)

    for one in (one for unit in units_of(model) for one in unit.fsdp_params):
        one.init_unsharded_param = partial(init, one, by_name[names[place_of(one)]], one.init_unsharded_param)


def _originals(model: nn.Module, compute: torch.dtype | None) -> tuple[dict[int, _Original], dict[str, str]]:
    """The parameters by their `id`, in the model's order, and the further names of tied ones with the first."""
    found: dict[int, _Original] = {}
    aliases: dict[str, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in found:
            aliases[name] = found[id(p)].name
            continue
        dtype = compute if compute and p.is_floating_point() else p.dtype
        found[id(p)] = _Original(name, p, p.shape, rows_held_by(p), dtype, replicated=not p.ndim or not p.numel())
    return found, aliases


def _units(
    model: nn.Module, originals: Mapping[int, _Original], zero: Zero, world: World, wrap: Wrap | Iterable[Wrap] | None
) -> list[list[nn.Module]]:
    """The units for `fully_shard`, each as its modules; parameters that no unit can have become replicated."""
    units = find_units(model, wrap)
    if len({one.dtype for one in originals.values() if one.is_cut}) > 1:
        return [[unit] for unit in _one_dtype_each([*units, model], originals)]
    bucket = _bucket(model, zero) if wrap is None and world.device.type == "cpu" else 0
    return [*(merge_units(units, model, bucket) if bucket else ([unit] for unit in units)), [model]]


def _sharded_parameters(
    model: nn.Module, originals: Mapping[int, _Original], zero: Zero, mesh: DeviceMesh, world: World
) -> tuple[ShardedParameter, ...]:
    """The part that this rank holds of each parameter, after `fully_shard`; deferred parameters get their numbers."""
    rank, size = mesh.get_local_rank("shard"), mesh["shard"].size()
    weights, holders = dict(model.named_parameters()), holders_of(model)
    found = []
    for one in originals.values():
        weight = weights[one.name]
        places = tuple(holders[id(weight)])
        if one.rows is not None:
            weight = _materialise(weight, one, one.rows, zero, world)
            one.rows.values = one.rows.values.new_empty(0)  # where this is another dtype's memory, it is free now
            vars(one.parameter).pop("ds_tensor", None)
            for module, name in places:
                module._parameters[name] = weight
        start, count = (0, one.shape.numel()) if one.replicated else elements_of(one.shape, size, rank)
        found.append(
            ShardedParameter(
                one.name, one.shape, start, count, one.replicated, one.dtype, weight, places, exact=one.exact
            )
        )
    return tuple(found)


def _bucket(model: nn.Module, zero: Zero) -> int:
    """The size, in parameters, of a collective on a device that cannot compute while it communicates; 0 for one unit's.

    At stages 0 and 1 parameters and gradients are whole anyway, and one collective for all costs least. At stage 2 the
    gradients of a collective are whole until it reduces them.
    """
    everything = sum(parameter.numel() for parameter in model.parameters())
    return {2: zero.reduce_bucket_size, 3: 0}.get(zero.stage, everything)


def _one_dtype_each(units: list[nn.Module], originals: Mapping[int, _Original]) -> list[nn.Module]:
    """Splits units until each has trained parameters of one dtype, as `fully_shard` needs; inner ones come first.

    Modules of another dtype than most of their unit become units of their own. Where a single module mixes dtypes, the
    parameters of the rarer one become replicated.
    """
    out: list[nn.Module] = []
    for unit, part in zip(units, parts_of([[unit] for unit in units]), strict=True):
        inside = {id(p): originals[id(p)] for p in part if originals[id(p)].is_cut}
        sizes: Counter[torch.dtype] = Counter()
        for one in inside.values():
            sizes[one.dtype] += one.shape.numel()
        usual = sizes.most_common(1)[0][0] if sizes else None
        rare = {key for key, one in inside.items() if one.dtype != usual}
        tied = {key for key, places in holders_of(unit).items() if len({id(module) for module, _ in places}) > 1}
        for module in unit.modules():
            own = {id(p) for p in module._parameters.values() if p is not None}
            alone = module is not unit and not any(True for _ in module.children()) and own <= rare
            if own and alone and len({originals[key].dtype for key in own}) == 1 and not own & tied:
                out.append(module)
                rare -= own
        for key in rare:
            originals[key].replicated = True
        out.append(unit)
    return out


@torch.no_grad()
def _prepare(one: _Original, world: World, *, trains: bool) -> None:
    """Gives a parameter rank 0's numbers, in the dtype that is stored."""
    parameter = one.parameter
    stored = torch.float32 if one.is_cut and trains else one.dtype
    if parameter.is_meta:
        parameter.data = parameter.data.to(stored)
        return
    data = parameter.data.to(world.device).contiguous()
    if world.size > 1 and data.numel():
        dist.broadcast(data.view(-1).view(torch.uint8), 0)
    parameter.data = data.to(stored)
    if one.replicated and parameter.requires_grad:
        one.exact = data.clone()


def home_of(zero: Zero, device: torch.device) -> torch.device:
    """The device of the parts: they are in host memory if the config offloads either side; see [Note: offloading]."""
    return torch.device("cpu") if zero.offloads_optimizer or zero.offloads_param else device


def _offload_policy(zero: Zero) -> OffloadPolicy:
    """The policy for `fully_shard`; memory is page-locked if there is an accelerator to copy to."""
    if not (zero.offloads_optimizer or zero.offloads_param):
        return OffloadPolicy()
    sections = [section for section in (zero.offload_optimizer, zero.offload_param) if section is not None]
    pin = zero.cpu_offload_use_pin_memory
    if pin is None:
        pin = all(section.pin_memory for section in sections)
    return CPUOffloadPolicy(pin_memory=pin and not zero.nvme and pins())


def _reshard_after_forward(zero: Zero, *, is_root: bool) -> bool | int | None:
    if zero.stage < 3:
        return False
    if zero.zero_hpz_partition_size > 1:
        return zero.zero_hpz_partition_size
    return None if is_root else True


@torch.no_grad()
def _materialise(meta: nn.Parameter, one: _Original, rows: Rows, zero: Zero, world: World) -> nn.Parameter:
    """A parameter with numbers, in place of a deferred one."""
    if not isinstance(meta, DTensor):
        weight = nn.Parameter(rows.values.to(world.device, one.dtype), requires_grad=meta.requires_grad)
        if world.size > 1 and weight.numel():
            dist.broadcast(weight.data.view(-1).view(torch.uint8), 0)
        one.exact = rows.values.to(world.device)
        return weight
    size = meta.device_mesh.size(-1)
    if size != rows.size:
        raise UsageError(
            "the model was made under zero.Init for another number of ranks",
            found=f"parameters shared by {rows.size} ranks", expected=f"{size} ranks, as the config says",
            remedy="Pass the same config to zero.Init and to initialize.",
        )  # fmt: skip
    local = rows.values.to(home_of(zero, world.device), meta.dtype)
    mesh, places, stride = meta.device_mesh, meta.placements, meta.stride()
    placed = DTensor.from_local(local, mesh, places, run_check=False, shape=meta.shape, stride=stride)
    return nn.Parameter(placed, requires_grad=meta.requires_grad)


def cast_buffers(model: nn.Module, settings: Settings) -> None:
    """Casts floating-point buffers as the config asks, in place."""
    dtype = settings.config.data_types.buffer_dtype
    keep = _kept_in_fp32(model, settings)
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point():
                continue
            if keep is not None and keep.search(f"{prefix}.{name}" if prefix else name):
                module._buffers[name] = buffer.float()
            elif dtype is not None:
                module._buffers[name] = buffer.to(DTYPES[dtype])


def _kept_in_fp32(model: nn.Module, settings: Settings) -> re.Pattern[str] | None:
    precision = settings.config.precision
    asked = settings.config.data_types.keep_in_fp32_modules
    if precision == "fp32":
        return None
    if isinstance(asked, list):
        patterns = {name.replace("*", ".*") for name in asked}
    else:
        patterns = set()
        for prefix, module in model.named_modules():
            names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
            if precision == "fp16":
                names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
            start = rf"^{re.escape(prefix)}\..*" if prefix else ""
            patterns |= {start + name.replace("*", ".*") for name in names}
    return re.compile("|".join(sorted(patterns))) if patterns else None
