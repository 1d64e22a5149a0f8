"""Where each parameter lies in the flat fp32 sub-groups of a ZeRO-3 checkpoint, hpZ and MiCS included.

For `layouts.detect`. Arithmetic and the words used here: [Note: flat groups, partitions, padding] in `partition`.
hpZ and CPU offload change nothing on disk. MiCS cuts over `mics_shard_size` ranks and repeats the cut for each further
group of ranks: the first group is read, the others are replicas that checks compare.
Source: DeepSpeed 0.19.8, runtime/zero/stage3.py `_rigid_state_dict`; 0.15.4, runtime/zero/mics.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from zckpt.catalog import Catalog, Replica, Source, TensorEntry
from zckpt.containers import TensorRef
from zckpt.errors import IncompleteError, InconsistentError, UnsupportedError, some
from zckpt.fragments import Fragment
from zckpt.layouts.assembly import assemble
from zckpt.layouts.listing import Listing
from zckpt.layouts.module_states import ModelStates, Shape, read_model_states, refuse_other_parallelism
from zckpt.layouts.optimizer_states import (
    OptimizerShard,
    check_ranks,
    missing_model_file,
    missing_ranks,
    read_shards,
)
from zckpt.layouts.partition import SubGroups, partition_numel, partition_of

_KNOWN = frozenset((
    *("zero_stage", "loss_scaler", "dynamic_loss_scale", "overflow", "partition_count",),
    *("optimizer_state_dict", "fp32_flat_groups", "clip_grad", "ds_version", "ds_config",),
    *("param_shapes",),
))  # fmt: skip


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not."""
    return None if listing.shards("model") else "no zero_pp_rank_*_model_states.pt"


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a ZeRO-3 save; arguments and errors as in `zero12.read`."""
    refuse_other_parallelism(listing)
    names = listing.shards("model")
    if not names:
        raise missing_model_file(listing)
    shards = read_shards(listing, _KNOWN, allow_unknown=allow_unknown)
    model = read_model_states(listing, next(iter(names.values())))
    if not shards:
        world_size = model.number("dp_world_size") or len(names)
        raise missing_ranks(listing, "optimizer", [], list(range(world_size)), world_size)
    if not model.param_shapes:
        raise UnsupportedError(
            "a ZeRO-3 save without parameter shapes", file=model.file, found="no 'param_shapes'",
            expected="DeepSpeed 0.3.16 or later, and an optimizer, write them",
        )  # fmt: skip
    world_size = check_ranks(listing, shards, model)
    missing = sorted(set(range(world_size)) - names.keys())
    if missing:
        raise missing_ranks(listing, "model", sorted(names), missing, world_size)
    shard_size = _shard_size(model, shards, world_size)
    source = Source(
        layout="zero3",
        path=listing.directory,
        tag=listing.tag,
        framework=("DeepSpeed", model.version),
        zero_stage=3,
        global_steps=model.number("global_steps"),
        optimizer_states=shards[0].state_names,
    )
    masters = dict(_masters(model, shards, shard_size))
    models = _all_models(listing, names) if model.frozen_shapes else {}
    frozen = dict(_frozen(models, model.frozen_shapes, shard_size))
    return assemble(model, masters, source, model.topology(world_size), frozen)


def _all_models(listing: Listing, names: Mapping[int, str]) -> dict[int, ModelStates]:
    """Every rank's model file: they hold nothing but each rank's pieces of frozen parameters.

    Raises:
        InconsistentError: they are of different saves.
    """
    models = {rank: read_model_states(listing, name) for rank, name in names.items()}
    steps = {rank: model.number("global_steps") for rank, model in models.items()}
    if len(set(steps.values())) > 1:
        raise InconsistentError(
            "files of different saves",
            file=listing.directory,
            found="; ".join(f"rank {rank} says step {step}" for rank, step in list(steps.items())[:8]),
            remedy="Copy the files of one save again, or choose another tag.",
        )
    return models


def _shard_size(model: ModelStates, shards: Sequence[OptimizerShard], world_size: int) -> int:
    """Ranks that one parameter is cut over: the world, or fewer under MiCS. The lengths of the vectors prove it.

    Raises:
        InconsistentError: no way of cutting gives the lengths that the files have.
    """
    numels = [math.prod(shape) for group in model.param_shapes for shape in group.values()]
    held = {shard.rank: sum(vector.numel for vector in shard.vectors) for shard in shards}
    mics = model.zero_config.get("mics_shard_size")
    sizes = [world_size, *([mics] if isinstance(mics, int) and 0 < mics < world_size else [])]
    for size in sizes:
        if set(held.values()) == {sum(partition_numel(numel, size) for numel in numels)}:
            return size
    wanted = sum(partition_numel(numel, world_size) for numel in numels)
    rank = next((rank for rank, count in held.items() if count != wanted), 0)
    raise InconsistentError(
        "element counts that do not add up",
        file=shards[rank].file,
        found=f"{held[rank]:,} elements of masters",
        expected=f"{len(numels):,} parameters cut over {world_size} ranks need {wanted:,} on each",
        remedy="A file is of another save, or its layout is unknown. Nothing was written.",
    )


def _masters(
    model: ModelStates, shards: Sequence[OptimizerShard], shard_size: int
) -> Iterator[tuple[str, TensorEntry]]:
    groups = [SubGroups([vector.numel for vector in shard.vectors]) for shard in shards]
    offset = 0
    for name, shape in ((name, shape) for group in model.param_shapes for name, shape in group.items()):
        numel = math.prod(shape)
        copies = [
            tuple(_pieces(numel, offset, shards[first : first + shard_size], groups[first : first + shard_size]))
            for first in range(0, len(shards), shard_size)
        ]
        dtype = shards[0].vectors[0].dtype
        replicas = tuple(Replica(dtype, copy) for copy in copies[1:])
        yield name, TensorEntry(name, shape, dtype, "parameter", copies[0], replicas)
        offset += partition_numel(numel, shard_size)


def _pieces(
    numel: int, offset: int, shards: Sequence[OptimizerShard], groups: Sequence[SubGroups]
) -> Iterator[Fragment]:
    for rank, (shard, group) in enumerate(zip(shards, groups, strict=True)):
        held = partition_of(numel, len(shards), rank)
        for piece in group.pieces(offset, len(held)):
            vector = shard.vectors[piece.index]
            byte_offset = vector.byte_offset + piece.offset * vector.dtype.itemsize
            yield Fragment(vector.store, byte_offset, held.start + piece.start, piece.count)


def _frozen(
    models: Mapping[int, ModelStates], shapes: Mapping[str, Shape], shard_size: int
) -> Iterator[tuple[str, TensorEntry]]:
    """Frozen parameters: each rank's model file holds its piece, the last ones padded or short.

    Raises:
        IncompleteError: a rank does not hold its piece.
    """
    for name, shape in shapes.items():
        pieces: list[tuple[TensorRef, range]] = []
        for rank in range(shard_size):
            held = partition_of(math.prod(shape), shard_size, rank)
            ref = models[rank].frozen_fragments.get(name)
            if ref is None or ref.numel < len(held) or not ref.is_contiguous:
                if all(name not in model.frozen_fragments for model in models.values()):
                    break  # saved without frozen parameters
                raise IncompleteError(
                    f"a piece of the frozen parameter {name!r} that is not there",
                    file=models[rank].file,
                    found="nothing" if ref is None else f"{ref.numel:,} elements",
                    expected=f"rank {rank} holds {len(held):,} of them",
                    remedy="Copy that file again, or choose another tag.",
                )
            pieces.append((ref, held))
        else:
            dtypes = {ref.dtype for ref, _ in pieces}
            if len(dtypes) != 1:
                raise InconsistentError(
                    f"pieces of the frozen parameter {name!r} in several dtypes",
                    file=models[0].file,
                    found=some(dtype.name for dtype in dtypes),
                )
            fragments = tuple(Fragment(r.store, r.byte_offset, h.start, len(h)) for r, h in pieces if len(h))
            yield name, TensorEntry(name, shape, dtypes.pop(), "frozen", fragments)
