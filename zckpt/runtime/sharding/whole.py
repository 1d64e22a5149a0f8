"""Parameters that are whole between steps: at stages 0 to 2 every rank holds them, as DeepSpeed does.

For `training_run` and `engine`.
[Note: whole parameters]
`fully_shard` gathers a unit's parameters for a forward, and registers the whole ones in the modules for as long as it holds
them. At stages 0 to 2 they are gathered when a step has updated the masters, and held until the next step does. So
`module.state_dict()`, `module.parameters()` and `save_pretrained` find plain tensors of the computation's dtype on every rank,
and ask no other rank. The next forward finds them gathered: there are as many collectives as without. A whole parameter is
no master: what a script writes to it (the average of another network's weights, for one) is taken into the rank's part before
the part is used: by a step, a save, an export. Of `.half()`, `.cpu()` and the like, modules get copies in the dtype or on the
device that was asked for, until the next forward that trains.
At stage 3 a state dict would be rows that only this rank can use, so it is refused.
Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py `unshard`, `_register_state_dict_hooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zckpt.base.errors import UsageError
from zckpt.runtime.sharding.gradients import names_of_places, place_of, units_of
from zckpt.runtime.sharding.parameter import ShardedParameter


class WholeParameters:
    """Keeps the parameters of a model whole between steps.

    Args:
        model: the sharded model, at stage 0, 1 or 2.
        parameters: of the model.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[ShardedParameter]) -> None:
        self._model = model
        self._by_name = {one.name: one for one in parameters}
        self._copied: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        assert isinstance(model, FSDPModule)
        model._get_fsdp_state()._lazy_init()  # the root's, before that of a unit in it
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_reshard_after_backward(False, recurse=False)
        self.gather()
        names = names_of_places(parameters)
        for unit in units_of(model):
            for hooks in (
                unit._module_to_pre_save_state_dict_hook_handle,
                unit._module_to_pre_load_state_dict_hook_handle,
            ):
                for hook in hooks.values():  # they would drop the whole parameters
                    hook.remove()
            for one in unit.fsdp_params:
                one._post_load_hook_handle.remove()  # it looks for a part where the whole is
                self._by_name[names[place_of(one)]].hold(one._unsharded_param, unit.reshard, self._give_back)
        _refuse(model, self._refuse_parts)
        model.register_load_state_dict_pre_hook(lambda *_: self._refuse_parts())  # type: ignore[no-untyped-call]
        model.register_load_state_dict_post_hook(lambda module, keys: self.take_all())  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(lambda *_: self._give_back() if torch.is_grad_enabled() else None, prepend=True)
        for inner in model.modules():
            inner._apply = partial(self._convert, inner)  # type: ignore[method-assign]

    @torch.no_grad()
    def gather(self) -> None:
        """Gathers all parameters that are not whole. Every rank calls it."""
        with torch.inference_mode(False):
            for module in self._modules:
                module.unshard()
        for one in self._by_name.values():
            one.settle()

    def take_up(self) -> None:
        """Takes what scripts have written to the whole parameters into this rank's parts."""
        for one in self._by_name.values():
            one.take_up()

    @torch.no_grad()
    def take_all(self) -> None:
        """Takes the numbers of the whole parameters into the masters, after `load_state_dict`: this rank's rows."""
        for one in self._by_name.values():
            if one.replicated:
                if one.master is not None and one.master.data_ptr() != one.weight.data_ptr():
                    one.master.copy_(one.weight)
            elif one.whole is not None:
                given = self._put_back(one, one.whole)
                one.local().view(-1).copy_(given.reshape(-1)[one.elements])
                one.settle()

    def _put_back(self, one: ShardedParameter, whole: nn.Parameter) -> torch.Tensor:
        """Registers the whole parameter again, where `load_state_dict(assign=True)` has put another in its place.

        Returns:
            What was loaded; a copy of another dtype stays where it is.
        """
        found: torch.Tensor = whole
        for module, name in one.holders:
            given = module._parameters[name]
            if given is not whole and given is not None:
                whole.copy_(given)
                if (id(module._parameters), name) in self._copied:
                    found = given
                else:
                    module._parameters[name] = whole
        return found

    def _convert(self, module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """What `.cpu()`, `.to()`, `.float()` and `.half()` do: what they change is copied."""
        copies: dict[int, torch.Tensor] = {}
        for inner in module.modules() if recurse else (module,):
            for table in (inner._parameters, inner._buffers):
                for name, held in table.items():
                    if held is None or _stays(held, convert):
                        continue
                    self._refuse_parts()
                    copy = copies.get(id(held))
                    if copy is None:
                        copy = copies[id(held)] = convert(held.detach())
                        if isinstance(held, nn.Parameter):
                            copy = copies[id(held)] = nn.Parameter(copy, requires_grad=held.requires_grad)
                    self._copied.setdefault((id(table), name), (table, held))
                    table[name] = copy  # type: ignore[assignment]
        return module

    def _give_back(self) -> None:
        """Registers what `_convert` has replaced."""
        for (_, name), (table, held) in self._copied.items():
            table[name] = held
        self._copied.clear()

    def _refuse_parts(self) -> None:
        if all(unit.is_unsharded for unit in units_of(self._model)):
            return
        raise UsageError(
            "the model's parameters are in parts now", remedy="Call engine.gather() on every rank first.",
        )  # fmt: skip


def refuse_state_dict(model: nn.Module) -> None:
    """Lets `state_dict()` of a model at stage 3 raise an error that names the calls that work."""

    def refuse() -> None:
        raise UsageError(
            "state_dict() of a model at stage 3 holds a part of each parameter, which nothing can load",
            remedy="Call zckpt.live.save_pretrained(engine, dir, dtype='fp32') on all ranks to write fp32 weights, "
            "or engine.save_16bit_model(dir) in the dtype of the computation. For a state dict in memory, call "
            "engine._zero3_consolidated_16bit_state_dict() on every rank.",
        )

    def convert(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Changes buffers only: no part of a parameter is for scripts."""
        for inner in module.modules() if recurse else (module,):
            inner._buffers.update(
                {name: held if held is None else change(held) for name, held in inner._buffers.items()}
            )
        return module

    def refuse_load(*_: Any) -> None:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise UsageError(
                "load_state_dict() of a model at stage 3 finds a part of each parameter",
                remedy="Call engine.load_module_state_dict({'module': state}) on every rank. For a model in fp32 call "
                "load_state_dict_from_zero_checkpoint(model, dir) of zckpt.runtime.utils.zero_to_fp32.",
            )

    _refuse(model, refuse)
    model.register_load_state_dict_pre_hook(refuse_load)
    for module in model.modules():
        module._apply = partial(convert, module)  # type: ignore[method-assign]


def take_out(model: nn.Module, parameters: Sequence[ShardedParameter]) -> nn.Module:
    """Makes a sharded model a plain one again, on the CPU; its weights are fp32, of any numbers. Its engine is of no use then."""
    for module in model.modules():
        own = vars(module)
        for name in [name for name in own if name in ("_apply", "_zckpt_take_out") or "composable_api" in name]:
            del own[name]
        tables = [table for name, table in own.items() if "_hooks" in name and isinstance(table, dict)]
        ours = [key for table in tables for key, hook in table.items() if _is_ours(hook)]
        for table in tables:
            for key in ours:
                table.pop(key, None)
        if isinstance(module, FSDPModule):
            module.__class__ = type(module).__bases__[-1]
            _module_state_mapping.pop(module, None)
        module._buffers.update({name: held if held is None else held.cpu() for name, held in module._buffers.items()})
    for one in parameters:
        dtype = torch.float32 if one.dtype.is_floating_point else one.dtype
        plain = nn.Parameter(torch.empty(one.shape, dtype=dtype), requires_grad=one.trained)
        for module, name in one.holders:
            module._parameters[name] = plain
    return model


def _is_ours(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(("zckpt.", "torch.distributed.fsdp."))


def _stays(held: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    found = convert(torch.empty(0, dtype=held.dtype, device=held.device))
    return found.dtype == held.dtype and found.device == held.device


def _refuse(model: nn.Module, check: Callable[[], None]) -> None:
    def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not prefix or prefix == "module.":  # the first that is asked, or the engine's only child
            check()

    for module in model.modules():
        module.register_state_dict_pre_hook(before)
