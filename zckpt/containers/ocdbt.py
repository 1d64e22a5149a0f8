"""OCDBT, TensorStore's key-value store: the bytes in its files that each key stands for.

For Orbax's saves. `manifest.ocdbt` says where the root of the newest B+tree is; a leaf has keys with values, or with the places
of values in data files; an inner node has the places of nodes, and the part of the key that all of a node's keys begin with. Each
file or node has a magic number, its length, its CRC-32C at the end, and may be a zstd frame within. Nothing but these is read.
Source: tensorstore 0.1.86, kvstore/ocdbt/format/{manifest,version_tree,btree,indirect_data_reference,codec_util}.cc, and its
description of the format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zckpt.base import limits
from zckpt.base.errors import COPY_AGAIN, CorruptError, UnsupportedError
from zckpt.containers.zstd import Decompressor

MANIFEST = "manifest.ocdbt"
_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_KEY_COST = 400
"""Bytes of memory for each key."""
_HIGHEST = 32
"""Inner nodes above each other."""

Read = Callable[[str, int, int | None], bytes]
"""Gives bytes of a file of the save: its name, the offset, and how many; None for all."""


class StoredValue(NamedTuple):
    """Where the value of a key is.

    Attributes:
        file: with its bytes, or with the node that has them.
        offset: of the first byte in the file.
        nbytes: how many there are.
        inline: the bytes, where the node has them; None where they are in the file as they are.
    """

    file: str
    offset: int
    nbytes: int
    inline: bytes | None = None


class _Node(NamedTuple):
    """Where a node is: a file, an offset and a length; and how keys in it begin."""

    file: str
    offset: int
    nbytes: int
    prefix: bytes
    height: int


class _Cursor:
    """Numbers and texts of a body, one after the other."""

    def __init__(self, data: bytes, file: str) -> None:
        self.data, self.at, self.file = data, 0, file

    def number(self) -> int:
        """A number in pieces of seven bits, the lowest first."""
        value = shift = 0
        while True:
            if self.at >= len(self.data) or shift > 63:
                raise damage_error(self.file, "a number that does not end")
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def numbers(self, count: int) -> list[int]:
        """So many numbers."""
        self.check(count)
        return [self.number() for _ in range(count)]

    def take(self, count: int) -> bytes:
        """So many bytes."""
        self.check(count)
        self.at += count
        return self.data[self.at - count : self.at]

    def check(self, count: int) -> None:
        """Raises CorruptError where fewer bytes are left."""
        if count > len(self.data) - self.at:
            raise damage_error(self.file, f"{count:,} bytes where {len(self.data) - self.at:,} are left")

    def files(self) -> list[str]:
        """The names of data files: each begins as the one before it, for so many bytes."""
        count = self.number()
        prefixes, suffixes = [0, *self.numbers(max(0, count - 1))][:count], self.numbers(count)
        self.numbers(count)  # how much of each name is the path of the store that it came from
        return [self.text(name) for name in self._texts(prefixes, suffixes, "a name of a data file")]

    def text(self, data: bytes) -> str:
        """Bytes as text."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise damage_error(self.file, f"a name that is no text: {error.reason}") from error

    def keys(self, count: int, *, inner: bool) -> tuple[list[bytes], list[int]]:
        """So many keys, in order; of an inner node, how much of each all keys below begin with."""
        prefixes, suffixes = [0, *self.numbers(max(0, count - 1))][:count], self.numbers(count)
        common = self.numbers(count) if inner else []
        return self._texts(prefixes, suffixes, "a key"), common

    def _texts(self, prefixes: list[int], suffixes: list[int], what: str) -> list[bytes]:
        """The next texts: each begins as the one before it, for so many bytes, and ends with so many of its own."""
        found: list[bytes] = []
        for prefix, suffix in zip(prefixes, suffixes, strict=True):
            before = found[-1] if found else b""
            if prefix > len(before):
                raise damage_error(self.file, f"{what} that begins as none")
            found.append(before[:prefix] + self.take(suffix))
        return found

    def places(self, count: int, files: list[str], *, sized: bool) -> list[tuple[str, int, int]]:
        """So many (file, offset, length)."""
        numbers, offsets = self.numbers(count), self.numbers(count)
        lengths = self.numbers(count) if sized else [0] * count
        if any(number >= len(files) for number in numbers):
            raise damage_error(self.file, "a data file that it does not name")
        return [(files[number], at, length) for number, at, length in zip(numbers, offsets, lengths, strict=True)]


