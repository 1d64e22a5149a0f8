"""Finds the modules that are gathered as one unit.

For `shard`. A unit's parameters are gathered in one collective before its forward and dropped after it, so the units of a
transformer are its blocks. What is outside of every unit belongs to the model as a whole.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from zckpt.base.errors import UsageError
from zckpt.base.words import examples
from zckpt.runtime.sharding.external import uses_of, z3_leaf_module

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
    groups: list[list[nn.Module]] = [[]]
    room = bucket
    for unit, part in zip([*units, model], parts_of([[unit] for unit in [*units, model]]), strict=True):
        numel = sum(p.numel() for p in part)
        if numel > room:
            groups.append([])
            room = bucket
        groups[-1].append(unit)
        room -= numel
    return [group[::-1] for group in groups if group and model not in group]


def parts_of(units: list[list[nn.Module]]) -> list[list[nn.Parameter]]:
    """The parameters that each unit adds to those of the units before it."""
    seen: set[int] = set()
    parts = []
    for unit in units:
        part = list({id(p): p for module in unit for p in module.parameters() if id(p) not in seen}.values())
        seen |= {id(p) for p in part}
        parts.append(part)
    return parts
