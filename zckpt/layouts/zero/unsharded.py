"""DeepSpeed without ZeRO: one model file, with fp32 masters of a half-precision run in its `optimizer`.

For `zero.read`. fp32 runs hold everything in `module`. fp16 and bf16 runs keep masters in the optimizer, without
names: `fp32_groups` (unfused: one tensor per parameter) or `fp32_groups_flat` (fused: one vector per group). Groups follow
the optimizer's, and within a group parameters stand in the model's order. So masters are a merge of G sequences in
model order; each guess is proved by `cast(master) == weight` on the ends of the parameter.
Source: DeepSpeed 0.19.8, runtime/fp16/{fused,unfused}_optimizer.py `state_dict`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError
from zckpt.base.words import count, examples
from zckpt.containers import TensorRef, list_at, mapping_at
from zckpt.core.catalog import Catalog, Replica, TensorEntry
from zckpt.core.evidence import Evidence
from zckpt.core.fragments import Fragment
from zckpt.engine.elements import ElementReader
from zckpt.engine.replicas import first_difference
from zckpt.layouts.run.values import missing_ranks
from zckpt.layouts.save.listing import MODEL_NAME, Listing
from zckpt.layouts.save.module_states import ModelStates, as_tensor, read_model_states, whole, with_frozen
from zckpt.layouts.zero.assembly import assemble, source_of


def read(listing: Listing) -> Catalog:
    """The catalog of a save without ZeRO; errors as in `zero12.load`."""
    model = read_model_states(listing, listing.matching(MODEL_NAME)[0])
    world_size = model.ranks("dp_world_size") or 1
    if model.is_zero():
        own = own_weights(model)
        if own is None:
            raise missing_ranks(listing, "optimizer", [], list(range(world_size)), world_size)
        source = source_of(listing, model, stage_of(model), (), (lost_masters(own, world_size),))
        return assemble(model, own, source, model.topology(world_size))
    found, notes = masters(model)
    source = source_of(listing, model, 0, state_names(model.root.get("optimizer")), notes)
    catalog = assemble(model, found, source, model.topology(world_size), frozen={})
    if (lost := _count_trained(model) - len(candidates(model))) > 0:
        by = f"its optimizer trains {count(lost, 'parameter')} more than its state dict has"
        catalog = replace(catalog, evidence=Evidence("unknown", by, "the model that the run began with"))
    return frozen_without_master(catalog, found) if found else catalog


def _count_trained(model: ModelStates) -> int:
    """Parameters in the groups of torch's optimizer; 0 where the file has no list of them."""
    return sum(len(list_at(group, "params")) for group in list_at(model.root, "optimizer", "param_groups"))


def own_weights(model: ModelStates) -> dict[str, TensorEntry] | None:
    """The module's own weights of the parameters that a ZeRO run trained, for a save without any optimizer file.

    None where the model file does not hold them: stage 3 has placeholders.
    """
    shapes = {name: shape for group in model.param_shapes for name, shape in group.items()}
    if not shapes or any(
        name not in model.module or model.module[name].shape != shape for name, shape in shapes.items()
    ):
        return None
    return {name: whole(name, model.module[name], "parameter") for name in shapes}


def stage_of(model: ModelStates) -> int:
    """The stage of a run without any optimizer file, from its config; it cannot be 3."""
    return 2 if model.zero_config.get("stage") == 2 else 1


def lost_masters(weights: Mapping[str, TensorEntry], world_size: int) -> str:
    """The note on a ZeRO save without any optimizer file."""
    dtypes = sorted({entry.dtype.name for entry in weights.values()})
    return (
        f"There is no optimizer file of the run's {count(world_size, 'rank')}: its fp32 master weights and the optimizer's "
        f"states are not here. These are the module's own weights, in {' and '.join(dtypes)}."
    )


def frozen_without_master(catalog: Catalog, masters: Mapping[str, TensorEntry]) -> Catalog:
    """The catalog of a run with masters; parameters without a master are frozen."""
    return replace(catalog, tensors=with_frozen(catalog.tensors, masters))


def masters(model: ModelStates) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """fp32 masters by name, if the optimizer has any, and notes on them for the user. Raises InconsistentError if they
    fit no parameters.
    """
    groups = master_groups(model.root.get("optimizer"), model.file)
    if groups is not None:
        return assign(candidates(model), groups, model.file), ()
    return {}, without_masters(model)


def without_masters(model: ModelStates) -> tuple[str, ...]:
    """Notes for the user on a save without masters."""
    half = any(ref.dtype.name in ("F16", "BF16") for ref in model.module.values())
    return (
        ("This save holds no fp32 master weights of the optimizer: the half-precision module weights are used.",)
        if half
        else ()
    )


def masters_by_group(model: ModelStates) -> list[list[str]]:
    """The names of the parameters in each of the optimizer's groups, in the order of its masters. Raises
    InconsistentError if they fit no parameters.
    """
    groups = master_groups(model.root.get("optimizer"), model.file) or []
    found = assign(candidates(model), groups, model.file)
    named: list[list[str]] = [[] for _ in groups]
    for name, entry in found.items():
        at = entry.fragments[0].byte_offset
        refs = ((number, ref) for number, group in enumerate(groups) for ref in group.tensors)
        homes = (n for n, ref in refs if ref.byte_offset <= at < ref.byte_offset + ref.numel * ref.dtype.itemsize)
        named[next(homes)].append(name)
    return named


