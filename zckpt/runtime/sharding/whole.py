"""Parameters that are whole between steps: at stages 0 to 2 every rank holds them, as DeepSpeed does.

For `training_run` and `engine`.
[Note: whole parameters]
`fully_shard` gathers a unit's parameters for a forward, and registers the whole ones in the modules for as long as it holds
them. At stages 0 to 2 they are gathered when a step has updated the masters, and held until the next step does. So
`module.state_dict()`, `module.parameters()` and `save_pretrained` find plain tensors of the computation's dtype on every rank,
and ask no other rank. The next forward finds them gathered: there are as many collectives as without. A whole parameter is
no master: what a script writes to it (the average of another network's weights, for one) is taken into the rank's part before
the part is used: by a step, a save, an export.
At stage 3 a state dict would be rows that only this rank can use, so it is refused.
Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py `unshard`, `_register_state_dict_hooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

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
                self._by_name[names[place_of(one)]].hold(one._unsharded_param, unit.reshard)
        _refuse(model, self._refuse_parts)
        model.register_load_state_dict_pre_hook(lambda *_: self._refuse_parts())  # type: ignore[no-untyped-call]
        model.register_load_state_dict_post_hook(lambda module, keys: self.take_all())  # type: ignore[no-untyped-call]

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
                self._put_back(one, one.whole)
                one.local().view(-1).copy_(one.whole.reshape(-1)[one.elements])
                one.settle()

    @staticmethod
    def _put_back(one: ShardedParameter, whole: nn.Parameter) -> None:
        """Registers the whole parameter again, where `load_state_dict(assign=True)` has put another in its place."""
        for module, name in one.holders:
            given = module._parameters[name]
            if given is not whole and given is not None:
                whole.copy_(given)
                module._parameters[name] = whole

    def _refuse_parts(self) -> None:
        if all(unit.is_unsharded for unit in units_of(self._model)):
            return
        raise UsageError(
            "the model's parameters are in parts now",
            remedy="Call engine.gather() on every rank first.",
        )


def refuse_state_dict(model: nn.Module) -> None:
    """Lets `state_dict()` of a model at stage 3 raise an error that names the calls that work."""

    def refuse() -> None:
        raise UsageError(
            "state_dict() of a model at stage 3 holds a part of each parameter, which nothing can load",
            remedy="Call engine.save_16bit_model(dir) on every rank to write consolidated weights. For a state dict in memory, "
            "call engine._zero3_consolidated_16bit_state_dict() on every rank.",
        )

    _refuse(model, refuse)


def _refuse(model: nn.Module, check: Callable[[], None]) -> None:
    def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not prefix or prefix == "module.":  # the first that is asked, or the engine's only child
            check()

    for module in model.modules():
        module.register_state_dict_pre_hook(before)
