"""The file with a rank's swapped tensors: it grows, belongs to this process alone, and is removed when the process ends.

For everything in `swapping`, and for saves, which read from it. [Note: two ways to the same bytes] A step and a gather read and
write the file directly, past the page cache, through buffers (`transfers`). Everything else sees ordinary tensors: the file's
memory map; the system fetches and drops its pages as it needs them. Both see the same bytes: Linux writes changed pages of a
range before it is read directly, and drops them when it is written directly.
[Note: the owner of a file] The file is locked as long as the process lives. Files in the directory without a lock are left
over from processes that were killed, and are removed by whoever comes next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import re
import socket
import weakref
from bisect import bisect_right
from collections.abc import Iterator

import torch

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError
from zckpt.base.words import size
from zckpt.core.stores import FileStore

ALIGN = 4096
"""The multiple for offsets and sizes of direct reads and writes, in bytes."""

_EXTENT = 64 << 20
_NAME = re.compile(r"zckpt-swap-.+\.bin")
_numbers = itertools.count()
_open: weakref.WeakSet[SwapFile] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A vector in a swap file, from `offset` on, a multiple of ALIGN. `tensor`: its elements, in the file's memory map; room
    up to the next multiple of ALIGN belongs to it too.
    """

    file: SwapFile
    offset: int
    tensor: torch.Tensor


class SwapFile:
    """A file of this process in a directory. `fd` is open for direct reads and writes, or for ordinary ones where the file
    system has no direct ones. Raises OutputError if the directory cannot be made or written to, or cannot be mapped.
    """

    def __init__(self, directory: str) -> None:
        host = re.sub(r"[^\w.]", "_", socket.gethostname())[:64]
        name = f"zckpt-swap-{host}-{os.getpid()}-{next(_numbers)}.bin"
        self.path = os.path.join(directory, name)
        try:
            os.makedirs(directory, exist_ok=True)
            _remove_stale(directory)
            self._lock = _create(self.path)
            self.fd = _open_direct(self.path)
        except OSError as error:
            raise OutputError(
                "no swap file can be made here", file=directory, found=error.strerror or str(error),
                remedy="Choose another nvme_path: a directory on a local disk that this user may write to.",
            ) from error  # fmt: skip
        self._end = self._used = 0  # of the file; of its last extent
        self._starts: list[int] = []  # addresses of extents, in order
        self._extents: list[tuple[int, int, int]] = []  # address, bytes, offset in the file
        self._map: mmap.mmap | None = None
        self._store: FileStore | None = None
        self.close = weakref.finalize(self, _remove, self.path, self.fd, self._lock)
        _open.add(self)

    @property
    def nbytes(self) -> int:
        """The file's size."""
        return self._end

    def reserve(self, nbytes: int) -> None:
        """Makes room for regions of `nbytes` padded bytes together. Raises OutputError if the disk has no room."""
        length = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._lock, self._end, length)
            self._map = mmap.mmap(self._lock, length, offset=self._end)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            free = os.statvfs(os.path.dirname(self.path) or ".")
            raise OutputError(
                "the swap file cannot grow" if full else "the swap file cannot be mapped into memory", file=self.path,
                found=f"{error.strerror}; {size(free.f_bavail * free.f_frsize)} free on this disk",
                expected=f"{size(length)} more for this rank, beside {size(self._end)}",
                remedy="Make room on the disk of nvme_path, or choose another nvme_path, or train with more ranks.",
            ) from error  # fmt: skip
        address = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        self._extents.append((address, length, self._end))
        self._extents.sort()
        self._starts = [extent[0] for extent in self._extents]
        self._used, self._end = self._end, self._end + length

    def region(self, numel: int, dtype: torch.dtype) -> Region:
        """A new vector of zeros. Raises OutputError if the disk has no room."""
        nbytes = padded_size(numel * dtype.itemsize)
        if self._used + nbytes > self._end or self._map is None:
            self.reserve(max(nbytes, _EXTENT))
        assert self._map is not None
        offset, inside = self._used, self._used - (self._end - len(self._map))
        self._used += nbytes
        empty = torch.empty(0, dtype=dtype)
        tensor = torch.frombuffer(self._map, dtype=dtype, count=numel, offset=inside) if numel else empty
        return Region(self, offset, tensor)

    def store(self) -> FileStore:
        """The file as it is now, for the engine: the same value until something is written."""
        now = os.fstat(self._lock)
        identity = (now.st_dev, now.st_ino, now.st_mtime_ns)
        if self._store is None or self._store.identity != identity:
            self._store = FileStore(self.path, now.st_size, identity)
        return self._store

    def offset_of(self, address: int) -> int | None:
        """The offset in the file of an address of the memory map; None for any other address."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        start, length, offset = self._extents[place]
        return offset + address - start if address < start + length else None


def padded_size(nbytes: int) -> int:
    """The bytes that a region of `nbytes` takes."""
    return -(-nbytes // ALIGN) * ALIGN


def place_of(tensor: torch.Tensor) -> tuple[FileStore, int] | None:
    """The swap file's store and the byte offset of a tensor in it; None for a tensor in memory."""
    found = file_of(tensor)
    return None if found is None else (found[0].store(), found[1])


def file_of(tensor: torch.Tensor) -> tuple[SwapFile, int] | None:
    """The swap file and the byte offset of a tensor in it; None for a tensor in memory."""
    if not _open or tensor.device.type != "cpu" or not tensor.numel():
        return None
    for file in _open:
        offset = file.offset_of(tensor.data_ptr())
        if offset is not None:
            return file, offset
    return None


def _create(path: str) -> int:
    """Creates and locks a file; retries if a sweep removed it before it was locked."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # some file systems have no locks: nothing is swept there either
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.exists(path):
            return fd
        os.close(fd)


def _open_direct(path: str) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)


def _remove_stale(directory: str) -> None:
    for path in _stale(directory):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _stale(directory: str) -> Iterator[str]:
    """The swap files that no process holds."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if not _NAME.fullmatch(name):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path
        except OSError:
            continue
        finally:
            os.close(fd)


def _remove(path: str, *fds: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
    for fd in fds:
        os.close(fd)
