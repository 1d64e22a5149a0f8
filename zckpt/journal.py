"""What a run has done so far, so that the next one need not do it again.

For `publish`. A journal is a text file of JSON lines: first the job, then each finished file as soon as it is durable, at
last that all is complete. A crash can only cut its last line short, which is then ignored. The job is a fingerprint of all
that decides the output's bytes: files of another job are of no use. Lines about files are left to the file system to write in its
own time: what a machine's crash takes of them is done again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Finished:
    """A file that is complete.

    Attributes:
        path: relative to the output.
        nbytes: its size.
        crc32: of the whole file.
        overflows: tensor name -> (elements whose cast overflowed, the largest of them), of tensors in this file.
    """

    path: str
    nbytes: int
    crc32: int
    overflows: Mapping[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])


class Journal:
    """The journal of one job.

    Args:
        path: of the file.
        job: fingerprint; what stands in the file for another job is forgotten.

    Attributes:
        finished: by path, what is recorded as complete.
        complete: the mark that the run was about to give the output its name; None before.
    """

    def __init__(self, path: str, job: str) -> None:
        self.path = path
        self.job = job
        self.finished: dict[str, Finished] = {}
        self.complete: int | None = None
        lines = _lines(path)
        if next(lines, None) == {"job": job}:
            for line in lines:
                self._take(line)
        self._fd = -1

    def _take(self, line: dict[str, object]) -> None:
        match line:
            case {"path": str(path), "bytes": int(nbytes), "crc32": int(crc), "overflows": dict(overflows)}:
                lost = {str(name): (int(n), float(x)) for name, (n, x) in overflows.items()}
                self.finished[path] = Finished(path, nbytes, crc, lost)
            case {"complete": int(mark)}:
                self.complete = mark

    def begin(self, kept: Mapping[str, Finished]) -> None:
        """Writes the journal anew, with what is kept of an earlier run."""
        self.finished = {}
        self.complete = None
        fresh = f"{self.path}.new"
        self._fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._write({"job": self.job})
        for file in kept.values():
            self.add(file)
        os.fsync(self._fd)
        os.rename(fresh, self.path)

    def add(self, file: Finished) -> None:
        """Records a file that is complete and durable."""
        overflows = {name: list(lost) for name, lost in file.overflows.items()}
        self._write({"path": file.path, "bytes": file.nbytes, "crc32": file.crc32, "overflows": overflows})
        self.finished[file.path] = file

    def completed(self, mark: int) -> None:
        """Records that everything is complete, and is about to get its name."""
        self._write({"complete": mark})
        os.fsync(self._fd)

    def _write(self, line: dict[str, object]) -> None:
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):  # what was synced is there
                os.close(fd)


def _lines(path: str) -> Iterator[dict[str, object]]:
    """The whole lines of the file; none where there is no such file."""
    try:
        with open(path, "rb") as file:
            for text in file:
                line = json.loads(text) if text.endswith(b"\n") else None
                if not isinstance(line, dict):
                    return
                yield line
    except (OSError, ValueError, RecursionError):
        return
