"""Keeps parameters whole between steps: at stages 0 to 2 every rank holds them, as in DeepSpeed.

For `training_run` and `engine`.
[Note: whole parameters]
`fully_shard` gathers a unit's parameters for a forward, and registers the whole ones in the modules for as long as it holds
them. At stages 0 to 2 they are gathered when a step has updated the masters, and held until the next step does. So
`module.state_dict()`, `module.parameters()` and `save_pretrained` find plain tensors of the computation's dtype on every rank,
and ask no other rank. The next forward finds them gathered: there are as many collectives as without. A whole parameter is
no master: what a script writes to it (the average of another network's weights, for one) is taken into the rank's part before
the part is used: by a step, a save, an export.
At stage 3 a state dict has no numbers of what is in parts; see `AbsentTensor`.
[Note: copies] `.half()`, `.cpu()` and the like would exchange the memory that `fully_shard` gathers into. So the modules get
copies in what was asked for, and hold them until the engine needs its own parameters: for a forward that trains, a step, a save.
`copy.deepcopy` of a module with whole parameters gives a plain one, without the hooks of `fully_shard` and zckpt.
Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py `unshard`, `_register_state_dict_hooks`.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zckpt.base.errors import UsageError
from zckpt.live.slices import COPIES, copies_of
from zckpt.runtime.sharding.gradients import names_of_places, place_of, units_of
from zckpt.runtime.sharding.parameter import ShardedParameter, sharded_parameter_of

Change = Callable[[torch.Tensor], torch.Tensor]

_log = logging.getLogger(__name__)


def _converting(apply: Callable[..., Any]) -> Callable[..., Any]:
    def convert(module: Any, change: Change, recurse: bool = True) -> Any:
        copies = copies_of(module)
        return apply(module, change, recurse) if copies is None else copies.convert(module, change, recurse)

    return convert


for _kind in (nn.Module, FSDPModule):  # a module in a unit is none itself
    _kind._apply = _converting(_kind._apply)  # type: ignore[method-assign]

_STATE = "__getstate__"
_MARKS = ("__composable_api_state_key", "_fsdp_use_orig_params", "_is_fsdp_managed_module", COPIES, _STATE)


def _plain_state(module: nn.Module) -> dict[str, Any]:
    """The `__getstate__` of a sharded module: the state of its class, without what `fully_shard` and zckpt put in."""
    own: dict[str, Any] = type(module).__getstate__(module)
    state = {name: value for name, value in own.items() if not name.startswith(_MARKS)}
    for name in [name for name in vars(nn.Module()) if name.endswith("_hooks")]:
        state[name] = type(state[name])((key, hook) for key, hook in state[name].items() if not _is_ours(hook))
    return state


def _is_ours(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(("zckpt.", "torch.distributed.fsdp."))


def _plain_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """The `__deepcopy__` of a unit: a module of its plain class. Raises UsageError if parameters are in parts."""
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise UsageError(
            "copy.deepcopy of a module with parameters in parts, which nothing else can use",
            remedy="Copy it inside of `with zckpt.runtime.zero.GatheredParameters(list(module.parameters())):`, on every "
            "rank: trained parameters are in fp32 there. At stages 0 to 2 engine.gather() on every rank makes them whole.",
        )  # fmt: skip
    kind: Any = type(module).__mro__[2]  # after the class of `fully_shard` and FSDPModule
    plain: nn.Module = kind.__new__(kind)
    memo[id(module)] = plain
    plain.__setstate__(copy.deepcopy(_plain_state(module), memo))
    return plain


class Copies:
    """The tensors that the modules of a sharded model hold in place of the engine's; see [Note: copies]."""

    def __init__(self, model: nn.Module, parameters: Sequence[ShardedParameter]) -> None:
        self._parameters = parameters
        self._shown: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        for one in parameters:
            one.end_copies = self.give_back
        for module in model.modules():
            vars(module).update({COPIES: self, _STATE: functools.partial(_plain_state, module)})
            if isinstance(module, FSDPModule):
                type(module).__deepcopy__ = _plain_copy  # type: ignore[attr-defined]
        model.register_forward_pre_hook(lambda model, _: self._before_forward(model), prepend=True)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a module, and one in a file, is plain

    def convert(self, module: nn.Module, change: Change, recurse: bool = True) -> nn.Module:
        """Gives a module copies of the tensors that a function changes; parameters in parts stay. Returns the module."""
        changed: dict[int, torch.Tensor] = {}
        in_parts = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        for inner in module.modules() if recurse else (module,):
            for table in (inner._parameters, inner._buffers):
                for name, held in table.items():
                    if held is None or (in_parts and table is inner._parameters):
                        continue
                    if id(held) not in changed:
                        new = change(held.detach())
                        is_same = new.dtype == held.dtype and new.device == held.device
                        changed[id(held)] = held if is_same else _copy_of(held, new)
                    if changed[id(held)] is not held:
                        self._show(table, name, changed[id(held)])
        return module

    def make_plain(self, model: nn.Module) -> None:
        """Gives the whole model tensors in fp32 on the CPU; those of parameters have arbitrary numbers."""
        for one in self._parameters:
            dtype = torch.float32 if one.dtype.is_floating_point else one.dtype
            plain = _copy_of(one.weight, torch.empty(one.shape, dtype=dtype))
            for module, name in one.holders:
                self._show(module._parameters, name, plain)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    dtype = torch.float32 if buffer.dtype in (torch.float16, torch.bfloat16) else buffer.dtype
                    self._show(module._buffers, name, buffer.to("cpu", dtype))

    def give_back(self) -> None:
        """Makes the modules hold the engine's tensors again."""
        while self._shown:
            table, name, held, copy = self._shown.pop()
            if table.get(name) is copy:
                table[name] = held

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a module's tensor is such a copy."""
        return any(copy is tensor for *_, copy in self._shown)

    def _show(self, table: Any, name: str, copy: torch.Tensor) -> None:
        self._shown.append((table, name, table[name], copy))
        table[name] = copy

    def _before_forward(self, model: nn.Module) -> None:
        if torch.is_grad_enabled() or not all(unit.is_unsharded for unit in units_of(model)):
            self.give_back()


