"""Finds what each rank's file holds of every tensor a second time: DTensors and ShardedTensors, by torch's own rules.

A DTensor is cut by one dimension of its mesh after the other, from left to right, as `torch.chunk` cuts; `_StridedShard` cuts
into `split_factor` chunks first, and takes its own part of each. Which coordinate a rank has, its number in the file's name
says, with the mesh's ranks; the pickle says it too, and both have to agree. Of a ShardedTensor, the metadata of all shards say
which rank has which. `optimizer.state_dict()` numbers the parameters in the order of the model's. FSDP1's states are the
elements that a rank has of a flattened parameter: those of all ranks, end to end, are the whole.
Source: torch 2.13, distributed/tensor/_utils.py `compute_local_shape_and_global_offset`, placement_types.py `_StridedShard`,
distributed/device_mesh.py, distributed/_shard/sharded_tensor/metadata.py; verl 0.6, model_merger/fsdp_model_merger.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zckpt.base.errors import UnsupportedError
from zckpt.containers import Placeholder, TensorRef
from zckpt.layouts.dcp.second import SavedTensor, look_at, unwrap
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import (
    NO_PROOF,
    HeldRun,
    Path,
    SecondLook,
    Shape,
    as_sequence,
    fields_of,
    hold_elements,
    join_path,
    leaves_of,
)

_VERL = re.compile(r"(model|optim)_world_size_\d+_rank_(\d+)\.pt")
_ANY = re.compile(r".*?[Rr]ank[-_]?(\d+)[\w.-]*\.(?:pt|pth|bin|ckpt)")
_FLAT = re.compile(r"(?:^|\.)_?flat_param(?:$|_)")
_ADAPTER = re.compile(r"(?:^|\.)(?:lora_|modules_to_save\.)")

Part = tuple[Sequence[int], TensorRef]
"""First indexes of a part, and its elements."""


class RankPart(NamedTuple):
    """What one rank has of a tensor of this shape."""

    shape: Shape
    parts: Sequence[Part]


class MeshCut(NamedTuple):
    """How one dimension of a mesh cuts a tensor, how many ranks it has, and which of them this one is."""

    kind: str
    dim: int
    factor: int
    ranks: int
    coordinate: int


def find_again(listing: Listing) -> SecondLook:
    """The model's tensors and the optimizer's states."""
    return look_at_ranks(listing, _files(listing))


def _files(listing: Listing) -> Iterator[tuple[int, Path, object]]:
    """(Rank, path, value) of everything that the files hold."""
    verl = [match for match in map(_VERL.fullmatch, listing.files) if match]
    for match in verl:
        yield from ((int(match[2]), path, value) for path, value in leaves_of(listing.open(match[0]).root, (match[1],)))
    for match in [] if verl else [match for match in map(_ANY.fullmatch, listing.files) if match]:
        yield from ((int(match[1]), path, value) for path, value in leaves_of(listing.open(match[0]).root))


def look_at_ranks(listing: Listing, values: Iterable[tuple[int, Path, object]]) -> SecondLook:
    """The model's tensors and the optimizer's states, from ranks' values by their paths."""
    shapes: dict[Path, Shape] = {}
    parts: dict[Path, list[Part]] = {}
    vectors: dict[Path, dict[int, TensorRef]] = {}
    cut: dict[Path, None] = {}
    others: dict[Path, None] = {}
    for rank, path, value in values:
        if _FLAT.search(join_path(path)):
            raise UnsupportedError(
                "holds flat parameters, and only the model knows their names", file=listing.directory, remedy=NO_PROOF
            )
        if isinstance(value, RankPart) or class_of(value) in ("DTensor", "ShardedTensor"):
            shape, own = value if isinstance(value, RankPart) else _part_of(value, rank)
            cut[path] = None
        elif isinstance(value, TensorRef):
            shape, own = value.shape, [((0,) * len(value.shape), value)]
            if "state" in path and len(shape) == 1:
                vectors.setdefault(path, {})[rank] = value
        else:
            others[path] = None
            continue
        shapes.setdefault(path, shape)
        parts.setdefault(path, []).extend(own)
    return _name_numbered(listing, shapes, parts, vectors, list(cut), list(others))


