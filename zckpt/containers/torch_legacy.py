"""Torch's files from before 1.6: a plain stream of pickles and storages, and the tar archive before that. Read only.

For `open_container`. `torch.save(.., _use_new_zipfile_serialization=False)` still writes the stream.

[Note: how a stream is read]
1. Three small pickles: a magic number, the protocol 1001, and facts of the machine that wrote it.
2. The object. It names storages, but does not say where they are.
3. The storages' keys, in file order. Then, for each, its number of elements in 8 bytes, and its elements.
Reading 3 costs 8 bytes per storage. The object is read twice: first for the storages' sizes, then with their places.

Elements are always little-endian: a big-endian machine swapped them on writing, whatever the facts of 1 say.
Source: torch/serialization.py `_legacy_save`, `_legacy_load` (2.13); torch/csrc/serialization.cpp (byte order).
"""

from __future__ import annotations

import struct
from dataclasses import replace

from zckpt.base import limits
from zckpt.base.errors import COPY_AGAIN, CorruptError, NotACheckpointError, UnsupportedError
from zckpt.containers.container import Container, Input, open_input
from zckpt.containers.machine import Machine, PersistentLoad
from zckpt.containers.meanings import storage_dtype
from zckpt.containers.pickles import read_pickle
from zckpt.containers.tensor_ref import MAX_DIMS, StorageRef
from zckpt.containers.torch_zip import read_input as read_zip
from zckpt.containers.torch_zip import records_in, storage_of, unknown_storage

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001

FIRST_WINDOW_BYTES = 1 << 16
"""So much is read of a pickle at first, then eight times more, and so on: a pickle does not say how long it is."""


def read_stream(file: Input) -> Container:
    """The object in a stream; see [Note: how a stream is read]. Raises CorruptError if the file is damaged,
    NotACheckpointError if it is a pickle of something else, UnsafeError if its pickle would run code.
    """
    stream = _Stream(file, 0, file.size)
    if stream.pickle() != MAGIC_NUMBER:
        raise NotACheckpointError(
            "is a pickle that torch did not save", file=file.path, expected="torch's magic number at its beginning",
            remedy="If it holds tensors, load it where it was made and save it again with torch.save.",
        )  # fmt: skip
    protocol = stream.pickle()
    if protocol != PROTOCOL_VERSION:
        raise UnsupportedError(
            "the version of torch's format is unknown", file=file.path, expected=f"version {PROTOCOL_VERSION}",
            remedy="Load it with the torch that wrote it, and save it again with a newer one.",
        )  # fmt: skip
    stream.pickle()
    store = file.store()
    known: dict[str, StorageRef] = {}
    placed: set[str] = set()  # keys of those with a known place

    def load(key: object) -> object:
        """The storage of a persistent id."""
        if type(key) is tuple and len(key) > 1 and key[0] == "module":
            return key[1]
        own = storage_of(key, store)
        before = known.setdefault(own.key, own)
        if placed and own.numel and (own.key not in placed or own.nbytes > before.nbytes):
            raise CorruptError(f"storage {own.key!r} is missing", file=store.path, remedy=COPY_AGAIN)
        own = replace(own, byte_offset=before.byte_offset)
        view = key[5] if type(key) is tuple and len(key) > 5 else None
        return own if view is None else _view_of(own, view)

    start = stream.position
    stream.pickle(load)
    keys = stream.pickle()
    for key in keys if isinstance(keys, list) else [keys]:
        storage = known.get(key) if isinstance(key, str) else None
        if storage is None or not isinstance(key, str):
            raise stream.corrupt("a storage without a tensor")
        known[key] = stream.storage(storage)
        placed.add(key)
    root = _Stream(file, start, file.size).pickle(load)
    return Container("torch_legacy", store, root)


