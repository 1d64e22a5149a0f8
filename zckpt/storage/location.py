"""Locations of files: a path on this machine, or an address (`s3://bucket/run`) that fsspec can reach.

For every module that lists, measures or reads input files. `locate` turns a text into a `Location`, which other modules keep
and call. Local paths do not import fsspec. The elements of tensors are not read here: the engine reads local files itself, and
`engine.prefetch` fetches ranges of files at addresses.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CorruptError, NotACheckpointError
from zckpt.base.patterns import compile_late
from zckpt.core.stores import FileStore
from zckpt.storage import fsspec_io, identity

if TYPE_CHECKING:
    from concurrent.futures import Future

_ADDRESS = compile_late(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_LOCAL = compile_late(r"(?:file|local)://", re.IGNORECASE)
_CACHES = compile_late(r"(?:(?:simplecache|filecache|blockcache|cached)::)+", re.IGNORECASE)
_SAME = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "az": "abfs", "abfss": "abfs", "adl": "abfs", "ssh": "sftp"}
"""Kind of address -> the kind that means the same store."""

_WITHOUT_HOST = ("memory", "hf")
_OPENED = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Paths that a shell has opened for the command; a pipe is allowed there."""


@dataclass(frozen=True, repr=False)
class Location(os.PathLike[str]):
    """A file or directory, which need not exist. `str()` and `os.fspath` return its path, `location / name` an entry of it.

    Attributes:
        path: as the user gave it.
        is_remote: whether it is an address.
        block_bytes: how many bytes `blocks` reads at once.
    """

    path: str
    is_remote: ClassVar[bool] = False
    block_bytes: ClassVar[int] = 1 << 20

    def __str__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return repr(self.path)

    def __fspath__(self) -> str:
        return self.path

    def __truediv__(self, name: str) -> Location:
        return type(self)(os.path.join(self.path, name))

    @property
    def name(self) -> str:
        """The last part of its absolute path."""
        return self.absolute().path.rpartition("/")[2]

    @property
    def fellow_path(self) -> str:
        """Of a `pictures.incomplete.StandIn`, the path of the file that is read in its place; empty for all others."""
        return ""

    @property
    @abstractmethod
    def parent(self) -> Location:
        """The directory that contains it; the top of an address is its own parent."""

    @abstractmethod
    def absolute(self) -> Location:
        """As `os.path.abspath`; an address loses slashes at its end."""

    @abstractmethod
    def resolved(self) -> Location:
        """As `absolute`; for a symbolic link, its target."""

    @abstractmethod
    def refreshed(self) -> Location:
        """The same location; an address drops everything cached about it."""

    @abstractmethod
    def is_file(self) -> bool:
        """As `os.path.isfile`."""

    @abstractmethod
    def is_dir(self) -> bool:
        """As `os.path.isdir`."""

    @abstractmethod
    def is_readable(self) -> bool:
        """Whether a directory may be listed; always True for an address, where only an attempt shows it."""

    @abstractmethod
    def names(self) -> list[str]:
        """Names of all entries of a directory. Raises OSError."""

    @abstractmethod
    def kinds(self) -> dict[str, str]:
        """Name -> "file", "directory" or another word, of all entries of a directory; links are followed. Raises OSError."""

    @abstractmethod
    def file_names(self, below: Sequence[str] = ()) -> list[str]:
        """Names of the files in a directory, and `NAME/...` of all under each directory `NAME` of `below`. Raises OSError."""

    @abstractmethod
    def size(self) -> int:
        """Bytes of a file. Raises OSError."""

    @abstractmethod
    def state(self) -> tuple[int, ...]:
        """Numbers that change when a file is written again, even if its modification time is reset. Raises OSError."""

    @abstractmethod
    def written_s(self) -> float | None:
        """When a file was last written, in seconds since 1970; None for an address, which knows only when it was uploaded."""

    @abstractmethod
    def open(self) -> OpenFile:
        """Opens a regular file. Raises NotACheckpointError if it is missing, cannot be read, or is not a file."""

    @abstractmethod
    def read(self, nbytes: int | None = None, offset: int = 0) -> bytes:
        """`nbytes` bytes from `offset` on, fewer at the end of the file; all by default. Raises OSError."""

    @abstractmethod
    def store(self, byteorder: Literal["little", "big"] = "little") -> FileStore:
        """A `FileStore` for an existing file, for the engine. Raises OSError."""

    @abstractmethod
    def relative_to(self, directory: Location) -> str:
        """Its path relative to a directory that contains it."""

    @abstractmethod
    def is_within(self, directory: Location) -> bool:
        """Whether it is the same as `directory` (which may be a file), or is in it, for all names of the two.

        Paths of this machine are compared as in `storage.identity`, addresses with the kind (`s3` and `s3a`), the host, and
        slashes normalized. A store may keep `..` as a name or resolve it, so both forms are compared.
        """

    def blocks(self) -> Iterator[bytes]:
        """A file's bytes in order, in blocks. Raises OSError."""
        for offset in range(0, self.size(), self.block_bytes):
            yield self.read(self.block_bytes, offset)

    def has_bytes_of(self, other: Location) -> bool:
        """Whether two files hold the same bytes. Raises OSError."""
        if self == other or (not self.is_remote and not other.is_remote and os.path.samefile(self, other)):
            return True
        nbytes, block = self.size(), self.block_bytes
        if nbytes != other.size():
            return False
        return all(self.read(block, at) == other.read(block, at) for at in range(0, nbytes, block))