def read_keys(read: Read) -> dict[str, StoredValue]:
    """The keys of the newest version of a store, and where their values are.

    Raises:
        CorruptError: the manifest or a node is damaged. UnsupportedError: the store is of a kind that is not read, or too large.
    """
    found: dict[str, StoredValue] = {}
    root = _root_of(_Cursor(_body(read(MANIFEST, 0, None), _MANIFEST_MAGIC, MANIFEST), MANIFEST))
    rest, seen, cost = [root] if root else [], set[tuple[str, int]](), 0
    while rest:
        node = rest.pop()
        data = read(node.file, node.offset, node.nbytes)
        if (node.file, node.offset) in seen or len(data) != node.nbytes:
            raise damage_error(
                node.file,
                "a node that is named twice" if len(data) == node.nbytes else "an end before that of a node",
                node.offset,
            )
        seen.add((node.file, node.offset))
        body = _Cursor(_body(data, _NODE_MAGIC, node.file), node.file)
        below, values = _read_node(body, node)
        rest += below
        found |= values
        cost += len(body.data)
        if cost + _KEY_COST * len(found) > limits.METADATA_BYTES:
            raise UnsupportedError(
                "names too many keys", file=MANIFEST, found=f"{len(found):,} so far", remedy=limits.REMEDY
            )
    return found


def _root_of(said: _Cursor) -> _Node | None:
    """Where the root of the newest version is; None where the store is empty."""
    said.take(16)  # a number of the store
    kind = said.number()
    if kind:
        raise UnsupportedError(
            "is of a kind of OCDBT that zckpt does not read", file=MANIFEST, found=f"manifests of kind {kind}",
            expected="one manifest", remedy="Restore it with orbax.checkpoint, and save it again.",
        )  # fmt: skip
    said.number()
    said.number()
    said.take(1)
    if said.number():
        said.take(4)  # zstd's level
    files, count = said.files(), said.number()
    generations, heights = said.numbers(count), said.take(count)
    places = said.places(count, files, sized=True)
    if not count:
        return None
    newest = max(range(count), key=generations.__getitem__)
    file, offset, nbytes = places[newest]
    if offset == nbytes == 2**64 - 1:
        return None
    return _Node(file, offset, nbytes, b"", heights[newest])


def _read_node(said: _Cursor, node: _Node) -> tuple[list[_Node], dict[str, StoredValue]]:
    """The nodes below one, or the values in it."""
    height = said.take(1)[0]
    if height != node.height or height > _HIGHEST:
        raise damage_error(node.file, f"a node of height {height}", node.offset)
    files, count = said.files(), said.number()
    keys, common = said.keys(count, inner=height > 0)
    if height:
        places = said.places(count, files, sized=True)
        if any(begin > len(key) for key, begin in zip(keys, common, strict=True)):
            raise damage_error(node.file, "a key that begins as none", node.offset)
        below = zip(places, keys, common, strict=True)
        return [_Node(*place, node.prefix + key[:begin], height - 1) for place, key, begin in below], {}
    lengths, kinds = said.numbers(count), said.take(count)
    if any(kind > 1 for kind in kinds):
        raise damage_error(node.file, "a value of an unknown kind", node.offset)
    apart = iter(said.places(sum(kinds), files, sized=False))
    values: dict[str, StoredValue] = {}
    for key, nbytes, kind in zip(keys, lengths, kinds, strict=True):
        if kind:
            file, offset, _ = next(apart)
            value = StoredValue(file, offset, nbytes)
        else:
            value = StoredValue(node.file, node.offset, nbytes, said.take(nbytes))
        values[said.text(node.prefix + key)] = value
    return [], values


def _body(data: bytes, magic: int, file: str) -> bytes:
    """What is in a manifest or node: what is around it is checked, and it is unpacked."""
    if len(data) < 18 or int.from_bytes(data[:4], "big") != magic:
        raise damage_error(file, "other first bytes than those of OCDBT")
    if int.from_bytes(data[4:12], "little") != len(data) or crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise damage_error(file, "another length or checksum than it says")
    version, packed = data[12], data[13]
    if version or packed > 1:
        raise UnsupportedError(
            "is of a version of OCDBT that zckpt does not read", file=file, found=f"version {version}, compression {packed}",
            expected="version 0", remedy="Restore it with orbax.checkpoint, and save it again.",
        )  # fmt: skip
    body = data[14:-4]
    return body if not packed else unpack(body, limits.METADATA_BYTES, file)


def unpack(data: bytes, most: int, file: str) -> bytes:
    """A zstd frame of at most so many bytes.

    Raises:
        CorruptError: it is none. UnsupportedError: it has more, or no package is there that reads it.
    """
    frame = Decompressor(lambda nbytes, at: data[at : at + nbytes], file, "a node of OCDBT")
    parts: list[bytes] = []
    while part := frame.some(1 << 20):
        parts.append(part)
        if (most := most - len(part)) < 0:
            raise UnsupportedError("is too large when it is unpacked", file=file, remedy=limits.REMEDY)
    return b"".join(parts)


def damage_error(file: str, found: str, byte_offset: int = 0) -> CorruptError:
    """The error for a store that contradicts itself."""
    return CorruptError(
        "is damaged", file=file, found=found, expected="an OCDBT store, as Orbax writes it", remedy=COPY_AGAIN,
        byte_offset=byte_offset,
    )  # fmt: skip


def _table() -> list[int]:
    found: list[int] = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        found.append(value)
    return found


_CRC32C = _table()


def crc32c(data: bytes) -> int:
    """The CRC-32C of bytes."""
    value, table = 0xFFFFFFFF, _CRC32C
    for byte in data:
        value = table[(value ^ byte) & 255] ^ value >> 8
    return value ^ 0xFFFFFFFF
