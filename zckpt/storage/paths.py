"""What a path given as text leads to, for modules that do not hold a `Location` yet; see `storage.location`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from zckpt.base.errors import UsageError
from zckpt.core.fragments import FileStore
from zckpt.storage.location import locate


def is_remote(path: str) -> bool:
    """Whether a path is an address that fsspec has to reach."""
    return locate(path).is_remote


def local(path: str | os.PathLike[str]) -> str:
    """The path itself, or the local one that a `file://` address means."""
    return locate(path).path


def is_file(path: str) -> bool:
    """As `os.path.isfile`."""
    return locate(path).is_file()


def is_dir(path: str) -> bool:
    """As `os.path.isdir`."""
    return locate(path).is_dir()


def is_readable(path: str) -> bool:
    """Whether a directory may be listed; of an address nobody knows before it is tried."""
    return locate(path).is_readable()


def names(directory: str) -> list[str]:
    """Names of everything in a directory. Raises OSError."""
    return locate(directory).names()


def file_names(directory: str, below: Sequence[str] = ()) -> list[str]:
    """As `Location.file_names`."""
    return locate(directory).file_names(below)


def absolute(path: str) -> str:
    """As `Location.absolute`."""
    return locate(path).absolute().path


def parent(path: str) -> str:
    """As `Location.parent`."""
    return locate(path).parent.path


def is_within(path: str, directory: str) -> bool:
    """As `Location.is_within`."""
    return locate(path).is_within(locate(directory))


def relative(path: str, directory: str) -> str:
    """A path in a directory, as seen from there."""
    return locate(path).relative_to(locate(directory))


def size(path: str) -> int:
    """As `os.path.getsize`."""
    return locate(path).size()


def read(path: str, nbytes: int | None = None, offset: int = 0) -> bytes:
    """As `Location.read`."""
    return locate(path).read(nbytes, offset)


def blocks(path: str) -> Iterator[bytes]:
    """As `Location.blocks`."""
    return locate(path).blocks()


def state(path: str) -> tuple[int, ...]:
    """As `Location.state`."""
    return locate(path).state()


def file_store(path: str | os.PathLike[str], byteorder: Literal["little", "big"] = "little") -> FileStore:
    """As `Location.store`."""
    return locate(path).store(byteorder)


def same_content(a: str, b: str) -> bool:
    """As `Location.has_bytes_of`."""
    return locate(a).has_bytes_of(locate(b))


def to_bytes(size: int | str) -> int:
    """A size such as "12GB" (decimal, as the hub counts) or "8GiB", in bytes.

    Raises:
        UsageError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(size), re.IGNORECASE)
    if not found:
        raise UsageError("a size that is none", found=repr(size), expected="it is a number of bytes, or like 12GB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))