@dataclass(frozen=True, repr=False)
class LocalPath(Location):
    """A path of this machine."""

    @property
    def parent(self) -> Location:  # noqa: D102
        return LocalPath(os.path.dirname(os.path.abspath(self.path)))

    def absolute(self) -> Location:  # noqa: D102
        return LocalPath(os.path.abspath(self.path))

    def resolved(self) -> Location:  # noqa: D102
        path = os.path.abspath(self.path)
        return LocalPath(os.path.realpath(path) if os.path.islink(path) else path)

    def refreshed(self) -> Location:  # noqa: D102
        return self

    def is_file(self) -> bool:  # noqa: D102
        return os.path.isfile(self.path)

    def is_dir(self) -> bool:  # noqa: D102
        return os.path.isdir(self.path)

    def is_readable(self) -> bool:  # noqa: D102
        return os.access(self.path, os.R_OK)

    def names(self) -> list[str]:  # noqa: D102
        return os.listdir(self.path)

    def kinds(self) -> dict[str, str]:  # noqa: D102
        with os.scandir(self.path) as entries:
            return {e.name: "file" if e.is_file() else "directory" if e.is_dir() else "other" for e in entries}

    def file_names(self, below: Sequence[str] = ()) -> list[str]:  # noqa: D102
        with os.scandir(self.path) as entries:
            names = [entry.name for entry in entries if entry.is_file()]
        for root, _, found in (step for name in below for step in os.walk(os.path.join(self.path, name))):
            names += [os.path.relpath(os.path.join(root, name), self.path).replace(os.sep, "/") for name in found]
        return names

    def size(self) -> int:  # noqa: D102
        return os.path.getsize(self.path)

    def state(self) -> tuple[int, ...]:  # noqa: D102
        found = os.stat(self.path)
        return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns

    def written_s(self) -> float | None:  # noqa: D102
        return os.path.getmtime(self.path)

    def open(self) -> OpenFile:  # noqa: D102
        try:
            # do not wait for a named pipe's writer
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise self._unreadable(getattr(error, "strerror", None) or str(error)) from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise self._unreadable("a directory" if stat.S_ISDIR(found.st_mode) else "a device, pipe or socket")
        return _LocalFile(self.path, descriptor, found.st_size, (found.st_dev, found.st_ino, found.st_mtime_ns))

    def _unreadable(self, found: str) -> NotACheckpointError:
        remedy = "Check the path and its permissions."
        return NotACheckpointError("cannot be read", file=self.path, found=found, expected="a file", remedy=remedy)

    def read(self, nbytes: int | None = None, offset: int = 0) -> bytes:  # noqa: D102
        mode = os.stat(self.path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode) and not self.path.startswith(_OPENED):
            raise OSError(errno.EINVAL, "is a pipe, socket or device, and no file", self.path)  # which may never end
        with open(self.path, "rb") as file:
            file.seek(offset)
            return file.read(-1 if nbytes is None else nbytes)

    def store(self, byteorder: Literal["little", "big"] = "little") -> FileStore:  # noqa: D102
        found = os.stat(self.path)
        return FileStore(self.path, found.st_size, (found.st_dev, found.st_ino, found.st_mtime_ns), byteorder)

    def relative_to(self, directory: Location) -> str:  # noqa: D102
        return os.path.relpath(self.path, directory)

    def is_within(self, directory: Location) -> bool:  # noqa: D102
        return not directory.is_remote and identity.is_within(self.path, directory.path)


