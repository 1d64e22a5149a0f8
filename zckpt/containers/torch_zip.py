"""Torch's zip files, `torch.save` since 1.6: where their tensors are, and how one is laid out before its tensors exist.

For `open_container`, and for the layouts that write `.bin` and `.pt`. Records of `<prefix>/`: `data.pkl` (the object,
with a persistent id for each storage), `byteorder`, `data/<key>` (a storage's bytes), `version`. Reading touches the
zip directory, `data.pkl` and one header per storage. Writing is a `Skeleton`: all bytes but the tensors', with a
checksum slot in each place of a tensor's CRC.

[Note: padding] torch begins each storage at a multiple of 64 bytes, so that it can be mapped into memory, by an extra
field "FB" in the record's local header. Example: header at 100, name of 12 bytes, no zip64 field. The bytes could begin
at 100 + 30 + 12 + 4 = 146; the next multiple is 192, so the field has 46 bytes of padding.
Long records begin at a given place in a page instead, by default at a multiple of `PAGE`, so that a file system that lets files
share blocks can share theirs.
Source: torch/serialization.py `_save`, `_load`; caffe2/serialize/inline_container.cc `getPadding` (2.13).
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from zckpt.base import limits
from zckpt.base.errors import COPY_AGAIN, CorruptError, NotACheckpointError, UnsupportedError
from zckpt.containers.container import Container, Input, open_input
from zckpt.containers.inert import brief
from zckpt.containers.meanings import storage_dtype
from zckpt.containers.pickles import load_pickle
from zckpt.containers.skeleton import Skeleton, TensorSpec, check_names
from zckpt.containers.tensor_ref import MAX_NUMBER, StorageRef
from zckpt.containers.zip_directory import END, END64, ENTRY, LOCAL_HEADER, LOCATOR, MAX16, MAX32, Directory
from zckpt.core.plan import Checksum
from zckpt.core.stores import FileStore

if TYPE_CHECKING:
    from zckpt.containers.alike import AlikePickles

ALIGNMENT = 64
PAGE = 4096
LONG = 64 << 10
"""Bytes of a record from which on a page of padding does not matter."""
PREFIX = "archive"
"""torch's own prefix for a file with a name that it does not know."""


def read_input(file: Input, alike: AlikePickles | None = None) -> Container:
    """The object in a torch zip file.

    Args:
        file: open for reading.
        alike: reads files with pickles that are nearly the same.

    Raises:
        CorruptError: the file is damaged.
        NotACheckpointError: it is a zip file of something else.
        UnsafeError: its pickle would run code.
        UnsupportedError: it is compressed, or TorchScript.
    """
    directory = Directory(file)
    prefix = next(iter(directory.records), "").partition("/")[0]
    names = directory.records.keys()
    if f"{prefix}/constants.pkl" in names:
        raise UnsupportedError(
            "is a TorchScript program", file=file.path, found="a record 'constants.pkl'",
            remedy="Load it with torch.jit.load and save its state_dict() with torch.save.",
        )  # fmt: skip
    if f"{prefix}/data.pkl" not in names:
        raise NotACheckpointError(
            "is a zip file that torch did not save", file=file.path,
            found=f"records such as {next(iter(names))!r}" if names else "no records", expected="a record 'data.pkl'",
            remedy="Give a file that torch.save wrote, or the directory of a checkpoint.",
        )  # fmt: skip
    order = directory.read(f"{prefix}/byteorder", 64) if f"{prefix}/byteorder" in names else b"little"
    if order not in (b"little", b"big"):
        raise file.damaged("the byte order is unknown", f"{order!r}", "little or big")
    store = file.store("little" if order == b"little" else "big")
    pickle = directory.read(f"{prefix}/data.pkl", limits.PICKLE_BYTES)
    base = file.base + directory.data_offset(f"{prefix}/data.pkl")

    def load(key: object) -> StorageRef:
        return _place(storage_of(key, store), directory, prefix)

    def like(storage: StorageRef) -> StorageRef:
        return _place(StorageRef(storage.key, storage.dtype, storage.numel, store, 0), directory, prefix)

    spent = limits.RECORD_COST * len(directory.records)
    root = alike.root(pickle, load, like, spent, file.path) if alike else None
    if root is None:
        root = load_pickle(pickle, file=file.path, record="data.pkl", base=base, persistent_load=load, spent=spent)
    return Container("torch_zip", store, root, {"prefix": prefix})


