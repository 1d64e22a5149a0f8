"""The GGUF format of llama.cpp: reads a file's index, and writes one.

For `open_container`, and for `layouts.gguf`. A file is the magic `GGUF`, its version, the numbers of tensors and of metadata
entries; the entries (key, kind, value); for each tensor its name, extents (the last dimension first), type and offset; and, from
a multiple of the alignment on, the tensors' bytes, each padded to the alignment. Numbers are little-endian.

[Note: types] Of ggml's many types those are read that converters of models write without loss, Q8_0 (blocks of 32 elements of a
row, each an fp16 scale and 32 signed bytes), and those of `PACKED`. A tensor of such blocks is read as bytes, with
`BLOCKS` among its attributes: a matrix (8, 64) of Q8_0 is U8 of shape (8, 68).
Source: ggml, docs/gguf.md, include/ggml.h (types), src/gguf.cpp (limits); gguf-py 0.19.0, constants.py, gguf_writer.py.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from zckpt.base import limits
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CorruptError, UnsupportedError
from zckpt.base.words import examples
from zckpt.containers.container import Container, Input
from zckpt.containers.skeleton import Skeleton
from zckpt.containers.tensor_ref import MAX_NUMBER, StorageRef, TensorRef, contiguous_stride
from zckpt.core.dtypes import BF16, F16, F32, F64, I8, I16, I32, I64, U8, DType
from zckpt.core.stores import FileStore

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
"""Where a file does not say another."""

BLOCKS = "ggml_type"
"""The attribute that a tensor of blocks has."""

_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_LEAST_CHUNK, _CHUNK = 64 << 10, 1 << 20
"""Bytes that are read at once: few at first, because what follows a short header is numbers, which may come from far away."""
_LISTED = 1024
"""Arrays with more items are vocabularies; they are not kept."""

_TENSOR_COST, _ENTRY_COST, _TEXT_COST, _NUMBER_COST, _SKIPPED_COST = 700, 320, 64, 40, 32
"""Bytes of memory for each tensor, entry, and text or number of an array that is kept; what is not kept costs time."""
_LETTER_COST = 4
"""Bytes of memory for each byte of a text: one letter beyond Unicode's first plane makes all letters as wide."""

Kind = Literal["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"]

_KINDS: tuple[Kind, ...] = (
    *("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"),
)  # fmt: skip
"""By their numbers."""

