"""The file with a rank's swapped tensors, which is removed when its process ends; and moves between it and buffers.

For everything in `swapping`, and for saves, which read from it. It grows, and belongs to this process alone. [Note: two ways to
the same bytes] A step and a gather read and write the file directly, past the page cache, through buffers (`Transfers`).
Everything else sees ordinary tensors: the file's memory map; the system fetches and drops its pages as it needs them. Both see
the same bytes: Linux writes changed pages of a range before it is read directly, and drops them when it is written directly.
[Note: the owner of a file] The file is locked as long as the process lives. Files in the directory without a lock are left
over from processes that were killed, and are removed by whoever comes next.

Bytes are moved in the background: by the C++ engine, or by Python's threads without it. Loads fill tensors in swap files through
a buffer, with writes that report a failing disk: a write to the file's memory map would end the process by SIGBUS where the disk
fails.
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
import struct
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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


try:
    from zckpt._core import Swapper
except ImportError:  # built without a compiler
    Swapper = None  # type: ignore[assignment,misc]


def elements_in(buffer: torch.Tensor, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements of a buffer from a byte on that is a multiple of ALIGN."""
    return buffer[at : at + count * dtype.itemsize].view(dtype)


_Run = tuple[int, int, int]
"""The place of bytes in a buffer, their offset in a file, and how many they are; all three are multiples of ALIGN."""


class Transfers:
    """Reads and writes under way: `blocks` at a time, each of `block_bytes` at most, a multiple of ALIGN. `pin`: buffers
    are page-locked. A buffer is a vector of bytes.
    """

    def __init__(self, blocks: int, block_bytes: int, *, pin: bool) -> None:
        self.pin = pin
        kind: Any = _Threads if Swapper is None else Swapper
        self._engine: Swapper | _Threads = kind(blocks, block_bytes)

    def make_buffer(self, nbytes: int) -> torch.Tensor:
        """A buffer, in memory that begins at a multiple of ALIGN."""
        room = torch.empty(nbytes + ALIGN, dtype=torch.uint8, pin_memory=self.pin)
        first = -room.data_ptr() % ALIGN
        return room[first : first + nbytes]

    def begin(self, file: SwapFile, buffer: torch.Tensor, runs: Sequence[_Run], *, write: bool) -> Transfer:
        """Begins to read into a buffer, or to write from it."""
        base = buffer.data_ptr()
        packed = b"".join(struct.pack("<3Q", base + at, offset, nbytes) for at, offset, nbytes in runs)
        return Transfer(self._engine, self._engine.begin(file.fd, write, packed), file, buffer, write)


@dataclass(slots=True)
class Transfer:
    """A transfer that was begun."""

    engine: Swapper | _Threads
    number: int
    file: SwapFile
    buffer: torch.Tensor
    write: bool

    def wait(self) -> None:
        """Waits until the transfer is done. Raises OutputError if the disk refused."""
        error, offset = self.engine.wait(self.number)
        if error:
            raise OutputError(
                f"the swap file cannot be {'written' if self.write else 'read'} at byte {offset:,}", file=self.file.path,
                found="the file ends there" if error < 0 else os.strerror(error),
                remedy="Check the disk of nvme_path. Then start the run again from its last checkpoint.",
            )  # fmt: skip


