"""What code uses while its unit is not called: a parameter, which is gathered or named, or a part of the model by itself.

For `start`, at stage 3. DeepSpeed finds such parameters by itself when they are taken from their module.
[Note: parameters used elsewhere] Modules keep their parameters in a dict; here it is one that is asked for each of them. During a
forward of the model, and while a backward computes a forward again, who takes a part from it gets the whole parameter, gathered
for this use: a plain tensor in the dtype of the computation. All ranks run the same code, so all take part. Its gradient goes to
the part, as the mean over all ranks, beside what the unit's own forward gives. Outside of forwards code gets the part, as ever. A
parameter that is registered (`units`) costs nothing of this: it is gathered with the model as a whole.
Source: DeepSpeed 0.19.8, runtime/zero/partition_parameters.py `ZeROOrderedDict`, parameter_offload.py.

A use that fails gets an error that names the parameter and the place, for `engine`: torch says only that an operator got mixed
tensors. The traceback has the statement that failed, with its variables: the values of its expressions are looked up, attribute
by attribute, and nothing is called.

A part of a sharded model is called by itself, or under `torch.inference_mode()`: `fully_shard` makes the buffers that a unit's
parameters are gathered into in the unit's first forward, and keeps them; made under `inference_mode`, they are tensors that it
can never write to again.
[Note: parts of a model] `generate` of an encoder-decoder model calls the encoder, not the model; a critic's method calls its
transformer and its head. Parameters of the model's own unit, such as the embeddings, are not gathered then. DeepSpeed has hooks
on every module; here they are on every module between a unit and those that hold its parameters. With gradients, such a call is a
forward of the unit, and the backward gathers and reduces. Without, the unit is gathered if nobody has, and freed afterwards.
Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py `init_all_gather_outputs` and `alloc_all_gather_outputs`,
_fsdp_state.py `_lazy_init`: the first unit that is called takes itself for the model, if the model has not been asked before.
"""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from zckpt.base.errors import UsageError
from zckpt.runtime.sharding.deferred import gather_rows
from zckpt.runtime.sharding.older_torch import groups_of
from zckpt.runtime.sharding.parameter import ShardedParameter, sharded_parameter_of


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


_MIXED = "mixed torch.Tensor and DTensor"


def explain_failure(error: RuntimeError, model: nn.Module) -> UsageError | None:
    """The error for a forward that failed with torch's error about mixed tensors; None for any other error."""
    if _MIXED not in str(error):
        return None
    for frame, line in reversed(list(_frames(error.__traceback__))):
        for value in _values(frame, line):
            found = sharded_parameter_of(value) if isinstance(value, torch.Tensor) else None
            if found is not None:
                unit = _unit_of(found.name, model)
                return UsageError(
                    f"parameter {found.name!r} is used while it is not gathered",
                    found=f"{frame.f_code.co_filename}, line {line}: {linecache.getline(frame.f_code.co_filename, line).strip()}",
                    expected=f"the parameter taken from its module in the forward, or the forward of {unit!r}",
                    remedy="Take it from its module where it is used, not before the forward. In a compiled model name it by "
                    "zero.register_external_parameter before initialize. "
                    f"Or call {unit!r}, so that its forward uses the parameter.",
                )
    return None


def _unit_of(name: str, model: nn.Module) -> str:
    """The innermost module around a parameter that is gathered as one."""
    modules = dict(model.named_modules())
    while name:
        name = name.rpartition(".")[0]
        if isinstance(modules[name], FSDPModule):
            break
    return name or type(model).__name__


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _values(frame: FrameType, line: int) -> Iterator[Any]:
    """The values of the names and attributes in the statement of a line; the longest chains first."""
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    if not source or not os.path.isfile(frame.f_code.co_filename):
        return
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    holding = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]  # fmt: skip
    if not holding:
        return
    smallest = min(holding, key=lambda node: (node.end_lineno or node.lineno) - node.lineno)
    for node in ast.walk(smallest):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            try:
                yield _value(node, frame)
            except Exception:  # whatever its attributes do
                continue


def _value(node: ast.expr, frame: FrameType) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals[node.id] if node.id in frame.f_locals else frame.f_globals[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return _value(node.value, frame)[_value(node.slice, frame)]
    raise TypeError("an expression that would have to be computed")


def allow_parts(model: nn.Module) -> list[Callable[[], None]]:
    """Lets parts of a sharded model be called by themselves, and its first forward run under `inference_mode`. Returns an
    empty list: what is put into it is called at the end of each call of a part that is a forward of a unit.
    """
    assert isinstance(model, FSDPModule)
    model._get_fsdp_state()._lazy_init()
    ready = False
    ended: list[Callable[[], None]] = []

    def prepare(module: nn.Module, inputs: Any) -> None:
        nonlocal ready
        if ready or not torch.is_inference_mode_enabled():
            return
        ready = True
        with torch.inference_mode(False), torch.no_grad():
            for unit in model.modules():
                if isinstance(unit, FSDPModule):
                    unit.unshard()
                    unit.reshard()

    for module, units in _between(model):
        _gather_around(module, units, ended)
        module.register_forward_pre_hook(prepare, prepend=True)
    model.register_forward_pre_hook(prepare, prepend=True)
    return ended


def _gather_around(module: nn.Module, units: list[FSDPModule], ended: list[Callable[[], None]]) -> None:
    """Makes a module that is called by itself gather the units around it before its forwards, and free them after."""
    begun: list[tuple[list[FSDPModule], list[Any]]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        gathered: list[FSDPModule] = []
        entered: list[Any] = []
        begun.append((gathered, entered))
        for unit in units:
            state: Any = unit._get_fsdp_state()
            if torch.is_grad_enabled():
                if state._training_state == TrainingState.IDLE:
                    args, kwargs = state._pre_forward(module, args, kwargs)
                    entered.append(state)
            elif not all(group.is_unsharded for group in groups_of(unit)):
                gathered.append(unit)
                with torch.inference_mode(False), torch.no_grad():
                    unit.unshard()
        return (args, kwargs) if entered else None

    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not begun:
            return None
        gathered, entered = begun.pop()
        for unit in gathered:
            unit.reshard()
        for state in reversed(entered):
            output = state._post_forward(module, inputs, output)
        for end in ended if entered else ():
            end()
        return output if entered else None

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)


def _between(model: nn.Module) -> list[tuple[nn.Module, list[FSDPModule]]]:
    """The modules that are not units but contain parameters of a unit around them, each with these units."""
    names: dict[int, list[str]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        names.setdefault(id(module), []).append(name)
    found: dict[int, tuple[nn.Module, list[FSDPModule]]] = {}
    for name, unit in modules.items():
        if not isinstance(unit, FSDPModule) or names[id(unit)][0] != name:
            continue
        parameters = [p for group in groups_of(unit) for p in group.fsdp_params]
        holders = {id(m): m for p in parameters for m in (p._module_info.module, *p._module_info.shared_modules)}
        for place in (place for holder in holders for place in names[holder]):
            while place != name and (place.startswith(f"{name}.") or not name):
                module = modules[place]
                if isinstance(module, FSDPModule):
                    break
                _, units = found.setdefault(id(module), (module, []))
                if unit not in units:
                    units.append(unit)
                place = place.rpartition(".")[0]
    return list(found.values())
