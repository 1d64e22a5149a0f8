"""Plain weights with their optimizer's states: their numbers get the names of parameters where the shapes prove them.

For `layouts`. One optimizer for all numbers its parameters group by group: see `run.numbering`.

[Note: parts of ranks] Each rank numbers its own parameters, group by group. OSS gives parameters to ranks in the order of a
group, each to the rank that has the fewest elements so far; ZeroRedundancyOptimizer sorts a group by size first, the largest in
front. So the place of each parameter follows from the model's shapes, if it is known which parameters a group has:
the only group
has all; of several, the shapes must tell. Every number of parameters of every rank, and the shape of every state, must then
come out as the files have it, in one of both ways only.
Source: fairscale 0.4.13, optim/oss.py (`partition_parameters`, `state_dict`); torch 2.13,
distributed/optim/zero_redundancy_optimizer.py (`_partition_parameters`, `state_dict`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.base.errors import InconsistentError, UnsupportedError, ZckptError
from zckpt.base.words import count, examples
from zckpt.containers import TensorRef, list_at, mapping_at, value_at
from zckpt.core.catalog import Catalog, TensorEntry, Topology
from zckpt.layouts.numbered.files import OptimizerFiles, find
from zckpt.layouts.plain import read as plain
from zckpt.layouts.run.agreement import steps_of
from zckpt.layouts.run.numbering import Extent, positions
from zckpt.layouts.run.training import ParameterGroup, Training, client_state
from zckpt.layouts.run.values import is_vector, keep_alike, missing_ranks, refuse_odd_values
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.model_shapes import MAKE, is_sorted, own_name, read_shapes
from zckpt.layouts.save.module_states import Shape, as_mapping, whole

_BUFFERS = re.compile(r"(?:^|\.)(?:running_mean|running_var|num_batches_tracked|inv_freq|original_inv_freq)$")
_WEIGHTS_ALONE = "Convert the weights alone (to-fp32)."


_Optimizer = tuple["list[tuple[list[str], Mapping[str, object]]]", "Mapping[str, Mapping[str, object]]"]
"""An optimizer with parameters that have names: for each group, its names and settings; and name -> its states."""


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of the weights; errors as of `plain`."""
    files = _files(listing)
    catalog = plain.read(files.weights, allow_unknown=allow_unknown)
    source = catalog.source
    try:
        with refuse_odd_values(listing):
            groups, states = _name_states(files, catalog, listing)
            steps = _steps(files)
    except ZckptError as error:
        return replace(
            catalog,
            source=replace(source, notes=(*source.notes, f"The optimizer's states are not read: {error.what}.")),
        )
    trained = {name for names, _ in groups for name in names}
    kinds = (kind for own in states.values() for kind, value in own.items() if is_vector(value))
    tensors = {
        name: entry if entry.role == "buffer" or name in trained
        else replace(entry, role="buffer" if _BUFFERS.search(name) else "frozen")
        for name, entry in catalog.tensors.items()
    }  # fmt: skip
    found = replace(source, optimizer_states=tuple(dict.fromkeys(kinds)), global_steps=steps)
    return replace(catalog, tensors=tensors, source=found, topology=Topology(dp=max(len(files.ranks), 1)))


