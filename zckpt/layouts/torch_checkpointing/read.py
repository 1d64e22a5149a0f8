"""Reads a save of torch_checkpointing: the items of all ranks become one save of torch.distributed.checkpoint.

For `layouts`. A save is a dict of items: `{"model": .., "optimizer": .., "step": 7}`. Each rank writes each of its items into a
file `<item>_<rank>.pt`, or where the item's layout says, as torch, safetensors, JSON or raw bytes. Files of torch hold DTensors,
which say how they were cut (`save.cut_tensors`); safetensors hold the ranks' own elements only.

[Note: metadata.pkl] A pickle of plain values: `{"version": "2.0", "world_size": 2, "metadata": {item: ..}}`. An item has
`nested_path_to_metadata`, from a path as JSON text (`["state","a.weight","exp_avg"]`) to a list of
`{"sharding_metadata": {"type", "data"}, "ranks"}`, and `rank_to_layout_info`, from a rank to None or
`{"file_path", "serialization_format": {"type"}}`. Data of a DTensor are its shape, mesh and placements, with the mesh's ranks in
row-major order; those of other tensors the offsets of their pieces. In version 1.0 the paths begin with the item, and
`rank_to_layout_info_mappings` has a rank's items. Items without a resharder are not in it; without any, there is no such file.
Source: torch_checkpointing 0.1.1, distributed_metadata.py, dtensor_metadata.py, default_metadata.py, checkpoint_layout.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from zckpt.base import limits
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError, UnsupportedError, ZckptError
from zckpt.containers import Container, TensorRef, brief, list_at, load_pickle, mapping_at, open_container, torch_zip
from zckpt.containers.container import open_input
from zckpt.containers.tensor_ref import as_shape
from zckpt.core.catalog import Catalog
from zckpt.core.evidence import Evidence
from zckpt.core.fragments import Box
from zckpt.layouts.dcp import read as dcp
from zckpt.layouts.dcp.metadata import Path, file_elsewhere
from zckpt.layouts.fsdp.read import RankFile, RankFiles, leaves
from zckpt.layouts.run.training import Training
from zckpt.layouts.run.values import missing_ranks
from zckpt.layouts.save.cut_tensors import CutReader, CutTensor, Placement, Shape, class_of
from zckpt.layouts.save.family import Record
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.torch_checkpointing import ITEM, METADATA, NO_ITEM
from zckpt.storage.identity import stays_inside
from zckpt.storage.location import Location

_JSON_BYTES = 1 << 20
_OPTIMIZER = "optimizer"
_TORCH = "TorchSerialization"


def match_files(listing: Listing) -> str | None:
    """None when this layout reads files without a metadata.pkl; otherwise why not. Opens one file."""
    if listing.directory in listing.files.values():
        return "one file"
    first = [name for name in listing.matching(ITEM) if _number(name) == 0]
    for name in sorted(first, key=lambda name: not name.startswith("model"))[:1]:
        root = listing.open(name).root
        if isinstance(root, Mapping) and any(class_of(value) == "DTensor" for _, value in leaves(root)):
            return None
    return NO_ITEM


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a save.

    Raises:
        IncompleteError: ranks' files are missing. InconsistentError: ranks do not agree.
        CorruptError: the metadata contradict themselves. UnsafeError: they name files elsewhere.
        UnsupportedError: tensors do not say how they were cut, or were cut in a way that zckpt does not know.
    """
    del allow_unknown  # nothing here is laid out by unknown rules
    ranks = _ranks(listing)
    has_metadata = METADATA in listing.files
    evidence = Evidence("metadata", "'metadata.pkl'") if has_metadata else ranks.evidence()
    return ranks.catalog("torch_checkpointing", "torch_checkpointing", evidence)


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """The optimizer's states, if their parameters have names; arguments and errors as in `read`."""
    del allow_unknown
    return _ranks(listing).training()


def unread_states(listing: Listing) -> str:
    """Why optimizer states of a save are not read, in words; empty if they are read, or there are none."""
    return _ranks(listing).unread_states()


def beside(listing: Listing) -> list[str]:
    """Names of tensors that are neither the model's nor the optimizer's, without random states."""
    return dcp.beside_in(_ranks(listing).save())


def records(listing: Listing) -> Iterator[tuple[str, list[Record] | ZckptError]]:
    """(path of a file, its records with their checksums, or its error), for all files that ranks wrote in torch's form."""
    save = _Save(listing)
    try:
        places = [place for item in save.items().values() for place in item.values()]
    except (ZckptError, TypeError, ValueError, LookupError, AttributeError):
        return  # `read` raises the reason
    for name, form in places:
        where = listing.where(name)
        if form != _TORCH or not where.is_file():
            continue
        try:
            with open_input(where.path) as file:
                yield where.path, torch_zip.records_in(file)
        except ZckptError as error:
            yield where.path, error


def _ranks(listing: Listing) -> RankFiles:
    save = _Save(listing)
    try:
        return RankFiles(listing, save.files(), _OPTIMIZER)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise save.corrupt(f"{type(error).__name__}: {error}") from error


