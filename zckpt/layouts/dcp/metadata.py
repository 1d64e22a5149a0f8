"""Reads the metadata of a torch.distributed.checkpoint save: the place of each chunk of each tensor.

For `dcp`. There are three forms. `.metadata` is a pickle of a `Metadata` object for all ranks; `__R.metadata` is the same
for one rank that saved without the others; and safetensors shards say in their headers where their tensors belong.
Pickles are read by the machine that runs nothing, and every number in them is checked here.

[Note: the words of torch.distributed.checkpoint] A state dict of nested dicts is flattened: `{"model": {"a.weight": ..}}`
has the item `model.a.weight`, with the path ("model", "a.weight"). An item is a tensor or bytes (a pickled object). A
tensor is cut into chunks: boxes of `sizes` at `offsets`. Each chunk, and each object, is a whole torch file of its own,
`length` bytes at `offset` of a `.distcp` file.
Source: torch/distributed/checkpoint/{metadata,filesystem,hf_storage,_nested_dict}.py (2.1 - 2.13).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from zckpt.base import limits
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import (
    COPY_AGAIN,
    OTHER_SAVE,
    CorruptError,
    IncompleteError,
    InconsistentError,
    UnsafeError,
    UnsupportedError,
)  # fmt: skip
from zckpt.base.words import count, examples, ranks
from zckpt.containers import Placeholder, brief, load_pickle
from zckpt.containers.container import open_input
from zckpt.containers.tensor_ref import MAX_DIMS, is_count
from zckpt.core.catalog import numel_of
from zckpt.core.dtypes import DType
from zckpt.core.fragments import Box
from zckpt.layouts.dcp import DATA, METADATA, SAFETENSORS
from zckpt.layouts.dcp.chunks import (
    FINISHERS,
    NOWHERE,
    Boxes,
    Chunks,
    DcpChunk,
    ItemPlace,
    Shape,
    is_inside,
    is_shape,
    row_kinds,
)
from zckpt.layouts.save.listing import Listing

if TYPE_CHECKING:
    from zckpt._core import Described
    from zckpt.containers.records import PlaceTable

_ROOTS = ("Metadata", "MCoreMetadata")
"""Classes of the pickled metadata: torch's, and that of some versions of Megatron-Core, which has the same attributes.
"""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor: its path in the state dict, what it is, and the chunks it was cut into.

    `view` is the tensor's own shape where it was flattened before it was cut, so that `size` has one dimension.
    """

    name: str
    path: Path
    dtype: DType
    size: Shape
    chunks: Sequence[DcpChunk]
    view: Shape | None = None

    @property
    def shape(self) -> Shape:
        """The tensor's own shape."""
        return self.size if self.view is None else self.view


class InertValue(NamedTuple):
    """A pickled object that has been read."""

    value: object


@dataclass(frozen=True, slots=True)
class BytesItem:
    """A pickled object: its path in the state dict, and its place, or its value; None if it is in no file."""

    name: str
    path: Path
    place: ItemPlace | InertValue | None


@dataclass(frozen=True, slots=True)
class Metadata:
    """A save's items, in the order of the state dict if it is recorded.

    Attributes:
        file: the file that describes them.
        items: by name.
        nested: whether the paths are recorded, and not only names.
        version: of the format, or an empty string.
        beside: what Megatron-Core's planner adds of tensors, by their names; empty where it added nothing.
    """

    file: str
    items: Mapping[str, TensorItem | BytesItem]
    nested: bool
    version: str = ""
    beside: Mapping[object, object] = field(default_factory=dict[object, object])


def read_metadata(listing: Listing) -> Metadata:
    """The metadata of a save.

    Raises:
        IncompleteError: there are data files, but no metadata.
        CorruptError: the metadata contradict themselves.
        UnsafeError: it would run code, or names files elsewhere.
        UnsupportedError: its bytes were transformed, or are a kind of item that zckpt does not know.
    """
    names = listing.matching(METADATA)
    if ".metadata" in names:
        return _Pickled(listing, ".metadata").metadata
    if names:
        return _merge_metadata(listing, [_Pickled(listing, name).metadata for name in names])
    if shards := listing.matching(SAFETENSORS):
        return _of_safetensors(listing, shards)
    raise _missing_error(listing)


