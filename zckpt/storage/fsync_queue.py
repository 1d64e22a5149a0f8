"""Syncs complete files in threads while the next ones are written, and reports each file in order when it is durable.

For `engine.move`. A sync waits until the disk has written what it holds back: with one file at a time, a pause after each.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from zckpt.storage.descriptors import forget

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

T = TypeVar("T")

SYNCS = 8
"""Syncs at once: file systems with a journal complete many of them in one commit."""
MOST = 128
"""The most files in the queue, each with a descriptor."""


def make_durable(fd: int) -> None:
    """Waits until a file, or the names in a directory, are on the disk. macOS's `fsync` leaves them in the disk's own memory."""
    if (full := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        try:
            fcntl.fcntl(fd, full)
            return
        except OSError:  # not supported by every file system
            pass
    os.fsync(fd)


class Syncing(contextlib.AbstractContextManager["Syncing[T]"], Generic[T]):
    """A queue of files that are being synced; use as a context manager.

    Args:
        done: called with each file when it is durable, in the order in which files were added.
        give_back: whether to drop its pages from the page cache then.
    """

    def __init__(self, done: Callable[[T], None], *, give_back: bool = False) -> None:
        self._done = done
        self._give_back = give_back
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[T, Future[None]]] = deque()

    def add(self, file: T, fd: int) -> None:
        """Adds a complete file; the caller may close `fd` after this. Raises errors of earlier files as in `settle`."""
        from concurrent.futures import ThreadPoolExecutor

        while len(self._pending) >= MOST:
            self._next()
        self._pool = self._pool or ThreadPoolExecutor(SYNCS, "sync")
        self._pending.append((file, self._pool.submit(self._sync, os.dup(fd))))

    def _sync(self, fd: int) -> None:
        try:
            make_durable(fd)
            if self._give_back:
                forget(fd)
        finally:
            os.close(fd)

    def settle(self, *, wait: bool = True) -> None:
        """Reports files that are durable, and with `wait` waits for the others. Raises OSError if a file could not be
        written; later files are not reported.
        """
        while self._pending and (wait or self._pending[0][1].done()):
            self._next()

    def _next(self) -> None:
        file, future = self._pending.popleft()
        future.result()
        self._done(file)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.settle()
            elif isinstance(error, Exception):  # a resumed run keeps the files that are durable
                with contextlib.suppress(OSError):
                    self.settle()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
