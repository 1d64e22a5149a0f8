"""Lays out a save of torch.distributed.checkpoint: `.metadata`, and data files that any number of ranks can load.

For `to_dcp`. The words are those of `metadata`; its reading is the check: what is laid out here is what it reads.

[Note: how tensors are cut] A rank that loads reads every chunk that holds a row of its shard, and reads it whole. So large
tensors are cut, by rows of their first dimension: of it `fully_shard` gives each rank a run. Example: 10 rows of 30 MiB in
chunks of 64 MiB are cut into 2, 2, 2, 2, 2 rows; rank 1 of 3, which holds rows 4-7, reads the third and fourth chunk. Where
one row is larger, as in stacked layers or experts, each row is cut again, by the next dimension: (4, 10) rows of 30 MiB are
cut into 4 x 5 chunks.

[Note: a smaller save] `slim` leaves out items of a save. Every item is a torch file of its own in a data file, so those that stay
are copied as they are, one after another, into data files of the same names, and `.metadata` says where they are then. Nothing of
them is interpreted.
Source: torch/distributed/checkpoint/{filesystem,metadata,default_planner,_nested_dict}.py (2.3 - 2.13).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.base.errors import UnsupportedError
from zckpt.containers import Placeholder, TensorSpec, torch_zip
from zckpt.containers.emit import Size, emit
from zckpt.containers.skeleton import Skeleton
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import U8, DType
from zckpt.core.fragments import Fragment
from zckpt.core.plan import Checksum, OutputFile, Pair, Plan, literal_file
from zckpt.core.stores import FileStore
from zckpt.layouts.dcp.chunks import DcpChunk, ItemPlace, Shape
from zckpt.layouts.dcp.metadata import BytesItem, Metadata, Path, TensorItem
from zckpt.layouts.dcp.state import join_path, optimizers_of
from zckpt.layouts.save.listing import Listing

CHUNK_BYTES = 64 << 20
"""The most bytes of a chunk, but a chunk has at least one row. Every chunk costs a kilobyte and a read."""

_METADATA = "torch.distributed.checkpoint.metadata"


_Run = tuple[str, int, int, int]
"""The file of a chunk, and of its elements the first byte there, the number of the first, and how many."""


class DcpWriter:
    """A save that is being laid out: items are added one after another, then it is finished.

    Args:
        max_file_bytes: a data file that would become larger is followed by another; a chunk is never split.
        chunk_bytes: see [Note: how tensors are cut].
        directory: of the output that the save is in; empty for the output itself.
    """

    def __init__(self, max_file_bytes: int, chunk_bytes: int = CHUNK_BYTES, *, directory: str = "") -> None:
        self.max_file_bytes = max_file_bytes
        self.chunk_bytes = chunk_bytes
        self.directory = directory and directory + "/"
        self._files: dict[str, list[Skeleton]] = {}  # path -> the torch files in it, one after another
        self._end = 0  # of the last file
        self._tensors: list[tuple[TensorEntry, DType, list[_Run]]] = []
        self._paths: dict[str, Path] = {}
        self._items: dict[str, tuple[DType, Shape, tuple[DcpChunk, ...]] | ItemPlace] = {}

    def tensor(self, path: Path, source: TensorEntry, dtype: DType) -> None:
        """Adds a tensor, perhaps cast to `dtype`."""
        chunks: list[DcpChunk] = []
        runs: list[_Run] = []
        for offsets, sizes in split_into_chunks(source.shape, dtype.itemsize, self.chunk_bytes):
            spec = TensorSpec("", dtype, sizes)
            skeleton = torch_zip.skeleton_of(spec, [spec])
            place = self._append(skeleton)
            chunks.append(DcpChunk(offsets, sizes, place))
            if spec.numel:
                first = _first(offsets, source.shape)
                runs.append((place.file, place.offset + skeleton.offsets[""], first, spec.numel))
        self._tensors.append((source, dtype, runs))
        self._add(path, (dtype, source.shape, tuple(chunks)))

    def number(self, path: Path, dtype: DType, data: bytes) -> None:
        """Adds a tensor without dimensions, with its bytes."""
        spec = TensorSpec("", dtype, ())
        skeleton = torch_zip.skeleton_of(spec, [spec])
        skeleton = replace(skeleton, literals=(*skeleton.literals, (skeleton.offsets[""], data)))
        self._add(path, (dtype, (), (DcpChunk((), (), self._append(skeleton)),)))

    def value(self, path: Path, value: object) -> None:
        """Adds a pickled object. Raises UnsupportedError if `emit` cannot write it."""
        self._add(path, self._append(torch_zip.skeleton_of(value, [])))

    def again(self, path: Path, known: Path) -> None:
        """Adds an item with the value and place of an earlier one."""
        self._add(path, self._items[join_path(known)])

    def values(self, paths: Iterable[Path], value: object) -> None:
        """Adds the same pickled object several times, with one place."""
        place = self._append(torch_zip.skeleton_of(value, []))
        for path in paths:
            self._add(path, place)

    def _add(self, path: Path, item: tuple[DType, Shape, tuple[DcpChunk, ...]] | ItemPlace) -> None:
        self._paths[join_path(path)] = path
        self._items[join_path(path)] = item

    def _append(self, skeleton: Skeleton) -> ItemPlace:
        if not self._files or (self._end and self._end + skeleton.size > self.max_file_bytes):
            self._files[f"__0_{len(self._files)}.distcp"] = []
            self._end = 0
        path, at = next(reversed(self._files)), self._end
        self._files[path].append(skeleton)
        self._end += skeleton.size
        return ItemPlace(path, at, skeleton.size)

    def finish(self) -> Plan:
        """The plan of the files, in the order of their bytes."""
        outputs = {path: _data_file(self.directory + path, held) for path, held in self._files.items()}
        stores = {path: FileStore(output.path, output.size) for path, output in outputs.items()}
        files = [(output, stores[path]) for path, output in outputs.items()]
        files.append(literal_file(f"{self.directory}.metadata", metadata_file(self._items, self._paths)))
        pairs: list[Pair] = []
        for source, dtype, runs in self._tensors:
            fragments = tuple(Fragment(stores[file], at, start, count) for file, at, start, count in runs)
            pairs.append((source, replace(source, dtype=dtype, fragments=fragments, replicas=())))
        return Plan(tuple(files), pairs)


def _data_file(path: str, skeletons: Iterable[Skeleton]) -> OutputFile:
    """A `.distcp` file of torch files, one after another."""
    literals: list[tuple[int, bytes]] = []
    checksums: list[Checksum] = []
    at = 0
    for skeleton in skeletons:
        literals += [(at + offset, data) for offset, data in skeleton.literals]
        checksums += [
            replace(sum_, start=at + sum_.start, slots=tuple(at + slot for slot in sum_.slots))
            for sum_ in skeleton.checksums
        ]
        at += skeleton.size
    return OutputFile(path, at, tuple(literals), tuple(checksums))


Described = tuple[DType, Shape, tuple[DcpChunk, ...]] | ItemPlace
"""A tensor's dtype, shape and chunks; or the place of a pickled object."""


