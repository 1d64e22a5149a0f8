"""The files that are read from: opened when needed, never too many at once, and the very ones that were planned with.

For `mover` and `scan`.
"""

from __future__ import annotations

import contextlib
import os

from zckpt.batches import MOST_STORES
from zckpt.errors import CorruptError, InconsistentError
from zckpt.fragments import FileStore
from zckpt.tuning import forget


class Sources:
    """Descriptors by path.

    Args:
        give_back: whether the page cache is to forget a file when it is closed.
        most: files open at once.
    """

    def __init__(self, give_back: bool = False, most: int = MOST_STORES) -> None:
        self._give_back = give_back
        self._most = most
        self._open: dict[str, int] = {}
        self._seen: dict[str, FileStore] = {}

    def descriptor(self, store: FileStore) -> int:
        """A descriptor to read from; the file must be the one that was planned with.

        The least recently used is closed where there are too many, so never one of the batch in progress.
        """
        if store.path in self._open:
            self._open[store.path] = self._open.pop(store.path)
            return self._open[store.path]
        while len(self._open) >= self._most:
            self._close(next(iter(self._open)))
        try:
            fd = os.open(store.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CorruptError(
                "a file that can no longer be read", file=store.path, found=error.strerror or str(error)
            ) from error
        self._open[store.path] = fd
        _check_identity(store, os.fstat(fd))
        self._seen[store.path] = store
        return fd

    def check(self) -> None:
        """Makes sure that nothing changed while it was read.

        Raises:
            CorruptError, InconsistentError: it did.
        """
        for path, store in self._seen.items():
            try:
                stat = os.stat(path)
            except OSError as error:
                raise CorruptError("a file that vanished while it was read", file=path, found=str(error)) from error
            _check_identity(store, stat)

    def close(self) -> None:
        """Closes all."""
        for path in list(self._open):
            self._close(path)

    def _close(self, path: str) -> None:
        fd = self._open.pop(path)
        if self._give_back:
            forget(fd)
        with contextlib.suppress(OSError):
            os.close(fd)


def _check_identity(store: FileStore, stat: os.stat_result) -> None:
    if store.identity != (0, 0, 0) and (stat.st_dev, stat.st_ino, stat.st_mtime_ns) != store.identity:
        raise InconsistentError(
            "a file that changed while it was read",
            file=store.path,
            found="another file or modification time than when it was opened",
            remedy="Something still writes to the checkpoint. Wait until it is done, and start again.",
        )