def _name_numbered(
    listing: Listing,
    shapes: Mapping[Path, Shape],
    parts: Mapping[Path, list[Part]],
    vectors: Mapping[Path, Mapping[int, TensorRef]],
    cut: Sequence[Path],
    others: Sequence[Path],
) -> SecondLook:
    numbered = [path for path in shapes if "state" in path and type(path[path.index("state") + 1]) is int]
    tensors = [SavedTensor(path, shapes[path], own) for path, own in parts.items() if path not in numbered]
    look = look_at(listing, tensors, others)
    if not numbered:
        return look
    numbers = {path[path.index("state") + 1] for path in numbered}
    trained = [(name, look.names[name]) for path in cut for name in look.names if join_path(path).endswith(f".{name}")]
    if len(trained) != len(numbers):
        trained = [(name, shape) for name, shape in trained if _ADAPTER.search(name)]
    if numbers != set(range(len(trained))):
        return look
    states: list[HeldRun] = []
    for path in numbered:
        number, state = path[path.index("state") + 1 :][:2]
        name, shape = trained[int(number)]
        if path in vectors and path not in cut:
            states += _end_to_end(name, str(state), vectors[path], math.prod(shape or ()))
        else:
            tensor = SavedTensor((name,), shapes[path], parts[path])
            states += [run._replace(state=str(state)) for run in look_at(listing, [tensor]).runs]
    return SecondLook(look.names, [*look.runs, *states])


def _end_to_end(name: str, state: str, ranks: Mapping[int, TensorRef], numel: int) -> Iterator[HeldRun]:
    """The runs of a flattened tensor: each rank has the next elements; ranks of another replica have the same once
    more.
    """
    at = 0
    for _, ref in sorted(ranks.items()):
        at = 0 if at == numel else at
        if ref.numel:
            yield hold_elements(name, state, ref, 0, ref.numel, at)
        at += ref.numel


def class_of(value: object) -> str:
    """The name of a pickled object's class, or of the class of tensors that `_rebuild_wrapper_subclass` makes."""
    if not isinstance(value, Placeholder):
        return ""
    first = value.args[0] if value.args else None
    return (first if value.name.startswith("_rebuild") and isinstance(first, Placeholder) else value).name.split(".")[
        -1
    ]


def _part_of(value: object, rank: int) -> RankPart:
    """The part of a DTensor or ShardedTensor in the file of this rank."""
    if not isinstance(value, Placeholder):
        raise TypeError(f"{value!r:.80} is not a tensor")
    shape = sizes_of(value.args[2])
    if class_of(value) == "ShardedTensor":
        return RankPart(shape, list(_shards(value, rank)))
    held = fields_of(value)
    spec, local = fields_of(held["_spec"]), unwrap(held["_local_tensor"])
    extents, coordinate = _mesh(spec["mesh"], rank)
    said = [(class_of(placement), fields_of(placement)) for placement in as_sequence(spec["placements"])]
    cuts = [
        MeshCut(kind, number_of(own.get("dim", 0)), number_of(own.get("split_factor", 1)), extent, at)
        for (kind, own), extent, at in zip(said, extents, coordinate, strict=True)
    ]
    return place_part(shape, [cuts[at] for at in _order(spec.get("shard_order"), len(cuts))], local)


def place_part(shape: Shape, cuts: Sequence[MeshCut], local: object) -> RankPart:
    """The place of a rank's elements in a tensor that was cut along one dimension of the mesh after the other. Raises
    ValueError, TypeError if the elements are not what the cuts leave to the rank.
    """
    if not isinstance(local, TensorRef):
        raise TypeError("a tensor without elements")
    offsets: list[int] = []
    for dim, extent in enumerate(shape):
        indexes = [(0, extent)]
        for kind, of, factor, ranks, coordinate in cuts:
            if kind in ("Shard", "_StridedShard") and of % len(shape) == dim:
                indexes = _cut_spans(indexes, factor if kind == "_StridedShard" else 1, ranks, coordinate)
            elif kind not in ("Shard", "_StridedShard", "Replicate"):
                raise ValueError(f"a placement {kind}")
        spans = _join_spans(indexes)
        if len(spans) > 1 or sum(stop - start for start, stop in spans) != local.shape[dim]:
            raise ValueError(f"a rank has {spans} of {extent} indexes, and {local.shape[dim]} in its file")
        offsets.append(spans[0][0] if spans else 0)
    return RankPart(shape, [(offsets, local)] if local.numel else [])


