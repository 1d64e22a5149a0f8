"""Where each parameter is in the flat fp32 sub-groups of a ZeRO-3 checkpoint, hpZ and MiCS included.

For `zero.read`. Arithmetic and the words used here: [Note: flat groups, partitions, padding] in `partition`.
hpZ and CPU offload change nothing on disk. MiCS cuts over `mics_shard_size` ranks and repeats the cut for each further
group of ranks: the first group is read, the others are replicas that checks compare.
Source: DeepSpeed 0.19.8, runtime/zero/stage3.py `_rigid_state_dict`; 0.15.4, runtime/zero/mics.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OTHER_SAVE, IncompleteError, InconsistentError
from zckpt.base.words import examples
from zckpt.containers import TensorRef
from zckpt.core.catalog import Padding, Replica, TensorEntry
from zckpt.core.fragments import Fragment
from zckpt.layouts.run.values import missing_model_file, missing_ranks
from zckpt.layouts.run.vectors import fragment_of
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import ModelStates, Shape, read_model_states, without_shapes
from zckpt.layouts.save.origins import check_alike
from zckpt.layouts.zero.optimizer_states import (
    OptimizerShard,
    check_ranks,
    group_of,
    per_element,
    read_shards,
    state_vector,
    training_of,
)
from zckpt.layouts.zero.partition import SubGroups, partition_numel, partition_of
from zckpt.layouts.zero.swapped import tail_of, with_swapped

if TYPE_CHECKING:
    from zckpt.layouts.run.training import Training

_KNOWN = frozenset((
    *("zero_stage", "loss_scaler", "dynamic_loss_scale", "overflow", "partition_count",),
    *("optimizer_state_dict", "fp32_flat_groups", "clip_grad", "ds_version", "ds_config",),
    *("param_shapes", "ds_zero_partition_groups",),
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Zero3Save:
    """One model-parallel rank's files of a save, read and checked.

    Attributes:
        listing: all files.
        names: data-parallel rank -> its model file.
        model: that of the first rank.
        shards: optimizer files, by rank.
        world_size: data-parallel ranks.
        shard_size: ranks that one parameter is cut over: all, or fewer under MiCS.
    """

    listing: Listing
    names: Mapping[int, str]
    model: ModelStates
    shards: list[OptimizerShard]
    world_size: int
    shard_size: int
    stage: ClassVar[int] = 3

    def masters(self) -> dict[str, TensorEntry]:
        """Trainable parameters by name; under MiCS, those of further groups of ranks are replicas."""
        size, lengths = self.shard_size, _sub_groups(self.shards)
        found: dict[str, TensorEntry] = {}
        for place in _places(self):
            copies = [
                tuple(_pieces(place, self.shards[first : first + size], lengths[first : first + size]))
                for first in range(0, len(self.shards), size)
            ]
            dtype = self.shards[0].vectors[0].dtype
            replicas = tuple(Replica(dtype, copy, f"MiCS group {number}") for number, copy in enumerate(copies[1:], 1))
            found[place.name] = TensorEntry(place.name, place.shape, dtype, "parameter", copies[0], replicas)
        return found

    def frozen(self) -> dict[str, TensorEntry]:
        """Frozen parameters by name: each rank's model file holds a piece, and the last may be padded or short. Raises
        IncompleteError if a rank does not hold its piece.
        """
        shapes, shard_size = self.model.frozen_shapes, self.shard_size
        models = {rank: read_model_states(self.listing, name) for rank, name in self.names.items()} if shapes else {}
        found: dict[str, TensorEntry] = {}
        for name, shape in shapes.items():
            pieces: list[tuple[TensorRef, range]] = []
            for rank in range(shard_size):
                held = partition_of(math.prod(shape), shard_size, rank)
                ref = models[rank].frozen_fragments.get(name)
                if ref is None or ref.numel < len(held) or not ref.is_contiguous:
                    if all(name not in model.frozen_fragments for model in models.values()):
                        break  # saved without frozen parameters
                    if ref is not None and ref.shape == () and len(held) > 1:
                        raise _on_nvme(name, models[rank])
                    raise IncompleteError(
                        f"part of the frozen parameter {name!r} is missing",
                        file=models[rank].file,
                        found="no elements" if ref is None else f"{ref.numel:,} elements",
                        expected=f"{len(held):,} elements on rank {rank}",
                        remedy="Copy that file again, or choose another tag.",
                    )
                pieces.append((ref, held))
            else:
                dtypes = {ref.dtype for ref, _ in pieces}
                if len(dtypes) != 1:
                    raise InconsistentError(
                        f"parts of the frozen parameter {name!r} have several dtypes", file=models[0].file,
                        found=examples(dtype.name for dtype in dtypes), remedy=OTHER_SAVE,
                    )  # fmt: skip
                fragments = tuple(Fragment(r.store, r.byte_offset, h.start, len(h)) for r, h in pieces if len(h))
                found[name] = TensorEntry(name, shape, dtypes.pop(), "frozen", fragments)
        return found

    def padding(self) -> Iterator[Padding]:
        """The elements of the masters behind the last piece of each parameter, and at the end of swap files: arbitrary values."""
        lengths = _sub_groups(self.shards)
        for place in _places(self):
            for first in range(0, len(self.shards), self.shard_size):
                group = slice(first, first + self.shard_size)
                yield from _padding(place, self.shards[group], lengths[group])
        for shard in self.shards:
            for vector in shard.vectors:
                yield from tail_of(vector)

    def training(self) -> Training:
        """What the run needs beside its weights. Raises IncompleteError if a rank's file does not have a state that others
        have.
        """
        shards = self.shards[: self.shard_size]
        first = shards[0]
        lengths = _sub_groups(shards)
        owned = owners(first)
        names: list[list[str]] = [[] for _ in range(1 + max(owned.values(), default=0))]
        states: dict[str, dict[str, TensorEntry]] = {}
        padding: list[Padding] = []
        sub_group = 0
        for place in _places(self):
            sub_group = next((piece.index for piece in lengths[0].pieces(place.offset, 1)), sub_group)
            names[owned.get(sub_group, 0)].append(place.name)
            states[place.name] = {}
            for state in per_element(first.states[sub_group]):
                dtype = state_vector(first, sub_group, state).dtype
                fragments = tuple(_pieces(place, shards, lengths, state))
                states[place.name][state] = TensorEntry(place.name, place.shape, dtype, "parameter", fragments)
                padding += _padding(place, shards, lengths, state)
        padding += _copies(self)
        vectors = (ref for shard in self.shards for own in shard.states for ref in per_element(own).values())
        padding += (tail for vector in vectors for tail in tail_of(vector))
        firsts = {owner: number for number, owner in reversed(owned.items())}
        groups = (group_of(tuple(listed), first, n, firsts.get(n, 0)) for n, listed in enumerate(names))
        return training_of(self.model, first, groups, states, padding)


def load(listing: Listing, mp_rank: int = 0, *, allow_unknown: bool = False) -> Zero3Save:
    """The files of one model-parallel rank; arguments and errors as in `zero12.load`."""
    names = listing.shards("model", mp_rank)
    if not names:
        raise missing_model_file(listing)
    shards = read_shards(listing, _KNOWN, mp_rank, allow_unknown=allow_unknown)
    model = read_model_states(listing, next(iter(names.values())))
    if not shards:
        world_size = model.ranks("dp_world_size") or len(names)
        raise missing_ranks(listing, "optimizer", [], list(range(world_size)), world_size)
    if not model.param_shapes:
        raise without_shapes(model)
    world_size = check_ranks(listing, shards, model)
    missing = sorted(set(range(world_size)) - names.keys())
    if missing:
        raise missing_ranks(listing, "model", sorted(names), missing, world_size)
    steps = {name: listing.numbers(name, "global_steps").get("global_steps") for name in names.values()}
    check_alike(listing, "the step", steps)
    shards = [with_swapped(listing, shard, model, mp_rank, world_size) for shard in shards]
    is_of_experts = bool(shards[0].root.get("ds_zero_partition_groups"))  # cut as it records: see `check_lengths`
    size = world_size if is_of_experts else _proved_size(model, shards, world_size)
    return Zero3Save(listing, names, model, shards, world_size, size)


def check_lengths(save: Zero3Save) -> None:
    """Checks the number of elements on every rank of a part of a save; errors as in `load`."""
    _proved_size(save.model, save.shards, save.world_size)


def _proved_size(model: ModelStates, shards: Sequence[OptimizerShard], world_size: int) -> int:
    """Ranks that one parameter is cut over: all, or fewer under MiCS; found by the lengths of the vectors. Raises
    InconsistentError if no way of cutting gives the lengths that the files have.
    """
    numels = [math.prod(shape) for group in model.param_shapes for shape in group.values()]
    held = {shard.rank: sum(vector.numel for vector in shard.vectors) for shard in shards}
    mics = model.zero_config.get("mics_shard_size")
    sizes = [world_size, *([mics] if isinstance(mics, int) and 0 < mics < world_size else [])]
    for size in sizes:
        if set(held.values()) == {sum(partition_numel(numel, size) for numel in numels)}:
            return size
    wanted = sum(partition_numel(numel, world_size) for numel in numels)
    odd = next((shard for shard in shards if held[shard.rank] != wanted), shards[0])
    raise InconsistentError(
        "element counts do not add up", file=odd.file, found=f"{held[odd.rank]:,} elements of master weights",
        expected=f"{wanted:,} elements, of {len(numels):,} parameters over {world_size} ranks", remedy=OTHER_SAVE,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter's place in every rank's run of pieces."""

    name: str
    shape: Shape
    offset: int


