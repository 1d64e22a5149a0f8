"""The two engines as one thing: does a batch with either, and knows what is then known of the files it wrote.

For `mover`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from zckpt.batches import Batch, ranges
from zckpt.errors import UnsupportedError, read_error
from zckpt.fragments import FileStore
from zckpt.mover_reference import run_batch as reference_batch
from zckpt.open_files import OpenFiles
from zckpt.plan import OutputFile, Plan
from zckpt.sums import Partial, file_checksums, join, joined
from zckpt.tuning import THREADS, forget, pace, window_bytes

try:
    from zckpt._core import run as native_run
except ImportError:  # pragma: no cover - depends on the build
    native_run = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Overflow:
    """Finite numbers of one tensor that became infinite in the cast (or were clamped), and the largest of them."""

    count: int
    largest: float


def choose(wanted: Literal["auto", "native", "reference"]) -> str:
    """Which engine works, "native" or "reference"; a person is told of the slow one.

    Raises:
        UnsupportedError: the one that is wanted was not built.
    """
    if wanted == "native" and native_run is None:
        raise UnsupportedError("an engine that was not built", found="zckpt._core is missing")
    chosen = "reference" if wanted == "reference" or native_run is None else "native"
    if wanted == "auto" and chosen == "reference":
        warnings.warn("zckpt's C++ engine was not built: the slow Python one is used.", RuntimeWarning, stacklevel=3)
    return chosen


class Work:
    """Batches, done by one engine; and what is known of the files so far: CRCs of their parts, and overflows."""

    def __init__(
        self,
        plan: Plan,
        engine: str,
        clamp: bool,
        threads: int | None,
        window: int | None,
        give_back: bool,
        bytes_per_s: int | None,
    ) -> None:
        self.engine = engine
        self.clamp = clamp
        self.threads = threads or THREADS
        self.window = window_bytes(window)
        self.give_back = give_back
        self.bytes_per_s = bytes_per_s or 0
        self.spend = pace(bytes_per_s)
        self.overflows: dict[int, Overflow] = {}
        self.ranges: dict[int, list[tuple[int, int, int]]] = {}
        for number, (store, start, nbytes) in enumerate(ranges(plan)):
            self.ranges.setdefault(id(store), []).append((number, start, nbytes))
        self.tensors: dict[int, set[int]] = {}
        for number, (_, entry) in enumerate(plan.pairs):
            for fragment in entry.fragments:
                self.tensors.setdefault(id(fragment.store), set()).add(number)
        self.parts: dict[int, list[Partial]] = {}

    def do(self, batch: Batch, files: OpenFiles, progress: Callable[[int], None] | None) -> None:
        """Runs a batch."""
        if self.engine == "reference":
            lost = reference_batch(
                batch.stores,
                [files.of(store) for store in batch.stores],
                batch.moves,
                batch.literals,
                self.clamp,
                self.spend,
            )
            if progress:
                progress(batch.nbytes)
        else:
            lost = self._do_native(batch, files, progress)
        for tensor, count, largest in lost:
            old = self.overflows.get(tensor, Overflow(0, 0.0))
            self.overflows[tensor] = Overflow(old.count + count, max(old.largest, largest))

    def _do_native(
        self, batch: Batch, files: OpenFiles, progress: Callable[[int], None] | None
    ) -> list[tuple[int, int, float]]:
        (kind, number, store, offset), crcs, overflows = native_run(
            *batch.packed([files.of(store) for store in batch.stores]),
            threads=self.threads,
            window=self.window,
            clamp=self.clamp,
            give_back=self.give_back,
            bytes_per_s=self.bytes_per_s,
            progress=progress,
        )
        if kind:
            where = str(batch.stores[store])
            raise OSError(number, os.strerror(number), where) if kind == "write" else read_error(where, number, offset)
        for number, crc, offset, length in crcs:
            self.parts.setdefault(number, []).append((offset, length, crc))
        return overflows

    def finish(self, output: OutputFile, store: FileStore, files: OpenFiles) -> int:
        """Fills in the CRCs of a complete file, makes it durable, and gives the CRC of the whole."""
        fd, _ = files.of(store)
        crcs: dict[int, int] = {}
        for number, start, nbytes in self.ranges.get(id(store), ()):
            parts = self.parts.pop(number, ())
            crcs[start] = crc_of_file(fd, start, nbytes) if self.engine == "reference" else join(parts, start, nbytes)
        crc = sealed(fd, output, crcs)
        if self.give_back:
            forget(fd)
        return crc

    def taken(self, store: FileStore) -> tuple[Partial, ...] | None:
        """The CRCs of what was put into a file; what follows each other is joined."""
        if self.engine == "reference":
            return None
        numbers = (number for number, _, _ in self.ranges.get(id(store), ()))
        return tuple(part for number in numbers for part in joined(self.parts.pop(number, ())))

    def lost(self, store: FileStore) -> dict[int, Overflow]:
        """What casts have lost so far of the tensors in a file."""
        here = self.overflows.keys() & self.tensors.get(id(store), set())
        return {number: self.overflows[number] for number in sorted(here)}


def sealed(fd: int, output: OutputFile, crcs: Mapping[int, int]) -> int:
    """Fills in a file's CRC slots, makes it durable, and gives the CRC of the whole."""
    crc, slots = file_checksums(output, crcs)
    for slot, data in slots.items():
        write(fd, data, slot)
    os.fsync(fd)
    return crc


def crc_of_file(fd: int, start: int, nbytes: int) -> int:
    """The CRC of bytes of a file, read again."""
    import zlib

    crc, stop = 0, start + nbytes
    while start < stop and (data := os.pread(fd, min(stop - start, 1 << 20), start)):
        crc = zlib.crc32(data, crc)
        start += len(data)
    return crc


def write(fd: int, data: bytes, offset: int) -> None:
    """Writes all of it."""
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done
