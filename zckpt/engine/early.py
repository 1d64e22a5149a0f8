"""Reads large files on a thread while Python still finds out what they hold; what was seen need not be read again.

For `verify --deep`. Imports little, because it begins before everything else is imported: on the command line (`begin`) before
the command line's own modules are. It takes the CRC of each window of a file, and whether its numbers would all be finite as
fp32, which most large tensors are. Whatever stops it is not an error: what it has not read is read later, and reported then.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from zckpt.base.dataclass import dataclass
from zckpt.base.pace import DEFAULT_PACE, Pace, gives_back, thread_count

try:
    from zckpt._core import EarlyReader
except ImportError:  # pragma: no cover - depends on the build; nothing is read early
    EarlyReader = None  # type: ignore[assignment,misc]

WINDOW = 1 << 20
LEAST_BYTES = 64 << 20
"""The least bytes of all files together: fewer are read before a thread has started."""

_FILE = struct.Struct("=qQ")


@dataclass(frozen=True, slots=True)
class EarlyFile:
    """What was seen of a file, from its first window on.

    Attributes:
        crcs: of its windows.
        finite: 1 for each window that has no NaN or infinity, if it were fp32 from its first byte on.
    """

    crcs: array[int]
    finite: bytes

    def run(self, start: int, stop: int) -> tuple[int, int]:
        """The whole windows within these bytes that were read, as (start, stop)."""
        low = -(-start // WINDOW) * WINDOW
        return low, max(low, min(stop // WINDOW, len(self.crcs)) * WINDOW)

    def parts(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(byte offset, bytes, CRC-32) of the windows of a run."""
        return [(at, WINDOW, self.crcs[at // WINDOW]) for at in range(start, stop, WINDOW)]

    def is_finite(self, start: int, stop: int) -> bool:
        """Whether these bytes were read, and hold neither NaN nor infinity if they are fp32."""
        first, last = start // WINDOW, -(-stop // WINDOW)
        return start % 4 == 0 and last <= len(self.finite) and self.finite.find(0, first, last) < 0


class EarlyReads(AbstractContextManager["EarlyReads"]):
    """Reads files from when it is made until `stop`, or the end of a `with` block.

    Args:
        paths: of the files, in the order in which they are read; those that cannot be opened are left out.
        pace: nothing is read early if only one thread may work, at a given rate, or without filling the page cache.
    """

    def __init__(self, paths: Iterable[str], pace: Pace) -> None:
        self._files: list[tuple[int, os.stat_result]] = []
        self._reader: EarlyReader | None = None
        paths = self.paths = list(paths)
        if EarlyReader is None or pace["bytes_per_s"] is not None or thread_count(pace["threads"]) < 2:
            return
        for path in paths:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:
                continue
            self._files.append((fd, os.fstat(fd)))
        total = sum(stat.st_size for _, stat in self._files)
        if total >= LEAST_BYTES and not gives_back(pace["keep_cache"], total):
            self._reader = EarlyReader(b"".join(_FILE.pack(fd, stat.st_size) for fd, stat in self._files), WINDOW)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> Mapping[tuple[tuple[int, int, int], int], EarlyFile]:
        """Ends the reading. (identity as in `FileStore`, size) of each file that did not change -> what was seen of it."""
        seen: dict[tuple[tuple[int, int, int], int], EarlyFile] = {}
        packed, finite = (b"", b"") if self._reader is None else self._reader.stop()
        crcs, first = array("I", packed), 0
        for fd, stat in self._files:
            last, after = first - (-stat.st_size // WINDOW), os.fstat(fd)
            os.close(fd)
            if (after.st_size, after.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns) and first < len(crcs):
                identity = (stat.st_dev, stat.st_ino, stat.st_mtime_ns)
                seen[identity, stat.st_size] = EarlyFile(crcs[first:last], finite[first:last])
            first = last
        self._reader, self._files = None, []
        return seen


_begun: EarlyReads | None = None


def begin(path: str) -> None:
    """Begins to read the files that `verify` of this path would read; `begun` returns the reader."""
    global _begun
    _begun = EarlyReads(likely_files(path, None), DEFAULT_PACE)


def begun(paths: Sequence[str], pace: Pace) -> EarlyReads:
    """The reader of these files: the one that the command line has begun, or a new one."""
    global _begun
    found, _begun = _begun, None
    if found is not None:
        if found.paths == list(paths):
            return found
        found.stop()
    return EarlyReads(paths, pace)


def likely_files(path: str, tag: str | None) -> list[str]:
    """The torch files of the save that is probably meant, the largest first; a wrong guess costs what was read."""
    try:
        if tag is None and os.path.isfile(pointer := os.path.join(path, "latest")):
            with open(pointer, encoding="utf-8") as file:
                tag = file.read(1024).strip()
        with os.scandir(os.path.join(path, os.path.basename(tag or ""))) as entries:
            files = [
                (entry.stat().st_size, entry.path)
                for entry in entries
                if entry.name.endswith(".pt") and entry.is_file()
            ]
    except (OSError, ValueError):
        return []
    return [path for _, path in sorted(files, reverse=True)]
