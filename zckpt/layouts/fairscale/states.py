"""The catalog of a FairScale save, and its optimizer's states.

For `layouts`. Each rank saves its own optimizer's state dict; its numbers mean the stored parameters that are
trained, in the
order of the model's `parameters()`: that of the state dict. A state lies as its parameter does, with the same padding.
Source: fairscale 0.4.13, nn/data_parallel/fully_sharded_data_parallel.py (`_gather_optim_state`); metaseq 0.0.1,
checkpoint_utils.py (`_merge_flat_fsdp_opt_state`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError, UnsupportedError, ZckptError
from zckpt.base.words import count, examples
from zckpt.containers import TensorRef, list_at, mapping_at
from zckpt.core.catalog import Catalog, Padding, Replica, Source, TensorEntry, Topology
from zckpt.core.evidence import Evidence
from zckpt.core.fragments import Fragment
from zckpt.layouts.fairscale.read import Held, Rank, holders, metadata_in, read_ranks, step_in, world_sizes
from zckpt.layouts.run.agreement import parameter_groups
from zckpt.layouts.run.numbering import positions
from zckpt.layouts.run.training import ParameterGroup, Training, client_state
from zckpt.layouts.run.values import is_vector, keep_alike, refuse_odd_values
from zckpt.layouts.run.vectors import unflatten
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import whole, with_frozen
from zckpt.layouts.save.origins import other_kind

_NUMBERED = "a 'state' and 'param_groups' with the parameters of the files, in their order"


def _evidence(ranks: list[Rank], experts: Sequence[str]) -> Evidence:
    """The evidence for the number of ranks: every rank's metadata list all parameters and their shapes, except experts."""
    least, most = world_sizes(ranks)
    if experts and least != most:
        return Evidence("unknown", "the files do not say how many ranks have experts", "the number of ranks of the run")
    return Evidence("metadata", "the shapes that every rank's file records")


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a save. Raises IncompleteError, InconsistentError, CorruptError, UnsupportedError as `read_ranks`
    and `holders` say.
    """
    ranks = read_ranks(listing)
    held = holders(ranks, allow_unknown=allow_unknown)
    tensors: dict[str, TensorEntry] = {}
    padding: list[Padding] = []
    for one in held:
        refs = {rank: ranks[rank].tensor(one.key) for rank in one.used}
        tensors |= _laid_out(one, refs, listing.directory.path)
        padding += _padding(one, refs)
    aliases = {dropped: kept for dropped, kept in ranks[0].tied.items() if kept in tensors and dropped not in tensors}
    tensors, aliases = _others(ranks, tensors, aliases)
    notes: tuple[str, ...] = ()
    if experts := [name for one in held if len(one.used) < len(ranks) for name in one.shapes]:
        notes += (
            f"{count(len(experts), 'tensor')} of experts that each rank has of its own ({examples(experts)}): numbered by rank.",
        )
    extra = ranks[0].root.get("extra_state")
    if isinstance(extra, Mapping) and extra.get("ema"):
        notes += ("The averaged weights (extra_state.ema) are not read: the weights are the model's own.",)
    states: tuple[str, ...] = ()
    try:
        with refuse_odd_values(listing):
            optimizer = _optimizer(ranks, held)
    except ZckptError as error:
        notes += (f"The optimizer's states are not read: {error.what}.",)
    else:
        if optimizer is not None:
            states = optimizer.names
            trained = {name for numbers in optimizer.groups for number in numbers for name in held[number].shapes}
            tensors = with_frozen(tensors, trained)
    source = Source(
        layout="fairscale", path=listing.directory.path, tag=listing.tag, framework=("FairScale", ""),
        global_steps=step_in(ranks[0].root), optimizer_states=states, notes=notes,
    )  # fmt: skip
    return Catalog(tensors, source, _evidence(ranks, experts), aliases, Topology(dp=len(ranks)), padding=tuple(padding))


def _laid_out(one: Held, refs: Mapping[int, TensorRef], file: str) -> dict[str, TensorEntry]:
    """Finds the parameters that lie in a stored one. Raises InconsistentError if the ranks' parts do not have as many
    elements, or have several dtypes.
    """
    try:
        return unflatten(one.shapes, [(refs[rank], used) for rank, used in one.used.items()])
    except InconsistentError as error:
        raise InconsistentError(
            f"the ranks' parts of {one.key!r} do not make up its parameters", file=file, found=error.found,
            expected=error.expected, remedy=error.remedy,
        ) from error  # fmt: skip


def _padding(one: Held, refs: Mapping[int, TensorRef], zero: bool = True) -> Iterator[Padding]:
    """The padding behind the last parameter; `zero` is false for states, which need not begin at zero."""
    for rank, used in one.used.items():
        ref = refs[rank]
        if behind := ref.numel - used:
            yield Padding(
                ref.dtype, (Fragment(ref.store, ref.byte_offset + used * ref.dtype.itemsize, 0, behind),),
                "the rank's last elements", zero,
            )  # fmt: skip


def _others(
    ranks: Sequence[Rank], tensors: Mapping[str, TensorEntry], aliases: Mapping[str, str]
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors, with the other entries of the state dicts: buffers, which every rank has, and further names of the
    same vectors.
    """
    first = ranks[0]
    places = {first.tensor(key).place: own for key, own in first.params.items() if len(own.shapes) == 1}
    found, tied = dict(tensors), dict(aliases)
    _check_kinds(ranks)
    for name, ref in first.model.items():
        if not isinstance(ref, TensorRef) or name in first.params:
            continue
        if (own := places.get(ref.place)) is not None and ref.numel:
            tied[name] = next(iter(own.shapes))
            continue
        copies = [(n, rank.model.get(name)) for n, rank in enumerate(ranks) if n]
        replicas = tuple(
            Replica(copy.dtype, copy.fragments(), f"rank {n}", True)
            for n, copy in copies
            if isinstance(copy, TensorRef) and copy.shape == ref.shape and copy.dtype == ref.dtype
        )
        found[name] = whole(name, ref, "buffer", replicas=replicas)
    return found, tied