def unread_states(listing: Listing) -> str:
    """Why the states are not read, in words; empty if they are read."""
    files = _files(listing)
    try:
        with refuse_odd_values(listing):
            _name_states(files, plain.read(files.weights, allow_unknown=True), listing)
    except ZckptError as error:
        return error.what
    return ""


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """What a run needs beside its weights.

    Raises:
        IncompleteError: ranks are missing. UnsupportedError: the numbers of the states cannot be named.
    """
    files = _files(listing)
    catalog = plain.read(files.weights, allow_unknown=allow_unknown)
    named, held = _name_states(files, catalog, listing)
    states: dict[str, dict[str, TensorEntry]] = {}
    others: dict[str, dict[str, TensorEntry]] = {}
    groups: list[ParameterGroup] = []
    for names, settings in named:
        shared: dict[str, object] = {}
        kinds: dict[str, None] = {}
        for name in names:
            for kind, value in held.get(name, {}).items():
                if isinstance(value, TensorRef) and value.shape == catalog.tensors[name].shape and value.shape:
                    states.setdefault(name, {})[kind] = whole(name, value, "parameter")
                    kinds[kind] = None
                elif isinstance(value, TensorRef) and (value.numel != 1 or (value.shape and kind != "step")):
                    others.setdefault(name, {})[kind] = whole(name, value, "buffer")
                else:
                    keep_alike(shared, kind, value, name, listing.directory.path)
        kept = {key: value for key, value in settings.items() if key != "params"}
        groups.append(ParameterGroup(tuple(names), kept, shared, tuple(kinds)))
    precisions = Counter(catalog.tensors[name].dtype for names, _ in named for name in names)
    (first,) = list(files.weights.files)[:1]
    rest = client_state(mapping_at(files.weights.open(first).root), _steps(files))
    return Training(tuple(groups), states, {}, rest, precisions.most_common(1)[0][0], other_shapes=others)


def _steps(files: OptimizerFiles) -> int | None:
    parts = [files.whole] if files.whole else list(files.ranks.values())
    return max((step for _, state in parts if (step := steps_of(state)) is not None), default=None)


def _files(listing: Listing) -> OptimizerFiles:
    files = find(listing)
    if files is None:
        raise InconsistentError("its files have changed while they were read", file=listing.directory)
    return files


# -- names for numbers -----------------------------------------------------------------------------------------------


def _name_states(files: OptimizerFiles, catalog: Catalog, listing: Listing) -> _Optimizer:
    """The optimizer, with names in place of numbers. Raises IncompleteError, UnsupportedError as in `read_training`."""
    if files.whole and (named := _by_names(*files.whole, catalog)) is not None:
        return named
    parts = [files.whole] if files.whole else [files.ranks[rank] for rank in sorted(files.ranks)]
    if files.ranks and (missing := sorted(set(range(max(files.ranks))) - set(files.ranks))):
        raise missing_ranks(listing, "optimizer", sorted(files.ranks), missing, 1 + max(files.ranks))
    groups = [[list_at(group, "params") for group in _groups(state)] for _, state in parts]
    states = [_unwrap_states(mapping_at(state, "state")) for _, state in parts]
    if any(len(own) != len(groups[0]) for own in groups) or not groups[0]:
        raise UnsupportedError(
            "the ranks' optimizers do not have the same groups", file=listing.directory,
            found=f"{[len(own) for own in groups]} groups", remedy=_WEIGHTS_ALONE,
        )  # fmt: skip
    extents = [
        [[_extent(own.get(number)) for number in group] for group in numbers]
        for own, numbers in zip(states, groups, strict=True)
    ]
    for names in _candidates(catalog, _in_order(files, catalog, listing)):
        shapes = [catalog.tensors[name].shape for name in names]
        found = _placed_whole(shapes, extents[0]) if files.whole else _placed_on_ranks(shapes, extents)
        if found is not None:
            return _with_names(names, found, groups, states, _groups(parts[0][1]))
    total = sum(len(group) for own in groups for group in own)
    raise UnsupportedError(
        "optimizer states have numbers that fit the parameters in no way, or in several", file=listing.directory,
        found=f"{count(total, 'number')} in {count(len(groups[0]), 'group')}, for {count(len(catalog.tensors), 'tensor')}",
        expected="the model's parameters in order, in groups that their shapes tell apart", remedy=_WEIGHTS_ALONE,
    )  # fmt: skip


