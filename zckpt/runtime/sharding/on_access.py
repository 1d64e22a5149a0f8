"""Gathers a parameter that code uses while its unit is not called: in a forward of another module, by a method beside `forward`.

For `start`, at stage 3. DeepSpeed finds such parameters by itself when they are taken from their module.
[Note: parameters used elsewhere] Modules keep their parameters in a dict; here it is one that is asked for each of them. During a
forward of the model, and while a backward computes a forward again, who takes a part from it gets the whole parameter, gathered
for this use: a plain tensor in the dtype of the computation. All ranks run the same code, so all take part. Its gradient goes to
the part, as the mean over all ranks, beside what the unit's own forward gives. Outside of forwards code gets the part, as ever. A
parameter that is registered (`external`) costs nothing of this: it is gathered with the model as a whole.
Source: DeepSpeed 0.19.8, runtime/zero/partition_parameters.py `ZeROOrderedDict`, parameter_offload.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zckpt.runtime.sharding.deferred import gather_rows
from zckpt.runtime.sharding.parameter import ShardedParameter


class GatheringDict(dict[str, Any]):
    """A module's parameters by name, as `nn.Module` keeps them; see [Note: parameters used elsewhere]. `parts`: by name, what
    this rank holds of each; `in_forward`: whether a forward of the model is under way.
    """

    parts: dict[str, ShardedParameter]
    in_forward: Callable[[], bool]

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, DTensor) and name in self.parts and self.in_forward():
            one = self.parts[name]
            whole: torch.Tensor = _Whole.apply(one.weight, one)  # type: ignore[no-untyped-call]
            one.own(whole)
            return whole
        return found

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy of a module, and one in a file, is plain


class _Whole(torch.autograd.Function):
    """The whole of a parameter in parts; each rank keeps its rows of the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Any, one: ShardedParameter) -> torch.Tensor:
        """Gathers the rows of all ranks."""
        ctx.one, mesh = one, weight.device_mesh
        rows = weight._local_tensor.to(mesh.device_type, one.dtype)
        return gather_rows(rows, one.shape, mesh.get_group("shard"))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """This rank's rows of the mean over all ranks."""
        one, weight = ctx.one, ctx.one.weight
        mean = grads[0].float().contiguous()
        if dist.get_world_size() > 1:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        local = weight._local_tensor
        rows = mean.reshape(-1)[one.elements].view(local.shape).to(local.device, local.dtype)
        places, shape, stride = weight.placements, weight.shape, weight.stride()
        return DTensor.from_local(rows, weight.device_mesh, places, run_check=False, shape=shape, stride=stride), None


def gather_on_access(model: nn.Module, parameters: Sequence[ShardedParameter]) -> None:
    """Makes a model's modules give whole parameters during its forwards."""
    inside = 0

    def count(change: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            nonlocal inside
            if not torch.compiler.is_compiling():
                inside += change

        return hook

    def in_forward() -> bool:
        return inside > 0 or torch._C._current_graph_task_id() != -1

    model.register_forward_pre_hook(count(1))
    model.register_forward_hook(count(-1), always_call=True)
    parts: dict[int, dict[str, ShardedParameter]] = {}
    for one in parameters:
        for module, name in () if one.replicated else one.holders:
            parts.setdefault(id(module), {})[name] = one
    for module in model.modules():
        if id(module) in parts:
            held = GatheringDict(module._parameters)
            held.parts, held.in_forward = parts[id(module)], in_forward
            module._parameters = held