def _copy_of(held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if not isinstance(held, nn.Parameter):
        return new
    copy = nn.Parameter(new, requires_grad=held.requires_grad)
    vars(copy).update({name: value for name, value in vars(held).items() if name.startswith("_zckpt_sharded")})
    return copy


class WholeParameters:
    """Keeps the parameters of a model whole between steps, at stage 0, 1 or 2. `copies`: what its modules may hold."""

    def __init__(self, model: nn.Module, parameters: Sequence[ShardedParameter], copies: Copies) -> None:
        self._copies = copies
        self._by_name = {one.name: one for one in parameters}
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_reshard_after_backward(False, recurse=False)
        self.gather()
        names = names_of_places(parameters)
        for unit in units_of(model):
            for one in unit.fsdp_params:
                self._by_name[names[place_of(one)]].hold(one._unsharded_param, unit.reshard)
        refuse_parts(model, "Call engine.gather() on every rank first.")
        model.register_load_state_dict_post_hook(lambda module, keys: self.take_all())

    @torch.no_grad()
    def gather(self) -> None:
        """Gathers all parameters that are not whole. Every rank calls it."""
        self._copies.give_back()
        with torch.inference_mode(False):
            for module in self._modules:
                module.unshard()
        for one in self._by_name.values():
            one.settle()

    def take_up(self) -> None:
        """Copies what scripts have written to the whole parameters into this rank's parts."""
        self._copies.give_back()
        for one in self._by_name.values():
            one.take_up()

    @torch.no_grad()
    def take_all(self) -> None:
        """Copies the whole parameters into the masters (this rank's rows), after `load_state_dict`."""
        for one in self._by_name.values():
            if one.replicated:
                if one.master is not None and one.master.data_ptr() != one.weight.data_ptr():
                    one.master.copy_(one.weight)
            elif one.whole is not None:
                given = self._put_back(one, one.whole)
                one.local().view(-1).copy_(given.reshape(-1)[one.elements])
                one.settle()

    def _put_back(self, one: ShardedParameter, whole: nn.Parameter) -> torch.Tensor:
        """Registers the whole parameter again after `load_state_dict(assign=True)` has put another in its place.
        Returns what was loaded; a copy stays where it is.
        """
        given: torch.Tensor | None = None
        for module, name in one.holders:
            given = module._parameters[name]
            if given is not whole and given is not None:
                if whole.untyped_storage().size():
                    whole.copy_(given)
                if not self._copies.has(given):
                    module._parameters[name] = whole
        return whole if given is None else given


def refuse_parts(model: nn.Module, remedy: str | None = None) -> None:
    """Makes a model refuse to give or take a state dict while its modules hold parts of parameters.

    Without a remedy, as at stage 3, it gives one that has `AbsentTensor` for what is in parts.
    """

    def check(what: str) -> None:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            found = f"{what} finds a part of each parameter, which nothing else can use"
            raise UsageError(found, remedy=remedy or OF_STAGE_3)

    def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not prefix or prefix == "module.":  # the first that is asked, or the engine's only child
            check("state_dict()")

    def after(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name, held in module._parameters.items():
            if isinstance(held, DTensor) and isinstance(state.get(f"{prefix}{name}"), DTensor):
                one = sharded_parameter_of(held)
                meta = torch.empty(held.shape, dtype=held.dtype if one is None else one.dtype, device="meta")
                state[f"{prefix}{name}"] = meta.as_subclass(AbsentTensor)

    for unit in units_of(model):
        for hooks in (unit._module_to_pre_save_state_dict_hook_handle, unit._module_to_pre_load_state_dict_hook_handle):
            for hook in hooks.values():  # they would drop whole parameters
                hook.remove()
        for one in unit.fsdp_params:
            one._post_load_hook_handle.remove()  # it looks for a part where the whole is
    for module in model.modules():
        if remedy is None:
            module._register_state_dict_hook(after)
        else:
            module.register_state_dict_pre_hook(before)
    model.register_load_state_dict_pre_hook(lambda *_: check("load_state_dict()"))


_KNOWN = ("__get__", "__repr__", "__format__", "detach", "dim", "is_floating_point", "numel", "size", "stride")


class AbsentTensor(torch.Tensor):
    """What a state dict at stage 3 has for a parameter in parts: its shape and dtype. A use of its numbers is an error.

    DeepSpeed has tensors without elements there, and its scripts let rank 0 alone save them, before all ranks gather each
    parameter and overwrite the file. So `torch.save` writes such tensors, and this is said.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers what it is; anything else raises a UsageError."""
        name = getattr(func, "__name__", "")
        if name in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise UsageError(
            f"{name} of a parameter in a state dict of stage 3, which has no numbers", found=f"shape {list(args[0].shape)}",
            remedy=OF_STAGE_3,
        )  # fmt: skip

    def __reduce_ex__(self, protocol: Any) -> Any:
        _log_absent()
        return torch.empty(0, dtype=self.dtype).__reduce_ex__(protocol)


@functools.cache
def _log_absent() -> None:
    """Says once what a saved state dict lacks."""
    _log.warning("A state dict of stage 3 is saved: weights in parts are empty in it, as in DeepSpeed. %s", OF_STAGE_3)


OF_STAGE_3 = (
    "At stage 3 call zckpt.live.save_pretrained(engine, dir, dtype='fp32') on every rank to write the consolidated weights in "
    "fp32, or engine.save_16bit_model(dir) on every rank in the dtype of the computation. For a state dict in memory call "
    "engine._zero3_consolidated_16bit_state_dict() on every rank. To load one, call engine.load_module_state_dict. For a model "
    "in fp32 call load_state_dict_from_zero_checkpoint(model, dir) of zckpt.runtime.utils.zero_to_fp32."
)