def peek(path: str | os.PathLike[str], keys: Sequence[str]) -> dict[str, int]:
    """The whole numbers under some keys in the object of a torch zip file, by searching its pickle for them.

    This is much faster than reading the object, and only a hint. A key that is not found, or not followed by a number,
    is left out. If a key is found twice, the last one counts: DeepSpeed writes its own keys after the state dict.
    Raises ZckptError as `read_input`, if the file is damaged or of another kind.
    """
    data = pickle_of(path)
    found: dict[str, int] = {}
    for key in keys:
        text = re.escape(key.encode())
        for match in _memo_pattern(len(key), text).finditer(data):
            number = match["small"] or match["medium"] or match["large"]
            found[key] = int.from_bytes(number, "little", signed=match["large"] is not None)
    return found


def pickle_of(path: str | os.PathLike[str]) -> bytes:
    """The pickle of a torch zip file: all that it says of its tensors. Raises ZckptError as `read_input`, if the file
    is damaged or of another kind.
    """
    with open_input(path) as file:
        directory = Directory(file)
        prefix = next(iter(directory.records), "").partition("/")[0]
        return directory.read(f"{prefix}/data.pkl", limits.PICKLE_BYTES)


def find_storages(
    path: str | os.PathLike[str], keys: Iterable[str]
) -> tuple[FileStore, dict[str, tuple[int, int]], str]:
    """Where some storages of a file are that zckpt wrote, without its pickle being read.

    `keys`: of storages, as the pickle of another file that was written alike says them. Returns the file; by key, where a storage
    begins and its bytes, 0 of one without a record; and a text that tells this file from others. Raises CorruptError if the
    pickle does not have its checksum, or was written under another name, ZckptError as `read_input`.
    """
    prefix = prefix_of(os.fspath(path))
    with open_input(path) as file:
        directory = Directory(file)
        crc = zlib.crc32(directory.read(f"{prefix}/data.pkl", limits.PICKLE_BYTES))
        order = directory.read(f"{prefix}/byteorder", 64)
        if crc != directory.records[f"{prefix}/data.pkl"].crc or order != b"little":
            raise file.damaged("its pickle is damaged", f"checksum {crc:08x}")
        places: dict[str, tuple[int, int]] = {}
        for key in keys:
            name = f"{prefix}/data/{key}"
            places[key] = (
                (directory.data_offset(name), directory.records[name].nbytes) if name in directory.records else (0, 0)
            )
        return file.store(), places, f"{file.size} {crc}"


def _memo_pattern(length: int, text: bytes) -> re.Pattern[bytes]:
    """A text of this length, its memo entry, and a number of 1, 2 or 4 bytes."""
    sized = re.escape(length.to_bytes(4, "little"))
    return re.compile(
        rb"(?:X" + sized + rb"|\x8c" + re.escape(bytes([length])) + rb")" + text
        + rb"(?:q.|r....|\x94)?(?:K(?P<small>.)|M(?P<medium>..)|J(?P<large>....))", re.DOTALL
    )  # fmt: skip


def _place(storage: StorageRef, directory: Directory, prefix: str) -> StorageRef:
    """The storage at the place of its record. Raises CorruptError if that is too small."""
    if storage.numel == 0:  # ZeRO-3 leaves thousands of these: they have no record
        return storage
    name = f"{prefix}/data/{storage.key}"
    record = directory.records.get(name)
    byte_offset = directory.data_offset(name)
    if record is None or storage.nbytes > record.nbytes:
        found = f"{record.nbytes if record else 0:,} bytes"
        raise directory.file.damaged(
            f"record {name!r} is too small for its storage", found, f"{storage.nbytes:,} bytes", byte_offset
        )
    return StorageRef(storage.key, storage.dtype, storage.numel, storage.store, directory.file.base + byte_offset)