def metadata_file(
    items: Mapping[str, Described], paths: Mapping[str, Path], beside: Mapping[object, object] | None = None
) -> bytes:
    """The pickle of torch's own `Metadata`, as torch pickles it.

    Args:
        items: what is in the save, by name.
        paths: name -> path in the state dict; empty for a save that has no paths.
        beside: what Megatron-Core's planner adds of tensors, by their names; None for a save that is not its own.
    """
    described: dict[str, object] = {}
    stored: dict[object, object] = {}
    for name, item in items.items():
        if isinstance(item, ItemPlace):
            described[name] = _torch_object("BytesStorageMetadata", None)
            stored[_index(name, None)] = _info(item)
            continue
        dtype, shape, chunks = item
        described[name] = _torch_object(
            "TensorStorageMetadata",
            {
                "properties": _torch_object("TensorProperties", (dtype, _STRIDED, False, _CONTIGUOUS, False)),
                "size": Size(shape),
                "chunks": [
                    _torch_object("ChunkStorageMetadata", {"offsets": Size(c.offsets), "sizes": Size(c.sizes)})
                    for c in chunks
                ],
            },
        )
        for chunk in chunks:
            assert isinstance(chunk.place, ItemPlace)
            stored[_index(name, chunk.offsets)] = _info(chunk.place)
    root = {"state_dict_metadata": described, "planner_data": dict(paths), "storage_data": stored}
    more = {"mcore_data": beside} if beside else {}
    return emit(_torch_object("Metadata", {**root, "storage_meta": None, "version": "1.0.0", **more}), {})