_FORMATS = dict(zip(_KINDS, ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")))


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A type of elements.

    Attributes:
        name: ggml's.
        number: ggml's.
        dtype: of what is stored; of blocks, U8.
        block: elements in a block; 1 without blocks.
        nbytes: of a block.
    """

    name: str
    number: int
    dtype: DType
    block: int
    nbytes: int

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which a tensor is stored: of blocks, in bytes."""
        return shape if self.block == 1 else (*shape[:-1], shape[-1] // self.block * self.nbytes)


Q8_0 = GgmlType("Q8_0", 8, U8, 32, 34)
BY_DTYPE = {
    dtype: GgmlType(dtype.name, number, dtype, 1, dtype.itemsize)
    for dtype, number in ((F32, 0), (F16, 1), (I8, 24), (I16, 25), (I32, 26), (I64, 27), (F64, 28), (BF16, 30))
}
PACKED = tuple(
    GgmlType(name, number, U8, block, nbytes)
    for name, number, block, nbytes in (
        ("Q4_0", 2, 32, 18), ("Q4_1", 3, 32, 20), ("Q5_0", 6, 32, 22), ("Q5_1", 7, 32, 24), ("Q2_K", 10, 256, 84),
        ("Q3_K", 11, 256, 110), ("Q4_K", 12, 256, 144), ("Q5_K", 13, 256, 176), ("Q6_K", 14, 256, 210), ("IQ4_NL", 20, 32, 18),
        ("MXFP4", 39, 32, 17),
    )
)  # fmt: skip
"""Other types of blocks."""
BY_NUMBER = {kind.number: kind for kind in (*BY_DTYPE.values(), Q8_0, *PACKED)}
BY_NAME = {kind.name: kind for kind in BY_NUMBER.values()}
_OTHERS = {
    9: "Q8_1", 15: "Q8_K", **dict(enumerate(("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "", "IQ3_S", "IQ2_S", "IQ4_XS"), 16)),
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufValue:
    """A value of the metadata.

    Attributes:
        kind: of the value.
        value: a number, text, or a list of these; None for an array that was too long to be kept.
        items: kind of an array's items.
        length: of an array.
    """

    kind: Kind
    value: object
    items: Kind | None = None
    length: int = 0


# ---- reading ------------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads numbers and text one after the other, a chunk of the file at a time.

    Never more than `limits.HEADER_BYTES`, and nothing that makes more objects than `limits.GGUF_MEMORY_BYTES` have room for.
    """

    def __init__(self, file: Input) -> None:
        self.file = file
        self.at = 0
        self.holds = ""
        self._cost = 0
        self._chunk = b""
        self._start = 0
        self._ahead = _LEAST_CHUNK

    def take(self, nbytes: int, what: str) -> bytes:
        """Takes the next bytes."""
        if self.at + nbytes > limits.HEADER_BYTES:
            if self.at + nbytes > self.file.size:
                raise self.file.cut_short(what, self.at + nbytes)
            raise UnsupportedError(
                "the header is too large", file=self.file.path, found=f"more than {limits.HEADER_BYTES:,} bytes",
                expected=f"at most {limits.HEADER_BYTES:,} bytes", remedy=limits.REMEDY,
            )  # fmt: skip
        begin = self.at - self._start
        if begin + nbytes > len(self._chunk):
            if self.at + nbytes > self.file.size:
                raise self.file.cut_short(what, self.at + nbytes)
            self._start, begin = self.at, 0
            self._chunk = self.file.read(self.at, min(max(nbytes, self._ahead), self.file.size - self.at), what)
            self._ahead = min(2 * self._ahead, _CHUNK)
        self.at += nbytes
        return self._chunk[begin : begin + nbytes]

    def charge(self, cost: int) -> None:
        """Adds to the cost: bytes of objects about to be made. Raises UnsupportedError if all together would take too
        much memory.
        """
        self._cost += cost
        if self._cost > limits.GGUF_MEMORY_BYTES:
            raise UnsupportedError(
                "the header would take too much memory", file=self.file.path, found=self.holds,
                expected=f"a header for which {limits.GGUF_MEMORY_BYTES:,} bytes of memory are enough", remedy=limits.REMEDY,
            )  # fmt: skip

    def number(self, form: str, what: str) -> int:
        """The next number, of one of `struct`'s formats."""
        value: int = struct.unpack(f"<{form}", self.take(struct.calcsize(form), what))[0]
        return value

    def text(self, what: str) -> str:
        """Takes the next string."""
        nbytes = self.number("Q", what)
        self.charge(_LETTER_COST * min(nbytes, self.file.size))
        data = self.take(nbytes, what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise index_error(self.file, f"no Unicode in {what}") from error


def index_error(file: Input, found: str, expected: str = "") -> CorruptError:
    """The error for an index that contradicts itself."""
    return file.damaged("the GGUF header is damaged", found, expected)


def read_input(file: Input) -> Container:
    """The tensors of a GGUF file in its order, and its metadata as `values`. Raises CorruptError if the index
    contradicts itself or the file's size; UnsupportedError if the file is of another version or byte order, or a
    tensor's type cannot be read.
    """
    reader = _Reader(file)
    reader.take(4, "the magic")
    version = reader.number("I", "the version")
    if version not in (2, VERSION):
        swapped = version & 0xFFFF == 0
        raise UnsupportedError(
            "is a GGUF file for big-endian machines" if swapped else "is a GGUF file of another version", file=file.path,
            found=f"version {version.to_bytes(4, 'little').hex() if swapped else version}",
            expected="version 2 or 3, little-endian",
            remedy="Convert the model again with llama.cpp's own converter.",
        )  # fmt: skip
    tensors, entries = reader.number("Q", "the number of tensors"), reader.number("Q", "the number of entries")
    if tensors * 24 + entries * 13 > file.size:  # the least that they take
        raise index_error(
            file, f"{tensors:,} tensors and {entries:,} entries", f"so many as fit into {file.size:,} bytes"
        )
    reader.holds = f"{tensors:,} tensors and {entries:,} entries, with their texts and arrays"
    reader.charge(_TENSOR_COST * tensors + _ENTRY_COST * entries)
    values: dict[str, GgufValue] = {}
    for _ in range(entries):
        key = reader.text("a key of the metadata")
        if key in values:
            raise index_error(file, f"the key {key!r:.80} twice")
        values[key] = _value(reader, _kind(reader), key)
    infos = [_info(reader) for _ in range(tensors)]
    said = values.get("general.alignment")
    alignment = ALIGNMENT if said is None else said.value
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise index_error(file, f"an alignment of {alignment!r:.40}", "a power of two")
    data_at = -(-reader.at // alignment) * alignment
    store = file.store()
    root: dict[str, TensorRef] = {}
    for name, shape, number, offset in infos:
        if name in root:
            raise index_error(file, f"the tensor {name!r:.80} twice")
        if offset % alignment:
            raise index_error(file, f"tensor {name!r:.80} at offset {offset:,}", f"a multiple of {alignment}")
        root[name] = _tensor(file, store, name, shape, number, data_at + offset)
    _check_places(file, root, data_at, alignment)
    return Container("gguf", store, root, values=values)


def _check_places(file: Input, root: Mapping[str, TensorRef], data_at: int, alignment: int) -> None:
    """Makes sure that tensors fill the file: one with a smaller shape or type than it was written with leaves a hole.

    Source: llama.cpp, ggml/src/gguf.cpp (a tensor begins where the one before it ends, rounded up to the alignment).
    """
    last, end = "", data_at
    for name, ref in sorted(root.items(), key=lambda item: (item[1].byte_offset, item[1].nbytes)):
        expected = -(-end // alignment) * alignment
        if ref.numel and ref.byte_offset != expected:
            raise index_error(
                file, f"tensor {name!r:.80} at byte {ref.byte_offset:,}",
                f"byte {expected:,}, behind " + (f"tensor {last!r:.80}" if last else "the header"),
            )  # fmt: skip
        if ref.numel:
            last, end = name, ref.byte_offset + ref.nbytes
    if last and file.size > (most := -(-end // alignment) * alignment):
        raise index_error(
            file, f"{file.size - end:,} bytes behind the last tensor, {last!r:.80}", f"{most:,} bytes in all"
        )


def _kind(reader: _Reader) -> Kind:
    number = reader.number("I", "the kind of a value")
    if number >= len(_KINDS):
        raise index_error(reader.file, f"a value of kind {number:,}", f"a kind below {len(_KINDS)}")
    return _KINDS[number]


def _value(reader: _Reader, kind: Kind, key: str) -> GgufValue:
    what = f"the value of {key!r:.80}"
    if kind == "string":
        return GgufValue(kind, reader.text(what))
    if kind != "array":
        return GgufValue(kind, reader.number(_FORMATS[kind], what))
    items, length = _kind(reader), reader.number("Q", what)
    if items == "array":
        raise UnsupportedError(
            "the metadata has arrays of arrays", file=reader.file.path, found=f"the key {key!r:.80}",
            remedy="Convert the model again with llama.cpp's own converter.",
        )  # fmt: skip
    if items == "string":
        if length * 8 > reader.file.size:
            raise reader.file.cut_short(what, reader.at + length * 8)
        reader.charge((_TEXT_COST if length <= _LISTED else _SKIPPED_COST) * length)
        if length <= _LISTED:
            return GgufValue(kind, [reader.text(what) for _ in range(length)], items, length)
        for _ in range(length):
            reader.take(reader.number("Q", what), what)
        return GgufValue(kind, None, items, length)
    form = _FORMATS[items]
    reader.charge(_NUMBER_COST * length if length <= _LISTED else 0)
    data = reader.take(length * struct.calcsize(form), what)
    listed = None if length > _LISTED else list(struct.unpack(f"<{length}{form}", data))
    return GgufValue(kind, listed, items, length)


def _info(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's name, shape, number of its type, and offset from the first one."""
    name = reader.text("the name of a tensor")
    dims = reader.number("I", f"the dimensions of tensor {name!r:.80}")
    if dims > _MAX_DIMS:
        raise index_error(reader.file, f"tensor {name!r:.80} in {dims:,} dimensions", f"at most {_MAX_DIMS}")
    data = reader.take(8 * dims + 12, f"the shape, type and offset of tensor {name!r:.80}")
    *extents, number, offset = struct.unpack(f"<{dims}QIQ", data)
    return name, tuple(reversed(extents)), number, offset


def _tensor(
    file: Input, store: FileStore, name: str, shape: tuple[int, ...], number: int, byte_offset: int
) -> TensorRef:
    kind = BY_NUMBER.get(number)
    if kind is None:
        known = ", ".join(each.name for each in sorted(BY_NUMBER.values(), key=lambda each: each.number))
        raise UnsupportedError(
            f"the type of tensor {name!r:.80} cannot be read", file=file.path, found=_OTHERS.get(number) or f"type {number:,}",
            expected=f"one of {known}", remedy="Give a GGUF file of the model in one of these, such as Q8_0.",
        )  # fmt: skip
    if kind.block > 1 and (not shape or shape[-1] % kind.block):
        raise index_error(
            file, f"tensor {name!r:.80} of {kind.name} with shape {list(shape)}", f"rows of {kind.block}s"
        )
    stored = kind.stored(shape)
    numel = 1
    for extent in stored:
        numel *= extent
    nbytes = numel * kind.dtype.itemsize
    if nbytes > MAX_NUMBER:
        raise index_error(file, f"tensor {name!r:.80} of shape {list(shape)}", "at most 2^63 bytes")
    if byte_offset + nbytes > file.size:
        raise file.cut_short(f"tensor {name!r:.80}", byte_offset + nbytes)
    storage = StorageRef(name, kind.dtype, numel, store, byte_offset)
    ref = storage.view(0, stored, contiguous_stride(stored))
    return ref if kind.block == 1 else replace(ref, attributes={BLOCKS: kind.name})


# ---- writing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GgufSpec:
    """Name, type and shape of a tensor to be written; the shape in elements, row-major as in torch."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in which it is stored."""
        return self.type.stored(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        nbytes = self.type.dtype.itemsize
        for extent in self.stored:
            nbytes *= extent
        return nbytes


def skeleton(specs: Sequence[GgufSpec], metadata: Mapping[str, GgufValue]) -> Skeleton:
    """A GGUF file without its elements.

    Args:
        specs: the tensors, in the order in which they lie.
        metadata: key -> value, in the order in which they are written.

    Raises:
        UnsupportedError: the format cannot hold a shape.
    """
    unfit = [spec.name for spec in specs if not 0 < len(spec.shape) <= _MAX_DIMS or 0 in spec.shape]
    if unfit:
        raise UnsupportedError(
            "GGUF cannot hold these tensors", found=examples(unfit), expected=f"1 to {_MAX_DIMS} dimensions, none of them 0",
            remedy="Leave them out with --exclude.",
        )  # fmt: skip
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(specs), len(metadata)))
    for key, value in metadata.items():
        head += _text(key) + struct.pack("<I", _KINDS.index(value.kind)) + _pack_value(value)
    relative: dict[str, int] = {}
    end = 0
    for spec in specs:
        relative[spec.name] = end
        head += _text(spec.name) + struct.pack("<I", len(spec.shape))
        head += struct.pack(f"<{len(spec.shape)}QIQ", *reversed(spec.shape), spec.type.number, end)
        end = _align_up(end + spec.nbytes)
    start = _align_up(len(head))
    literals = [(0, bytes(head) + b"\0" * (start - len(head)))]
    for spec in specs:
        stop = relative[spec.name] + spec.nbytes
        if gap := _align_up(stop) - stop:
            literals.append((start + stop, b"\0" * gap))
    return Skeleton(start + end, tuple(literals), (), {name: start + offset for name, offset in relative.items()})


def _align_up(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _text(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def _pack_value(value: GgufValue) -> bytes:
    if value.kind == "string":
        return _text(value.value)  # type: ignore[arg-type]
    if value.kind != "array":
        return struct.pack("<" + _FORMATS[value.kind], value.value)
    items: Sequence[object] = value.value  # type: ignore[assignment]
    kind = value.items or "string"
    begin = struct.pack("<IQ", _KINDS.index(kind), len(items))
    if kind == "string":
        return begin + b"".join(_text(item) for item in items)  # type: ignore[arg-type]
    return begin + struct.pack(f"<{len(items)}{_FORMATS[kind]}", *items)
