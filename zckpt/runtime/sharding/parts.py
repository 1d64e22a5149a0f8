"""Calls of a part of a sharded model by itself, outside of the model's forward; and forwards under `torch.inference_mode()`.

For `start`. `fully_shard` makes the buffers that a unit's parameters are gathered into in the unit's first forward, and
keeps them; made under `inference_mode`, they are tensors that it can never write to again.
[Note: parts of a model] `generate` of an encoder-decoder model calls the encoder, not the model; a critic's method calls its
transformer and its head. Parameters of the model's own unit, such as the embeddings, are not gathered then. DeepSpeed has hooks
on every module; here they are on every module between a unit and those that hold its parameters. With gradients, such a call is a
forward of the unit, and the backward gathers and reduces. Without, the unit is gathered if nobody has, and freed afterwards.
Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py `init_all_gather_outputs` and `alloc_all_gather_outputs`,
_fsdp_state.py `_lazy_init`: the first unit that is called takes itself for the model, if the model has not been asked before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from zckpt.runtime.sharding.older_torch import groups_of


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
        _Part(units, ended).hook(module)
        module.register_forward_pre_hook(prepare, prepend=True)
    model.register_forward_pre_hook(prepare, prepend=True)
    return ended


class _Part:
    """The units around a module that it needs when it is called by itself."""

    def __init__(self, units: list[FSDPModule], ended: list[Callable[[], None]]) -> None:
        self._units, self._ended = units, ended
        self._begun: list[tuple[list[FSDPModule], list[Any]]] = []

    def hook(self, module: nn.Module) -> None:
        """Makes the module's forwards gather before and free after."""
        module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        gathered: list[FSDPModule] = []
        entered: list[Any] = []
        self._begun.append((gathered, entered))
        for unit in self._units:
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

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self._begun:
            return None
        gathered, entered = self._begun.pop()
        for unit in gathered:
            unit.reshard()
        for state in reversed(entered):
            output = state._post_forward(module, inputs, output)
        for end in self._ended if entered else ():
            end()
        return output if entered else None


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
