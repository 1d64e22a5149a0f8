"""Records what a script says about units before sharding: parameters used elsewhere, and modules that stay whole.

For `units`, and for scripts under DeepSpeed's names. A parameter that another module uses is left to the model as a whole, so
that it is there during the whole forward. A leaf module is one unit, whatever it contains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zckpt.base.errors import UsageError
from zckpt.base.words import examples
from zckpt.runtime.sharding.parameter import sharded_parameter_of

Classes = Sequence[type | str]
Modules = list[nn.Module]

_EXTERNAL = "_zckpt_external_parameters"
_LEAF = "_z3_leaf"


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Says that a module's forward uses a parameter of another module. Before `initialize` it is then gathered with the model;
    later nothing changes, since what is not registered is gathered for each use in a forward. Raises UsageError if `parameter`
    is not one.
    """
    if not isinstance(parameter, nn.Parameter) and sharded_parameter_of(parameter) is None:
        raise UsageError(
            "register_external_parameter got what is not a parameter", found=f"a {type(parameter).__name__}",
            remedy="Pass a parameter of a module, such as self.embed.weight.",
        )  # fmt: skip
    module.__dict__.setdefault(_EXTERNAL, {})[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Undoes `register_external_parameter`."""
    module.__dict__.get(_EXTERNAL, {}).pop(id(parameter), None)


def uses_of(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Pairs of a module and the `id` of a parameter that it was said to use."""
    return [(module, id(p)) for module in model.modules() for p in module.__dict__.get(_EXTERNAL, {}).values()]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Makes a module a leaf: its parameters are gathered together, whatever it contains. To be called before `initialize`."""
    setattr(model, _LEAF, flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is a leaf."""
    return bool(getattr(model, _LEAF, False))


def z3_leaf_parameter(model: torch.Tensor) -> bool:
    """Whether a parameter is known to be a leaf's: False, since leaves are known by their modules."""
    return False


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaves of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True) -> Modules:
    """Makes all modules of some classes leaves, and returns them. Classes may be given by their names, or names with the
    module that they are defined in. Raises UsageError if there is none, and `raise_if_not_found` is set.
    """
    return _flag(model, leaf_module_classes, True, raise_if_not_found, _is_of)[0]


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True) -> Modules:
    """Undoes `set_z3_leaf_modules`, with the same arguments and errors."""
    return _flag(model, leaf_module_classes, False, raise_if_not_found, _is_of)[0]


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Makes modules leaves by their names. Returns them, and the names that the model does not have. Raises UsageError
    if there are such names, and `raise_if_not_found` is set.
    """
    return _flag(model, module_names, flag, raise_if_not_found, lambda name, _, wanted: name == wanted, each=True)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """As `set_z3_leaf_modules_by_name`, by the ends of names."""
    return _flag(
        model, module_name_suffixes, flag, raise_if_not_found, lambda name, _, end: name.endswith(end), each=True
    )


def _flag(
    model: nn.Module, wanted: Sequence[Any], flag: bool, must: bool, fits: Callable[..., bool], *, each: bool = False
) -> tuple[Modules, list[Any]]:
    """Flags the modules that fit one of what is wanted. Returns them, and what fits none: an error if they `must` all be
    there (`each`), or one of them.
    """
    named = [*model.named_modules()]
    found = [module for name, module in named if any(fits(name, module, one) for one in wanted)]
    missing = [one for one in wanted if not any(fits(name, module, one) for name, module in named)]
    if must and (missing if each else not found):
        raise UsageError(
            "the model has no such modules to be leaves", found=examples(getattr(o, "__name__", str(o)) for o in missing),
            remedy="Correct the names or classes, or pass raise_if_not_found=False.",
        )  # fmt: skip
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


def _is_of(name: str, module: nn.Module, wanted: type | str) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    return wanted in (type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}")