@dataclass(frozen=True, repr=False)
class Address(Location):
    """A path behind an address. `begun`: a file of it that is being opened, for `open`."""

    begun: Future[fsspec_io.RemoteFile] | None = field(default=None, compare=False)
    is_remote: ClassVar[bool] = True
    block_bytes: ClassVar[int] = 16 << 20

    @property
    def parent(self) -> Location:  # noqa: D102
        above, _, name = self.path.rstrip("/").rpartition("/")
        is_inside = name and not above.endswith("/") and _ADDRESS.match(above + "/")
        return Address(above) if is_inside else self.absolute()

    def absolute(self) -> Location:  # noqa: D102
        return Address(self.path.rstrip("/"))

    resolved = absolute

    def refreshed(self) -> Location:  # noqa: D102
        fsspec_io.refresh(self.path)
        return self.absolute()

    def is_file(self) -> bool:  # noqa: D102
        return fsspec_io.kind(self.path) == "file"

    def is_dir(self) -> bool:  # noqa: D102
        return fsspec_io.kind(self.path) == "directory"

    def is_readable(self) -> bool:  # noqa: D102
        return True

    def names(self) -> list[str]:  # noqa: D102
        return sorted(fsspec_io.entries(self.path))

    def kinds(self) -> dict[str, str]:  # noqa: D102
        return fsspec_io.entries(self.path)

    def file_names(self, below: Sequence[str] = ()) -> list[str]:  # noqa: D102
        kinds = fsspec_io.entries(self.path)
        inner = [name for name in below if kinds.get(name) == "directory"]
        names = sorted(name for name, kind in kinds.items() if kind == "file")
        return names + [f"{name}/{file}" for name in inner for file in fsspec_io.walk((self / name).path)]

    def size(self) -> int:  # noqa: D102
        return fsspec_io.status(self.path).size

    def state(self) -> tuple[int, ...]:  # noqa: D102
        found = fsspec_io.status(self.path)
        return found.size, *found.identity

    def written_s(self) -> float | None:  # noqa: D102
        return None

    def open(self) -> OpenFile:  # noqa: D102
        return fsspec_io.RemoteFile.opened(self.path) if self.begun is None else self.begun.result()

    def read(self, nbytes: int | None = None, offset: int = 0) -> bytes:  # noqa: D102
        return fsspec_io.read(self.path, offset, self.size() if nbytes is None else nbytes)

    def store(self, byteorder: Literal["little", "big"] = "little") -> FileStore:  # noqa: D102
        return replace(fsspec_io.status(self.path), byteorder=byteorder)

    def relative_to(self, directory: Location) -> str:  # noqa: D102
        return self.path.removeprefix(directory.path.rstrip("/") + "/")

    def is_within(self, directory: Location) -> bool:  # noqa: D102
        return isinstance(directory, Address) and any(
            identity.is_below(inner, outer)
            for inner, outer in zip(self._spellings(), directory._spellings(), strict=True)
        )

    def _spellings(self) -> tuple[str, str]:
        """Its path in a normal form: first with `..` kept as a name, then with `..` resolved."""
        kind, _, rest = self.path[found.end() if (found := _CACHES.match(self.path)) else 0 :].partition("://")
        kind = _SAME.get(kind.lower(), kind.lower())
        host, *parts = rest.split("/")
        if kind in _WITHOUT_HOST:
            host, parts = "", [host, *parts]
        host = host.rpartition("@")[2].lower() if kind != "abfs" else host.partition("@")[0]
        names = [part for part in parts if part not in ("", ".")]
        resolved: list[str] = []
        for name in names:
            if name != "..":
                resolved.append(name)
            elif resolved:
                resolved.pop()
        return "/".join([f"{kind}:", host, *names]), "/".join([f"{kind}:", host, *resolved])


def locate(path: str | os.PathLike[str]) -> Location:
    """Where a path leads; `file://` means a path of this machine, `~` the home directory, and a `Location` stays what it is."""
    if isinstance(path, Location):
        return path
    text = os.path.expanduser(path)
    if found := _LOCAL.match(text):
        return LocalPath(text[found.end() :])
    return Address(text) if "://" in text and _ADDRESS.match(text) else LocalPath(text)


def location_of(store: FileStore) -> Location:
    """Where a file of elements is."""
    return Address(store.path) if store.is_remote else LocalPath(store.path)


@dataclass(frozen=True, slots=True)
class _LocalFile(AbstractContextManager["_LocalFile"]):
    """A file of this machine that is open for reading. `size` and `identity`: as in `FileStore`, when it was opened."""

    path: str
    descriptor: int
    size: int
    identity: tuple[int, int, int] = field(repr=False)

    def read(self, offset: int, nbytes: int) -> bytes:
        """At most `nbytes` bytes from `offset` on; fewer only at the end of the file. Raises CorruptError."""
        try:
            data = os.pread(self.descriptor, nbytes, offset)
            while len(data) < nbytes and (more := os.pread(self.descriptor, nbytes - len(data), offset + len(data))):
                data += more
        except OSError as error:
            found = error.strerror or str(error)
            raise CorruptError("cannot be read", file=self.path, found=found, byte_offset=offset) from error
        return data

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


OpenFile = _LocalFile | fsspec_io.RemoteFile
"""A file that is open for reading, on this machine or at an address; use as a context manager."""