def storage_of(key: object, store: FileStore) -> StorageRef:
    """The storage of a persistent id ("storage", class, key, location, numel, ..), at byte 0 until it is placed. Raises
    CorruptError if `key` is not such an id, UnsupportedError if zckpt does not know the storage class.
    """
    if type(key) is tuple and len(key) >= 5 and key[0] == "storage" and type(key[2]) is str and type(key[4]) is int:
        _, kind, name, _, numel = key[:5]
        if 0 <= numel <= MAX_NUMBER:
            try:
                return StorageRef(name, storage_dtype(kind), numel, store, 0)
            except LookupError as error:
                raise unknown_storage(store.path, kind) from error
    raise CorruptError("its pickle refers to something that is not a storage", file=store.path, remedy=COPY_AGAIN)


def unknown_storage(path: str, kind: object) -> UnsupportedError:
    """The error for a storage class that zckpt does not know."""
    remedy = "Load the file with the torch that wrote it, convert its tensors to a standard dtype, and save it again."
    return UnsupportedError("the class of a storage is unknown", file=path, found=brief(kind), remedy=remedy)


def records(path: str | os.PathLike[str]) -> list[tuple[str, int, int, int]]:
    """(name, byte offset, bytes, stored CRC-32) of every record, in file order. Raises CorruptError if the file is
    damaged, UnsupportedError if a record is compressed.
    """
    with open_input(path) as file:
        return records_in(file)


def records_in(file: Input) -> list[tuple[str, int, int, int]]:
    """As `records`, of an open file or a part of one; offsets are those in the file."""
    directory = Directory(file)
    return [(r.name, file.base + directory.data_offset(r.name), r.nbytes, r.crc) for r in directory.records.values()]


def prefix_of(path: str) -> str:
    """What torch names the records of a file that it saves under a path: by this a file is known that bears another rank's name.

    Source: as `Listing.find_misnamed`.
    """
    stem = os.path.splitext(path.rpartition("/")[2])[0]
    return stem if stem and stem.isascii() else PREFIX


def skeleton(specs: Sequence[TensorSpec], *, aliases: Mapping[str, str] | None = None, zip64: bool = False) -> Skeleton:
    """A torch zip file of a state dict, without its elements.

    Args:
        specs: the tensors, in the state dict's order.
        aliases: dropped name -> kept name; both will be in the state dict, with one storage.
        zip64: write 64-bit figures even where 32 bits would do.

    Raises:
        UsageError: two tensors have the same name, or an alias has no tensor.
    """
    by_name, aliases = {spec.name: spec for spec in specs}, aliases or {}
    check_names(specs, aliases)
    return skeleton_of(by_name | {name: by_name[kept] for name, kept in aliases.items()}, specs, zip64=zip64)


def skeleton_of(
    root: object,
    specs: Sequence[TensorSpec],
    *,
    zip64: bool = False,
    phases: Mapping[str, int] | None = None,
    prefix: str = PREFIX,
) -> Skeleton:
    """A torch zip file of any inert object, without the elements of its tensors.

    Args:
        root: what `emit` writes; its tensors are `specs`, each in one or more places.
        specs: the tensors, in the order of their records.
        zip64: write 64-bit figures even where 32 bits would do.
        phases: tensor name -> bytes from the last multiple of `PAGE` to its record, a multiple of `ALIGNMENT`; 0 for others. Of
            records of `LONG` bytes and more; shorter ones begin as soon as they can.
        prefix: of the records' names, as `prefix_of` has it.
    """
    phases = phases or {}
    keys = {spec.name: str(number) for number, spec in enumerate(specs)}
    writer = _Writer(zip64, prefix)
    from zckpt.containers.emit import emit

    writer.add("data.pkl", emit(root, keys))
    writer.add("byteorder", b"little")
    offsets = {
        spec.name: writer.reserve(f"data/{keys[spec.name]}", spec.nbytes, phases.get(spec.name, 0)) for spec in specs
    }
    writer.add("version", b"3\n")
    return writer.finish(offsets)


