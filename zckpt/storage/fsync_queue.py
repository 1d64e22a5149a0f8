"""Complete files become durable while the next ones are written; whoever waits for that is told of each in turn.

For `mover`. A disk answers to a sync when all that it holds back is written: one file at a time, that is a pause after each.
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
"""At once: file systems that keep a journal answer many in one commit."""
MOST = 128
"""Files on their way, each with a descriptor."""


def make_durable(fd: int) -> None:
    """Waits until a file, or the names in a directory, are on the disk. macOS's `fsync` leaves them in the disk's own memory."""
    if (full := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        try:
            fcntl.fcntl(fd, full)
            return
        except OSError:  # not every file system knows it
            pass
    os.fsync(fd)


class Syncing(Generic[T]):
    """Files on their way to the disk, the oldest first; use as a context manager.

    Args:
        done: told of each file, in the order in which they were added, as soon as it is durable.
        give_back: whether the page cache is to forget it then.
    """

    def __init__(self, done: Callable[[T], None], *, give_back: bool = False) -> None:
        self._done = done
        self._give_back = give_back
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[T, Future[None]]] = deque()

    def add(self, file: T, fd: int) -> None:
        """A file that is complete; its descriptor may be closed. Errors as in `settle`, of earlier ones."""
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
        """Tells of the files that are durable, and waits for the others unless `wait` is False.

        Raises:
            OSError: one could not be written; later ones are not told of.
        """
        while self._pending and (wait or self._pending[0][1].done()):
            self._next()

    def _next(self) -> None:
        file, future = self._pending.popleft()
        future.result()
        self._done(file)

    def __enter__(self) -> Syncing[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.settle()
            elif isinstance(error, Exception):  # what is durable need not be done again
                with contextlib.suppress(OSError):
                    self.settle()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
