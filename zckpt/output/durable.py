"""Makes files and names in directories durable, and exchanges two names in one step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from zckpt.storage.fsync_queue import SYNCS, make_durable


def sync(path: str) -> None:
    """Makes a file, or the names in a directory, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        make_durable(fd)
    finally:
        os.close(fd)


def sync_all(paths: Iterable[str]) -> None:
    """Makes several durable, more than a few at once: a disk completes flushes that come together as one."""
    todo = list(paths)
    if len(todo) <= 3:  # threads would take longer than what the first sync leaves to the others
        for path in todo:
            sync(path)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(SYNCS, "sync") as pool:
        for _ in pool.map(sync, todo):
            pass


def tree(directory: str) -> list[str]:
    """A directory and all below it; their names are durable when each of them is."""
    return [root for root, _, _ in os.walk(directory, topdown=False)]


def make_directories(path: str) -> list[str]:
    """Makes a directory and its missing parents, and makes each new name durable. Returns the directories that were
    missing, the innermost first.
    """
    missing: list[str] = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for made in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(made)
        sync(os.path.dirname(made))
    return missing


def replace_file(path: str, data: bytes, fresh: str = "", mode: int | None = None) -> None:
    """Makes a small file, or replaces one, in one step and durably; does nothing if it has these bytes already.

    Args:
        path: of the file.
        data: its bytes.
        fresh: what the file is called until it is whole; by default its name with `.new` behind it.
        mode: of the file; None for the usual one.
    """
    with contextlib.suppress(OSError), open(path, "rb") as old:
        if old.read() == data:
            return
    fresh = fresh or f"{path}.new"
    with open(fresh, "wb") as file:
        file.write(data)
        file.flush()
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        make_durable(file.fileno())
    os.replace(fresh, path)
    sync(os.path.dirname(os.path.abspath(path)))


def exchange(a: str, b: str) -> bool:
    """Exchanges two names in one step (Linux: RENAME_EXCHANGE). Returns False if that is not supported here."""
    try:
        from zckpt import _core
    except ImportError:  # pragma: no cover - depends on the build
        return False
    return not _core.exchange(a, b)
