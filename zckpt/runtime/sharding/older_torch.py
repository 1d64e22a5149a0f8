"""Provides what the trainer needs of `fully_shard` and torch 2.6 to 2.12 lack.

For `shard` and `gradients`. Each function does what the newest torch does where that has the means itself.
[Note: which torch has what] 2.7: parameters to be left out. 2.8: `reshard_after_forward=None`. 2.9: own collectives, frozen
parameters of another dtype. By 2.13: zeros for parameters that had no part in a loss, several groups of parameters per unit.
Source: torch 2.6, 2.7, 2.8, 2.9 and 2.13, distributed/fsdp/_fully_shard/*.py, cpu/__init__.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

_TAKES = inspect.signature(fully_shard).parameters


def shard_unit(unit: list[nn.Module], ignored: Iterable[nn.Parameter], reshard: bool | int | None, **more: Any) -> None:
    """Calls `fully_shard` for the modules of a unit, with `more` arguments; parameters that are `ignored`, of this unit or
    not, stay as they are. `reshard` is `reshard_after_forward`; None for the root, which is then kept gathered for its
    backward.
    """
    module: Any = unit[0] if len(unit) == 1 else unit
    if reshard is None and _TAKES["reshard_after_forward"].default is not None:
        reshard = False
    if "ignored_params" in _TAKES:
        fully_shard(module, reshard_after_forward=reshard, ignored_params=set(ignored), **more)
        return
    with _absent(unit, {id(parameter) for parameter in ignored}):
        fully_shard(module, reshard_after_forward=reshard, **more)


@contextmanager
def _absent(unit: list[nn.Module], parameters: Collection[int]) -> Iterator[None]:
    """Removes these parameters from the modules while the context lasts."""
    hidden = [
        (module, name, parameter)
        for root in unit
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in parameters
    ]
    for module, name, _ in hidden:
        module._parameters[name] = None
    try:
        yield
    finally:
        for module, name, parameter in hidden:
            module._parameters[name] = parameter


def groups_of(module: FSDPModule) -> list[Any]:
    """The state that `fully_shard` keeps of a unit's groups of parameters."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reduce_unused(model: FSDPModule, wanted: bool) -> None:
    """Makes a parameter without a part in a rank's loss take part in the reduction with zeros, so that no rank waits."""
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(wanted)
        return
    groups = {id(group): group for module in _sharded_modules(model) for group in groups_of(module)} if wanted else {}
    for group in groups.values():
        group.post_backward = _with_zeros(group, group.post_backward)


def allow_frozen_dtypes(model: FSDPModule) -> None:
    """Lets frozen parameters of a unit have another dtype than those that are trained; for torch before 2.9."""
    if hasattr(model, "set_custom_all_gather"):
        return
    for module in _sharded_modules(model):
        for group in groups_of(module):
            group._init_mp_dtypes = _of_trained(group, group._init_mp_dtypes)


def _of_trained(group: Any, init: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        every = group.fsdp_params
        for parameter in every:
            parameter.init_dtype_attrs(group.mp_policy)
        group.fsdp_params = [one for one in every if one.sharded_param.requires_grad] or every[:1]
        try:
            init()
        finally:
            group.fsdp_params = every

    return run


def _with_zeros(group: Any, post_backward: Callable[..., None]) -> Callable[..., None]:
    def run(*unused: Any) -> None:
        for parameter in group.fsdp_params if group.reduce_grads else ():
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is None or not whole.requires_grad or parameter.unsharded_accumulated_grad is not None:
                continue
            if whole.grad is None and group.is_unsharded:
                whole.grad = torch.zeros_like(whole)
        post_backward(*unused)

    return run


def communicate(model: FSDPModule, all_gather: Any, reduce_scatter: Any) -> None:
    """Makes every unit of a model on CPUs gather and reduce by these functions; None leaves that to torch."""
    if hasattr(model, "set_custom_all_gather"):
        for module in _sharded_modules(model):
            if all_gather is not None:
                module.set_custom_all_gather(all_gather())
            module.set_custom_reduce_scatter(reduce_scatter())
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    vars(_fsdp_collectives)["dist"] = _OnCpus(all_gather, reduce_scatter)
    for name in ("record_event", "wait_event"):
        setattr(torch.cpu.Stream, name, lambda *_: torch.cpu.Event())
    if "ignored_params" not in _TAKES:
        _preserve_versions()
        for module in _sharded_modules(model):
            for group in groups_of(module):
                group.finalize_backward = _without_event(group, group.finalize_backward)


def _without_event(group: Any, finalize_backward: Callable[[], None]) -> Callable[[], None]:
    """The function without the wait of torch 2.6 on a GPU for gathered buffers, on any device."""

    def run() -> None:
        if group._all_gather_result is not None:
            group._all_gather_result = group._all_gather_result._replace(all_gather_event=None)
        finalize_backward()

    return run


def gather(whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    """Fills a tensor with the parts of all ranks of a group."""
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(whole, part, group=group)


def _preserve_versions() -> None:
    """Lets a backward use parameters that were gathered again since the forward, which changed no number; for torch 2.6."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    copy_out: Callable[..., None] = vars(_fsdp_param_group)["foreach_all_gather_copy_out"]

    def uncounted(result: Any, parameters: Any, group: Any) -> None:
        before = [(out, out._version) for one in parameters for out in one.all_gather_outputs]
        copy_out(result, parameters, group)
        for out, version in before:
            if not out.is_inference():
                torch._C._autograd._unsafe_set_version_counter(out, version)

    vars(_fsdp_param_group)["foreach_all_gather_copy_out"] = uncounted


class _OnCpus:
    """`torch.distributed` as `fully_shard` calls it, with other collectives for tensors in host memory."""

    def __init__(self, all_gather: Any, reduce_scatter: Any) -> None:
        self._all_gather, self._reduce_scatter = all_gather, reduce_scatter

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather_into_tensor(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if self._all_gather is None or output_tensor.device.type != "cpu":
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        self._all_gather()(output_tensor, input_tensor, group)
        return None

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
    ) -> None:
        if output.device.type != "cpu":
            dist.reduce_scatter_tensor(output, input, op, group)
        else:
            self._reduce_scatter()(output, input, group, op)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        mean = op == dist.ReduceOp.AVG and tensor.device.type == "cpu"  # which gloo has not
        dist.all_reduce(tensor, dist.ReduceOp.SUM if mean else op, group)
        if mean:
            tensor /= group.size()


def _sharded_modules(model: FSDPModule) -> Iterator[Any]:
    assert isinstance(model, nn.Module)
    return (module for module in model.modules() if isinstance(module, FSDPModule))