def _check_kinds(ranks: Sequence[Rank]) -> None:
    """Raises InconsistentError where a name is a tensor in one rank's state dict and something else in another's."""
    files = {name: rank.file for rank in ranks for name, value in rank.model.items() if isinstance(value, TensorRef)}
    for rank in ranks:
        for name, value in rank.model.items():
            if not isinstance(value, TensorRef) and name in files:
                raise other_kind(str(name), rank.file, value, files[name])


# -- the optimizer ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """All ranks' optimizers, which have the same numbers.

    Attributes:
        groups: of each parameter group, the positions of its parameters in the list of stored ones.
        settings: of each group.
        states: rank -> number of the stored parameter -> its states.
        names: of the states that each element has.
    """

    groups: list[list[int]]
    settings: list[Mapping[str, object]]
    states: Sequence[Mapping[int, Mapping[str, object]]]
    names: tuple[str, ...]


def _state_dict(rank: Rank) -> Mapping[str, object] | None:
    for key, value in rank.root.items():
        if isinstance(value, Mapping) and "param_groups" in value and "state" in value and "optim" in str(key):
            return value
    return None


def _optimizer(ranks: Sequence[Rank], held: Sequence[Held]) -> _Optimizer | None:
    """The optimizers, if the files have any.

    Raises:
        UnsupportedError: their numbers cannot be named. InconsistentError: ranks differ.
    """
    found = [_state_dict(rank) for rank in ranks]
    if found[0] is None:
        return None
    keys = list(dict.fromkeys(one.key for one in held))
    groups: list[list[int]] | None = None
    settings: list[Mapping[str, object]] = []
    states: list[Mapping[int, Mapping[str, object]]] = []
    for rank, said in zip(ranks, found, strict=True):
        numbered, own = _number_states(rank, said, keys)
        if groups is not None and groups != numbered:
            raise InconsistentError(
                "ranks' optimizers do not have the same parameters", file=rank.file,
                found=f"{sum(map(len, numbered))} parameters",
                expected=f"{sum(map(len, groups))}, as rank 0 has them",
            )  # fmt: skip
        groups = numbered
        settings = settings or [group for group, _ in parameter_groups(said)]
        states.append(own)
    assert groups is not None
    stored = {key: [n for n, one in enumerate(held) if one.key == key] for key in keys}
    spread = [[number for position in group for number in stored[keys[position]]] for group in groups]
    at = {key: position for position, key in enumerate(keys)}
    of_held = [{n: own.get(at[one.key], {}) for n, one in enumerate(held)} for own in states]
    names = tuple(dict.fromkeys(
        name for own in of_held for values in own.values() for name, value in values.items() if is_vector(value)
    ))  # fmt: skip
    return _Optimizer(spread, settings, of_held, names)


def _number_states(
    rank: Rank, said: Mapping[str, object] | None, keys: Sequence[str]
) -> tuple[list[list[int]], dict[int, Mapping[str, object]]]:
    """The positions in `keys` of each group's parameters, and their states by position."""
    own = mapping_at(said, "state")
    numbers = [list_at(group, "params") for group in list_at(said, "param_groups") if isinstance(group, Mapping)]
    extents = [[_extent(own.get(number)) for number in group] for group in numbers]
    stored = [(rank.tensor(key).numel,) for key in keys]
    if any(type(number) is not int for group in numbers for number in group):
        found = None
    else:
        found = positions(stored, extents)
    if found is None:
        raise UnsupportedError(
            "optimizer states have numbers that fit the parameters in no way, or in several", file=rank.file,
            found=f"{count(sum(map(len, numbers)), 'number')}, for {count(len(keys), 'stored parameter')}",
            expected=_NUMBERED, remedy="Convert the weights alone (to-fp32).",
        )  # fmt: skip
    pairs = (pair for group, at in zip(numbers, found, strict=True) for pair in zip(group, at, strict=True))
    return found, {at: values for number, at in pairs if isinstance(values := own.get(number), Mapping)}