def _by_names(file: str, state: Mapping[str, object], catalog: Catalog) -> _Optimizer | None:
    """The optimizer of a state dict that has names itself, as FSDP's `optim_state_dict` gives it; None for numbers.

    Source: torch 2.13, distributed/checkpoint/state_dict.py `get_optimizer_state_dict`, distributed/fsdp
    `optim_state_dict`; accelerate 1.15, utils/fsdp_utils.py (`FULL_STATE_DICT`: `optimizer.bin`).

    Raises:
        InconsistentError: the weights have no parameter of such a name, or of its states' shape, or a name is there twice.
    """
    groups = [(list_at(group.get("params")), group) for group in _groups(state)]
    said = [name for names, _ in groups for name in names]
    if not said or not all(isinstance(name, str) for name in said):
        return None
    own = {own_name(name): name for name in (*catalog.aliases, *catalog.tensors)}
    own = {name: catalog.aliases.get(whole, whole) for name, whole in own.items()}
    held = {own_name(str(name)): value for name, value in as_mapping(state["state"], "state", file).items()}
    wrong = [name for name in map(own_name, map(str, said)) if name not in own]
    shapes = ((name, _extent(held.get(name))) for name in own)
    wrong += [name for name, times in Counter(map(own_name, map(str, said))).items() if times > 1]
    wrong += [name for name, shape in shapes if shape not in (None, catalog.tensors[own[name]].shape)]
    if wrong:
        raise InconsistentError(
            "optimizer states are of other parameters than the weights", file=file,
            found=f"{count(len(wrong), 'parameter')} such as {examples(wrong)}",
            expected="names and shapes of the weights beside it, each once",
            remedy="Give the file of the weights that were saved with it, such as pytorch_model_fsdp.bin.",
        )  # fmt: skip
    named = {own[name]: value for name, value in held.items() if name in own and isinstance(value, Mapping)}
    unique = dict.fromkeys(own[own_name(str(name))] for name in said)  # of tied names, the first
    kept = [
        [name for name in (own[own_name(str(n))] for n in names) if unique.pop(name, 0) is None] for names, _ in groups
    ]
    return [(names, group) for names, (_, group) in zip(kept, groups, strict=True)], named


_PACKED = "__bnb_optimizer_quant_state__"
"""Under it, bitsandbytes keeps what FSDP must not cut. Source: bitsandbytes 0.50.2, optim/optimizer.py `state_dict`."""


def _unwrap_states(states: Mapping[object, object]) -> dict[object, object]:
    """Number -> states, without the level that bitsandbytes puts around them."""
    found: dict[object, object] = {}
    for number, own in states.items():
        inner = value_at(own, _PACKED)
        if isinstance(own, Mapping) and isinstance(inner, Mapping):
            own = {**{key: value for key, value in own.items() if key != _PACKED}, **inner}
        found[number] = own
    return found


def _groups(state: Mapping[str, object]) -> list[Mapping[str, object]]:
    return [group for group in list_at(state, "param_groups") if isinstance(group, Mapping)]


def _extent(state: object) -> Extent:
    """The shape of a parameter, as its states have it; None where it has none."""
    values = mapping_at(state).values()
    return next((value.shape for value in values if isinstance(value, TensorRef) and value.shape), None)


def _in_order(files: OptimizerFiles, catalog: Catalog, listing: Listing) -> list[str]:
    """The tensors in the model's order: as `--shapes` says, or as the weights' files have them. Raises UnsupportedError
    if they are safetensors sorted by name, which say no order.
    """
    if listing.options.shapes:
        own = {own_name(name): name for name in catalog.tensors}
        return [own[name] for name in read_shapes(listing.options.shapes)[0] if name in own]
    for name in files.weights.files:
        if not name.endswith(".safetensors"):
            continue
        root = files.weights.open(name).root
        if is_sorted(
            {n: ref for n, ref in as_mapping(root, "its content", name).items() if isinstance(ref, TensorRef)}
        ):
            raise UnsupportedError(
                "optimizer states have numbers, and the weights do not say the order of the model's parameters",
                file=files.weights.files[name], found="tensors sorted by name, as safetensors has them",
                expected="--shapes", remedy=f"Pass --shapes with a JSON file of names and shapes. {MAKE}",
            )  # fmt: skip
    return list(catalog.tensors)


