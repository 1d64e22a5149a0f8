"""JSON files of strangers: read whole only when they are small enough, and made objects only when these will be.

For indexes, configs, manifests and safetensors headers. A byte of JSON can become sixty of Python objects, so a file that
would need more memory than any honest one is refused before it is parsed.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from zckpt.base import limits
from zckpt.base.errors import CorruptError, NotACheckpointError, UnsupportedError, read_error
from zckpt.storage import paths


def read_json(path: str, most_bytes: int, what: str) -> Any:
    """A JSON file's contents.

    Args:
        path: of the file.
        most_bytes: that it may have.
        what: names it in errors.

    Raises:
        NotACheckpointError: it cannot be opened, or is no file. CorruptError: it is no JSON.
        UnsupportedError: it is too large.
    """
    data = _remote(path, most_bytes, what) if paths.is_remote(path) else _local(path, most_bytes, what)
    check_size(data, path, what)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what} that is not JSON", file=path, found=f"{str(error)[:200]}") from error


def _remote(path: str, most_bytes: int, what: str) -> bytes:
    nbytes = paths.size(path)
    if nbytes > most_bytes:
        raise _too_large(path, nbytes, most_bytes, what)
    return paths.read(path, nbytes)


def _local(path: str, most_bytes: int, what: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotACheckpointError(f"{what} that cannot be read", file=path, found=error.strerror or "") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotACheckpointError(f"{what} that is no file", file=path)
        if status.st_size > most_bytes:
            raise _too_large(path, status.st_size, most_bytes, what)
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(most_bytes + 1)
    except OSError as error:
        if isinstance(error, NotACheckpointError):
            raise
        raise read_error(path, error.errno or 0, 0) from error
    finally:
        os.close(fd)


def _too_large(path: str, nbytes: int, most_bytes: int, what: str) -> UnsupportedError:
    found, expected = f"{nbytes:,} bytes", f"at most {most_bytes:,}"
    return UnsupportedError(f"{what} that is too large", file=path, found=found, expected=expected)


def check_size(data: bytes, path: str, what: str) -> None:
    """Refuses a document whose objects would need too much memory: lists, dicts, their items and the text itself.

    Raises:
        UnsupportedError: it is one.
    """
    needed = (2 if data.isascii() else 6) * len(data)
    needed += 48 * data.count(b",") + 72 * data.count(b"[") + 240 * data.count(b"{")
    if needed > limits.JSON_MEMORY_BYTES:
        raise UnsupportedError(
            f"{what} that would fill the memory",
            file=path,
            found=f"{len(data):,} bytes, {data.count(b','):,} items",
            remedy=limits.REMEDY,
        )