LARGE_BYTES = 16 << 20
"""Metadata of 60,000 tensors: those of more are read as columns, where they can be."""


def read_columns(listing: Listing) -> Described | None:
    """The metadata of a save of very many tensors that are one chunk each, as columns; None for any other save, with which
    `read_metadata` says what it is.
    """
    if ".metadata" not in listing.files or listing.options.key or listing.absent:
        return None
    with open_input(listing.files[".metadata"].path) as source:
        descriptor = getattr(source.file, "descriptor", None)
        if descriptor is None or not LARGE_BYTES <= source.size <= limits.METADATA_BYTES:
            return None
        try:
            from zckpt._core import read_described
        except ImportError:
            return None
        found = read_described(descriptor, source.size)
    return found if found is not None and all(map(is_inside, found.files())) else None


_MOST_FRAME_BYTES = 1 << 17
"""Python ends a frame of a pickle when it has 64 KiB."""

_PLANS = b"\x8c\x0fall_local_plans\x94"


def without_plans(data: bytes) -> bytes:
    """The pickle without the last attribute, if that is `all_local_plans`: what each rank was to write, once more.

    Megatron-Core keeps it, and it is as large as everything else. The key of the attribute, in protocol 4, is followed by its
    value, and that by the end of the attributes, BUILD and STOP. Zeros stand for the rest of the frame that is cut.
    """
    at = data.find(_PLANS)
    if at < 0 or data.find(_PLANS, at + 1) >= 0:
        return data
    return data[:at] + b"ub." + bytes(min(len(data) - at - 3, _MOST_FRAME_BYTES))


_KEYS = {str, int}
"""The types of a path's keys."""

_MOST_KNOWN = 1024
"""Descriptions of tensors that are kept to be used again."""