def _extent(state: object) -> tuple[int, ...] | None:
    """The number of elements of a parameter, by its states; None where it has none."""
    values = mapping_at(state).values()
    return next(((value.numel,) for value in values if isinstance(value, TensorRef) and value.shape), None)


def unread_states(listing: Listing) -> str:
    """Why optimizer states of a save are not read, in words; empty if they are read, or there are none."""
    ranks = read_ranks(listing)
    try:
        with refuse_odd_values(listing):
            _optimizer(ranks, holders(ranks, allow_unknown=True))
    except ZckptError as error:
        return f"The optimizer's states are not read: {error.what}"
    return ""


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """What a run needs beside its weights; arguments and errors as in `read`. Raises UnsupportedError if there are no
    states, or their parameters cannot be named.
    """
    ranks = read_ranks(listing)
    held = holders(ranks, allow_unknown=allow_unknown)
    optimizer = _optimizer(ranks, held)
    if optimizer is None:
        raise UnsupportedError(
            "holds no optimizer states", file=listing.directory, found="weights only",
            expected="an entry such as last_optimizer_state", remedy="Convert the weights alone (to-fp32).",
        )  # fmt: skip
    states: dict[str, dict[str, TensorEntry]] = {}
    padding: list[Padding] = []
    groups: list[ParameterGroup] = []
    for numbers, settings in zip(optimizer.groups, optimizer.settings, strict=True):
        names = [name for number in numbers for name in held[number].shapes]
        shared: dict[str, object] = {}
        own: dict[str, None] = {}
        for number in numbers:
            one = held[number]
            for state, first in optimizer.states[min(one.used)][number].items():
                if not is_vector(first):
                    keep_alike(shared, state, first, one.key, listing.directory.path)
                    continue
                refs = {rank: _state_of(optimizer, ranks, rank, number, one, state) for rank in one.used}
                for name, entry in _laid_out(one, refs, listing.directory.path).items():
                    states.setdefault(name, {})[state] = entry
                padding += _padding(one, refs, False)
                own[state] = None
        kept = {key: value for key, value in settings.items() if key != "params"}
        groups.append(ParameterGroup(tuple(names), kept, shared, tuple(own)))
    dtype = ranks[0].tensor(held[0].key).dtype
    root = {key: value for key, value in ranks[0].root.items() if value is not metadata_in(ranks[0].root)}
    rest = client_state(root, step_in(root))
    return Training(tuple(groups), states, {}, rest, dtype, padding=tuple(padding))


def _state_of(optimizer: _Optimizer, ranks: Sequence[Rank], rank: int, number: int, one: Held, state: str) -> TensorRef:
    value = optimizer.states[rank][number].get(state)
    numel = ranks[rank].tensor(one.key).numel
    if not isinstance(value, TensorRef) or value.numel != numel:
        raise InconsistentError(
            f"the optimizer's {state!r} of {one.key!r} has another length than the parameter", file=ranks[rank].file,
            found=count(value.numel, "element") if isinstance(value, TensorRef) else "none", expected=f"{numel:,}",
            remedy="Convert the weights alone (to-fp32).",
        )  # fmt: skip
    return value