@dataclass(frozen=True, slots=True)
class GroupMasters:
    """The masters of one group: one tensor per parameter, or one vector for all."""

    tensors: tuple[TensorRef, ...]
    is_flat: bool

    @property
    def numel(self) -> int:
        """Elements of all masters."""
        return sum(ref.numel for ref in self.tensors)

    def at(self, place: int, shape: tuple[int, ...]) -> tuple[Fragment, int] | None:
        """The master of a parameter of this shape at `place`, and the next place; None if it does not fit there."""
        numel = math.prod(shape)
        if self.is_flat:
            vector = self.tensors[0]
            if place + numel > vector.numel:
                return None
            byte_offset = vector.byte_offset + place * vector.dtype.itemsize
            return Fragment(vector.store, byte_offset, 0, numel), place + numel
        if place >= len(self.tensors) or self.tensors[place].shape != shape or not self.tensors[place].is_contiguous:
            return None
        return Fragment(self.tensors[place].store, self.tensors[place].byte_offset, 0, numel), place + 1

    @property
    def end(self) -> int:
        """The place after the last master."""
        return self.tensors[0].numel if self.is_flat else len(self.tensors)


def master_groups(optimizer: object, file: str) -> list[GroupMasters] | None:
    """The masters in an optimizer's state, or None if it has no masters."""
    if not isinstance(optimizer, Mapping):
        return None
    flat, unfused = optimizer.get("fp32_groups_flat"), optimizer.get("fp32_groups")
    if isinstance(flat, list | tuple):
        return [GroupMasters((as_tensor(ref, "a flat group", file),), True) for ref in flat]
    if isinstance(unfused, list | tuple):
        groups = (group if isinstance(group, list | tuple) else [group] for group in unfused)
        return [GroupMasters(tuple(as_tensor(ref, "a master", file) for ref in group), False) for group in groups]
    return None


def candidates(model: ModelStates) -> list[TensorEntry]:
    """The weights that may have a master, in the model's order."""
    seen: set[object] = set()
    found: list[TensorEntry] = []
    for name, ref in model.module.items():
        if name in model.buffer_names or ref.dtype.kind != "float" or ref.place in seen or not ref.numel:
            continue
        seen.add(ref.place)
        found.append(whole(name, ref, "parameter"))
    return found


def assign(weights: Sequence[TensorEntry], groups: Sequence[GroupMasters], file: str) -> dict[str, TensorEntry]:
    """The masters by name, which a comparison with the weights finds. Raises InconsistentError if no assignment, or
    more than one, agrees with the weights.
    """
    with ElementReader() as reader:
        solutions = _solutions(reader, weights, groups, skipping=False)
        solutions = solutions or _solutions(reader, weights, groups, skipping=True)
    if len(solutions) != 1:
        raise InconsistentError(
            "master weights without names cannot be told apart" if solutions else "master weights fit no parameters",
            file=file,
            found=f"{len(groups)} groups of {sum(group.numel for group in groups):,} elements",
            expected=f"{len(weights):,} parameters such as {examples(weight.name for weight in weights)}",
            remedy="Nothing was written.",
        )
    found: dict[str, TensorEntry] = {}
    for at, (group, fragment) in solutions[0].items():
        weight, dtype = weights[at], groups[group].tensors[0].dtype
        replica = Replica(weight.dtype, weight.fragments)
        found[weight.name] = TensorEntry(weight.name, weight.shape, dtype, "parameter", (fragment,), (replica,))
    return found


_Solution = dict[int, tuple[int, Fragment]]


def _solutions(
    reader: ElementReader, weights: Sequence[TensorEntry], groups: Sequence[GroupMasters], *, skipping: bool
) -> list[_Solution]:
    """At most two ways to merge the groups into the model's order; `skipping`: some parameters have no master.

    Depth first with its own stack, since models have more parameters than Python has frames. States without a solution
    are remembered, so the work is bounded by parameters x places that are reached.
    """
    if not skipping and sum(weight.numel for weight in weights) != sum(group.numel for group in groups):
        return []
    found: list[_Solution] = []
    start = tuple(0 for _ in groups)
    chosen: list[tuple[int, Fragment] | None] = []
    stack: list[Iterator[tuple[tuple[int, Fragment] | None, tuple[int, ...]]]] = []
    dead: set[tuple[int, ...]] = set()
    path = [start]
    hits = [0]
    ends = tuple(group.end for group in groups)

    def options(index: int, places: tuple[int, ...]) -> Iterator[tuple[tuple[int, Fragment] | None, tuple[int, ...]]]:
        weight = weights[index]
        for number, group in enumerate(groups):
            placed = group.at(places[number], weight.shape)
            if placed is None:
                continue
            master = ((placed[0],), group.tensors[0].dtype)
            if first_difference(reader, master, (weight.fragments, weight.dtype)) is None:
                yield (number, placed[0]), (*places[:number], placed[1], *places[number + 1 :])
        if skipping:
            yield None, places

    stack.append(options(0, start) if weights else iter(()))
    while stack and len(found) < 2:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            places = path.pop()
            if not hits.pop():
                dead.add((len(path), *places))
            elif hits:
                hits[-1] += 1
            if chosen:
                chosen.pop()
            continue
        choice, places = step
        if (len(path), *places) in dead:
            continue
        if len(path) == len(weights):
            if places == ends:
                hits[-1] += 1
                full = [*chosen, choice]
                found.append({at: c for at, c in enumerate(full) if c is not None})
            continue
        chosen.append(choice)
        path.append(places)
        hits.append(0)
        stack.append(options(len(path) - 1, places))
    return found


def state_names(optimizer: object) -> tuple[str, ...]:
    """Names of the per-element states in an optimizer's state."""
    for key in ("optimizer_state_dict", "state"):
        optimizer = mapping_at(optimizer, key) or optimizer
    states = map(mapping_at, mapping_at(optimizer).values())
    return tuple(
        dict.fromkeys(str(n) for state in states for n, v in state.items() if isinstance(v, TensorRef) and v.shape)
    )
