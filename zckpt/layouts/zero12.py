"""Where each parameter lies in the flat fp32 groups of a ZeRO-1 or ZeRO-2 checkpoint, the bf16 optimizer's included.

For `layouts.detect`. Arithmetic and the words used here: [Note: flat groups, partitions, padding] in `partition`.
Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py `state_dict`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from zckpt.catalog import Catalog, Padding, Replica, Source, TensorEntry
from zckpt.containers import TensorRef
from zckpt.errors import CorruptError, InconsistentError, UnsupportedError
from zckpt.fragments import Fragment
from zckpt.layouts.assembly import assemble
from zckpt.layouts.listing import MODEL_NAME, Listing
from zckpt.layouts.module_states import ModelStates, Shape, read_model_states, refuse_other_parallelism
from zckpt.layouts.optimizer_states import OptimizerShard, check_ranks, missing_model_file, read_shards
from zckpt.layouts.partition import flat_offsets, flat_pieces

_KNOWN = frozenset((
    *("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "base_optimizer_state",),
    *("base_optimizer_state_step", "single_partition_of_fp32_groups", "zero_stage", "group_paddings",),
    *("groups_padding", "param_alignment_paddings", "partition_count", "ds_version",),
    *("param_slice_mappings", "universal_checkpoint_info", "ds_config", "param_shapes",),
))  # fmt: skip


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not."""
    if listing.shards("model"):
        return "one model file per rank, as ZeRO-3 writes"
    return None if listing.shards("optim") else "no *_optim_states.pt"


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a ZeRO-1 or ZeRO-2 save.

    Args:
        listing: the files.
        allow_unknown: convert though an optimizer file holds keys that this version of zckpt does not know.

    Raises:
        IncompleteError, InconsistentError, CorruptError, UnsupportedError: see those.
    """
    refuse_other_parallelism(listing)
    names = listing.matching(MODEL_NAME)
    shards = read_shards(listing, _KNOWN, allow_unknown=allow_unknown)
    if not names:
        raise missing_model_file(listing)
    model = read_model_states(listing, names[0])
    world_size = check_ranks(listing, shards, model)
    if not model.param_shapes:
        raise UnsupportedError(
            "a checkpoint of a DeepSpeed too old to record parameter shapes",
            file=model.file,
            found=f"version {model.version or 'not recorded'}, and no 'param_shapes'",
            expected="0.3.16 or later writes them",
            remedy="Load it with the DeepSpeed that wrote it and save it with a newer one.",
        )
    stage = shards[0].stage or _configured_stage(model)
    masters = dict(_masters(model, shards, world_size))
    source = Source(
        layout=f"zero{stage}",
        path=listing.directory,
        tag=listing.tag,
        framework=("DeepSpeed", model.version),
        zero_stage=stage,
        global_steps=model.number("global_steps"),
        optimizer_states=shards[0].state_names,
    )
    catalog = assemble(model, masters, source, model.topology(world_size))
    return replace(catalog, padding=tuple(_padding(model, shards)))


def _configured_stage(model: ModelStates) -> int:
    """The bf16 optimizer's files do not name the stage; the config does, and stage 1 is the only one it runs at."""
    stage = model.zero_config.get("stage")
    return stage if isinstance(stage, int) and stage in (1, 2) else 1


@dataclass(frozen=True, slots=True)
class _Group:
    """One optimizer group: its parameters, and the vector each rank holds of it."""

    number: int
    shapes: Mapping[str, Shape]
    paddings: tuple[int, ...] | None
    vectors: tuple[TensorRef, ...]


def _masters(model: ModelStates, shards: list[OptimizerShard], world_size: int) -> Iterator[tuple[str, TensorEntry]]:
    counts = {len(shard.vectors) for shard in shards}
    if counts != {len(model.param_shapes)}:
        raise InconsistentError(
            "optimizer groups that do not match the model's",
            file=shards[0].file,
            found=f"{sorted(counts)} groups of masters",
            expected=f"{len(model.param_shapes)} in {model.file!r}",
        )
    for number, shapes in enumerate(model.param_shapes):
        paddings = shards[0].alignment_paddings
        group = _Group(
            number,
            shapes,
            None if paddings is None else _group_paddings(paddings, number, len(shapes), shards[0]),
            tuple(shard.vectors[number] for shard in shards),
        )
        yield from _group_masters(group, model, shards, world_size)