def _candidates(catalog: Catalog, order: Sequence[str]) -> Iterator[list[str]]:
    """Lists of names that the optimizer may have: first without those that look like torch's buffers, then all."""
    floats = [name for name in order if catalog.tensors[name].role != "buffer"]
    usual = [name for name in floats if not _BUFFERS.search(name)]
    yield usual
    if len(usual) != len(floats):
        yield floats


def _placed_whole(
    shapes: Sequence[Shape], extents: Sequence[Sequence[Extent]]
) -> list[list[tuple[int, int, int]]] | None:
    """For each group: (position in the model, 0, place in the group) of each parameter."""
    found = positions(shapes, extents)
    return None if found is None else [[(at, 0, n) for n, at in enumerate(group)] for group in found]


def _placed_on_ranks(
    shapes: Sequence[Shape], extents: Sequence[Sequence[Sequence[Extent]]]
) -> list[list[tuple[int, int, int]]] | None:
    """For each group: (position in the model, rank, place in the rank's group); see [Note: parts of ranks]."""
    members = _members(shapes, extents)
    if members is None:
        return None
    ways: list[list[list[tuple[int, int, int]]]] = []
    for largest_first in (False, True):
        sizes = [0] * len(extents)
        placed: list[list[tuple[int, int, int]]] = []
        fits = True
        for number, group in enumerate(members):
            own: list[list[int]] = [[] for _ in extents]
            order = sorted(group, key=lambda at: -math.prod(shapes[at])) if largest_first else group
            for at in order:
                rank = sizes.index(min(sizes))
                own[rank].append(at)
                sizes[rank] += math.prod(shapes[at])
            for rank, held in enumerate(own):
                said = extents[rank][number]
                fits &= len(held) == len(said) and all(s in (None, shapes[at]) for s, at in zip(said, held))
            whose = {at: (rank, n) for rank, held in enumerate(own) for n, at in enumerate(held)}
            placed.append([(at, *whose[at]) for at in group])
        if fits and placed not in ways:
            ways.append(placed)
    return ways[0] if len(ways) == 1 else None


def _members(shapes: Sequence[Shape], extents: Sequence[Sequence[Sequence[Extent]]]) -> list[list[int]] | None:
    """The positions of each group's parameters in the model, in order; None where the shapes do not tell."""
    totals = [sum(len(own[number]) for own in extents) for number in range(len(extents[0]))]
    if sum(totals) != len(shapes):
        return None
    if len(totals) == 1:
        return [list(range(len(shapes)))]
    group_of: dict[Shape, int] = {}
    for own in extents:
        for number, said in enumerate(own):
            for shape in said:
                if shape is None or group_of.setdefault(shape, number) != number:
                    return None
    if any(shape not in group_of for shape in shapes):
        return None
    found = [[at for at, shape in enumerate(shapes) if group_of[shape] == number] for number in range(len(totals))]
    return found if [len(group) for group in found] == totals else None


def _with_names(
    names: Sequence[str],
    placed: Sequence[Sequence[tuple[int, int, int]]],
    numbers: Sequence[Sequence[Sequence[object]]],
    states: Sequence[Mapping[object, object]],
    settings: Sequence[Mapping[str, object]],
) -> _Optimizer:
    groups: list[tuple[list[str], Mapping[str, object]]] = []
    named: dict[str, Mapping[str, object]] = {}
    for number, (group, said) in enumerate(zip(placed, settings, strict=True)):
        for at, rank, place in group:
            own = states[rank].get(numbers[rank][number][place])
            if isinstance(own, Mapping):
                named[names[at]] = own
        groups.append(([names[at] for at, _, _ in group], said))
    return groups, named