class _Pickled:
    """One metadata pickle, checked; `metadata` is the result."""

    def __init__(self, listing: Listing, name: str) -> None:
        self.listing = listing
        self.file = listing.files[name].path
        with open_input(self.file) as source:
            if source.size > limits.METADATA_BYTES:
                raise UnsupportedError(
                    "the metadata are too large", file=self.file, found=f"{source.size:,} bytes", remedy=limits.REMEDY,
                )  # fmt: skip
            data = source.read(0, source.size, "the metadata")
        if not data:
            raise CorruptError(
                "the metadata are empty",
                file=self.file,
                remedy="Copy the file again, or use an older save: one that did not finish has such a file.",
            )
        most = max(limits.PICKLE_COST, limits.METADATA_COST_PER_BYTE * len(data))
        data = without_plans(data)
        root = load_pickle(data, file=self.file, most=most, finishers=FINISHERS, rows=row_kinds())
        del data
        if not isinstance(root, Placeholder) or root.name not in _ROOTS or not isinstance(root.state, Mapping):
            raise self.corrupt("is not a metadata file of torch.distributed.checkpoint", brief(root))
        self.state = root.state
        self.places = self._places(root.state.get("storage_data"))
        paths = root.state.get("planner_data")
        self.paths = paths if isinstance(paths, Mapping) and paths else None
        self._known: dict[int, tuple[DType, Shape, object]] = {}
        described = self._described()
        items: dict[str, TensorItem | BytesItem] = {}
        for name in itertools.chain(self.paths or (), described):
            if name not in items and name in described:
                items[name] = self._item(name, described[name])
        version = root.state.get("version")
        version, beside = version if isinstance(version, str) else "", root.state.get("mcore_data")
        nested = self.paths is not None
        self.metadata = Metadata(self.file, items, nested, version, beside if isinstance(beside, Mapping) else {})

    def corrupt(self, what: str, found: str) -> CorruptError:
        return CorruptError(what, file=self.file, found=found, remedy=COPY_AGAIN)

    def fields(self, value: object, kind: str) -> Mapping[str, Any]:
        """The attributes of an object of torch's class of this name."""
        if not isinstance(value, Placeholder) or value.name != kind or not isinstance(value.state, Mapping):
            raise self.corrupt(f"holds another object instead of a {kind}", brief(value))
        return value.state

    def shape(self, value: object, what: str) -> Shape:
        """A tuple of counts, checked."""
        if not isinstance(value, tuple | list) or len(value) > MAX_DIMS:
            raise self.corrupt(f"{what} cannot be read", brief(value))
        if not is_shape(tuple(value)):
            raise self.corrupt(f"{what} have impossible numbers", f"{list(value)!r:.200}")
        return tuple(value)

    def _described(self) -> Mapping[str, object]:
        described = self.state.get("state_dict_metadata")
        if not isinstance(described, Mapping):
            raise self.corrupt("the metadata have no state dict", brief(described))
        for name in described:
            if type(name) is not str:
                raise self.corrupt("the name of an item is not a text", brief(name))
        return described

    def _places(self, stored: object) -> Mapping[tuple[str, Shape | None], ItemPlace] | PlaceTable:
        """(name, offsets) -> the place of that chunk; offsets are None for bytes."""
        if type(stored).__name__ == "PlaceTable":
            return self._checked_table(cast("PlaceTable", stored))
        if not isinstance(stored, Mapping):
            raise self.corrupt("the metadata name no data files", brief(stored))
        if all(type(index) is tuple and type(info) is ItemPlace for index, info in stored.items()):
            return stored
        return {self._index(index): self._place(index, info) for index, info in stored.items()}

    def _checked_table(self, table: PlaceTable) -> PlaceTable:
        for file in table.files:
            self._check_inside(file)
        odd = [(self._index(index), self._place(index, info)) for index, info in table.odd.items()]
        table.update(odd)
        return table

    def _index(self, index: object) -> tuple[str, Shape | None]:
        if type(index) is tuple:
            return index
        key = self.fields(index, "MetadataIndex")
        name, offsets = key.get("fqn"), key.get("offset")
        if type(name) is not str:
            raise self.corrupt("the name of an item is not a text", brief(name))
        return name, None if offsets is None else self.shape(offsets, f"the offsets of {name!r}")

    def _place(self, index: object, info: object) -> ItemPlace:
        if type(info) is ItemPlace:
            return info
        name, at = self._index(index)[0], self.fields(info, "_StorageInfo")
        if at.get("transform_descriptors"):
            raise UnsupportedError(
                f"the bytes of {name!r} are transformed", file=self.file, found=f"{at['transform_descriptors']!r:.80}",
                remedy="Save it again without the extension that compressed or encrypted it.",
            )  # fmt: skip
        path = self._check_inside(at.get("relative_path"))
        offset, length = self.shape((at.get("offset"), at.get("length")), f"the place of {name!r}")
        return ItemPlace(path, offset, length)

    def _check_inside(self, path: object) -> str:
        """The path of a data file. Raises UnsafeError if it is not beside the metadata or below them."""
        if type(path) is not str or not is_inside(path):
            raise file_elsewhere(self.file, path)
        return path

    def _path(self, name: str) -> Path:
        if self.paths is None:
            return (name,)
        path = self.paths.get(name, (name,))
        if not isinstance(path, tuple | list) or not path or not _KEYS.issuperset(map(type, path)):
            raise self.corrupt(f"the path of {name!r} cannot be read", brief(path))
        return tuple(path)

    def _item(self, name: str, value: object) -> TensorItem | BytesItem:
        if isinstance(value, Placeholder) and value.name == "BytesStorageMetadata":
            return BytesItem(name, self._path(name), self.places.get((name, None)))
        if (known := self._known.get(id(value))) is None:
            known = self._tensor(name, value)
            if len(self._known) < _MOST_KNOWN:
                self._known[id(value)] = known
        dtype, size, described_chunks = known
        if (quick := self._chunks(name, size, described_chunks)) is not None:
            return TensorItem(name, self._path(name), dtype, size, quick)
        assert isinstance(described_chunks, list | tuple | Boxes)
        boxes = dict.fromkeys(self._box(name, size, value) for value in described_chunks)
        chunks = ((*box, self._placed(name, box)) for box in boxes)
        made = Chunks(len(size), chunks) if size else tuple(DcpChunk(*chunk) for chunk in chunks)
        return TensorItem(name, self._path(name), dtype, size, made)

    def _tensor(self, name: str, value: object) -> tuple[DType, Shape, object]:
        """The dtype, the size and the chunks of a tensor; one object may describe many."""
        described = self.fields(value, "TensorStorageMetadata")
        size = self.shape(described.get("size"), f"the size of {name!r}")
        numel_of(size, name=name, file=self.file)
        chunks = described.get("chunks")
        if not isinstance(chunks, list | tuple | Boxes):
            raise self.corrupt(f"chunks of {name!r} cannot be read", brief(chunks))
        return self._dtype(name, described.get("properties")), size, chunks

    def _chunks(self, name: str, size: Shape, described: object) -> Chunks | None:
        """The chunks of a tensor, all at once; None where they have to be looked at one by one."""
        if not isinstance(described, Boxes) or described.dims != len(size) or isinstance(self.places, Mapping):
            return None
        places = self.places.places(name, size, described.numbers)
        return Chunks.of_columns(described, places, self.places.files) if places else None

    def _box(self, name: str, size: Shape, value: object) -> Box:
        if type(value) is not Box:
            described = self.fields(value, "ChunkStorageMetadata")
            offsets = self.shape(described.get("offsets"), f"the offsets of a chunk of {name!r}")
            value = Box(offsets, self.shape(described.get("sizes"), f"the sizes of a chunk of {name!r}"))
        offsets, sizes = value
        if len(offsets) != len(size) or len(sizes) != len(size):
            raise self.corrupt(
                f"chunks of {name!r} have other dimensions", f"{list(sizes)} at {list(offsets)} of {list(size)}"
            )
        if any(offset + extent > whole for offset, extent, whole in zip(offsets, sizes, size, strict=True)):
            raise InconsistentError(
                f"the metadata place a chunk outside of tensor {name!r}", file=self.file,
                found=f"sizes {list(sizes)} at offsets {list(offsets)}", expected=f"chunks within {list(size)}",
                remedy=COPY_AGAIN,
            )  # fmt: skip
        return value

    def _placed(self, name: str, box: Box) -> ItemPlace:
        place = self.places.get((name, box.offsets))
        if place is None and 0 not in box.sizes:
            raise IncompleteError(
                f"no file holds a chunk of tensor {name!r}",
                file=self.file,
                found=f"sizes {list(box.sizes)} at {list(box.offsets)}",
                remedy="Copy the metadata and data files of all ranks here, or use another save.",
            )
        return place or NOWHERE

    def _dtype(self, name: str, value: object) -> DType:
        """The dtype of a `TensorProperties`, which pickles itself as a tuple that begins with the dtype and the layout."""
        state = value.state if isinstance(value, Placeholder) and value.name == "TensorProperties" else None
        if not isinstance(state, tuple) or len(state) < 2:
            raise self.corrupt(f"properties of {name!r} cannot be read", brief(state))
        dtype, layout = state[:2]
        if isinstance(layout, Placeholder) and layout.args not in ((), ("torch.strided",)):
            raise UnsupportedError(
                f"tensor {name!r} is sparse", file=self.file, found=brief(layout.args[0]),
                remedy="Save it again as a dense tensor.",
            )  # fmt: skip
        if not isinstance(dtype, DType):
            raise UnsupportedError(
                f"the dtype of tensor {name!r} is unknown", file=self.file, found=brief(dtype),
                remedy="Save that tensor in another dtype.",
            )  # fmt: skip
        return dtype