def split_into_chunks(shape: Shape, itemsize: int, chunk_bytes: int) -> Iterator[tuple[Shape, Shape]]:
    """(offsets, sizes) of a tensor's chunks, in the order of their elements; see [Note: how tensors are cut].

    Args:
        shape: of the tensor.
        itemsize: bytes of one element.
        chunk_bytes: the most bytes of a chunk, unless one row of the last dimension but one has more.
    """
    numel = math.prod(shape)
    dim = next((dim for dim, extent in enumerate(shape) if extent > 1), len(shape))
    if not numel or dim == len(shape):
        yield (0,) * len(shape), shape
        return
    while dim < len(shape) - 2 and math.prod(shape[dim + 1 :]) * itemsize > chunk_bytes:
        dim += 1
    rows = max(1, chunk_bytes // (math.prod(shape[dim + 1 :]) * itemsize))
    behind, whole = (0,) * (len(shape) - dim - 1), shape[dim + 1 :]
    for before in itertools.product(*map(range, shape[:dim])):
        for row in range(0, shape[dim], rows):
            yield (*before, row, *behind), (*(1 for _ in before), min(rows, shape[dim] - row), *whole)


def _first(offsets: Sequence[int], shape: Shape) -> int:
    """The number of the element at these offsets."""
    number = 0
    for offset, extent in zip(offsets, shape, strict=True):
        number = number * extent + offset
    return number


_STRIDED = Placeholder("torch.serialization", "_get_layout", ("torch.strided",), called=True)
_CONTIGUOUS = Placeholder(_METADATA, "_MEM_FORMAT_ENCODING", (0,), called=True)


def _torch_object(name: str, state: object) -> Placeholder:
    """An object of one of torch's dataclasses."""
    return Placeholder(_METADATA, name, (), state, called=True, new=True)


def _index(name: str, offsets: Shape | None) -> Placeholder:
    return _torch_object(
        "MetadataIndex", {"fqn": name, "index": None, **({} if offsets is None else {"offset": Size(offsets)})}
    )


def _info(place: ItemPlace) -> Placeholder:
    state: dict[str, object] = {"relative_path": place.file, "offset": place.offset, "length": place.length}
    return Placeholder("torch.distributed.checkpoint.filesystem", "_StorageInfo", (), state, called=True, new=True)


def of_optimizers(metadata: Metadata) -> frozenset[str]:
    """The names of all items that belong to optimizers."""
    optimizers = optimizers_of(metadata).values()
    return frozenset(item.name for one in optimizers for _, item in (*one.states, *one.settings))


def nbytes_of(metadata: Metadata, names: Collection[str]) -> int:
    """Bytes of these items' torch files."""
    return sum(place.length for place in {p for name in names for p in _places(metadata.items[name])})


def without(listing: Listing, metadata: Metadata, dropped: Collection[str], directory: str) -> Plan:
    """The files of a save without some of its items.

    Args:
        listing: of the save.
        metadata: of the save.
        dropped: names of the items that are left out.
        directory: of the output that the files are in; empty, or with a slash at its end.

    Raises:
        UnsupportedError: items are in files of another kind.
    """
    kept = {name: item for name, item in metadata.items.items() if name not in dropped}
    moved: dict[ItemPlace, ItemPlace] = {}
    files: list[tuple[OutputFile, FileStore]] = []
    pairs: list[Pair] = []
    by_file: dict[str, list[ItemPlace]] = {}
    for place in sorted({place for item in kept.values() for place in _places(item)}):
        by_file.setdefault(place.file, []).append(place)
    for name, places in by_file.items():
        at = 0
        source = listing.where(name).store()
        fragments: list[Fragment] = []
        for place in places:
            moved[place] = ItemPlace(name, at, place.length)
            fragments.append(Fragment(source, place.offset, at, place.length))
            at += place.length
        store = FileStore(directory + name, at)
        files.append((OutputFile(store.path, at), store))
        entry = TensorEntry(store.path, (at,), U8, "buffer", tuple(fragments))
        pairs.append((entry, replace(entry, fragments=(Fragment(store, 0, 0, at),))))
    paths: dict[str, Path] = {name: item.path for name, item in kept.items()} if metadata.nested else {}
    items = {name: _describe_item(item, moved) for name, item in kept.items()}
    beside: dict[object, object] = {name: value for name, value in metadata.beside.items() if name in kept}
    files.append(literal_file(f"{directory}.metadata", metadata_file(items, paths, beside)))
    return Plan(tuple(files), pairs)


def _places(item: TensorItem | BytesItem) -> Sequence[ItemPlace]:
    """The places of an item's torch files."""
    places = [item.place] if isinstance(item, BytesItem) else [chunk.place for chunk in item.chunks if chunk.numel]
    found = [place for place in places if isinstance(place, ItemPlace)]
    if len(found) != len(places) or (isinstance(item, TensorItem) and item.view is not None):
        raise UnsupportedError(
            f"item {item.name!r} is not in a file of torch.distributed.checkpoint's own", found="another kind of file",
            expected="data files *.distcp", remedy="Run zckpt to-dcp, which writes the weights alone.",
        )  # fmt: skip
    return found


def _describe_item(item: TensorItem | BytesItem, moved: dict[ItemPlace, ItemPlace]) -> Described:
    if isinstance(item, BytesItem):
        assert isinstance(item.place, ItemPlace)
        return moved[item.place]
    chunks: list[DcpChunk] = []
    for chunk in item.chunks:
        assert isinstance(chunk.place, ItemPlace)
        chunks.append(chunk._replace(place=moved.get(chunk.place, chunk.place)))
    return item.dtype, item.size, tuple(chunks)
