"""The chunks of tensors, in few bytes: a large save has hundreds of thousands.

For `metadata`. An object that says where one chunk is takes a kilobyte when it is read as an inert object. So the objects of the
classes below become plain values as soon as the pickle has made them (`FINISHERS`), and a tensor's chunks are kept as numbers in
arrays. What is not as it should be stays an inert object; `metadata` looks at that, and its errors name what is wrong.
Source: torch/distributed/checkpoint/{metadata,filesystem}.py (2.1 - 2.13).
"""

from __future__ import annotations

import itertools
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, overload

from zckpt.containers import TensorRef
from zckpt.containers.tensor_ref import MAX_DIMS, is_count
from zckpt.core.fragments import Box
from zckpt.storage.identity import stays_inside

if TYPE_CHECKING:
    from zckpt.containers.records import RowKinds

Shape = tuple[int, ...]


class ItemPlace(NamedTuple):
    """The place of an item's torch file: `length` bytes at `offset` of a file of the save."""

    file: str
    offset: int
    length: int


NOWHERE = ItemPlace("", 0, 0)
"""The place of a chunk without elements, which no file needs to have."""


class DcpChunk(NamedTuple):
    """A box of a tensor, and its torch file, or its place in a safetensors file."""

    offsets: Shape
    sizes: Shape
    place: ItemPlace | TensorRef

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)


class Boxes:
    """Boxes of a tensor of `dims` dimensions; one array holds the offsets and then the sizes of each.

    `whole`: the tensor's size, if they are one box, which is all of the tensor.
    """

    __slots__ = ("dims", "numbers", "whole")

    def __init__(self, dims: int, numbers: Iterable[int] | bytes) -> None:
        self.dims = dims
        self.numbers = array("q", numbers)
        is_one = len(self.numbers) == 2 * dims and not any(self.numbers[:dims])
        self.whole = tuple(self.numbers[dims:]) if is_one else None

    def __len__(self) -> int:
        return len(self.numbers) // (2 * self.dims)

    def __iter__(self) -> Iterator[Box]:
        return map(self.at, range(len(self)))

    def at(self, number: int) -> Box:
        """Returns the box with this number."""
        dims, first = self.dims, 2 * self.dims * number
        numbers = tuple(self.numbers[first : first + 2 * dims])
        return Box(numbers[:dims], numbers[dims:])


_PLACE = Struct("3q")
"""A file's number, an offset and a length."""


class Chunks(Sequence[DcpChunk]):
    """The chunks of a tensor of one dimension or more, all in torch files; a `DcpChunk` is made when it is asked for.

    Args:
        dims: how many.
        chunks: offsets, sizes and place of each.
    """

    __slots__ = ("_boxes", "_files", "_places")

    def __init__(self, dims: int, chunks: Iterable[tuple[Shape, Shape, ItemPlace]]) -> None:
        places = array("q")
        self._files: list[str] = []
        self._boxes = Boxes(dims, self._numbers(chunks, places))
        self._places = places.tobytes()

    @classmethod
    def of_columns(cls, boxes: Boxes, places: bytes, files: list[str]) -> Chunks:
        """Chunks in these boxes, at these places: a file's number in `files`, an offset and a length for each."""
        made = cls.__new__(cls)
        made._boxes, made._places, made._files = boxes, places, files
        return made

    def _numbers(self, chunks: Iterable[tuple[Shape, Shape, ItemPlace]], held: array[int]) -> Iterator[int]:
        files: dict[str, int] = {}
        for offsets, sizes, place in chunks:
            held.extend((files.setdefault(place.file, len(files)), place.offset, place.length))
            yield from offsets
            yield from sizes
        self._files += files

    def __len__(self) -> int:
        return len(self._boxes)

    @overload
    def __getitem__(self, index: int) -> DcpChunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DcpChunk]: ...
    def __getitem__(self, index: int | slice) -> DcpChunk | Sequence[DcpChunk]:
        number = range(len(self))[index]
        if isinstance(number, range):
            return tuple(map(self._at, number))
        return self._at(number)

    def __iter__(self) -> Iterator[DcpChunk]:
        return map(self._at, range(len(self)))

    def places(self) -> Iterator[ItemPlace]:
        """Where the chunks with elements are: as `place` of each, without making the chunks."""
        numbers, dims = iter(array("q", self._places)), self._boxes.dims
        sizes = [iter(self._boxes.numbers[dim :: 2 * dims]) for dim in range(dims, 2 * dims)]
        for file, offset, length, *extents in zip(numbers, numbers, numbers, *sizes, strict=True):
            if 0 not in extents:
                yield ItemPlace(self._files[file], offset, length)

    @property
    def files(self) -> Sequence[str]:
        """The files that hold them; where the C++ read the metadata, those of all tensors."""
        return self._files

    def first(self) -> ItemPlace | None:
        """Where the first chunk with elements is; None if there is none."""
        if (size := self._boxes.whole) is not None and 0 not in size:
            file, offset, length = self.only_place()
            return ItemPlace(self._files[file], offset, length)
        return next(self.places(), None)

    def only_place(self) -> tuple[int, int, int]:
        """Where the only chunk is: as `place_columns`, without columns."""
        file, offset, length = _PLACE.unpack(self._places)
        return file, offset, length

    def place_columns(self) -> tuple[array[int], array[int], array[int]]:
        """Where each is: the number of its file in `files`, an offset and a length."""
        places = array("q", self._places)
        return places[::3], places[1::3], places[2::3]

    def are_one(self, size: Shape) -> bool:
        """Whether they are one chunk, which is all of a tensor of this size."""
        return self._boxes.whole == size

    def are_rows(self, size: Shape) -> bool:
        """Whether they are all of the rows of a tensor of this size, one chunk after another."""
        dims, numbers = self._boxes.dims, self._boxes.numbers
        columns = [numbers[at :: 2 * dims] for at in range(2 * dims)]
        if any(set(columns[dim]) != {0} or set(columns[dims + dim]) != {size[dim]} for dim in range(1, dims)):
            return False
        starts, counts = columns[0], columns[dims]
        order = sorted(range(len(starts)), key=starts.__getitem__)
        ends = itertools.accumulate(counts[at] for at in order)
        covered = [starts[at] for at in order] == [0, *itertools.islice(ends, len(order) - 1)]
        return 0 not in counts and 0 not in size and covered and sum(counts) == size[0]

    def rows(self) -> tuple[array[int], array[int]]:
        """The first row of each chunk and how many it has, as columns, if `are_rows`."""
        dims, numbers = self._boxes.dims, self._boxes.numbers
        return numbers[:: 2 * dims], numbers[dims :: 2 * dims]

    def _at(self, number: int) -> DcpChunk:
        file, offset, length = memoryview(self._places).cast("q")[3 * number : 3 * number + 3]
        return DcpChunk(*self._boxes.at(number), ItemPlace(self._files[file], offset, length))