class _Stream:
    """Pickles and numbers one after another, up to `end`."""

    def __init__(self, file: Input, position: int, end: int) -> None:
        self.file = file
        self.position = position
        self.end = end

    def pickle(self, persistent_load: PersistentLoad | None = None) -> object:
        window = FIRST_WINDOW_BYTES
        while True:
            window = min(window, limits.PICKLE_BYTES)
            data = self.file.peek(self.position, min(window, self.end - self.position))
            try:
                machine = Machine(data, self.file.path, base=self.position, persistent_load=persistent_load)
                value = read_pickle(machine)
            except EOFError as error:
                if len(data) < window:
                    raise self.file.cut_short("a pickle", self.position + len(data) + 1) from error
                if window >= limits.PICKLE_BYTES:
                    found = f"more than {window:,} bytes"
                    what = "its pickle is too large"
                    raise UnsupportedError(what, file=self.file.path, found=found, remedy=limits.REMEDY) from error
                window *= 8
            else:
                self.position += machine.position
                return value

    def numbers(self, layout: str) -> tuple[int, ...]:
        nbytes = struct.calcsize(layout)
        self.skip(nbytes)
        return struct.unpack(layout, self.file.read(self.position - nbytes, nbytes, "a number"))

    def skip(self, nbytes: int) -> None:
        self.position += nbytes
        if nbytes < 0 or self.position > self.end:
            raise self.file.cut_short("a storage", self.position)

    def storage(self, storage: StorageRef) -> StorageRef:
        """`storage` with its place, which is here; skips it."""
        (numel,) = self.numbers("<q")
        if numel != storage.numel:
            raise self.corrupt(
                f"storage {storage.key!r} of {numel:,} elements", f"{storage.numel:,} elements, as the pickle says"
            )
        placed = replace(storage, byte_offset=self.position)
        self.skip(storage.nbytes)
        return placed

    def corrupt(self, found: str, expected: str = "") -> CorruptError:
        return self.file.damaged("the torch file is damaged", found, expected, self.position)


def _view_of(storage: StorageRef, view: object) -> StorageRef:
    """A part of a storage, as a storage; torch had such before 0.4."""
    match view:
        case (str(key), int(offset), int(numel)) if offset >= 0 and numel >= 0 and offset + numel <= storage.numel:
            itemsize = storage.dtype.itemsize if storage.dtype else 1
            return replace(storage, key=key, numel=numel, byte_offset=storage.byte_offset + offset * itemsize)
    what = f"the view of storage {storage.key!r} is impossible"
    raise CorruptError(what, file=storage.store.path, remedy=COPY_AGAIN)


# -- tar ---------------------------------------------------------------------------------------------------------------


def read_tar(file: Input) -> Container:
    """The object in a tar archive: members `storages`, `tensors` and `pickle`, the last naming tensors by number."""
    members = _members(file)
    if "model_config.yaml" in members:
        return _read_nemo(file, members)
    missing = [name for name in ("storages", "tensors", "pickle") if name not in members]
    if missing:
        raise _other_tar(file, f"no member {missing[0]!r}")
    store = file.store()
    objects: dict[object, object] = {}
    stream = _Stream(file, *members["storages"])
    for _ in range(_count(stream)):
        key, _, kind = _fields(stream, 3)
        try:
            storage = StorageRef(str(key), storage_dtype(kind), 0, store, 0)
        except LookupError as error:
            raise unknown_storage(file.path, kind) from error
        (numel,) = stream.numbers("<q")
        objects[key] = storage = replace(storage, numel=numel, byte_offset=stream.position)
        stream.skip(storage.nbytes)
    views = stream.pickle()
    for view in views if isinstance(views, list | tuple) else ():
        if not isinstance(view, tuple) or len(view) != 4 or not isinstance(view[0], int | str):
            raise stream.corrupt("a view without 4 fields")
        storage = _storage(objects, view[1], stream)
        objects[view[0]] = _view_of(storage, (str(view[0]), *view[2:]))
    stream = _Stream(file, *members["tensors"])
    for _ in range(_count(stream)):
        key, storage_key, _kind = _fields(stream, 3)
        ndim, _unused = stream.numbers("<2i")
        if not 0 <= ndim <= MAX_DIMS:
            raise stream.corrupt(f"a tensor of {ndim:,} dimensions")
        shape, stride, (offset,) = stream.numbers(f"<{ndim}q"), stream.numbers(f"<{ndim}q"), stream.numbers("<q")
        objects[key] = _storage(objects, storage_key, stream).view(offset, shape, stride)
    stream = _Stream(file, *members["pickle"])

    def load(key: object) -> object:
        if type(key) is tuple and key:
            return key[0]
        number = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        if not isinstance(number, int) or number not in objects:
            raise stream.corrupt("a reference to a missing object")
        return objects[number]

    return Container("torch_tar", store, stream.pickle(load))


def _read_nemo(file: Input, members: dict[str, tuple[int, int]]) -> Container:
    """The torch files in an archive of NeMo, by their names; the config's text is among the metadata. Raises
    UnsupportedError if it holds no torch file.
    """
    roots: dict[str, object] = {}
    for name, (start, end) in members.items():
        if name.endswith(".ckpt"):
            part = file.part(start, end - start, f"member {name!r}")
            roots[name] = (read_zip(part) if part.peek(0, 4) == b"PK\x03\x04" else read_stream(part)).root
    if not roots:
        raise UnsupportedError(
            "is an archive of NeMo with weights in another form than model_weights.ckpt", file=file.path,
            found=f"members such as {', '.join(map(repr, list(members)[:3]))}", expected="a torch file, or one of each rank",
            remedy="Unpack it with tar -xf, and give the directory model_weights in it.",
        )  # fmt: skip
    start, end = members["model_config.yaml"]
    text = file.read(start, min(end - start, _MOST_TEXT), "the config").decode("utf-8", "replace")
    return Container("nemo", file.store(), roots, {"model_config.yaml": text})


