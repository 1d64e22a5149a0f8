"""Readers that look in the wrong places: every planted fault is refused, or `verify --deep` does not believe the output.

The faults are planted in the arithmetic of each family's reader, in this process; then a real checkpoint is converted (or
resharded, for optimizer states) and verified by the very same faulty readers. What must not happen is a conversion that ends
well and a `verify` that says "may be deleted", of an output that is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from zckpt import layouts
from zckpt.containers import TensorRef, open_container, torch_zip
from zckpt.core.fragments import Fragment
from zckpt.jobs.options import Options
from zckpt.layouts.dcp import items as dcp_items
from zckpt.layouts.fairscale import states as fairscale_states
from zckpt.layouts.fsdp import read as fsdp_read
from zckpt.layouts.gguf import read as gguf_read
from zckpt.layouts.joining import slices
from zckpt.layouts.megatron_legacy import files as megatron_files
from zckpt.layouts.megatron_legacy import training as megatron_training
from zckpt.layouts.moe import experts
from zckpt.layouts.moe import groups as expert_groups
from zckpt.layouts.numbered import read as numbered_read
from zckpt.layouts.parallel import read as model_parallel
from zckpt.layouts.places import find
from zckpt.layouts.run import vectors
from zckpt.layouts.save import cut_tensors, module_states
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.universal import read as universal
from zckpt.layouts.weights_alone import nanotron, orbax, sliced, xla
from zckpt.layouts.zero import optimizer_states, partition, unsharded, unsharded_training, zero3, zero12
from zckpt.storage.location import locate

sys.path.insert(0, str(Path(__file__).parent))
import test_sliced

FIXTURES = Path(__file__).parents[2] / "fixtures"
Wrapper = Callable[..., Callable[..., Any]]


class Planter:
    """Puts a faulty function in place of a right one, wherever a reader uses it, and counts how often it is asked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.calls = 0

    def counted(self, faulty: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return faulty(*args, **kwargs)

        return asked

    def function(self, right: Callable[..., Any], wrong: Wrapper) -> None:
        faulty = self.counted(wrong(right))
        for name, module in list(sys.modules.items()):
            if name.startswith(("zckpt.layouts", "zckpt.containers")):
                for key, value in list(vars(module).items()):
                    if value is right:
                        self.patch.setattr(module, key, faulty)

    def method(self, owner: type, name: str, wrong: Wrapper) -> None:
        self.patch.setattr(owner, name, self.counted(wrong(getattr(owner, name))))


Plant = Callable[[Planter], None]


# ---- faults in flat groups (ZeRO-1, ZeRO-2, the bf16 optimizer; under tensor and pipeline parallelism too) ----------------


def never_advances(p: Planter) -> None:
    p.function(partition.flat_offsets, lambda right: lambda n, pad=None: ([0] * len(n), right(n, pad)[1]))


def off_by_one(p: Planter) -> None:
    """All but the first parameter begin an element late, and the last one ends where the next begins."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(numels: Any, paddings: Any = None) -> Any:
            offsets, total = right(numels, paddings)
            return [offset + bool(number) for number, offset in enumerate(offsets)], total

        return faulty

    p.function(partition.flat_offsets, wrong)


def swapped_in_group(p: Planter) -> None:
    """Two parameters of as many elements change places."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(numels: Any, paddings: Any = None) -> Any:
            offsets, total = right(numels, paddings)
            if len(set(numels)) < len(numels):
                swap(offsets, list(numels))
            return offsets, total

        return faulty

    p.function(partition.flat_offsets, wrong)


def padding_not_skipped(p: Planter) -> None:
    p.function(partition.flat_offsets, lambda right: lambda n, pad=None: right(n, None))


def aligned_to_the_wrong_multiple(p: Planter) -> None:
    p.function(
        partition.flat_offsets,
        lambda right: lambda n, pad=None: right(n, partition.alignment_paddings(list(n), 1)),
    )


def wrong_partition_size(p: Planter) -> None:
    p.function(partition.flat_pieces, lambda right: lambda offset, numel, size: right(offset, numel, max(2, size - 2)))


def ranks_swapped(p: Planter) -> None:
    """The vectors of the last two ranks whose vectors are of one length change places, with their states."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            shards = right(*args, **kwargs)
            lengths = [[vector.numel for vector in shard.vectors] for shard in shards]
            order = list(shards)
            try:
                swap(order, lengths)
            except LookupError:
                order[:2] = order[1::-1]
            return [replace(shard, rank=at) for at, shard in enumerate(order)]

        return faulty

    p.function(optimizer_states.read_shards, wrong)


def swap(values: list[Any], keys: list[Any]) -> None:
    """Exchanges the first two values that have equal keys."""
    for at, key in enumerate(keys):
        for other in range(at + 1, len(keys)):
            if keys[other] == key and key:
                values[at], values[other] = values[other], values[at]
                return
    raise LookupError("nothing alike to be exchanged")


FLAT: dict[str, Plant] = {
    "offset never advances": never_advances,
    "offset off by one": off_by_one,
    "equal parameters swapped": swapped_in_group,
    "partition size": wrong_partition_size,
    "ranks swapped": ranks_swapped,
}
PADDED: dict[str, Plant] = {
    "padding not skipped": padding_not_skipped,
    "aligned to the wrong multiple": aligned_to_the_wrong_multiple,
}


# ---- faults in ZeRO-3 ------------------------------------------------------------------------------------------------


def places_3(change: Callable[[list[Any]], Any]) -> Plant:
    def plant(p: Planter) -> None:
        p.function(zero3._places, lambda right: lambda save: change(list(right(save))))

    return plant


def swapped_3(places: list[Any]) -> list[Any]:
    offsets = [place.offset for place in places]
    swap(offsets, [place.shape for place in places])
    return [replace(place, offset=offset) for place, offset in zip(places, offsets, strict=True)]


def floor_3(p: Planter) -> None:
    p.function(partition.partition_numel, lambda right: lambda numel, size: numel // size or 1)


def even_3(p: Planter) -> None:
    p.function(partition.partition_numel, lambda right: lambda numel, size: -(-right(numel, size) // 2) * 2)


def pieces_reversed(p: Planter) -> None:
    p.function(partition.partition_of, lambda right: lambda numel, size, rank: right(numel, size, size - 1 - rank))


def sub_groups_restart(p: Planter) -> None:
    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, offset, count: (piece._replace(offset=0) for piece in right(self, offset, count))

    p.method(partition.SubGroups, "pieces", wrong)


STAGE_3: dict[str, Plant] = {
    "offset never advances": places_3(lambda places: [replace(place, offset=0) for place in places]),
    "offset off by one": places_3(lambda places: [replace(q, offset=q.offset + bool(n)) for n, q in enumerate(places)]),
    "equal parameters swapped": places_3(swapped_3),
    "pieces rounded down": floor_3,
    "pieces aligned to the wrong multiple": even_3,
    "pieces in reverse": pieces_reversed,
    "every piece from the start of its sub-group": sub_groups_restart,
    "ranks swapped": ranks_swapped,
}


# ---- faults in optimizer states alone: masters are read as they should be ------------------------------------------------


Change = Callable[[Mapping[str, Any]], Any]


def states(reader: Callable[..., Any], change: Change) -> Plant:
    """What a family's reader, or its kind of save, says of states, changed; those of other families are right."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            training = right(*args, **kwargs)
            return replace(training, states=change(training.states))

        return faulty

    return lambda p: p.method(reader, "training", wrong) if isinstance(reader, type) else p.function(reader, wrong)


def states_swapped(found: Mapping[str, Any]) -> Any:
    names = [name for name in found if found[name]]
    order = list(names)
    swap(order, [next(iter(found[name].values())).shape for name in names])
    return {
        name: {s: replace(entry, name=name) for s, entry in found[other].items()}
        for name, other in zip(names, order, strict=True)
    }


def states_of_the_first(found: Mapping[str, Any]) -> Any:
    """Parameters of one shape all have the states of the first of them."""
    first: dict[Any, Any] = {}
    return {name: first.setdefault(next(iter(own.values())).shape, own) if own else own for name, own in found.items()}


def moments_exchanged(found: Mapping[str, Any]) -> Any:
    return {name: dict(zip(own, reversed(list(own.values())), strict=True)) for name, own in found.items()}


READERS = {"zero3": zero3.Zero3Save, "autoep": zero3.Zero3Save, "zero0": unsharded_training.training_of}


def state_vectors_of_the_first(p: Planter) -> None:
    p.function(optimizer_states.state_vector, lambda right: lambda shard, number, state: right(shard, 0, state))


STATES: dict[str, Change] = {
    "states of equal parameters swapped": states_swapped,
    "states of the first parameter": states_of_the_first,
    "exp_avg and exp_avg_sq exchanged": moments_exchanged,
}


# ---- faults in saves without ZeRO ------------------------------------------------------------------------------------


def master_at(change: Callable[[unsharded.GroupMasters, int], int]) -> Plant:
    def plant(p: Planter) -> None:
        def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
            def faulty(self: unsharded.GroupMasters, place: int, shape: tuple[int, ...]) -> Any:
                found = right(self, change(self, place), shape)
                return found and (found[0], right(self, place, shape)[1] if right(self, place, shape) else place)

            return faulty

        p.method(unsharded.GroupMasters, "at", wrong)

    return plant


def weights_swapped(p: Planter) -> None:
    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(model: Any) -> Any:
            found = right(model)
            swap(found, [entry.shape for entry in found])
            return found

        return faulty

    p.function(unsharded.candidates, wrong)


def cut_never_advances(p: Planter) -> None:
    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(model: Any, names: Any, shapes: Any, state: Any, per_element: Any) -> Any:
            for name, shape in zip(names, shapes, strict=True):
                yield from right(model, [name], [shape], state, per_element)

        return faulty

    p.function(unsharded_training._cut_states, wrong)


UNSHARDED: dict[str, Plant] = {
    "offset never advances": master_at(lambda self, place: 0),
    "offset off by one": master_at(lambda self, place: place + bool(place)),
    "equal parameters swapped": weights_swapped,
}


# ---- faults in slices, stages and experts ----------------------------------------------------------------------------


def joints(change: Callable[[slices.Joint], slices.Joint]) -> Plant:
    """What rules say of split tensors, changed: those whose pieces are of several ranks."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            joint = right(*args, **kwargs)
            return change(joint) if len({piece.rank for piece in joint.pieces}) > 1 else joint

        return faulty

    return lambda p: (
        p.function(model_parallel.ParallelSave._joint, wrong) or p.method(model_parallel.ParallelSave, "_joint", wrong)
    )


def pieces(change: Callable[[slices.SliceRows], slices.SliceRows]) -> Callable[[slices.Joint], slices.Joint]:
    return lambda joint: replace(joint, pieces=tuple(map(change, joint.pieces)))


def one_shape_swapped(p: Planter) -> None:
    p.method(model_parallel.ParallelSave, "_joint", equal_slices_reversed)


def ranks_of(joint: slices.Joint) -> slices.Joint:
    most = max(piece.rank for piece in joint.pieces)
    return pieces(lambda piece: replace(piece, rank=most - piece.rank))(joint)


SLICES: dict[str, Plant] = {
    "slices swapped": joints(ranks_of),
    "all from the first slice": joints(pieces(lambda piece: replace(piece, rank=0))),
    "slices never advance": joints(pieces(lambda piece: replace(piece, start=0))),
    "slices off by one": joints(pieces(lambda piece: replace(piece, start=piece.start + bool(piece.start)))),
    "pitch": joints(pieces(lambda piece: replace(piece, pitch=piece.pitch + 1))),
}


def layers_swapped(p: Planter) -> None:
    """Tensors of one shape in a stage's layer files change their names."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Any, *args: Any) -> Any:
            module = right(self, *args)
            names = list(module)
            refs = [module[name] for name in names]
            swap(refs, [ref.shape if ref.numel > 1 else None for ref in refs])
            return dict(zip(names, refs, strict=True))

        return faulty

    p.method(model_parallel.ParallelSave, "_stage_module", wrong)


def expert_ranks_swapped(p: Planter) -> None:
    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ep, rank, world_size, *, data_first: right(ep, ep - 1 - rank, world_size, data_first=data_first)

    p.function(experts.sharers, wrong)


def experts_swapped(p: Planter) -> None:
    """Which experts a rank holds, in reverse."""
    p.method(
        experts.Layer,
        "spread",
        lambda right: lambda self, ep: replace(right(self, ep), held=right(self, ep).held[::-1]),
    )


def placement_reversed(p: Planter) -> None:
    p.function(experts._placement, lambda right: lambda *args: right(*args)[::-1])


def stack_never_advances(p: Planter) -> None:
    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, shapes: pieces(lambda piece: replace(piece, rows=piece.rows._replace(start=0)))(
            right(self, shapes)
        )

    p.method(experts.Layer, "joint", wrong)


def stack_swapped(p: Planter) -> None:
    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, shapes: ranks_of(right(self, shapes))

    p.method(experts.Layer, "joint", wrong)


def expert_groups_not_told_apart(p: Planter) -> None:
    """Groups are taken to stand in one order in all files, and the first is read for all."""
    p.function(expert_groups._pick, lambda right: lambda shard, groups: right(shard, [groups[0]] * len(groups)))


EXPERTS: dict[str, Plant] = {
    "expert ranks swapped": expert_ranks_swapped,
    "experts swapped": experts_swapped,
    "one group for all": expert_groups_not_told_apart,
}
STACKS: dict[str, Plant] = {
    "placement reversed": placement_reversed,
    "stacks never advance": stack_never_advances,
    "stacks swapped": stack_swapped,
}


# ---- faults where files name their tensors -----------------------------------------------------------------------------


def named(change: Callable[[dict[str, TensorRef]], dict[str, TensorRef]]) -> Plant:
    """What a file says of its tensors, changed."""
    return lambda p: p.function(module_states.flatten, lambda right: lambda *args: change(right(*args)))


def refs_swapped(found: dict[str, TensorRef]) -> dict[str, TensorRef]:
    names = [name for name, ref in found.items() if ref.numel > 1]
    refs = [found[name] for name in names]
    try:
        swap(refs, [(ref.shape, ref.dtype) for ref in refs])
    except LookupError:
        return found
    return {**found, **dict(zip(names, refs, strict=True))}


def moved(elements: int) -> Plant:
    """Tensors are read some elements late, where their storage has room."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: TensorRef) -> Any:
            return tuple(later(self, fragment, elements) for fragment in right(self))

        return faulty

    return lambda p: p.method(TensorRef, "fragments", wrong)


def later(ref: TensorRef, fragment: Fragment, elements: int) -> Fragment:
    at = fragment.byte_offset + elements * ref.dtype.itemsize
    fits = replace(fragment, byte_offset=at).nbytes_end(ref.dtype.itemsize) <= ref.store.size
    return replace(fragment, byte_offset=at) if fits else fragment


NAMED: dict[str, Plant] = {
    "equal tensors swapped": named(refs_swapped),
    "offset off by one": moved(1),
}


def universal_swapped(p: Planter) -> None:
    """Directories of parameters of one shape change places."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(listing: Listing) -> Any:
            save = right(listing)
            names = [name for name in save.parameters if name in save.shapes]
            found = [save.parameters[name] for name in names]
            swap(found, [save.shapes[name] for name in names])
            return replace(save, parameters=save.parameters | dict(zip(names, found, strict=True)))

        return faulty

    p.function(universal._load, wrong)


def universal_moments(p: Planter) -> None:
    other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    p.method(
        universal._Save,
        "entry",
        lambda right: lambda self, name, state, shape: right(self, name, other.get(state, state), shape),
    )


def chunks(change: Callable[[list[Any]], list[Any]]) -> Plant:
    """The chunks of a tensor, changed before they are made into one."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Any, name: str, item: Any, role: Any) -> Any:
            return right(self, name, replace(item, chunks=tuple(change(list(item.chunks)))), role)

        return faulty

    return lambda p: p.method(dcp_items.Items, "_tensor", wrong)


def chunks_swapped(found: list[Any]) -> list[Any]:
    held = [chunk.place for chunk in found]
    try:
        swap(held, [chunk.sizes if chunk.numel else None for chunk in found])
    except LookupError:
        return found
    return [chunk._replace(place=place) for chunk, place in zip(found, held, strict=True)]


def chunks_of_the_first(found: list[Any]) -> list[Any]:
    first: dict[Any, Any] = {}
    return [chunk._replace(place=first.setdefault(chunk.sizes, chunk.place)) for chunk in found]


def chunks_never_advance(found: list[Any]) -> list[Any]:
    return [chunk._replace(offsets=tuple(0 for _ in chunk.offsets)) for chunk in found]


def items_swapped(p: Planter) -> None:
    """Tensors of one shape and one cut change places."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Any, items: Any, roles: Any) -> Any:
            names = list(items)
            held = [items[name].chunks for name in names]
            swap(held, [(items[n].size, items[n].dtype, tuple(c[:2] for c in items[n].chunks)) for n in names])
            return right(self, {n: replace(items[n], chunks=c) for n, c in zip(names, held, strict=True)}, roles)

        return faulty

    p.method(dcp_items.Items, "tensors", wrong)


CHUNKS: dict[str, Plant] = {
    "chunks swapped": chunks(chunks_swapped),
    "chunks of the first rank": chunks(chunks_of_the_first),
    "chunks never advance": chunks(chunks_never_advance),
    "equal tensors swapped": items_swapped,
    "offset off by one": moved(1),
}


# ---- faults in the order of ranks: each part has the size that it should have, and is put where another one belongs ----------


def equal_slices_reversed(right: Callable[..., Any]) -> Callable[..., Any]:
    """Slices of one shape are joined in reverse order of ranks."""

    def faulty(self: Any, name: Any, held: Any) -> Any:
        joint = right(self, name, held)
        shapes = {getattr(each, "shape", each) for each in held}
        return ranks_of(joint) if len(shapes) == 1 and len({piece.rank for piece in joint.pieces}) > 1 else joint

    return faulty


def megatron_ranks(axis: str) -> Plant:
    """The directories of a legacy save's ranks, in reverse on one axis."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Any, numbers: Any) -> Any:
            rank = right(self, numbers)
            return rank and rank._replace(**{axis: getattr(self, axis) - 1 - getattr(rank, axis)})

        return faulty

    return lambda p: p.method(megatron_files.RunSplit, "rank_of", wrong)


def coordinates_mirrored(p: Planter) -> None:
    """A rank's place on every dimension of its mesh, where its part's size stays."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Any, size: Any, placements: Any, extents: Any, coordinate: Any, order: Any = ()) -> Any:
            mirrored = tuple(extent - 1 - at for extent, at in zip(extents, coordinate, strict=True))
            own = right(self, size, placements, extents, coordinate, order)
            other = right(self, size, placements, extents, mirrored, order)
            return other if other.sizes == own.sizes else own

        return faulty

    p.method(cut_tensors.CutReader, "part", wrong)


def vectors_reversed(p: Planter) -> None:
    """Vectors of ranks are put together in reverse, those with as many elements as each other."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(shapes: Any, runs: Any, *more: Any) -> Any:
            return right(
                shapes, runs[::-1] if len({used for _, used in runs}) == 1 else [*runs[-2::-1], runs[-1]], *more
            )

        return faulty

    p.function(vectors.unflatten, wrong)


def xla_reversed(p: Planter) -> None:
    """Parts of torch_xla's ranks are put together in reverse."""
    p.function(xla._parts, lambda right: lambda *given: right(*given)[::-1])


def nanotron_crossed(p: Planter) -> None:
    """Pieces of one size of a rank's fused matrix change places."""
    p.function(nanotron._chunks, lambda right: lambda one, shape: refs_crossed([*right(one, shape)]))


def chunks_crossed(p: Planter) -> None:
    """Chunks of one size of an array of Zarr, inner ones too, change places."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Any, name: str, grid: Any, at: tuple[int, ...]) -> Any:
            there = tuple(number - 1 - n for n, number in zip(at, grid.counts, strict=True))
            moved = [*right(self, name, grid, there)]
            begin = tuple(number * own for number, own in zip(at, grid.chunk, strict=True))
            return [chunk._replace(offsets=begin) for chunk in moved]

        return faulty

    p.method(orbax._Arrays, "_chunks", wrong)


def ranks_reversed(p: Planter) -> None:
    """Slices of tensor-parallel ranks are joined in reverse."""
    p.function(sliced._join_ranks, lambda right: lambda ranks, *more: right(ranks[::-1], *more))


def refs_crossed(chunks: list[Any]) -> list[Any]:
    """Chunks of one size change places in the file."""
    places = [chunk.place for chunk in chunks]
    if len(chunks) > 1:
        swap(places, [chunk.sizes for chunk in chunks])
    return [chunk._replace(place=place) for chunk, place in zip(chunks, places, strict=True)]


def boxes_mirrored(p: Planter) -> None:
    """The offsets of a tensor's chunks, counted from the other end, where there is a chunk with such offsets."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Any, name: str, item: Any, role: Any) -> Any:
            there = {(chunk.offsets, chunk.sizes) for chunk in item.chunks}
            found = []
            for chunk in item.chunks:
                offsets = tuple(n - at - own for n, at, own in zip(item.size, chunk.offsets, chunk.sizes, strict=True))
                found.append(chunk._replace(offsets=offsets) if (offsets, chunk.sizes) in there else chunk)
            return right(self, name, replace(item, chunks=tuple(found)), role)

        return faulty

    p.method(dcp_items.Items, "_tensor", wrong)


def other_dimension(p: Planter) -> None:
    p.function(
        slices.join_along, lambda right: lambda shapes, dim: right(shapes, 1 - dim if len(shapes[0]) == 2 else dim)
    )


def gguf_swapped(p: Planter) -> None:
    p.function(gguf_read._tensors, lambda right: lambda container: refs_swapped(dict(right(container))))


RANKS: dict[tuple[str, str], tuple[str, Plant]] = {
    ("legacy Megatron", "megatron_legacy/hf_gpt2_tp2"): ("slices reversed", megatron_ranks("tp")),
    ("legacy Megatron llama", "megatron_legacy/hf_llama_tp2"): ("slices reversed", megatron_ranks("tp")),
    ("legacy Megatron masters", "megatron_legacy/groups_tp2"): ("slices reversed", megatron_ranks("tp")),
    ("legacy Megatron stages", "megatron_legacy/llama_tp2_pp2"): ("slices reversed", megatron_ranks("tp")),
    ("legacy Megatron before Core", "megatron_legacy/old_tp2_pp2"): ("stages reversed", megatron_ranks("pp")),
    ("legacy Megatron experts", "megatron_legacy/moe_ep2"): ("experts reversed", megatron_ranks("ep")),
    ("legacy Megatron sliced experts", "megatron_legacy/moe_tp2_ep2"): ("experts reversed", megatron_ranks("ep")),
    ("legacy Megatron mixtral", "megatron_legacy/hf_mixtral_pp2_ep2"): ("experts reversed", megatron_ranks("ep")),
    ("FairScale", "fairscale/fairseq_w3"): ("vectors reversed", vectors_reversed),
    ("FairScale experts", "fairscale/experts_w2"): ("vectors reversed", vectors_reversed),
    ("FairScale parts", "fairscale_parts/experts_w2"): ("vectors reversed", vectors_reversed),
    ("FairScale tensor-parallel parts", "fairscale_parts/metaseq_w4"): ("vectors reversed", vectors_reversed),
    ("rank files of adapters", "ranks/lora_w2"): ("coordinates mirrored", coordinates_mirrored),
    ("rank files of two axes", "ranks/tp_w4"): ("coordinates mirrored", coordinates_mirrored),
    ("rank files of verl", "verl/critic_w2"): ("coordinates mirrored", coordinates_mirrored),
    ("torch_checkpointing", "torch_checkpointing/safetensors_w4"): ("coordinates mirrored", coordinates_mirrored),
    ("dcp of safetensors", "dcp/huggingface_w2"): ("boxes mirrored", boxes_mirrored),
    ("dcp", "dcp/fsdp2_tp_w4"): ("boxes mirrored", boxes_mirrored),
    ("Megatron-Core", "mcore/stages_tp2_pp2"): ("boxes mirrored", boxes_mirrored),
    ("Megatron-Core model space", "mcore/model_space_tp2_dp2_0_12"): ("boxes mirrored", boxes_mirrored),
    ("torchtitan", "torchtitan/llama3_0_3_0_w3"): ("boxes mirrored", boxes_mirrored),
    ("torch_xla", "torch_xla/flat_w3"): ("parts reversed", xla_reversed),
    ("Llama's original files", "llama"): ("ranks reversed", ranks_reversed),
    ("NeMo 1", "nemo"): ("ranks reversed", ranks_reversed),
    ("NxD", "nxd"): ("ranks reversed", ranks_reversed),
    ("Orbax", "orbax bare"): ("chunks crossed", chunks_crossed),
    ("Orbax, zstd", "orbax zarr3"): ("chunks crossed", chunks_crossed),
    ("Orbax, OCDBT", "orbax ocdbt"): ("chunks crossed", chunks_crossed),
    ("nanotron", "nanotron/llama_tp2_pp2"): ("fused pieces swapped", nanotron_crossed),
    ("GGUF", "gguf"): ("equal tensors swapped", gguf_swapped),
}  # fmt: skip
"""(What, save) -> the fault."""

RANK_STATES: dict[tuple[str, str], tuple[str, Plant]] = {
    ("legacy Megatron", "megatron_legacy/llama_tp2_pp2"): ("slices reversed", megatron_ranks("tp")),
    ("FairScale", "fairscale/fairseq_w3"): ("vectors reversed", vectors_reversed),
    ("rank files of adapters", "ranks/lora_w2"): ("coordinates mirrored", coordinates_mirrored),
    ("torch_checkpointing", "torch_checkpointing/safetensors_w4"): ("coordinates mirrored", coordinates_mirrored),
    ("dcp", "dcp/fsdp2_tp_w4"): ("boxes mirrored", boxes_mirrored),
    ("Megatron-Core", "mcore/plain_0_9"): ("boxes mirrored", boxes_mirrored),
}


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A fault in the reader of a family; `run`: the states are what is looked at, in a resharded output."""

    family: str
    fixture: str
    fault: str
    plant: Plant
    run: bool = False

    def __str__(self) -> str:
        return f"{self.family}: {self.fault}" + (" (run)" if self.run else "")


def cases() -> Iterator[Case]:
    for family, fixture in {
        "zero1": "zero1/bf16_w3", "zero2": "zero2/fp16_w2", "bf16 optimizer": "bf16_optimizer/w2",
        "tensor-parallel zero1": "tensor/zero1_tp2_dp2", "pipeline zero1": "pipeline/zero1_pp2_dp2", "moe": "moe/zero2_w2",
        "autoep zero2": "autoep/zero2_w4",
    }.items():  # fmt: skip
        for fault, plant in FLAT.items():
            yield Case(family, fixture, fault, plant)
    for fault, plant in PADDED.items():
        yield Case("zero2 with alignment", "zero2/aligned_w2", fault, plant)
    for family, fixture in {
        "zero3": "zero3/groups_w3", "zero3 in sub-groups": "zero3/sub_groups_w2", "zero3 MiCS": "zero3/mics_w4",
        "tensor-parallel zero3": "tensor/zero3_tp2_dp2", "autoep zero3": "autoep/zero3_w4",
    }.items():  # fmt: skip
        for fault, plant in STAGE_3.items():
            even = family == "autoep zero3" and "piece" in fault and "reverse" not in fault  # nothing is rounded there
            if not even and ("sub-group" not in fault or "sub-groups" in family):
                yield Case(family, fixture, fault, plant)
    for family, fixture in {
        "zero1": "zero1/bf16_w3", "zero2": "zero2/groups_w3", "bf16 optimizer": "bf16_optimizer/groups_w3",
        "zero3": "zero3/sub_groups_w2", "autoep zero3": "autoep/zero3_w4", "zero0": "zero0/bf16", "zero0 fused": "zero0/fp16",
        "zero0 fp32": "zero0/fp32", "tensor-parallel": "tensor/zero1_tp2_dp2",
        "pipeline": "pipeline/zero1_pp2_dp2", "moe": "moe/zero2_w2",
    }.items():  # fmt: skip
        reader = READERS.get(family.partition(" ")[0], zero12.Zero12Save)
        for fault, change in STATES.items():
            yield Case(family, fixture, fault, states(reader, change), run=True)
    for family, fixture in {"zero2": "zero2/groups_w3", "zero3": "zero3/sub_groups_w2"}.items():
        yield Case(family, fixture, "state vectors of the first group", state_vectors_of_the_first, run=True)
    for family, fixture in {"zero0": "zero0/bf16", "zero0 fused": "zero0/fp16"}.items():
        for fault, plant in UNSHARDED.items():
            yield Case(family, fixture, fault, plant)
    for family, fixture in {
        "tensor-parallel zero0": "tensor/zero0_tp2", "tensor-parallel zero1": "tensor/zero1_tp2_dp2",
        "tensor-parallel zero3": "tensor/zero3_tp2_dp2", "autotp fused": "autotp/fused_tp2",
    }.items():  # fmt: skip
        for fault, plant in SLICES.items():
            yield Case(family, fixture, fault, plant)
    for family, fixture in {"pipeline zero1": "pipeline/zero1_pp2_dp2", "pipeline zero0": "pipeline/zero0_pp2"}.items():
        yield Case(family, fixture, "equal tensors swapped", layers_swapped)
    for family, fixture in {"moe": "moe/zero2_pyramid_w4"}.items():
        for fault, plant in EXPERTS.items():
            yield Case(family, fixture, fault, plant)
    for family, fixture in {"autoep zero2": "autoep/zero2_w4", "autoep zero3": "autoep/zero3_w4"}.items():
        for fault, plant in STACKS.items():
            yield Case(family, fixture, fault, plant)
    for family, fixture in {"plain weights": "plain", "zero0 fp32": "zero0/fp32"}.items():
        for fault, plant in NAMED.items():
            yield Case(family, fixture, fault, plant)
    yield Case("universal", "universal", "equal tensors swapped", universal_swapped)
    yield Case("universal", "universal", "offset off by one", moved(1))
    yield Case("universal", "universal", "exp_avg and exp_avg_sq exchanged", universal_moments, run=True)
    for family, fixture in {"dcp": "dcp/fsdp2_tp_w4", "dcp of boxes": "dcp/boxes_w4"}.items():
        for fault, plant in CHUNKS.items():
            yield Case(family, fixture, fault, plant)
    yield Case("tensor-parallel zero0", "tensor/zero0_tp2", "slices of one shape swapped", one_shape_swapped)
    yield Case("tensor-parallel zero0", "tensor/zero0_tp2", "slices joined in another dimension", other_dimension)
    for (family, fixture), (fault, plant) in RANKS.items():
        yield Case(family, fixture, fault, plant)
    for (family, fixture), (fault, plant) in RANK_STATES.items():
        yield Case(family, fixture, fault, plant, run=True)
    for family, (fixture, reader) in READERS_OF_STATES.items():
        for fault, change in STATES.items():
            yield Case(family, fixture, fault, states(reader, change), run=True)


READERS_OF_STATES: dict[str, tuple[str, Callable[..., Any]]] = {
    "legacy Megatron": ("megatron_legacy/llama_tp2_pp2", megatron_training.read_training),
    "FairScale": ("fairscale/fairseq_w3", fairscale_states.read_training),
    "rank files": ("ranks/fsdp2_w2", fsdp_read.read_training),
    "numbered": ("optimizers/oss_ranks_w3", numbered_read.read_training),
}
"""Kind of saves -> one of them, and what reads its states."""

CASES = list(cases())


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that no fixture has: a sharded directory of plain weights, and a universal checkpoint."""
    work = tmp_path_factory.mktemp("made")
    source = FIXTURES / "zero2/groups_w3/checkpoint"
    zckpt.convert(source, work / "plain", options=Options(max_shard_size=400))
    zckpt.to_universal(source, work / "universal")
    gguf = FIXTURES / "gguf/llama/llama.q8_0.gguf"
    test_sliced.write_llama(work / "llama", test_sliced.llama(), 2, 0)
    test_sliced.write_nemo(work / "model.nemo", 2, 2)
    nxd = {f"model.layers.0.mlp.{name}.weight": torch.randn(4, 4) for name in ("up_proj", "down_proj")}
    test_sliced.write_nxd(work / "nxd", nxd, 2, 1)
    found = {name: work / name for name in ("plain", "universal", "llama", "nxd")}
    found |= {f"orbax {form}": FIXTURES / "orbax" / form for form in ("bare", "zarr3", "ocdbt")}
    return {**found, "gguf": gguf, "nemo": work / "model.nemo"}


def output(case: Case, checkpoint: Path, out: Path) -> Path:
    if case.run:
        stage = 2 if case.family.startswith("zero3") else 3  # of another kind, which the faulty reader does not read
        zckpt.reshard(checkpoint, out, world_size=1, stage=stage)
    else:
        out = out.with_suffix(".safetensors")
        zckpt.convert(checkpoint, out)
    return out


def is_equal(a: Path, b: Path) -> bool:
    if a.is_dir():
        files = sorted(path.relative_to(a) for path in a.rglob("*.pt"))
        return all((a / file).read_bytes() == (b / file).read_bytes() for file in files)
    ours, theirs = load_file(a), load_file(b)
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def is_believed(checkpoint: Path, out: Path) -> bool:
    """Whether `verify --deep` has no doubt but one that no fault makes: a file alone never proves a whole model."""
    found = zckpt.verify(checkpoint, out, deep=True)
    assert found.deletable is not None
    doubts = [one for one in found.not_proved if "without its frozen parameters" not in one]
    return found.deletable[0] or (
        found.ok and bool(doubts) and all("whether this is the whole model" in one for one in doubts)
    )


Rights = Callable[[Case, Path], Path]


@pytest.fixture(scope="module")
def rights(tmp_path_factory: pytest.TempPathFactory) -> Rights:
    """What is made of a checkpoint without a fault, and verified; made once for all cases that need the same."""
    work, known = tmp_path_factory.mktemp("right"), dict[tuple[Path, bool, bool], Path]()

    def of(case: Case, checkpoint: Path) -> Path:
        key = (checkpoint, case.run, case.family.startswith("zero3"))
        if key not in known:
            known[key] = output(case, checkpoint, work / str(len(known)))
            assert is_believed(checkpoint, known[key])
        return known[key]

    return of


def outcome(case: Case, checkpoint: Path, right: Path, work: Path, patch: pytest.MonkeyPatch) -> str:
    """What became of a fault: "refused", "found" by `verify --deep`, or "believed"."""
    planter = Planter(patch)
    case.plant(planter)
    try:
        wrong = output(case, checkpoint, work / "wrong")
    except Exception:
        assert planter.calls
        return "refused"  # whatever with: nothing was written
    assert planter.calls
    if is_equal(right, wrong):
        pytest.fail("this fault changes nothing: it proves nothing")
    return "believed" if is_believed(checkpoint, wrong) else "found"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_planted_fault_is_caught(
    case: Case, made: dict[str, Path], rights: Rights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = made.get(case.fixture) or FIXTURES / case.fixture / "checkpoint"
    assert outcome(case, checkpoint, rights(case, checkpoint), tmp_path, monkeypatch) in ("refused", "found")


def test_every_kind_of_fault_is_planted_in_every_family() -> None:
    """All of these faults are caught; what cannot be is below."""
    assert len(CASES) == len(set(map(str, CASES))) == 210


def test_every_family_has_planted_faults(made: dict[str, Path]) -> None:
    """A family that is new here needs some: whose parts does it put together, and in which order?"""
    saves = {case.fixture for case in CASES}
    listings = (find(locate(str(made.get(save) or FIXTURES / save / "checkpoint"))).listing for save in saves)
    assert {layouts.family_of(listing).name for listing in listings} == {family.name for family in layouts.FAMILIES}


def storages_swapped(p: Planter) -> None:
    """What a pickle calls its storages: two of one size change their names."""
    (file,) = (FIXTURES / "zero0/fp32/checkpoint").glob("*/mp_rank_00_model_states.pt")
    refs = [ref for ref in open_container(str(file)).root["module"].values() if ref.numel > 1]  # type: ignore[index]
    keys = [ref.storage_key for ref in refs]
    others = list(keys)
    swap(others, [ref.storage_nbytes for ref in refs])
    names = dict(zip(keys, others, strict=True))

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(key: Any, store: Any) -> Any:
            return right((*key[:2], names.get(key[2], key[2]), *key[3:]), store)

        return faulty

    p.function(torch_zip.storage_of, wrong)


UNSEEN = {
    "in which storage of a file a tensor is": (
        Case("zero0 fp32", "zero0/fp32", "storages of one size swapped", storages_swapped),
        "both readers have it from the reader of pickles, which tests hold against torch's own",
    ),
}
"""Faults that no evidence in the files tells from the truth, and why; docs/verify.md lists them."""


@pytest.mark.parametrize("name", UNSEEN)
def test_what_nothing_in_the_files_tells_is_listed(
    name: str, rights: Rights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When one of these is caught, it belongs into the table above, and out of the docs."""
    case, _ = UNSEEN[name]
    checkpoint = FIXTURES / case.fixture / "checkpoint"
    assert outcome(case, checkpoint, rights(case, checkpoint), tmp_path, monkeypatch) == "believed"
    assert name in " ".join((FIXTURES.parent / "docs" / "verify.md").read_text().split())
