"""What this machine's disk and memory can do at most, and the least time in which bytes could move: for "part of the limit".

Measured once in a run, for each file system, with direct I/O, so that no page cache helps, and as many requests at once as a fast
disk wants. A file system in memory has no disk: there the copy of memory is all there is, and what is moved counts as cached.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from zckpt.storage.descriptors import is_in_memory

SIZE, BLOCK, DEPTH = 2 << 30, 4 << 20, 8
_Place = TypeVar("_Place")


@dataclass(frozen=True)
class Limits:
    """Bytes per second.

    Attributes:
        read: from the disk, one file from its begin to its end.
        write: to the disk, likewise, until it is durable.
        both_read: from the disk while it is also written to.
        both_write: to the disk while it is also read from.
        copy: from memory to memory, by all processors.
    """

    read: float
    write: float
    both_read: float
    both_write: float
    copy: float

    def least(self, *, read: int = 0, written: int = 0, cached: int = 0) -> float:
        """Seconds in which bytes could move, all at the same time as far as that helps.

        Args:
            read: bytes that come from the disk.
            written: bytes that go to the disk.
            cached: bytes that are in memory and are only read there, or go to memory.
        """
        apart = read / self.read + written / self.write
        together = min(read / self.both_read, written / self.both_write)
        rest = (read - together * self.both_read) / self.read + (written - together * self.both_write) / self.write
        return max(min(apart, together + rest), cached / 2 / self.copy)  # a copy reads a byte, and writes it


def limits(place: Path) -> Limits:
    """Of the file system that a directory is on, and of memory; a file system is measured once."""
    disk = os.stat(place).st_dev
    if disk not in _known:
        # a child's peak memory starts from its parent's, so this one stays small
        script = [
            sys.executable,
            __file__,
            str(place),
        ]
        _known[disk] = Limits(**json.loads(subprocess.run(script, check=True, capture_output=True).stdout))
    return _known[disk]


_known: dict[int, Limits] = {}


def least_time(place: Path, *, read: int, written: int, cold: bool = False) -> float:
    """Seconds in which a conversion's bytes could move.

    Args:
        place: a directory on the file system that it reads and writes.
        read: bytes of its sources.
        written: bytes of its output.
        cold: nothing of the sources is in the page cache; by default all is, of what memory has room for.
    """
    able = limits(place)
    fd = os.open(place, os.O_RDONLY)
    try:
        if is_in_memory(fd):
            return able.least(cached=read + written)
    finally:
        os.close(fd)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    from_disk = read if cold else max(read - memory, 0)
    return able.least(read=from_disk, written=written, cached=read - from_disk)


def _measured(work: Path) -> Limits:
    path = work / "limits"
    copy = _copying()
    try:
        try:
            wrote = _timed(lambda: _write(path))
        except OSError:  # no direct I/O
            return Limits(copy, copy, copy / 2, copy / 2, copy)
        read = _timed(lambda: _read(path))
        rates: dict[str, float] = {}
        with _meanwhile(lambda: rates.update(read=_timed(lambda: _read(path)))):
            rates["write"] = _timed(lambda: _write(path.with_name("limits2")))
        return Limits(read, wrote, rates["read"], rates["write"], copy)
    finally:
        path.unlink(missing_ok=True)
        path.with_name("limits2").unlink(missing_ok=True)


def _timed(job: Callable[[], None]) -> float:
    began = time.perf_counter()
    job()
    return SIZE / (time.perf_counter() - began)


@contextmanager
def _meanwhile(job: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=job)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def in_parts(wanted: Iterable[_Place], move: Callable[[mmap.mmap, _Place], object]) -> None:
    """Calls `move` with a buffer of `BLOCK` bytes and a place, for every place, on `DEPTH` threads."""
    places, lock = iter(wanted), threading.Lock()
    failed: list[OSError] = []

    def work() -> None:
        buffer = mmap.mmap(-1, BLOCK)
        buffer.write(os.urandom(BLOCK))
        while not failed:
            with lock:
                at = next(places, None)
            if at is None:
                return
            try:
                move(buffer, at)
            except OSError as error:
                failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(DEPTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _write(path: Path) -> None:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    try:
        if is_in_memory(fd):  # some take direct I/O, which is not a test of them
            raise OSError("a file system in memory")
        os.posix_fallocate(fd, 0, SIZE)
        in_parts(range(0, SIZE, BLOCK), lambda buffer, at: os.pwritev(fd, [buffer], at))
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        in_parts(range(0, SIZE, BLOCK), lambda buffer, at: os.preadv(fd, [buffer], at))
    finally:
        os.close(fd)


def _copying() -> float:
    """Bytes per second that all processors together copy from memory to memory."""
    size, rounds, count = 128 << 20, 8, os.cpu_count() or 1
    buffers = [(mmap.mmap(-1, size), mmap.mmap(-1, size)) for _ in range(count)]
    ends = [[ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in pair] for pair in buffers]
    for pair in ends:
        ctypes.memset(pair[0], 1, size)
        ctypes.memset(pair[1], 2, size)

    def work(to: int, source: int) -> None:
        for _ in range(rounds):
            ctypes.memmove(to, source, size)

    threads = [threading.Thread(target=work, args=pair) for pair in ends]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return count * rounds * size / (time.perf_counter() - began)


if __name__ == "__main__":
    print(json.dumps(asdict(_measured(Path(sys.argv[1])))))
