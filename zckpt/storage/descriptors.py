"""Opens the files of a run when they are needed, at most `MOST_STORES` at once, and checks that no source has changed."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zckpt.base.errors import CorruptError, InconsistentError, UnsupportedError, redact
from zckpt.core.stores import FileStore, Store

if TYPE_CHECKING:
    from zckpt.core.folds import Bytes

MOST_STORES = 512
"""The most files that one batch may name: all of them are open while it runs."""

try:
    from zckpt._core import is_in_memory
except ImportError:  # pragma: no cover - depends on the build; the Python engine has no use for direct I/O

    def is_in_memory(fd: int) -> bool:
        """Whether a file's file system is in memory, so that direct I/O is of no use."""
        return True


class OpenFiles(contextlib.AbstractContextManager["OpenFiles"]):
    """Descriptors by store. Closes the least recently used one if there are too many; a batch never names more than that.

    Args:
        outputs: id of a destination's store -> its path; everything else is a source.
        give_back: whether to drop a source's pages from the page cache when it is closed.
        direct: whether outputs may be written with direct I/O.
        most: files open at once.
        past_cache: open sources for direct I/O, too.
    """

    def __init__(
        self,
        outputs: Mapping[int, str] | None = None,
        *,
        give_back: bool = False,
        direct: bool = True,
        most: int = MOST_STORES,
        past_cache: bool = False,
    ) -> None:
        self._outputs = outputs or {}
        self._give_back = give_back
        self._direct = direct
        self._most = most
        self._past_cache = past_cache
        self._open: dict[str, tuple[int, int]] = {}
        self._seen: dict[str, FileStore] = {}

    def __exit__(self, *_: object) -> None:
        for path in list(self._open):
            self.close(path)

    def of(self, store: Store) -> tuple[int, int]:
        """A store's descriptor, and one for direct I/O; -1 for memory, and where direct I/O is not used."""
        if not isinstance(store, FileStore):
            return -1, -1
        path = self._outputs.get(id(store), store.path)
        found = self._open.pop(path, None)
        if found is None:
            while len(self._open) >= self._most:
                self.close(next(iter(self._open)))
            if id(store) in self._outputs:
                found = _open_output(path, store.size if self._direct else 0)
            else:
                fd = self._open_source(store)
                found = fd, _open_direct(path, os.O_RDONLY) if self._past_cache and not is_in_memory(fd) else -1
        self._open[path] = found
        return found

    def _open_source(self, store: FileStore) -> int:
        if store.is_remote:
            raise UnsupportedError(
                "cannot be read from an address by this command",
                file=redact(store.path),
                found="an address",
                expected="a file on a local disk",
                remedy="Copy it to this machine, and pass the path of the copy.",
            )
        try:
            fd = os.open(store.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CorruptError(
                "can no longer be read",
                file=store.path,
                found=error.strerror or str(error),
                expected="the file that was planned with",
                remedy="Check the disk, and run the same command again.",
            ) from error
        try:
            _check_identity(store, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        self._seen[store.path] = store
        return fd

    def check_sources(self) -> None:
        """Checks that no source changed while it was read. Raises CorruptError if a source was removed,
        InconsistentError if a source was changed.
        """
        for path, store in self._seen.items():
            try:
                stat = os.stat(path)
            except OSError as error:
                raise CorruptError(
                    "was removed while it was read",
                    file=path,
                    found=error.strerror or str(error),
                    expected="the same file until the command ends",
                    remedy="Put it back, and run the same command again.",
                ) from error
            _check_identity(store, stat)

    def close(self, path: str) -> None:
        """Closes a file that is open."""
        for fd in self._open.pop(path):
            if fd >= 0:
                if self._give_back and path in self._seen:
                    forget(fd)
                with contextlib.suppress(OSError):  # synced bytes are on the disk
                    os.close(fd)


def forget(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Drops a file's clean pages from the page cache, all or those of a range, and starts writing dirty ones to the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


_AHEAD_BYTES = 512 << 10
"""The size of one request; Linux cuts longer ones to it."""


def will_need(fd: int, offset: int, nbytes: int) -> None:
    """Lets the disk begin to read bytes of a file into the page cache."""
    if hasattr(os, "posix_fadvise"):
        for at in range(offset, offset + nbytes, _AHEAD_BYTES):
            os.posix_fadvise(fd, at, min(_AHEAD_BYTES, offset + nbytes - at), os.POSIX_FADV_WILLNEED)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of it at a byte offset. Raises OSError if it cannot be written."""
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def write_past_cache(fds: tuple[int, int], data: Bytes, offset: int) -> None:
    """Writes all of it at a byte offset: whole pages past the page cache, if the second descriptor is one for direct I/O, and
    they are pages in memory too. Raises OSError if it cannot be written.
    """
    fd, direct = fds
    first = -offset % mmap.PAGESIZE
    last = first + (len(data) - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if direct < 0 or last <= first or (data.ctypes.data + first) % mmap.PAGESIZE:
        return write_all(fd, data.data, offset)
    for start, part in ((0, data[:first].data), (last, data[last:].data)):
        write_all(fd, part, offset + start)
    whole = data[first:last].data
    try:
        write_all(direct, whole, offset + first)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which some file systems say after they let it be opened
            raise
        write_all(fd, whole, offset + first)


def _open_output(path: str, size: int) -> tuple[int, int]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    # Memory file systems accept direct I/O, but it saves no copy there.
    return fd, _open_direct(path, os.O_WRONLY) if size >= 1 << 20 and not is_in_memory(fd) else -1


def _open_direct(path: str, how: int) -> int:
    """A descriptor for direct I/O, or -1 where there is none."""
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            return os.open(path, how | os.O_DIRECT | os.O_CLOEXEC)
    return -1


def _check_identity(store: FileStore, stat: os.stat_result) -> None:
    if store.identity != (0, 0, 0) and (stat.st_dev, stat.st_ino, stat.st_mtime_ns) != store.identity:
        raise InconsistentError(
            "changed while it was read",
            file=store.path,
            found="another file or modification time",
            expected="the file and modification time from when it was opened",
            remedy="Wait until no other program writes to the checkpoint, and run the same command again.",
        )