def _places(save: Zero3Save) -> Iterator[_Place]:
    """The places of all parameters, in flat order."""
    offset = 0
    for listed in save.model.param_shapes:
        for name, shape in listed.items():
            yield _Place(name, shape, offset)
            offset += partition_numel(math.prod(shape), save.shard_size)


def _sub_groups(shards: Sequence[OptimizerShard]) -> list[SubGroups]:
    """The sub-groups of each rank; ranks that are cut alike share one object."""
    known: dict[tuple[int, ...], SubGroups] = {}
    found: list[SubGroups] = []
    for shard in shards:
        lengths = tuple(vector.numel for vector in shard.vectors)
        found.append(known.get(lengths) or known.setdefault(lengths, SubGroups(lengths)))
    return found


def _pieces(
    place: _Place, shards: Sequence[OptimizerShard], lengths: Sequence[SubGroups], state: str | None = None
) -> Iterator[Fragment]:
    """The pieces of a parameter in the masters, or in a state with the same layout."""
    numel = math.prod(place.shape)
    size = partition_numel(numel, len(shards))
    for rank in range(-(-numel // size) if size else 0):  # further ranks hold nothing of it
        shard, held = shards[rank], partition_of(numel, len(shards), rank)
        for piece in lengths[rank].pieces(place.offset, len(held)):
            yield fragment_of(_vector(shard, piece.index, state), piece, held.start + piece.start, shard.file)


def _padding(
    place: _Place, shards: Sequence[OptimizerShard], lengths: Sequence[SubGroups], state: str | None = None
) -> Iterator[Padding]:
    """The elements that fill up the last pieces of a parameter; arguments as in `_pieces`."""
    numel = math.prod(place.shape)
    size = partition_numel(numel, len(shards))
    fragments: list[Fragment] = []
    for rank in range(numel // size if size else 0, len(shards) if size else 0):
        real = len(partition_of(numel, len(shards), rank))
        for piece in lengths[rank].pieces(place.offset + real, size - real):
            vector = _vector(shards[rank], piece.index, state)
            fragments.append(fragment_of(vector, piece, piece.start, shards[rank].file))
    if fragments:
        yield Padding(
            vector.dtype, tuple(fragments), "the last pieces of parameters that ranks share evenly", zero=False
        )


def _copies(save: Zero3Save) -> Iterator[Padding]:
    """The states of further groups of ranks, which are not read; their masters are compared."""
    for shard in save.shards[save.shard_size :]:
        for vector in (ref for states in shard.states for ref in per_element(states).values()):
            yield Padding(vector.dtype, vector.fragments(), "the same states in another MiCS group", zero=False)


def _vector(shard: OptimizerShard, number: int, state: str | None) -> TensorRef:
    return shard.vectors[number] if state is None else state_vector(shard, number, state)


def owners(shard: OptimizerShard) -> dict[int, int]:
    """Sub-group -> parameter group, as the wrapped optimizer lists them."""
    listed = [group.get("params") for group in shard.settings]
    numbers = [owner for owner, params in enumerate(listed) if isinstance(params, list) for _ in params]
    return (
        dict(enumerate(numbers)) if len(numbers) == len(shard.vectors) else dict.fromkeys(range(len(shard.vectors)), 0)
    )


def _on_nvme(name: str, model: ModelStates) -> IncompleteError:
    """The error for a frozen parameter that was on NVMe: DeepSpeed saves a number that stands for nothing."""
    return IncompleteError(
        f"does not hold the frozen parameter {name!r}", file=model.file, found="one number in place of its elements",
        expected="the rank's part of it, which DeepSpeed leaves out if offload_param keeps it on NVMe",
        remedy="Take the frozen weights from the model that the run began with: save again with "
        "exclude_frozen_parameters=True, or with offload_param on 'cpu'.",
    )  # fmt: skip
