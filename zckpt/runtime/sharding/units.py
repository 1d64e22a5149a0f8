"""Finds the modules that are gathered as one unit.

For `shard`. A unit's parameters are gathered in one collective before its forward and dropped after it, so the units of a
transformer are its blocks. What is outside of every unit belongs to the model as a whole.

A script may say, before sharding, which parameters are used elsewhere and which modules stay whole. A parameter that another
module uses is left to the model as a whole, so that it is there during the whole forward. A leaf module is one unit, whatever it
contains.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zckpt.base.errors import UsageError
from zckpt.base.sizes import group_by_size
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


Wrap = str | type[nn.Module] | nn.Module | Callable[[nn.Module], bool]

_log = logging.getLogger(__name__)


def find_units(model: nn.Module, wrap: Wrap | Iterable[Wrap] | None = None) -> list[nn.Module]:
    """The units of a model, inner ones first.

    Without `wrap`, these are the modules that the model itself says must not be split (`_no_split_modules`, as transformers
    has them), or else the outermost ones that a `ModuleList` or `Sequential` repeats. A module that shares a parameter with
    the rest of the model is not a unit: both would hold the parameter.

    Args:
        model: the model.
        wrap: class names, classes, modules of the model, functions that say whether a module is a unit; one or several.

    Raises:
        UsageError: `wrap` names nothing in the model.
    """
    if wrap is None:
        unsplit = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        found = list(_outermost(model, lambda module: type(module).__name__ in unsplit))
        found = found or list(_outermost(model, _repeated_children(model)))
    else:
        several = [wrap] if isinstance(wrap, str | type | nn.Module) or callable(wrap) else list(wrap)
        inner = [module for module in model.modules() if module is not model]
        found = [module for module in inner if any(_is_wanted(module, want) for want in several)]
        if not found:
            raise UsageError(
                "the model has no module that wrap names", found=examples(getattr(w, "__name__", w) for w in several),
                expected=f"classes among {examples(sorted({type(m).__name__ for m in model.modules()}), 20)}",
                remedy="Correct zero_optimization.wrap, or initialize(wrap=...).",
            )  # fmt: skip
    leaves = list(_outermost(model, z3_leaf_module))
    if leaves:  # in the model's order, and nothing inside of a leaf
        within = {id(inner) for leaf in leaves for inner in leaf.modules()} - {id(leaf) for leaf in leaves}
        chosen = {id(module) for module in (*found, *leaves)} - within
        found = [module for module in model.modules() if id(module) in chosen]
    shared, uses = holders_of(model), uses_of(model)
    units = []
    for unit in reversed(found):  # children come after their parents
        inside = {id(module) for module in unit.modules()}
        own = {id(p) for p in unit.parameters()}
        if any(parameter in own and id(user) not in inside for user, parameter in uses):
            _log.info("%s has a parameter that another module uses, so it is not gathered alone.", type(unit).__name__)
            continue
        if any(id(owner) not in inside for p in unit.parameters() for owner, _ in shared[id(p)]):
            _log.info("%s shares parameters with other modules, so it is not gathered by itself.", type(unit).__name__)
        elif any(True for _ in unit.parameters()):
            units.append(unit)
    return units


def holders_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules that a parameter, known by its `id`, is registered in, with its names there."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module, name))
    return holders


def _is_wanted(module: nn.Module, want: Wrap) -> bool:
    if isinstance(want, str):
        return type(module).__name__ == want
    if isinstance(want, type):
        return isinstance(module, want)
    return module is want if isinstance(want, nn.Module) else bool(want(module))


def _repeated_children(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Children of lists and sequences with a class that occurs there more than once."""
    repeated: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            counts = Counter(type(child) for child in module)
            repeated |= {id(child) for child in module if counts[type(child)] > 1}
    return lambda module: id(module) in repeated and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _outermost(model: nn.Module, is_unit: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            if is_unit(child):
                yield child
            else:
                yield from walk(child)

    yield from walk(model)


def merge_units(units: list[nn.Module], model: nn.Module, bucket: int) -> list[list[nn.Module]]:
    """Merges units where fewer and larger collectives cost less: units of `find_units`, in the order of the backward, into
    lists of modules in the order of the forward. One has at most `bucket` parameters, if a single unit does not have more.
    What fits in the last bucket together with the model's own parameters is left to the model.
    """
    every = [*units, model]
    sizes = (sum(p.numel() for p in part) for part in parts_of([[unit] for unit in every]))
    groups = group_by_size(zip(every, sizes, strict=True), bucket)
    return [group[::-1] for group in groups if model not in group]


def parts_of(units: list[list[nn.Module]]) -> list[list[nn.Parameter]]:
    """The parameters that each unit adds to those of the units before it."""
    seen: set[int] = set()
    parts = []
    for unit in units:
        part = list({id(p): p for module in unit for p in module.parameters() if id(p) not in seen}.values())
        seen |= {id(p) for p in part}
        parts.append(part)
    return parts