def records_of_nemo(path: str) -> list[tuple[str, int, int, int]]:
    """The records of the torch zip files in an archive of NeMo, as `torch_zip.records` has them."""
    found: list[tuple[str, int, int, int]] = []
    with open_input(path) as file:
        for name, (start, end) in _members(file).items():
            part = file.part(start, end - start, f"member {name!r}") if name.endswith(".ckpt") else None
            if part is not None and part.peek(0, 4) == b"PK\x03\x04":
                found += [(f"{name}: {record[0]}", *record[1:]) for record in records_in(part)]
    return found


_MOST_TEXT = 1 << 20
"""Bytes of a config, and of a header in front of a member's."""


def _members(file: Input) -> dict[str, tuple[int, int]]:
    """Name -> (start, end) of the members of a tar archive; headers of GNU or pax before a member have its long name or size."""
    members: dict[str, tuple[int, int]] = {}
    at = count = 0
    before: dict[bytes, bytes] = {}
    while len(header := file.peek(at, 512)) == 512 and header.strip(b"\0"):
        digits, kind = header[124:136].strip(b" \0"), header[156:157]
        is_wide = header[124] == 0x80
        if not is_wide and (not digits or digits.strip(b"01234567")):
            raise file.damaged("the tar archive is damaged", "a member size that is not a number", byte_offset=at)
        nbytes = int.from_bytes(header[125:136], "big") if is_wide else int(digits, 8)
        if kind not in (b"x", b"g", b"L", b"K") and (said := before.get(b"size", b"")).isdigit() and len(said) < 20:
            nbytes = int(said)
        name = before.get(b"path", header[:100].rstrip(b"\0")).decode("utf-8", "replace").removeprefix("./")
        if (count := count + 1) > limits.TAR_MEMBERS:
            raise _other_tar(file, f"more than {limits.TAR_MEMBERS:,} members")
        if at + 512 + nbytes > file.size:
            raise file.cut_short(f"member {name!r}", at + 512 + nbytes)
        if kind in (b"x", b"L") and nbytes <= _MOST_TEXT:
            text = file.read(at + 512, nbytes, "a header")
            before |= {b"path": text.rstrip(b"\0")} if kind == b"L" else _pax_fields(text)
        elif kind not in (b"x", b"g", b"L", b"K"):
            if kind in (b"0", b"\0"):
                members[name] = (at + 512, at + 512 + nbytes)
            before = {}
        at += 512 + -(-nbytes // 512) * 512
    return members


def _pax_fields(text: bytes) -> dict[bytes, bytes]:
    """What a pax header says: lines of a length, a key and a value."""
    found: dict[bytes, bytes] = {}
    while text:
        length = text.partition(b" ")[0]
        end = int(length) if length.isdigit() and len(length) < 8 else 0
        key, mark, value = text[len(length) + 1 : end].partition(b"=")
        if not mark or end > len(text):
            break
        found[key], text = value.removesuffix(b"\n"), text[end:]
    return found


def _other_tar(file: Input, found: str) -> NotACheckpointError:
    return NotACheckpointError(
        "is a tar archive that torch did not save", file=file.path, found=found,
        expected="members 'storages', 'tensors' and 'pickle'",
        remedy="Unpack it if it holds a checkpoint, and give the directory.",
    )  # fmt: skip


def _count(stream: _Stream) -> int:
    count = stream.pickle()
    if not isinstance(count, int) or not 0 <= count <= stream.end:
        raise stream.corrupt("an impossible count")
    return count


def _fields(stream: _Stream, count: int) -> tuple[object, ...]:
    fields = stream.pickle()
    if not isinstance(fields, tuple) or len(fields) != count or not isinstance(fields[0], int | str):
        raise stream.corrupt(f"an entry without {count} fields")
    return fields


def _storage(objects: dict[object, object], key: object, stream: _Stream) -> StorageRef:
    storage = objects.get(key) if isinstance(key, int | str) else None
    if not isinstance(storage, StorageRef):
        raise stream.corrupt("a reference to a missing storage")
    return storage
