"""The journal of a run: the files that it finished, and the seal of its commit.

A journal is a text file of JSON lines: first the job, then each finished file as soon as it is durable, then the seal. A
crash can only cut its last line short; `read` ignores that line. The job is a fingerprint of everything that the output's bytes
depend on. A run uses the finished files only of its own job, but must finish a sealed commit of any job. Lines about files are
not synced: if the machine crashes, files with lost lines are made again. A seal is synced before any name is
changed. Its
end is synced before the work directory is used on, by this run or by the next; where the directory is removed next, a seal that
has come back after a crash is of a commit with all steps done, and doing them again does no harm.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, field
from typing import Any, Literal

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError
from zckpt.core.plan import WrittenFile
from zckpt.storage.fsync_queue import make_durable
from zckpt.storage.identity import stays_inside


@dataclass(frozen=True, slots=True)
class Seal:
    """A complete output, and the steps of its commit.

    Paths are relative to the output's directory; for a single file, to the directory that the file is in. By inode numbers,
    `Commit` recognizes files that another program has put there since; 0 means no file.

    Attributes:
        how: "swap": the staged directory and the output's are exchanged. "order": files are moved one by one.
        single: whether the output is one file.
        staged: inode of the staged directory.
        old: inode of the old output.
        leave: for "order": (path, inode) of the old files and directories that are moved into the work directory first.
        enter: for "order": paths that are moved from the work directory to the output after that.
        deleted: files of the old output, which are deleted last.
        files: (path, bytes, CRC-32) of the new output's files, without its manifest.
    """

    how: Literal["swap", "order"]
    single: bool
    staged: int
    old: int
    leave: tuple[tuple[str, int], ...] = ()
    enter: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    files: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """What a journal says.

    Attributes:
        job: fingerprint of its job; None if there is no journal.
        finished: the finished files, by path.
        seal: of a commit that is not finished; None if there is no such commit.
        done: whether a sealed output of this job got its name.
    """

    job: str | None = None
    finished: dict[str, WrittenFile] = field(default_factory=dict[str, WrittenFile])
    seal: Seal | None = None
    done: bool = False


def read(path: str) -> JournalRecord:
    """A journal; an empty record where there is none, or no whole first line."""
    lines = _lines(path)
    match next(lines, None):
        case {"job": str(job)}:
            pass
        case _:
            return JournalRecord()
    finished: dict[str, WrittenFile] = {}
    seal: Mapping[str, Any] | None = None
    done = False
    for line in lines:
        match line:
            case {"path": str(name), "bytes": int(nbytes), "crc32": int(crc), "overflows": dict(overflows)}:
                lost = {str(tensor): (int(n), float(x)) for tensor, (n, x) in overflows.items()}
                finished[name] = WrittenFile(name, nbytes, crc, lost)
            case {"seal": dict(facts)}:
                seal, done = facts, False
            case {"end": str(end)}:
                seal, done = None, end == "done"
            case _:
                pass
    return JournalRecord(job, finished, None if seal is None else _seal(seal, path), done)


def _seal(facts: Mapping[str, Any], path: str) -> Seal:
    """Checks a seal: a work directory made by an attacker must not move or delete files outside the output. Raises
    OutputError if zckpt did not write the seal.
    """

    def inner(name: object) -> str:
        if not stays_inside(str(name)):
            raise _foreign(path, f"a file elsewhere, {name!r:.80}")
        return str(name)

    try:
        return Seal(
            how="swap" if facts["how"] == "swap" else "order",
            single=bool(facts["single"]),
            staged=int(facts["staged"]),
            old=int(facts["old"]),
            leave=tuple((inner(name), int(inode)) for name, inode in facts["leave"]),
            enter=tuple(map(inner, facts["enter"])),
            deleted=tuple(map(inner, facts["deleted"])),
            files=tuple((inner(name), int(nbytes), int(crc)) for name, nbytes, crc in facts["files"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _foreign(path, f"{error!r:.80}") from error


def _foreign(path: str, found: str) -> OutputError:
    return OutputError(
        "is a journal that zckpt did not write", file=path, found=found,
        remedy="Move the directory that holds it away. Nothing was changed.",
    )  # fmt: skip


class Journal:
    """Writes the journal of one job.

    Args:
        path: of the file.
        job: fingerprint; entries of another job in the file are dropped.

    Attributes:
        finished: the finished files, by path.
        done: whether the output of this job got its name.
    """

    def __init__(self, path: str, job: str) -> None:
        self.path = path
        self.job = job
        record = read(path)
        self.finished: dict[str, WrittenFile] = record.finished if record.job == job else {}
        self.done = record.done and record.job == job
        self._fd = -1

    def begin(self, kept: Collection[WrittenFile] = ()) -> None:
        """Starts a new journal file with the files that are kept of an earlier run."""
        self.finished = {}
        self.done = False
        fresh = f"{self.path}.new"
        self._fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _write(self._fd, {"job": self.job})
        for file in kept:
            self.add(file)
        if kept:  # otherwise a crash loses nothing that the seal's sync does not make durable
            make_durable(self._fd)
        os.rename(fresh, self.path)

    def add(self, file: WrittenFile) -> None:
        """Records a file that is complete and durable."""
        facts = {"path": file.path, "bytes": file.nbytes, "crc32": file.crc32, "overflows": dict(file.overflows)}
        _write(self._fd, facts)
        self.finished[file.path] = file

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):  # lines that were synced are in the file
                os.close(fd)


def write_seal(path: str, seal: Seal) -> None:
    """Appends a seal to a journal, durably."""
    _append(path, {"seal": asdict(seal)}, durable=True)


def end_seal(path: str, end: Literal["done", "withdrawn"], *, durable: bool = True) -> None:
    """Appends the end of a seal: its commit is done, or was undone."""
    _append(path, {"end": end}, durable=durable)


def _append(path: str, line: Mapping[str, object], *, durable: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.write(fd, b"\n")  # ends a last line that a crash cut short
        _write(fd, line)
        if durable:
            make_durable(fd)
    finally:
        os.close(fd)


def _write(fd: int, line: Mapping[str, object]) -> None:
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


def _lines(path: str) -> Iterator[dict[str, object]]:
    """The whole lines of the file that are JSON objects; nothing if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            for text in file:
                with contextlib.suppress(ValueError, RecursionError):
                    line = json.loads(text) if text.endswith(b"\n") else None
                    if isinstance(line, dict):
                        yield line
    except OSError:
        return