def _group_paddings(
    paddings: tuple[tuple[int, ...], ...], number: int, expected: int, shard: OptimizerShard
) -> tuple[int, ...]:
    found = len(paddings[number]) if number < len(paddings) else 0
    if found != expected:
        raise CorruptError(
            f"alignment paddings of group {number} that do not fit its parameters",
            file=shard.file,
            found=f"{found} paddings",
            expected=f"{expected} parameters",
        )
    return paddings[number]


def _group_masters(
    group: _Group, model: ModelStates, shards: list[OptimizerShard], world_size: int
) -> Iterator[tuple[str, TensorEntry]]:
    numels = [math.prod(shape) for shape in group.shapes.values()]
    offsets, total = flat_offsets(numels, group.paddings)
    lengths = [vector.numel for vector in group.vectors]
    size = lengths[0]  # see the note in `partition`: rank 0 is full, or holds all
    _check_lengths(group, lengths, total, world_size, shards)
    dtype = group.vectors[0].dtype
    for (name, shape), offset, numel in zip(group.shapes.items(), offsets, numels, strict=True):
        fragments = []
        for rank, local, start, count in flat_pieces(offset, numel, size):
            vector = group.vectors[rank]
            fragments.append(Fragment(vector.store, vector.byte_offset + local * dtype.itemsize, start, count))
        weight = model.module.get(name)
        replicas: tuple[Replica, ...] = ()
        if weight is not None and weight.shape == shape:
            replicas = (Replica(weight.dtype, weight.fragments()),)
        yield name, TensorEntry(name, shape, dtype, "parameter", tuple(fragments), replicas)


def _padding(model: ModelStates, shards: list[OptimizerShard]) -> Iterator[Padding]:
    """Alignment padding between the parameters, and what is left of the padding at the end: DeepSpeed fills both with
    zeros, which no optimizer step changes.
    """
    for number, shapes in enumerate(model.param_shapes):
        vectors = [shard.vectors[number] for shard in shards]
        paddings = shards[0].alignment_paddings
        numels = [math.prod(shape) for shape in shapes.values()]
        offsets, _ = flat_offsets(numels, None if paddings is None else paddings[number])
        ends = [*offsets[1:], vectors[0].numel * len(vectors)] if numels else []
        fragments = [
            Fragment(vector.store, vector.byte_offset + local * vector.dtype.itemsize, start, min(count, vector.numel - local))
            for offset, numel, end in zip(offsets, numels, ends, strict=True)
            for rank, local, start, count in flat_pieces(offset + numel, end - offset - numel, vectors[0].numel)
            if local < (vector := vectors[rank]).numel
        ]  # fmt: skip
        if fragments:
            yield Padding(vectors[0].dtype, tuple(fragments))


def _check_lengths(
    group: _Group, lengths: list[int], total: int, world_size: int, shards: list[OptimizerShard]
) -> None:
    """Every rank holds its whole partition, or what is left of it without the padding at the end.

    Raises:
        InconsistentError: the element counts do not add up.
    """
    size = lengths[0]
    padded = size * world_size
    for rank, length in enumerate(lengths):
        real = max(0, min(size, total - rank * size))
        if length not in (real, size) or padded < total or (size != total and padded - total >= 2 * world_size):
            raise InconsistentError(
                f"element counts of optimizer group {group.number} that do not add up",
                file=shards[rank].file,
                found=f"{length:,} elements in this rank's partition (rank 0 has {size:,}, all ranks {sum(lengths):,})",
                expected=f"{real:,} of the {total:,} that its {len(group.shapes):,} parameters need",
                remedy="A file is of another save, or its layout is unknown. Nothing was written.",
            )
        dtypes = {vector.dtype.name for vector in group.vectors}
        if len(dtypes) != 1:
            raise InconsistentError(
                f"master weights of several dtypes in optimizer group {group.number}",
                file=shards[rank].file, found=", ".join(sorted(dtypes)),
            )  # fmt: skip