class _Writer:
    """Lays records out one after another. `entries` is the directory so far, `pending` are the CRCs to be filled in."""

    def __init__(self, zip64: bool, prefix: str) -> None:
        self.zip64 = zip64
        self.prefix = prefix
        self.size = 0
        self.literals: list[tuple[int, bytes]] = []
        self.entries = bytearray()
        self.count = 0
        self.pending: list[tuple[int, int, int, int]] = []

    def add(self, name: str, data: bytes) -> None:
        """Adds a record with its contents."""
        start = self._header(name, len(data), zlib.crc32(data))
        self.literals.append((start, data))
        self.size = start + len(data)

    def reserve(self, name: str, nbytes: int, phase: int) -> int:
        """Adds a record without its contents; returns where they begin."""
        header, entry = self.size, len(self.entries)
        start = self._header(name, nbytes, 0, phase if nbytes >= LONG else None)
        self.size = start + nbytes
        if nbytes:  # the CRC of nothing is 0
            self.pending.append((start, nbytes, header + 14, entry + 16))
        return start

    def _header(self, name: str, nbytes: int, crc: int, phase: int | None = None) -> int:
        offset = self.size
        encoded = f"{self.prefix}/{name}".encode()
        wide = self.zip64 or nbytes >= MAX32
        far = self.zip64 or offset >= MAX32
        version, shown = (45 if wide or far else 20), MAX32 if wide else nbytes
        common = (version, 0x0800, 0, 0, 0x21, crc, shown, shown, len(encoded))  # UTF-8 names, stored, 1980-01-01
        extra = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if wide else b""
        unpadded = offset + LOCAL_HEADER.size + len(encoded) + len(extra) + 4
        padding = -unpadded % ALIGNMENT if phase is None else (phase - unpadded) % PAGE
        extra += struct.pack("<2s H", b"FB", padding) + b"Z" * padding
        self.literals.append((offset, LOCAL_HEADER.pack(b"PK\x03\x04", *common, len(extra)) + encoded + extra))
        figures = ([nbytes, nbytes] if wide else []) + ([offset] if far else [])
        extra = struct.pack(f"<2H{len(figures)}Q", 1, 8 * len(figures), *figures) if figures else b""
        self.entries += ENTRY.pack(
            b"PK\x01\x02", version, *common, len(extra), 0, 0, 0, 0, MAX32 if far else offset
        )  # fmt: skip
        self.entries += encoded + extra
        self.count += 1
        return unpadded + padding

    def finish(self, offsets: dict[str, int]) -> Skeleton:
        """Adds the directory and its end."""
        start, nbytes, count = self.size, len(self.entries), self.count
        end = b""
        if self.zip64 or start >= MAX32 or nbytes >= MAX32 or count >= MAX16:
            end = END64.pack(b"PK\x06\x06", END64.size - 12, 45, 45, 0, 0, count, count, nbytes, start)
            end += LOCATOR.pack(b"PK\x06\x07", 0, start + nbytes, 1)
        shown = [min(count, MAX16), min(count, MAX16), min(nbytes, MAX32), min(start, MAX32)]
        if self.zip64:
            shown = [MAX16, MAX16, MAX32, MAX32]
        end += END.pack(b"PK\x05\x06", 0, 0, *shown, 0)
        checksums = [Checksum(at, size, (local, start + entry)) for at, size, local, entry in self.pending]
        literals = (*self.literals, (start, bytes(self.entries) + end))
        return Skeleton(start + nbytes + len(end), literals, tuple(checksums), offsets)
