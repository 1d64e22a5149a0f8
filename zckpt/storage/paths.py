"""Where a path lies: on this machine, or behind an address (`s3://bucket/run`, `hf://user/model`) that fsspec reaches.

For every module that lists, measures or reads input files. A local path goes straight to `os`, and nothing of fsspec is
imported; `file://` is a local path. Bytes of tensors do not pass here: the mover reads local files itself, and `fetching`
brings it the ranges of the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Literal

from zckpt.base.errors import UsageError
from zckpt.core.fragments import FileStore
from zckpt.storage import fsspec_io

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_LOCAL = re.compile(r"(?:file|local)://", re.IGNORECASE)
_CACHES = re.compile(r"(?:(?:simplecache|filecache|blockcache|cached)::)+", re.IGNORECASE)
_SAME = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "az": "abfs", "abfss": "abfs", "adl": "abfs", "ssh": "sftp"}
"""Kinds of addresses that mean the same store as another kind."""

_WITHOUT_HOST = ("memory", "hf")


def is_remote(path: str) -> bool:
    """Whether a path is an address that fsspec has to reach."""
    return "://" in path and bool(_ADDRESS.match(path))


def local(path: str | os.PathLike[str]) -> str:
    """The path itself, or the local one that a `file://` address means."""
    name = os.fspath(path)
    found = _LOCAL.match(name)
    return name[found.end() :] if found else name


def is_file(path: str) -> bool:
    """As `os.path.isfile`."""
    return fsspec_io.kind(path) == "file" if is_remote(path) else os.path.isfile(path)


def is_dir(path: str) -> bool:
    """As `os.path.isdir`."""
    return fsspec_io.kind(path) == "directory" if is_remote(path) else os.path.isdir(path)


def is_readable(path: str) -> bool:
    """Whether a directory may be listed; of an address nobody knows before it is tried."""
    return is_remote(path) or os.access(path, os.R_OK)


def names(directory: str) -> list[str]:
    """Names of everything in a directory. Raises OSError."""
    return sorted(fsspec_io.entries(directory)) if is_remote(directory) else os.listdir(directory)


def file_names(directory: str, below: str = "") -> list[str]:
    """Names of the files in a directory, and `below/...` of all those under that directory in it. Raises OSError."""
    if is_remote(directory):
        kinds = fsspec_io.entries(directory)
        names = sorted(name for name, kind in kinds.items() if kind == "file")
        inner = fsspec_io.walk(f"{directory}/{below}") if kinds.get(below) == "directory" else []
        return names + [f"{below}/{name}" for name in inner]
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries if entry.is_file()]
    for root, _, found in os.walk(os.path.join(directory, below)) if below else ():
        names += [os.path.relpath(os.path.join(root, name), directory).replace(os.sep, "/") for name in found]
    return names


def absolute(path: str) -> str:
    """As `os.path.abspath`; an address is absolute already."""
    return path.rstrip("/") if is_remote(path) else os.path.abspath(path)


def parent(path: str) -> str:
    """The directory that a file or directory lies in; the top of an address is its own."""
    above, _, name = absolute(path).rpartition("/")
    if is_remote(path):
        return above if name and is_remote(above + "/") and not above.endswith("/") else absolute(path)
    return os.path.dirname(os.path.abspath(path))


def is_within(path: str, directory: str) -> bool:
    """Whether a path is a directory or file, or lies in it, however the two are spelled.

    Local paths are compared with their links resolved. Of addresses, the kind (`s3` and `s3a`), the host, and slashes are
    made the same. A store may keep `..` as it is or resolve it, so that either reading counts.
    """
    return any(
        inner == outer or inner.startswith(outer.rstrip("/") + "/")
        for inner, outer in zip(_spellings(path), _spellings(directory), strict=True)
    )


def _spellings(path: str) -> tuple[str, str]:
    """A path as one string of its kind: first with `..` as a name like others, then with `..` resolved."""
    path = local(path)
    if not is_remote(path):
        return (os.path.realpath(path),) * 2
    kind, _, rest = path[found.end() if (found := _CACHES.match(path)) else 0 :].partition("://")
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


def relative(path: str, directory: str) -> str:
    """A path in a directory, as seen from there."""
    if is_remote(path):
        return path.removeprefix(directory.rstrip("/") + "/")
    return os.path.relpath(path, directory)


def size(path: str) -> int:
    """As `os.path.getsize`."""
    return fsspec_io.status(path).size if is_remote(path) else os.path.getsize(path)


def read(path: str, nbytes: int | None = None, offset: int = 0) -> bytes:
    """`nbytes` bytes from `offset` on, fewer at the end of the file; all by default. Raises OSError."""
    if is_remote(path):
        return fsspec_io.read(path, offset, size(path) if nbytes is None else nbytes)
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(-1 if nbytes is None else nbytes)


def blocks(path: str) -> Iterator[bytes]:
    """A file's bytes in order, in pieces. Raises OSError."""
    if is_remote(path):
        yield read(path)
        return
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            yield block


def state(path: str) -> tuple[int, ...]:
    """What changes when a file is written again, whatever is done to its modification time. Raises OSError."""
    if is_remote(path):
        found = fsspec_io.status(path)
        return found.size, *found.identity
    stat = os.stat(path)
    return stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


def file_store(path: str | os.PathLike[str], byteorder: Literal["little", "big"] = "little") -> FileStore:
    """An existing file, as a place where elements lie. Raises OSError."""
    name = os.fspath(path)
    if is_remote(name):
        return FileStore(name, *fsspec_io.status(name), byteorder, is_remote=True)
    stat = os.stat(name)
    return FileStore(name, stat.st_size, (stat.st_dev, stat.st_ino, stat.st_mtime_ns), byteorder)


def same_content(a: str, b: str) -> bool:
    """Whether two files hold the same bytes."""
    if a == b or (not is_remote(a) and not is_remote(b) and os.path.samefile(a, b)):
        return True
    nbytes, block = size(a), 1 << 20
    if nbytes != size(b):
        return False
    return all(read(a, block, start) == read(b, block, start) for start in range(0, nbytes, block))


def to_bytes(size: int | str) -> int:
    """A size such as "12GB" (decimal, as the hub counts) or "8GiB", in bytes.

    Raises:
        UsageError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(size), re.IGNORECASE)
    if not found:
        raise UsageError("a size that is none", found=repr(size), expected="it is a number of bytes, or like 12GB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))