def is_shape(value: object) -> TypeGuard[Shape]:
    """Whether an object of a file is a tuple of counts."""
    return type(value) is tuple and len(value) <= MAX_DIMS and all(map(is_count, value))


def is_inside(path: str) -> bool:
    """Whether a path is that of a file beside the metadata or below them."""
    return stays_inside(path.replace("\\", "/"))


Finish = Callable[[object], object]


def _index(state: object) -> tuple[str, Shape | None] | None:
    """The value for a `MetadataIndex`: (name, offsets); for a pickled object the offsets are None."""
    if type(state) is dict and type(state.get("fqn")) is str:
        offsets = state.get("offset")
        if offsets is None or is_shape(offsets):
            return sys.intern(state["fqn"]), offsets
    return None


def _place(state: object) -> ItemPlace | None:
    """The `ItemPlace` for a `_StorageInfo`."""
    if type(state) is dict and not state.get("transform_descriptors"):
        file, offset, length = state.get("relative_path"), state.get("offset"), state.get("length")
        if type(file) is str and is_inside(file) and is_count(offset) and is_count(length):
            return ItemPlace(sys.intern(file), offset, length)
    return None


def _box(state: object) -> Box | None:
    """The offsets and sizes of a `ChunkStorageMetadata`."""
    if type(state) is dict and is_shape(state.get("offsets")) and is_shape(state.get("sizes")):
        return Box(state["offsets"], state["sizes"])
    return None


def _tensor(state: object) -> None:
    """Makes the chunks of a `TensorStorageMetadata` `Boxes`, except for a tensor without dimensions."""
    chunks = state.get("chunks") if type(state) is dict else None
    if type(state) is dict and type(chunks) is list and chunks and all(type(chunk) is Box for chunk in chunks):
        dims = {len(shape) for chunk in chunks for shape in chunk}
        if len(dims) == 1 and (number := dims.pop()):
            state["chunks"] = Boxes(number, (n for chunk in chunks for shape in chunk for n in shape))


FINISHERS: Mapping[str, Finish] = {
    "MetadataIndex": _index,
    "_StorageInfo": _place,
    "ChunkStorageMetadata": _box,
    "TensorStorageMetadata": _tensor,
}
"""Class -> the function that makes a plain value of an object's state; of None the object stays."""


def row_kinds() -> RowKinds:
    """What the C++ reads into columns at once: chunks of tensors, and the places of all."""
    from zckpt.containers.records import ObjectKind, RowKinds, shape_columns, text_columns

    return RowKinds(
        ObjectKind("ChunkStorageMetadata", shape_columns("offsets", "sizes")),
        Boxes,
        ObjectKind("MetadataIndex", text_columns("fqn") | shape_columns("offset"), optional="offset"),
        ObjectKind("_StorageInfo", text_columns("relative_path", "offset", "length"), "transform_descriptors"),
        ItemPlace,
    )
