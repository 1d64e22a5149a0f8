"""The calls by which a process changes names and makes bytes durable, counted; and what happens at the n-th of them."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zckpt import _core

COUNTED = (
    "rename",
    "replace",
    "link",
    "symlink",
    "unlink",
    "remove",
    "rmdir",
    "mkdir",
    "truncate",
    "ftruncate",
    "fsync",
    "fdatasync",
)


@contextmanager
def at_each(happens: Callable[..., None]) -> Iterator[list[str]]:
    """Inside, `happens` is told of each call before it is made: its number, from 1, name and arguments. Gives the names so far.

    Counted are the renaming, linking, removing, making, truncating and syncing functions of `os`, files that `os.open` and
    `open` make, and the exchange of two names.
    """
    seen: list[str] = []
    own = {name: getattr(os, name) for name in COUNTED}
    exchange, opens, open_file = _core.exchange, os.open, builtins.open

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            seen.append(name)
            happens(len(seen), name, *arguments)
            return function(*arguments, **named)

        return called

    def opened(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & (os.O_CREAT | os.O_TRUNC):
            seen.append("open")
            happens(len(seen), "open", path)
        return opens(path, flags, *arguments, **named)

    def opened_file(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if set(mode) & set("wxa+"):
            seen.append("open")
            happens(len(seen), "open", path)
        return open_file(path, mode, *arguments, **named)

    for name, function in own.items():
        setattr(os, name, counted(name, function))
    builtins.open = opened_file
    os.open, _core.exchange = opened, counted("exchange", exchange)  # type: ignore[assignment]
    try:
        yield seen
    finally:
        for name, function in own.items():
            setattr(os, name, function)
        os.open, _core.exchange, builtins.open = opens, exchange, open_file  # type: ignore[assignment]
