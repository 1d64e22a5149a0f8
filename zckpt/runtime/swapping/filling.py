"""Fills tensors in swap files through a buffer, with writes that report a failing disk.

For loads. A write to the file's memory map would end the process by SIGBUS where the disk fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from zckpt.runtime.swapping.files import ALIGN, SwapFile, file_of, padded_size
from zckpt.runtime.swapping.transfers import Buffer, BufferPlaces, Transfers

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