def _merge_metadata(listing: Listing, parts: list[Metadata]) -> Metadata:
    """The metadata of ranks that saved alone, together: each has only its own chunks. Raises InconsistentError if they
    do not agree on a tensor.
    """
    items: dict[str, TensorItem | BytesItem] = {}
    for part in parts:
        for name, item in part.items.items():
            known = items.setdefault(name, item)
            if known is item or (isinstance(known, BytesItem) and isinstance(item, BytesItem)):
                continue
            if isinstance(known, BytesItem) or isinstance(item, BytesItem) or (
                (known.size, known.dtype) != (item.size, item.dtype)
            ):  # fmt: skip
                raise InconsistentError(
                    f"ranks do not agree on {name!r}", file=part.file, found=_type_name(item),
                    expected=_type_name(known), remedy=OTHER_SAVE,
                )  # fmt: skip
            chunks = {(chunk.offsets, chunk.sizes): chunk for chunk in (*item.chunks, *known.chunks)}
            items[name] = TensorItem(name, known.path, known.dtype, known.size, tuple(chunks.values()))
    return Metadata(listing.directory.path, items, any(part.nested for part in parts), parts[0].version)


def _type_name(item: TensorItem | BytesItem) -> str:
    return f"{item.dtype} of {list(item.size)}" if isinstance(item, TensorItem) else "an object"


