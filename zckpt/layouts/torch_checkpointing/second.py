"""Finds what the files of torch_checkpointing hold of every tensor a second time.

`metadata.pkl` has for each item and path in it the ways in which ranks hold the tensor: a DTensor's placements, with the numbers
of the mesh's ranks in row-major order, or the offsets of pieces; and each rank's file, `<item>_<rank>.pt` where it says none.
Without `metadata.pkl`, DTensors say it themselves.
Source: torch_checkpointing 0.1.1, distributed_metadata.py, dtensor_metadata.py, default_metadata.py, checkpoint_layout.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.containers import TensorRef, load_pickle, open_container
from zckpt.layouts.fsdp.second import MeshCut, RankPart, look_at_ranks, number_of, place_part, sizes_of
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import Path, SecondLook, as_sequence, fields_of, leaves_of

_METADATA = "metadata.pkl"
_FILE = re.compile(r"([\w-]+?)_(\d+)\.pt")


def find_again(listing: Listing) -> SecondLook:
    """The model's tensors and the optimizer's states."""
    described: Mapping[str, object] = {}
    ranks = 0
    if _METADATA in listing.files:
        root = fields_of(load_pickle(listing.files[_METADATA].read(), file=listing.files[_METADATA].path))
        described, ranks = fields_of(root["metadata"]), number_of(root["world_size"])
    return look_at_ranks(listing, _values(listing, described, ranks))


def _values(listing: Listing, described: Mapping[str, object], ranks: int) -> Iterator[tuple[int, Path, object]]:
    files = {(match[1], int(match[2])): match[0] for match in map(_FILE.fullmatch, listing.files) if match}
    groups: dict[str, Mapping[str, object]] = {}
    for item, said in described.items():
        groups[item] = fields_of(fields_of(said)["nested_path_to_metadata"])
        for number, layout in fields_of(fields_of(said)["rank_to_layout_info"]).items():
            if "file_path" in fields_of(layout):
                files[item, number_of(number)] = str(fields_of(layout)["file_path"])
    for (item, rank), name in files.items():
        ways = groups.get(item, {})
        if name not in listing.files and not {"..", ""}.isdisjoint(name.split("/")):
            raise ValueError(f"a file {name!r} elsewhere")
        opened = listing.open(name) if name in listing.files else open_container(listing.directory / name)
        for path, value in leaves_of(opened.root):
            own = _way_of(ways.get(json.dumps(path, separators=(",", ":"))), rank)
            yield rank, (item, *path), _part_of(value, own, rank) if own and isinstance(value, TensorRef) else value


def _way_of(ways: object, rank: int) -> Mapping[str, object]:
    """The way in which a rank holds a tensor; empty if nothing says it."""
    for way in ways if isinstance(ways, list | tuple) else ():
        if rank in sizes_of(fields_of(way)["ranks"]):
            return fields_of(fields_of(way)["sharding_metadata"])
    return {}


def _part_of(ref: TensorRef, way: Mapping[str, object], rank: int) -> object:
    data = fields_of(way["data"])
    if way["type"] == "DTensorShardingMetadata":
        mesh = fields_of(data["mesh_spec"])
        extents, place = sizes_of(mesh["mesh_shape"]), sizes_of(mesh["mesh_data"]).index(rank)
        cuts: list[MeshCut] = []
        for dim, said in enumerate(map(fields_of, as_sequence(data["placements"]))):
            kind = {"StridedShard": "_StridedShard"}.get(str(said["type"]), str(said["type"]))
            at = place // math.prod(extents[dim + 1 :]) % extents[dim]
            own = number_of(said.get("dim", 0)), number_of(said.get("split_factor", 1))
            cuts.append(MeshCut(kind, *own, extents[dim], at))
        if all(cut.kind == "Replicate" for cut in cuts):
            return ref
        return place_part(sizes_of(data["global_shape"]), cuts, ref)
    pieces = zip(
        *(map(sizes_of, as_sequence(data[f"{name}"])) for name in ("global_offsets", "local_offsets", "local_sizes"))
    )
    parts: list[tuple[Sequence[int], TensorRef]] = []
    for offsets, local, sizes in pieces:
        first = sum(at * step for at, step in zip(local, ref.stride, strict=True))
        if any(at + own > extent for at, own, extent in zip(local, sizes, ref.shape, strict=True)):
            raise ValueError(f"a piece {list(sizes)} at {list(local)} of {list(ref.shape)}")
        parts.append((offsets, replace(ref, shape=sizes, byte_offset=ref.byte_offset + first * ref.dtype.itemsize,
                                       storage_offset=ref.storage_offset + first)))  # fmt: skip
    return RankPart(sizes_of(data["global_shape"]), parts)
