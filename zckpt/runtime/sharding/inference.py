"""Allows inference with a sharded model: under `torch.inference_mode()`, and with a part of the model alone.

For `start`. `fully_shard` makes the buffers that a unit's parameters are gathered into in the unit's first forward, and
keeps them; made under `inference_mode`, they are tensors that it can never write to again.
[Note: parts of a model] `generate` of an encoder-decoder model calls the encoder, not the model. Parameters of the model's own
unit, such as the embeddings that both share, are not gathered then. A hook before every module between a unit and those that hold
its parameters gathers them if nobody has, and frees them afterwards. A training forward is not helped so: its backward needs them
again.
Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py `init_all_gather_outputs` and `alloc_all_gather_outputs`,
_fsdp_state.py `_lazy_init`: the first unit that is called takes itself for the model, if the model has not been asked before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zckpt.runtime.sharding.older_torch import groups_of


def allow_inference(model: nn.Module) -> None:
    """Lets the first forward of a sharded model run under `inference_mode`, and its parts be called by themselves."""
    assert isinstance(model, FSDPModule)
    root = model
    ready = False

    def prepare(module: nn.Module, inputs: Any) -> None:
        nonlocal ready
        if ready or not torch.is_inference_mode_enabled():
            return
        ready = True
        with torch.inference_mode(False), torch.no_grad():
            root._get_fsdp_state()._lazy_init()
            for unit in model.modules():
                if isinstance(unit, FSDPModule):
                    unit.unshard()
                    unit.reshard()

    for module, units in _between(model):
        _Part(root, units).hook(module)
        module.register_forward_pre_hook(prepare, prepend=True)
    model.register_forward_pre_hook(prepare, prepend=True)


class _Part:
    """The units around a module that it needs when it is called by itself."""

    def __init__(self, root: FSDPModule, units: list[FSDPModule]) -> None:
        self._root = root
        self._units = units
        self._gathered: list[list[FSDPModule]] = []

    def hook(self, module: nn.Module) -> None:
        """Makes the module's forwards gather before and free after."""
        module.register_forward_pre_hook(self._before, prepend=True)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, inputs: Any) -> None:
        gathered: list[FSDPModule] = []
        self._gathered.append(gathered)
        if torch.is_grad_enabled():
            return
        for unit in self._units:
            if not all(group.is_unsharded for group in groups_of(unit)):
                self._root._get_fsdp_state()._lazy_init()
                gathered.append(unit)
                with torch.inference_mode(False), torch.no_grad():
                    unit.unshard()

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for unit in self._gathered.pop() if self._gathered else ():
            unit.reshard()


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
