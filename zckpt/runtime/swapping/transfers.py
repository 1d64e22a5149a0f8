"""Moves bytes between buffers and swap files in the background: by the C++ engine, or by Python's threads without it.

Loads fill tensors in swap files through a buffer, with writes that report a failing disk: a write to the file's memory map would
end the process by SIGBUS where the disk fails.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError
from zckpt.runtime.swapping.files import ALIGN, SwapFile, file_of, padded_size

try:
    from zckpt._core import Swapper
except ImportError:  # built without a compiler
    Swapper = None  # type: ignore[assignment,misc]


class Stretch(NamedTuple):
    """A run of bytes in a buffer and in a file; all three are multiples of ALIGN."""

    at: int
    offset: int
    nbytes: int


class Buffer:
    """Aligned memory of this process. `bytes`: all of it."""

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        room = torch.empty(nbytes + ALIGN, dtype=torch.uint8, pin_memory=pin)
        first = -room.data_ptr() % ALIGN
        self.bytes = room[first : first + nbytes]

    def view(self, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements at a byte that is a multiple of ALIGN."""
        return self.bytes[at : at + count * dtype.itemsize].view(dtype)


class _Engine(Protocol):
    def begin(self, fd: int, write: bool, stretches: bytes) -> int: ...

    def wait(self, number: int) -> tuple[int, int]: ...


class Transfers:
    """Reads and writes under way: `blocks` at a time, each of `block_bytes` at most, a multiple of ALIGN. `pin`: buffers
    are page-locked.
    """

    def __init__(self, blocks: int, block_bytes: int, *, pin: bool) -> None:
        self.pin = pin
        kind: Any = _Threads if Swapper is None else Swapper
        self._engine: _Engine = kind(blocks, block_bytes)

    def begin(self, file: SwapFile, buffer: Buffer, stretches: Sequence[Stretch], *, write: bool) -> Transfer:
        """Begins to read into a buffer, or to write from it."""
        base = buffer.bytes.data_ptr()
        packed = b"".join(struct.pack("<3Q", base + one.at, one.offset, one.nbytes) for one in merge_copies(stretches))
        return Transfer(self._engine, self._engine.begin(file.fd, write, packed), file, buffer, write)


@dataclass(slots=True)
class Transfer:
    """A transfer that was begun."""

    engine: _Engine
    number: int
    file: SwapFile
    buffer: Buffer
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


def merge_copies(stretches: Sequence[Stretch]) -> list[Stretch]:
    """The same bytes in as few stretches as possible."""
    found: list[Stretch] = []
    for one in stretches:
        last = found[-1] if found else None
        if last is not None and (last.at + last.nbytes, last.offset + last.nbytes) == one[:2]:
            found[-1] = last._replace(nbytes=last.nbytes + one.nbytes)
        else:
            found.append(one)
    return found


class BufferPlaces:
    """Runs of bytes in files, each with a place in one buffer. `nbytes`: of the buffer that they need."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._stretches: dict[SwapFile, list[Stretch]] = {}

    def add(self, file: SwapFile, offset: int, nbytes: int) -> int:
        """Adds a run, with the room behind it that is read and written too; returns its place."""
        one = Stretch(self.nbytes, offset, padded_size(nbytes))
        self._stretches.setdefault(file, []).append(one)
        self.nbytes += one.nbytes
        return one.at

    def begin(self, transfers: Transfers, buffer: Buffer, *, write: bool) -> list[Transfer]:
        """Begins to read all runs into a buffer, or to write them from it."""
        return [transfers.begin(file, buffer, runs, write=write) for file, runs in self._stretches.items()]


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


class Filled(NamedTuple):
    """A run of elements of the tensor with this number, from `start` on, which go into `memory`, a vector."""

    number: int
    start: int
    memory: torch.Tensor


def fill_through(tensors: Sequence[torch.Tensor], read: Callable[[Sequence[Filled]], None]) -> None:
    """Fills dense vectors in memory and in swap files; `read` puts elements into the memory of pieces, and is called more
    than once. Raises OutputError if a swap file cannot be written.
    """
    direct, swapped = [], []
    for number, tensor in enumerate(tensors):
        found = file_of(tensor)
        if found is None or found[1] % ALIGN:
            direct.append(Filled(number, 0, tensor))
        else:
            swapped.append((number, tensor, *found))
    read(direct)
    if not swapped:
        return
    most = min(_BUFFER_BYTES, sum(padded_size(tensor.nbytes) for _, tensor, *_ in swapped))
    batch = _Batch(Buffer(most, pin=False), Transfers(8, 1 << 20, pin=False), read)
    for number, tensor, file, offset in swapped:
        batch.add(number, tensor, file, offset)
    batch.write()


class _Batch:
    """Pieces that are read and written together."""

    def __init__(self, buffer: Buffer, transfers: Transfers, read: Callable[[Sequence[Filled]], None]) -> None:
        self._buffer, self._transfers, self._read = buffer, transfers, read
        self._pieces: list[Filled] = []
        self._places = BufferPlaces()

    def add(self, number: int, tensor: torch.Tensor, file: SwapFile, offset: int) -> None:
        """Adds a tensor; writes whenever the buffer is full."""
        itemsize, total, start = tensor.dtype.itemsize, tensor.numel(), 0
        while start < total:
            room = (self._buffer.bytes.numel() - self._places.nbytes) // ALIGN * ALIGN // itemsize
            if not room:
                self.write()
                continue
            count = min(room, total - start)
            at = self._places.add(file, offset + start * itemsize, count * itemsize)
            self._buffer.bytes[at + count * itemsize : self._places.nbytes].zero_()
            self._pieces.append(Filled(number, start, self._buffer.view(at, count, tensor.dtype)))
            start += count

    def write(self) -> None:
        """Reads and writes what was added."""
        if self._pieces:
            self._read(self._pieces)
        begun = self._places.begin(self._transfers, self._buffer, write=True)
        try:
            for transfer in begun:
                transfer.wait()
        finally:
            for transfer in begun:
                transfer.engine.wait(transfer.number)
        self._pieces, self._places = [], BufferPlaces()
