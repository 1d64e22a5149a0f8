"""Reads untrusted JSON files with limits on their size and on the memory of the parsed objects.

For indexes, configs, manifests and safetensors headers. A byte of JSON can become sixty bytes of Python objects, so a file that
would need more memory than any real one is refused before it is parsed.
"""

from __future__ import annotations

import json
import os
from typing import Any

from zckpt.base import limits
from zckpt.base.errors import CorruptError, UnsupportedError
from zckpt.storage.location import locate


def read_json(path: str | os.PathLike[str], most_bytes: int, what: str) -> Any:
    """Reads a JSON file.

    Args:
        path: of the file.
        most_bytes: the most bytes that it may have.
        what: what the file should be, for errors, such as "a manifest".

    Raises:
        NotACheckpointError: it cannot be opened, or is not a file.
        CorruptError: it is not JSON.
        UnsupportedError: it is too large.
    """
    location = locate(path)
    with location.open() as file:
        if file.size > most_bytes:
            raise UnsupportedError(
                "is too large", file=location, found=f"{file.size:,} bytes",
                expected=f"{what} of at most {most_bytes:,} bytes", remedy=limits.REMEDY,
            )  # fmt: skip
        data = file.read(0, file.size)
    check_size(data, location.path, what)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            "is not valid JSON", file=location, found=str(error)[:200], expected=what,
            remedy="Copy this file again from where it was written.",
        ) from error  # fmt: skip


def read_table(module: str) -> dict[str, Any]:
    """What the JSON file of a module of zckpt's own says, which lies beside it under its name; `module`: its `__file__`."""
    with open(f"{os.path.splitext(module)[0]}.json", "rb") as file:
        tables: dict[str, Any] = json.load(file)
    return tables


def check_size(data: bytes, path: str, what: str) -> None:
    """Refuses a JSON document that would need too much memory: its lists, dicts, their items and the text itself.
    Raises UnsupportedError if it would.
    """
    needed = (2 if data.isascii() else 6) * len(data)
    needed += 48 * data.count(b",") + 72 * data.count(b"[") + 240 * data.count(b"{") + 40 * data.count(b":")
    if needed > limits.JSON_MEMORY_BYTES:
        raise UnsupportedError(
            f"{what} would take too much memory",
            file=path,
            found=f"{len(data):,} bytes, {data.count(b','):,} items",
            remedy=limits.REMEDY,
        )
