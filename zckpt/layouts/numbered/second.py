"""Finds an optimizer's numbered states beside plain weights a second time.

`Optimizer.state_dict` numbers the parameters group by group, each in the order of the model; of several groups, those of one
shape must be of one. OSS gives a parameter to the rank with the fewest elements so far; ZeroRedundancyOptimizer does so with the
largest of a group first.
Source: torch 2.13, optim/optimizer.py `state_dict`, distributed/optim/zero_redundancy_optimizer.py `_partition_parameters`;
fairscale 0.4.13, optim/oss.py `partition_parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from zckpt.containers import TensorRef
from zckpt.layouts.plain.second import weights_in
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import SecondLook, Shape, as_sequence, fields_of, hold_whole

_RANK = re.compile(r"[\w.-]*?optim[\w.-]*?rank[-_]?(\d+)\.\w+", re.I)
_WHOLE = re.compile(r"[\w-]*optim[\w-]*\.(?:pt|pth|bin|ckpt)", re.I)
_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optimizer_state", "last_optimizer_state")
_BUFFER = re.compile(r"(?:^|\.)(?:running_mean|running_var|num_batches_tracked|inv_freq|original_inv_freq)$")


def find_again(listing: Listing) -> SecondLook:
    """The tensors of the files, and the states of its parameters."""
    held = weights_in(listing)
    runs = [run for name, ref in held.items() for run in hold_whole(name, "", ref)]
    for name, states in _states(listing, held).items():
        for kind, value in states.items():
            if isinstance(value, TensorRef) and value.shape and value.shape == held[name].shape:
                runs += hold_whole(name, kind, value)
    shapes = {name: ref.shape for name, ref in held.items()}
    return SecondLook(shapes, runs, unproved="shapes do not tell which parameters the optimizer's numbers mean")


def _states(listing: Listing, held: Mapping[str, TensorRef]) -> dict[str, Mapping[str, object]]:
    """Parameter -> its states, if there is one way to assign them."""
    parameters: dict[object, tuple[str, TensorRef]] = {}
    for name, ref in held.items():
        if ref.dtype.kind == "float" and not _BUFFER.search(name):
            parameters.setdefault(ref.place, (name, ref))
    ranks = {int(match[1]): match[0] for match in map(_RANK.fullmatch, listing.files) if match}
    whole = [name for name in listing.files if _WHOLE.fullmatch(name)] or list(listing.files)
    files = [ranks[rank] for rank in sorted(ranks)] or whole[:1]
    optimizers = [_groups_in(_optimizer_in(listing.open(name).root)) for name in files]
    of_shape: dict[Shape, set[int]] = {}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer):
            for state in group:
                for shape in _shapes_in(state):
                    of_shape.setdefault(shape, set()).add(number)
    if any(len(numbers) > 1 for numbers in of_shape.values()):
        return {}
    groups = [
        [own for own in parameters.values() if of_shape.get(own[1].shape) == {number}]
        for number in range(len(optimizers[0]))
    ]
    largest = [sorted(group, key=lambda own: -own[1].numel) for group in groups]
    ways = [found for way in (groups, largest) if (found := _fit_groups(way, optimizers)) is not None]
    return ways[0] if ways and all(way == ways[0] for way in ways) else {}


def _fit_groups(
    groups: Sequence[Sequence[tuple[str, TensorRef]]], optimizers: Sequence[Sequence[Sequence[Mapping[str, object]]]]
) -> dict[str, Mapping[str, object]] | None:
    """The states by names, where each parameter goes to the rank with the fewest elements; None where shapes contradict
    that.
    """
    sizes = [0] * len(optimizers)
    found: dict[str, Mapping[str, object]] = {}
    for number, group in enumerate(groups):
        shared: list[list[tuple[str, TensorRef]]] = [[] for _ in optimizers]
        for own in group:
            rank = sizes.index(min(sizes))
            shared[rank].append(own)
            sizes[rank] += own[1].numel
        for own_of_rank, optimizer in zip(shared, optimizers, strict=True):
            if len(own_of_rank) != len(optimizer[number]):
                return None
            for (name, ref), state in zip(own_of_rank, optimizer[number], strict=True):
                if any(shape != ref.shape for shape in _shapes_in(state)):
                    return None
                found[name] = state
    return found


def _shapes_in(state: Mapping[str, object]) -> list[Shape]:
    return [value.shape for value in state.values() if isinstance(value, TensorRef) and value.shape]


def _groups_in(optimizer: Mapping[str, object]) -> list[list[Mapping[str, object]]]:
    """The states of each group, in the order of its numbers."""
    states: dict[object, object] = dict(fields_of(optimizer.get("state")).items())
    groups = [as_sequence(fields_of(group).get("params")) for group in as_sequence(optimizer.get("param_groups"))]
    return [[fields_of(states.get(number)) for number in group] for group in groups]


def _optimizer_in(root: object) -> Mapping[str, object]:
    top = fields_of(root)
    if "param_groups" in top:
        return top
    return next((fields_of(top[key]) for key in _KEYS if "param_groups" in fields_of(top.get(key))), {})
