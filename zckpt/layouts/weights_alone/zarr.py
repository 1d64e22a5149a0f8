"""Zarr's arrays, of version 2 and 3: where the numbers of each chunk lie, by what an array's metadata say.

For Orbax's saves. An array is a grid of chunks of one shape; those at the edges are stored whole. Of version 2, `.zarray` says
the shapes, and a chunk is called `1.0`; of version 3, `zarr.json` does, a chunk is called `c/1/0`, and may hold smaller chunks;
their places are at its end (`sharding_indexed`). A chunk is numbers in row-major order, or a zstd frame of them.
Source: the specifications of Zarr 2 and 3; tensorstore 0.1.86, driver/zarr/metadata.cc, driver/zarr3/codec/sharding_indexed.cc.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

from zckpt.base.errors import COPY_AGAIN, CorruptError, UnsupportedError
from zckpt.containers import brief
from zckpt.containers.tensor_ref import MAX_DIMS, MAX_NUMBER
from zckpt.core import dtypes
from zckpt.core.dtypes import DType

V2, V3 = ".zarray", "zarr.json"
_AGAIN = "Restore it with orbax.checkpoint, and save it again with its own settings."
_NAMES = {dtype.numpy: dtype for dtype in dtypes.ALL if dtype.numpy} | dtypes.BY_TORCH_NAME
"""What the metadata call a dtype: version 2 as numpy does, and both as ml_dtypes does."""

Shape = tuple[int, ...]


class ZarrGrid(NamedTuple):
    """An array.

    Attributes:
        shape: of it.
        dtype: of its numbers.
        chunk: the shape of its chunks.
        inner: that of the chunks in these, which are what is stored; the same where there are none.
        packed: whether a chunk is a zstd frame.
        begin: what names of chunks begin with.
        separator: what is between the numbers in them.
        index_first: whether the places of inner chunks are at the beginning.
    """

    shape: Shape
    dtype: DType
    chunk: Shape
    inner: Shape
    packed: bool
    begin: str
    separator: str
    index_first: bool = False

    @property
    def counts(self) -> Shape:
        """How many chunks there are in each dimension."""
        return tuple(-(-extent // own) for extent, own in zip(self.shape, self.chunk, strict=True))

    @property
    def inner_counts(self) -> Shape:
        """How many chunks a chunk holds in each dimension."""
        return tuple(extent // own for extent, own in zip(self.chunk, self.inner, strict=True))

    @property
    def is_sharded(self) -> bool:
        """Whether chunks hold smaller ones, perhaps one."""
        return self.begin == "shard"

    def key(self, at: Shape) -> str:
        """The name of a chunk."""
        numbers = self.separator.join(map(str, at))
        if self.begin:
            return f"c{self.separator}{numbers}" if at else "c"
        return numbers or "0"

    def chunks(self) -> Iterator[Shape]:
        """The numbers of all chunks."""
        return itertools.product(*map(range, self.counts))

    def inner_chunks(self) -> Iterator[Shape]:
        """The numbers of the chunks in a chunk, in the order of their places."""
        return itertools.product(*map(range, self.inner_counts))


def parse(data: bytes, file: str, name: str) -> ZarrGrid:
    """What an array's metadata say; `file` ends in `.zarray` or `zarr.json`.

    Raises:
        CorruptError: they are damaged. UnsupportedError: numbers are stored in a way that is not read.
    """
    from zckpt.storage.json_files import check_size

    check_size(data, file, "an array's metadata")
    try:
        said = json.loads(data)
        if not isinstance(said, dict):
            raise TypeError(f"{brief(said)} instead of an object")
        grid = _parse_v2(said) if file.endswith(V2) else _parse_v3(said)
        if not len(grid.shape) == len(grid.chunk) == len(grid.inner) <= MAX_DIMS:
            raise ValueError(f"shape {brief(grid.shape)} in chunks {brief(grid.chunk)}")
        if any(whole % own for whole, own in zip(grid.chunk, grid.inner, strict=True)):
            raise ValueError(f"chunks {brief(grid.inner)} in chunks {brief(grid.chunk)}")
        if max(math.prod(grid.shape), math.prod(grid.chunk) * grid.dtype.itemsize) > MAX_NUMBER:
            raise ValueError(f"shape {brief(grid.shape)}")
    except NotImplementedError as error:
        raise UnsupportedError(
            f"array {name!r} is stored in a way that zckpt does not read", file=file, found=str(error),
            expected="little-endian numbers in row-major order, as they are or in zstd", remedy=_AGAIN,
        ) from error  # fmt: skip
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptError(
            f"does not describe array {name!r}", file=file, found=f"{type(error).__name__}: {error}"[:200],
            expected="the metadata of an array of Zarr", remedy=COPY_AGAIN,
        ) from error  # fmt: skip
    return grid


def _parse_v2(said: Mapping[str, object]) -> ZarrGrid:
    """The array, by metadata of version 2. Raises NotImplementedError for a way of storing that is not read."""
    packed = said["compressor"]
    if isinstance(packed, dict) and packed.get("id") != "zstd":
        raise NotImplementedError(f"compressed by {brief(packed.get('id'))}")
    if said["zarr_format"] != 2 or said.get("order") != "C" or said.get("filters"):
        raise NotImplementedError(f"order {brief(said.get('order'))}, filters {brief(said.get('filters'))}")
    chunk = _shape(said["chunks"], least=1)
    separator = said.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise ValueError(f"separator {brief(separator)}")
    return ZarrGrid(_shape(said["shape"]), _dtype(said["dtype"]), chunk, chunk, packed is not None, "", str(separator))


def _parse_v3(said: Mapping[str, object]) -> ZarrGrid:
    """As `_parse_v2`, of version 3."""
    grid = _object(said["chunk_grid"])
    if said["zarr_format"] != 3 or grid["name"] != "regular" or said.get("storage_transformers"):
        raise NotImplementedError(f"a grid {brief(grid.get('name'))}")
    chunk = inner = _shape(_object(grid["configuration"])["chunk_shape"], least=1)
    encoding = _object(said["chunk_key_encoding"])
    if encoding["name"] not in ("default", "v2"):
        raise NotImplementedError(f"names of chunks {brief(encoding['name'])}")
    is_default = encoding["name"] == "default"
    separator = _object(encoding.get("configuration") or {}).get("separator", "/" if is_default else ".")
    codecs, begin, index_first = _list(said["codecs"]), "c" if is_default else "", False
    if codecs and _object(codecs[0])["name"] == "sharding_indexed":
        how = _object(_object(codecs[0])["configuration"])
        if len(codecs) > 1 or not is_default or [_object(one)["name"] for one in _list(how["index_codecs"])] not in (
            ["bytes", "crc32c"], ["bytes"],
        ):  # fmt: skip
            raise NotImplementedError("chunks in chunks that are compressed again")
        inner, codecs, begin = _shape(how["chunk_shape"], least=1), _list(how["codecs"]), "shard"
        index_first = how.get("index_location") == "start"
        if len(_list(how["index_codecs"])) == 1:
            raise NotImplementedError("places of chunks without a checksum")
    names = [_object(one)["name"] for one in codecs]
    if names not in (["bytes"], ["bytes", "zstd"]):
        raise NotImplementedError(f"codecs {', '.join(map(brief, names))}")
    if _object(_object(codecs[0]).get("configuration") or {}).get("endian", "little") != "little":
        raise NotImplementedError("big-endian numbers")
    if separator not in (".", "/"):
        raise ValueError(f"separator {brief(separator)}")
    return ZarrGrid(
        _shape(said["shape"]),
        _dtype(said["data_type"]),
        chunk,
        inner,
        len(names) > 1,
        begin,
        str(separator),
        index_first,
    )


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{brief(value)} instead of an object")
    return cast("Mapping[str, object]", value)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{brief(value)} instead of a list")
    return cast("list[object]", value)


def _shape(value: object, least: int = 0) -> Shape:
    found = tuple(_list(value))
    if not all(type(extent) is int and least <= extent <= MAX_NUMBER for extent in found):
        raise ValueError(f"shape {brief(found)}")
    return cast("Shape", found)


def _dtype(value: object) -> DType:
    if not isinstance(value, str) or value not in _NAMES:
        raise NotImplementedError(f"numbers of type {brief(value)}")
    return _NAMES[value]