class BufferPlaces:
    """Runs of bytes in files, each with a place in one buffer. `nbytes`: of the buffer that they need."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._runs: dict[SwapFile, list[_Run]] = {}

    def add(self, file: SwapFile, offset: int, nbytes: int) -> int:
        """Adds a run, with the room behind it that is read and written too; returns its place."""
        at, more, runs = self.nbytes, padded_size(nbytes), self._runs.setdefault(file, [])
        self.nbytes += more
        if runs:
            place, first, before = runs[-1]
            if (place + before, first + before) == (at, offset):
                runs[-1] = place, first, before + more
                return at
        runs.append((at, offset, more))
        return at

    def begin(self, transfers: Transfers, buffer: torch.Tensor, *, write: bool) -> list[Transfer]:
        """Begins to read all runs into a buffer, or to write them from it."""
        return [transfers.begin(file, buffer, runs, write=write) for file, runs in self._runs.items()]


class _Threads:
    """The Python form of `Swapper` in csrc/swapping.h."""

    def __init__(self, threads: int, block: int) -> None:
        self._pool, self._block = ThreadPoolExecutor(threads, "zckpt-swap"), block
        self._pending: dict[int, list[Future[tuple[int, int]]]] = {}

    def begin(self, fd: int, write: bool, stretches: bytes) -> int:
        number = len(self._pending) + max(self._pending, default=0) + 1
        self._pending[number] = [
            self._pool.submit(_carry, fd, write, address + at, offset + at, min(self._block, nbytes - at))
            for address, offset, nbytes in struct.iter_unpack("<3Q", stretches)
            for at in range(0, nbytes, self._block)
        ]
        return number

    def wait(self, number: int) -> tuple[int, int]:
        outcomes = [future.result() for future in self._pending.pop(number, ())]
        return next((one for one in outcomes if one[0]), (0, 0))


def _carry(fd: int, write: bool, address: int, offset: int, nbytes: int) -> tuple[int, int]:
    import ctypes

    memory = memoryview((ctypes.c_char * nbytes).from_address(address))
    done = 0
    try:
        while done < nbytes:
            call = os.pwritev if write else os.preadv
            count = call(fd, [memory[done:]], offset + done)
            if not count:
                return -1, offset
            done += count
    except OSError as error:
        return error.errno or -1, offset
    return 0, 0


_BUFFER_BYTES = 32 << 20


Filled = tuple[int, int, torch.Tensor]
"""The number of a tensor, the first of a run of its elements, and the vector that they go into."""


def fill_through(tensors: Sequence[torch.Tensor], read: Callable[[Sequence[Filled]], None]) -> None:
    """Fills dense vectors in memory and in swap files; `read` puts elements into the memory of pieces, and is called more
    than once. Raises OutputError if a swap file cannot be written.
    """
    direct, swapped = [], []
    for number, tensor in enumerate(tensors):
        found = file_of(tensor)
        if found is None or found[1] % ALIGN:
            direct.append((number, 0, tensor))
        else:
            swapped.append((number, tensor, *found))
    read(direct)
    if not swapped:
        return
    most = min(_BUFFER_BYTES, sum(padded_size(tensor.nbytes) for _, tensor, *_ in swapped))
    transfers = Transfers(8, 1 << 20, pin=False)
    buffer = transfers.make_buffer(most)
    for pieces, places in _fillings(swapped, buffer):
        read(pieces)
        begun = places.begin(transfers, buffer, write=True)
        try:
            for transfer in begun:
                transfer.wait()
        finally:
            for transfer in begun:
                transfer.engine.wait(transfer.number)


def _fillings(
    swapped: Sequence[tuple[int, torch.Tensor, SwapFile, int]], buffer: torch.Tensor
) -> Iterator[tuple[list[Filled], BufferPlaces]]:
    """Pieces that fill a buffer, and their places in it and in files; `swapped` has the file and offset of numbered tensors."""
    pieces, places = list[Filled](), BufferPlaces()
    for number, tensor, file, offset in swapped:
        itemsize, total, start = tensor.dtype.itemsize, tensor.numel(), 0
        while start < total:
            room = (buffer.numel() - places.nbytes) // ALIGN * ALIGN // itemsize
            if not room:
                yield pieces, places
                pieces, places = [], BufferPlaces()
                continue
            count = min(room, total - start)
            at = places.add(file, offset + start * itemsize, count * itemsize)
            buffer[at + count * itemsize : places.nbytes].zero_()
            pieces.append((number, start, elements_in(buffer, at, count, tensor.dtype)))
            start += count
    yield pieces, places
