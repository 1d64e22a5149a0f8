"""Chunks of numbers that are compressed: they are unpacked when they are first read, each once, and not into memory.

For Orbax's arrays. A chunk that is read in parts is unpacked into a temporary file without a name (in TMPDIR), which is as large
as the chunks that are in use: the place of one that was read whole goes to the next. What is unpacked is counted, so that a chunk
that unpacks to more than its shape says is an error, and takes no more room than that.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import field
from threading import Lock
from typing import IO, TYPE_CHECKING

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError
from zckpt.containers.zstd import Decompressor
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import U8, DType
from zckpt.core.fragments import Fragment
from zckpt.core.recipes import DerivedStore, Formula
from zckpt.core.stores import Store

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Tools

_AT_ONCE = 1 << 20
_IN_MEMORY = 8 << 20
"""Bytes of a chunk that is unpacked into memory, where it is wanted whole."""


class UnpackedChunks:
    """The temporary file of a save."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._file: IO[bytes] | None = None
        self._process = 0
        self._end = 0
        self._free: list[tuple[int, int]] = []

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def take(self, nbytes: int) -> tuple[int, int]:
        """A place for so many bytes: where it begins, and its size."""
        with self._lock:
            if self._file is None or self._process != os.getpid():
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
                self._process, self._end, self._free = os.getpid(), 0, []
            for place in self._free:
                if place[1] >= nbytes:
                    self._free.remove(place)
                    return place
            self._end += nbytes
            return self._end - nbytes, nbytes

    def give_back(self, place: tuple[int, int]) -> None:
        """The place may be used for other bytes."""
        with self._lock:
            self._free.append(place)

    def write(self, data: bytes, at: int) -> None:
        """Raises OutputError where the disk is full."""
        assert self._file is not None
        try:
            os.pwrite(self._file.fileno(), data, at)
        except OSError as error:
            raise OutputError(
                "compressed numbers cannot be unpacked", file=tempfile.gettempdir(), found=error.strerror or str(error),
                expected="space for them", remedy="Set TMPDIR to a directory on a disk with more space.",
            ) from error  # fmt: skip

    def read(self, at: int, nbytes: int) -> bytes:
        """Bytes that were written."""
        assert self._file is not None
        return os.pread(self._file.fileno(), nbytes, at)


@dataclass(slots=True, eq=False)
class Unpacking:
    """A recipe (`core.recipes`): the numbers of a chunk that is a zstd frame.

    Attributes:
        packed: the frame.
        nbytes: of its numbers.
        dtype: of its numbers.
        scratch: where they are unpacked.
    """

    packed: TensorEntry
    nbytes: int
    dtype: DType
    scratch: UnpackedChunks
    unit: int = 1
    _lock: Lock = field(default_factory=Lock, repr=False)
    _place: tuple[int, int] | None = None
    _process: int = 0
    _served: int = 0

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        """The frame."""
        return (self.packed,)

    @property
    def facts(self) -> tuple[object, ...]:
        """What it unpacks to."""
        return ("zstd", self.nbytes, self.dtype.name)

    def reads(self, start: int, stop: int) -> list[tuple[TensorEntry, int, int]]:
        """What `compute` reads: the whole frame."""
        return [(self.packed, 0, self.packed.numel)] if start < stop else []

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        """As `Recipe.compute`.

        Raises:
            CorruptError: the frame is damaged, or not as long as it should be. OutputError: there is no space to unpack it.
        """
        import numpy as np

        size = self.dtype.itemsize
        first, last = start * size, stop * size
        if last - first == self.nbytes <= _IN_MEMORY:
            frame = self._frame(tools)
            data = frame.take(self.nbytes)
            frame.end()
        else:
            with self._lock:
                if self._place is None or self._process != os.getpid():
                    self._unpack(tools)
                assert self._place is not None
                data = self.scratch.read(self._place[0] + first, last - first)
                self._served += len(data) if len(data) < self.nbytes else 0
                if self._served >= self.nbytes:
                    self.scratch.give_back(self._place)
                    self._place, self._served = None, 0
        array: Array = np.frombuffer(bytearray(data), self.dtype.numpy or f"u{size}")
        return array

    def _frame(self, tools: Tools) -> Decompressor:
        frame = self.packed

        def read(nbytes: int, at: int) -> bytes:
            data: bytes = tools.read(frame, at, min(at + nbytes, frame.numel)).tobytes()
            return data

        return Decompressor(read, str(frame.fragments[0].store), f"a part of {frame.name!r}")

    def _unpack(self, tools: Tools) -> None:
        place = self.scratch.take(self.nbytes)
        frame, done = self._frame(tools), 0
        while done < self.nbytes:
            data = frame.take(min(_AT_ONCE, self.nbytes - done))
            self.scratch.write(data, place[0] + done)
            done += len(data)
        frame.end()
        self._place, self._process, self._served = place, os.getpid(), 0


def unpack_later(
    name: str, place: tuple[Store, int, int], numel: int, dtype: DType, scratch: UnpackedChunks
) -> DerivedStore:
    """A store of the numbers of a zstd frame, which is so many bytes of a store from an offset on."""
    store, offset, nbytes = place
    packed = TensorEntry(name, (nbytes,), U8, "parameter", (Fragment(store, offset, 0, nbytes),))
    recipe = Unpacking(packed, numel * dtype.itemsize, dtype, scratch)
    return DerivedStore(recipe, dtype.itemsize, recipe.nbytes, place=f"{store}[{offset}:{offset + nbytes}]")


def zeros(name: str, numel: int, dtype: DType) -> DerivedStore:
    """A store of zeros, as those of a chunk that was not stored; the name is of that chunk."""

    def compute(start: int, stop: int, _: Tools) -> Array:
        import numpy as np

        return np.zeros(stop - start, dtype.numpy or f"u{dtype.itemsize}")

    recipe = Formula((), ("zeros",), compute)
    return DerivedStore(recipe, dtype.itemsize, numel * dtype.itemsize, place=f"no {name}")