def _of_safetensors(listing: Listing, names: list[str]) -> Metadata:
    """The metadata of shards of torch's `HuggingFaceStorageWriter`: headers say where in the tensor each part begins."""
    found: dict[str, tuple[DType, dict[tuple[Shape, Shape], DcpChunk]]] = {}
    for name in names:
        container = listing.open(name)
        root = container.root
        try:
            info = json.loads(container.metadata.get("DCP_SHARDING_INFO", "{}"))
        except (ValueError, RecursionError) as error:
            raise CorruptError(
                "the sharding information cannot be read",
                file=listing.files[name].path,
                found=str(error),
                remedy=COPY_AGAIN,
            ) from error
        for key, ref in root.items() if isinstance(root, Mapping) else ():
            said = info.get(key) if isinstance(info, dict) else None
            offsets = tuple(said.get("saved_offsets", ())) if isinstance(said, dict) else (0,) * len(ref.shape)
            if len(offsets) != len(ref.shape) or not all(map(is_count, offsets)):
                raise CorruptError(
                    f"the offsets of {key!r} are impossible", file=listing.files[name].path, found=f"{offsets!r:.200}",
                    remedy=COPY_AGAIN,
                )  # fmt: skip
            dtype, chunks = found.setdefault(key, (ref.dtype, {}))
            if dtype != ref.dtype or len(next(iter(chunks), (offsets,))[0]) != len(offsets):
                raise InconsistentError(
                    f"ranks do not agree on {key!r}", file=listing.files[name].path,
                    found=f"{ref.dtype} of {list(ref.shape)}", remedy=OTHER_SAVE,
                )  # fmt: skip
            chunks.setdefault((offsets, ref.shape), DcpChunk(offsets, ref.shape, ref))
    items: dict[str, TensorItem | BytesItem] = {}
    for key, (dtype, chunks) in found.items():
        ends = ([at + extent for at, extent in zip(*box, strict=True)] for box in chunks)
        size = tuple(map(max, zip(*ends, strict=True)))
        numel_of(size, name=key, file=listing.directory.path)
        items[key] = TensorItem(key, (key,), dtype, size, tuple(chunks.values()))
    return Metadata(listing.directory.path, items, False)


def _missing_error(listing: Listing) -> IncompleteError:
    """The error for data files without metadata."""
    data = listing.matching(DATA)
    writers = sorted({int(name.split("_")[2]) for name in data})
    nbytes = sum(listing.files[name].size() for name in data)
    found = f"{count(len(data), 'data file')} of {ranks(writers)}, {nbytes:,} bytes, such as {examples(data, 1)}"
    begun = [name for name in listing.files if name.endswith(".metadata.tmp")]
    if begun:
        found += f", and {begun[0]!r}, which the save did not finish"
    return IncompleteError(
        "the file .metadata is missing",
        file=listing.directory,
        found=found,
        expected="a .metadata file, which rank 0 writes last",
        remedy="Use an older save if this one was interrupted. If the file was not copied, because its name begins with a dot "
        "(`cp DIR/* ..` leaves it out), copy it from where rank 0 saved, or pass that directory with --also.",
    )


def file_elsewhere(file: str, path: object) -> UnsafeError:
    """The error for metadata that name a file outside of the checkpoint."""
    return UnsafeError(
        "the metadata name a file elsewhere", file=file, found=brief(path),
        expected="data files in the checkpoint's own directory",
        remedy="Do not use this checkpoint unless you know who made it. Nothing was read from there.",
    )  # fmt: skip