def _cut_spans(indexes: list[tuple[int, int]], factor: int, ranks: int, coordinate: int) -> list[tuple[int, int]]:
    """What one rank of a mesh's dimension gets of spans of indexes: its chunk, or its chunk of each of `factor` chunks."""
    numel = sum(stop - start for start, stop in indexes)
    own: list[tuple[int, int]] = []
    for first, last in _chunks(0, numel, factor):
        own += _take_spans(indexes, *_chunks(first, last, ranks)[coordinate])
    return own


def _chunks(start: int, stop: int, number: int) -> list[tuple[int, int]]:
    """`torch.chunk`, with empty chunks at the end."""
    size = -(-(stop - start) // number)
    return [(min(stop, start + n * size), min(stop, start + (n + 1) * size)) for n in range(number)]


def _take_spans(indexes: Sequence[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int]]:
    """The spans that hold the indexes from number `first` to number `last` among those of `indexes`."""
    at = 0
    for start, stop in indexes:
        low, high = max(first, at), min(last, at + stop - start)
        if low < high:
            yield start + low - at, start + high - at
        at += stop - start


def _join_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _order(said: object, number: int) -> list[int]:
    """The order in which a mesh's dimensions cut: from left to right, unless the spec gives another."""
    order: list[int] = []
    for entry in as_sequence(said):
        order += sizes_of((entry.args if isinstance(entry, Placeholder) else as_sequence(entry))[1])
    return [*order, *(at for at in range(number) if at not in order)]


def _mesh(value: object, rank: int) -> tuple[Shape, Shape]:
    """The extents of a mesh, and a rank's coordinate in it."""
    mesh = fields_of(value)
    said = sizes_of(mesh["_coordinate_on_dim"])
    dims: list[tuple[list[int], list[int]]]  # of each dimension: extents and strides of what it is made from
    if isinstance(ranks := mesh.get("mesh", mesh.get("_mesh")), TensorRef):
        dims = [([extent], [stride]) for extent, stride in zip(ranks.shape, ranks.stride, strict=True)]
    else:
        layout = fields_of(mesh["_layout"])
        axes = [fields_of(axis) for axis in as_sequence(layout.get("axes"))]
        pairs = [(a["shape"], a["stride"]) for a in axes] or list(zip(_each(layout["shape"]), _each(layout["stride"])))
        dims = [(list(_flat(shape)), list(_flat(stride))) for shape, stride in pairs]
    extents = tuple(math.prod(shape) for shape, _ in dims)
    listed = mesh.get("_flatten_rank_map", mesh.get("_flatten_mesh_list"))
    if not isinstance(listed, tuple | list) or rank not in listed or len(dims) != len(said):
        return extents, said
    coordinate: Shape = ()
    for shape, strides in dims:
        own = 0
        for extent, stride in zip(shape, strides, strict=True):
            own = own * extent + listed.index(rank) // stride % extent
        coordinate += (own,)
    if coordinate != said:
        raise ValueError(f"rank {rank} is at {list(coordinate)} of its mesh, and its file says {list(said)}")
    return extents, coordinate


def _shards(value: Placeholder, rank: int) -> Iterator[Part]:
    state = as_sequence(value.state)
    local, metadata = as_sequence(state[0]), fields_of(state[1])
    everywhere = [fields_of(shard) for shard in as_sequence(metadata["shards_metadata"])]
    own = [shard for shard in everywhere if fields_of(shard["placement"]).get("_rank") == rank]
    for number, shard in enumerate(map(fields_of, local)):
        ref, said = shard["tensor"], own[number] if len(own) == len(local) else fields_of(shard["metadata"])
        if not isinstance(ref, TensorRef) or ref.shape != sizes_of(said["shard_sizes"]):
            raise ValueError(f"a shard of {said.get('shard_sizes')}")
        if ref.numel:
            yield sizes_of(said["shard_offsets"]), ref


def _each(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else [value]


def _flat(value: object) -> Iterator[int]:
    for one in value if isinstance(value, tuple | list) else [value]:
        yield from _flat(one) if isinstance(one, tuple | list) else [number_of(one)]


def sizes_of(value: object) -> Shape:
    """Sizes or offsets, one for each dimension."""
    if not isinstance(value, tuple | list):
        raise TypeError(f"{value!r:.80} instead of sizes")
    return tuple(map(number_of, value))


def number_of(value: object) -> int:
    """A number that counts something."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} instead of a number")
    return value