@dataclass(slots=True)
class _Item:
    """What the metadata say of an item.

    Attributes:
        groups: path -> (sharding metadata, ranks), for each way in which ranks have it.
        places: rank -> (path of its file, format), where a layout says it.
    """

    groups: dict[Path, list[tuple[Mapping[str, Any], set[int]]]] = field(
        default_factory=dict[Path, "list[tuple[Mapping[str, Any], set[int]]]"]
    )
    places: dict[int, tuple[str, str]] = field(default_factory=dict[int, "tuple[str, str]"])

    def ranks(self) -> set[int]:
        """The ranks that have some of the item."""
        return {rank for groups in self.groups.values() for _, ranks in groups for rank in ranks}

    def of(self, path: Path, rank: int) -> Mapping[str, Any] | None:
        """The sharding metadata of a rank for the tensor at a path; None if it has none."""
        return next((said for said, ranks in self.groups.get(path, ()) if rank in ranks), None)

    def is_cut(self) -> bool:
        """Whether any of the item's tensors is cut."""
        return any(not _is_whole(said) for groups in self.groups.values() for said, _ in groups)


class _Save:
    """A save's files; LookupError, TypeError and ValueError mean that the metadata are damaged."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.file = (listing.directory / METADATA).path
        self.world_size = 0

    def corrupt(self, found: str) -> CorruptError:
        """The error for contradictory metadata."""
        return CorruptError("its metadata contradict themselves", file=self.file, found=found[:200], remedy=COPY_AGAIN)

    def items(self) -> dict[str, dict[int, tuple[str, str]]]:
        """Item -> rank -> the path of its file and its format: as the metadata say, and of the files that are there."""
        found: dict[str, dict[int, tuple[str, str]]] = {
            item: dict(said.places) for item, said in self.described.items()
        }
        for name in self.listing.files:
            if (match := ITEM.fullmatch(name)) and (not self.world_size or int(match["dp"]) < self.world_size):
                found.setdefault(match["item"], {}).setdefault(int(match["dp"]), (name, _TORCH))
        return found

    def files(self) -> Iterator[RankFile]:
        """The contents of each rank's files, under paths that begin with the item; the model's come first."""
        found = self.items()
        self.world_size = self.world_size or max((rank + 1 for places in found.values() for rank in places), default=0)
        for item in sorted(found, key=lambda item: (item != "model", item)):
            said = self.described.get(item, _Item())
            wanted = said.ranks() or (
                set(range(self.world_size)) if item in ("model", _OPTIMIZER) else set(found[item])
            )
            places = {rank: found[item].get(rank, (f"{item}_{rank}.pt", _TORCH)) for rank in wanted}
            there = {rank: self.listing.where(path) for rank, (path, _) in places.items()}
            if missing := sorted(rank for rank, where in there.items() if not where.is_file()):
                raise missing_ranks(self.listing, item, sorted(wanted - {*missing}), missing, self.world_size)
            for rank in sorted(wanted):
                yield rank, there[rank].path, self._leaves(item, said, rank, *places[rank])

    # -- the metadata ------------------------------------------------------------------------------------------------

    @functools.cached_property
    def described(self) -> dict[str, _Item]:
        """The metadata of each item; empty if there are none."""
        if METADATA not in self.listing.files:
            return {}
        with open_input(self.file) as source:
            if source.size > limits.METADATA_BYTES:
                raise UnsupportedError(
                    "the metadata are too large", file=self.file, found=f"{source.size:,} bytes", remedy=limits.REMEDY
                )
            data = source.read(0, source.size, "the metadata")
        most = max(limits.PICKLE_COST, limits.METADATA_COST_PER_BYTE * len(data))
        root = load_pickle(data, file=self.file, most=most)
        if not isinstance(root, Mapping) or not isinstance(root.get("metadata"), Mapping):
            raise self.corrupt(f"{brief(root)} instead of what torch_checkpointing writes")
        world_size = root.get("world_size")
        if type(world_size) is not int or not 0 < world_size <= limits.RANKS:
            raise self.corrupt(f"a world size of {brief(world_size)}")
        self.world_size = world_size
        is_old = "rank_to_layout_info_mappings" in root
        return self._of_version_1(root) if is_old else {str(n): self._item(d) for n, d in root["metadata"].items()}

    def _item(self, said: Mapping[str, Any]) -> _Item:
        item = _Item()
        for text, groups in said["nested_path_to_metadata"].items():
            item.groups[_path(text)] = [self._group(group) for group in groups]
        for rank, layout in said["rank_to_layout_info"].items():
            if layout is not None:
                item.places[int(rank)] = self._place(layout)
        return item

    def _of_version_1(self, root: Mapping[str, Any]) -> dict[str, _Item]:
        items: dict[str, _Item] = {}
        for text, groups in root["metadata"].items():
            name, *path = _path(text)
            items.setdefault(str(name), _Item()).groups[tuple(path)] = [self._group(group) for group in groups]
        for rank, layouts in root["rank_to_layout_info_mappings"].items():
            for name, layout in layouts.items():
                if layout is not None and name in items:
                    items[name].places[int(rank)] = self._place(layout)
        return items

    def _group(self, group: Mapping[str, Any]) -> tuple[Mapping[str, Any], set[int]]:
        ranks = set(group["ranks"])
        if not all(type(rank) is int and 0 <= rank < self.world_size for rank in ranks):
            raise self.corrupt(f"ranks {sorted(map(brief, ranks))[:5]} of {self.world_size}")
        return group["sharding_metadata"], ranks

    def _place(self, layout: Mapping[str, Any]) -> tuple[str, str]:
        """The path of a file and its format, after checking that it is in the save's directory."""
        path = layout["file_path"]
        if type(path) is not str or not stays_inside(path.replace("\\", "/")):
            raise file_elsewhere(self.file, path)
        return path, str(layout["serialization_format"]["type"])

    # -- the items ---------------------------------------------------------------------------------------------------

    def _leaves(self, item: str, said: _Item, rank: int, path: str, form: str) -> Iterator[tuple[Path, object]]:
        """Path -> value of everything in a file."""
        where = self.listing.where(path)
        if form == _TORCH:
            root = self._container(path, where).root
            if not isinstance(root, Mapping | list):
                yield (item,), root
                return
            for inner, value in leaves(root):
                yield (item, *inner), self._cut(said, inner, rank, value, where.path)
        elif form == "SafetensorsSerialization":
            named = {".".join(map(str, inner)): inner for inner in said.groups}
            for name, value in mapping_at(self._container(path, where).root).items():
                inner = named.get(name, (name,))
                yield (item, *inner), self._cut(said, inner, rank, value, where.path)
        elif form == "JsonSerialization":
            data = where.read(_JSON_BYTES + 1)
            if len(data) <= _JSON_BYTES:
                yield (item,), json.loads(data)
        elif form != "RawSerialization":
            raise UnsupportedError(
                f"the form of item {item!r} is unknown", file=self.file, found=form,
                expected="TorchSerialization, SafetensorsSerialization, JsonSerialization or RawSerialization",
                remedy="Save it again in one of these forms.",
            )  # fmt: skip

    def _container(self, path: str, where: Location) -> Container:
        return self.listing.open(path) if path in self.listing.files else open_container(where)

    def _cut(self, item: _Item, path: Path, rank: int, value: object, file: str) -> object:
        """A tensor with its place in the whole, where only the metadata give it; any other value as it is."""
        said = item.of(path, rank)
        if said is None or not isinstance(value, TensorRef) or (_is_whole(said) and item.is_cut()):
            return value
        reader = CutReader(".".join(map(str, path)), file)
        data = said["data"]
        size = as_shape(data["global_shape"])
        if said["type"] == "DTensorShardingMetadata":
            return self._of_mesh(reader, data, size, rank, value)
        if said["type"] == "default_tensor_v1":
            pieces = zip(data["global_offsets"], data["local_offsets"], data["local_sizes"], strict=True)
            parts = [
                (Box(as_shape(offsets), as_shape(sizes)), value.box(as_shape(local), as_shape(sizes)))
                for offsets, local, sizes in pieces
            ]
            return reader.cut(value.dtype, size, parts, {})
        raise UnsupportedError(
            f"how {reader.name!r} was cut is not known", file=self.file, found=brief(said["type"]),
            expected="DTensorShardingMetadata or default_tensor_v1", remedy="Save it again as DTensors.",
        )  # fmt: skip

    def _of_mesh(self, reader: CutReader, data: Mapping[str, Any], size: Shape, rank: int, ref: TensorRef) -> CutTensor:
        mesh = data["mesh_spec"]
        extents = as_shape(mesh["mesh_shape"])
        at = list_at(mesh, "mesh_data").index(rank)
        coordinate: list[int] = []
        for extent in reversed(extents):
            coordinate.insert(0, at % extent)
            at //= extent
        placements = [_placement(placement) for placement in data["placements"]]
        part = reader.part(size, placements, extents, tuple(coordinate))
        names = mesh.get("mesh_dim_names") or range(len(extents))
        return reader.cut(ref.dtype, size, [(part, ref)], {str(n): e for n, e in zip(names, extents, strict=True)})


def _number(name: str) -> int:
    match = ITEM.fullmatch(name)
    return int(match["dp"]) if match else -1


def _path(text: str) -> Path:
    """The path in a JSON text."""
    path = json.loads(text)
    if not isinstance(path, list) or not all(type(key) in (str, int) for key in path):
        raise ValueError(f"a path {text!r:.80}")
    return tuple(path)


def _placement(said: Mapping[str, Any]) -> Placement:
    kinds = {"StridedShard": "_StridedShard"}
    return kinds.get(said["type"], said["type"]), said.get("dim", 0), said.get("split_factor", 1)


def _is_whole(said: Mapping[str, Any]) -> bool:
    """Whether every rank has all of a plain tensor: such a tensor has no names of dimensions."""
    data = said.get("data")
    if said.get("type") != "DTensorShardingMetadata" or not isinstance(data, Mapping):
        return False
    is_plain = not data["mesh_spec"].get("mesh_dim_names")
    return is_plain and all(placement["type"] == "Replicate" for placement in data["placements"])
