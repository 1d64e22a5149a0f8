"""The work directory of an output: who may use it, and what dead runs left in it.

It is `.OUT.zckpt`, so that the next run finds it. Whoever holds the lock in it owns it; a lock dies with its process, so what
nobody holds was left by a dead run. Where the file system has no locks, every run has a directory of its own, with its
process in the name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from stat import S_ISDIR

from zckpt.base.errors import OutputError
from zckpt.output import journal, locks
from zckpt.storage import processes
from zckpt.storage.output_places import beside, directory_for, inside

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class WorkDirectory:
    """The work directory of one run.

    Args:
        out: the output's path.
        path: of the directory, where it is not the usual one.

    Attributes:
        path: of the directory.
        is_locked: whether nobody else can use it, and the next run can find it.
        was_there: whether a dead run left it.
        dead: directories of runs that have ended, where there are no locks.
    """

    def __init__(self, out: str, path: str = "") -> None:
        self.path = path or directory_for(out)
        self.is_locked = False
        self.was_there = False
        self.dead: tuple[str, ...] = ()
        self._lock = -1

    @property
    def files(self) -> str:
        """Where the output's files are staged."""
        return os.path.join(self.path, "files")

    @property
    def aside(self) -> str:
        """Where lies what a commit replaces."""
        return os.path.join(self.path, "aside")

    @property
    def journal(self) -> str:
        """The journal's path."""
        return os.path.join(self.path, "journal")

    def take(self) -> None:
        """Makes the directory, or takes it over.

        Raises:
            OutputError: another run has it, or it is not ours to use.
        """
        while self._lock < 0:
            try:
                self.was_there = not _made(self.path)
                self._lock = locks.take(os.path.join(self.path, "lock"))
            except FileNotFoundError:  # the run that had it has ended, and removed it
                continue
            except locks.HeldError as error:
                raise OutputError(
                    "another run is writing this output", file=self.path, found=str(error),
                    remedy="Wait until that run has ended, or choose another OUT. Nothing was changed.",
                ) from error  # fmt: skip
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                self._take_without_locks()
                return
        self.is_locked = True

    def _take_without_locks(self) -> None:
        common = self.path
        if self.was_there:
            self.dead = tuple(_of_dead_processes(common))
        else:
            self.remove()
            self.dead = tuple(_of_dead_processes(common))
        self.path = f"{common}-{processes.this_process()}-{os.urandom(4).hex()}"
        os.mkdir(self.path, 0o700)
        self.was_there = False

    def release(self, *, remove: bool) -> None:
        """Lets go of the directory; removes it before, or leaves it to the next run."""
        if remove:
            self.remove()
        if self._lock >= 0:
            lock, self._lock = self._lock, -1
            locks.release(lock)

    def remove(self) -> None:
        """Removes the directory, unless a commit that is not complete needs what lies in it.

        The lock goes last, so that nobody takes over half a directory.
        """
        try:
            if journal.read(self.journal).seal is not None:
                return
        except OutputError:  # nobody knows what lies here
            return
        shutil.rmtree(self.files, ignore_errors=True)
        for name in ("journal.new", "journal", "lock"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, name))
        with contextlib.suppress(OSError):
            os.rmdir(self.path)


def _made(path: str) -> bool:
    """Makes the directory, or makes sure of the one that is there: who else writes to it could lead us elsewhere.

    Raises:
        OutputError: it is not ours.
    """
    try:
        os.mkdir(path, 0o700)
        return True
    except FileExistsError:
        pass
    stat = os.lstat(path)
    if S_ISDIR(stat.st_mode) and stat.st_uid == os.geteuid():
        return False
    raise OutputError(
        "zckpt needs this name for its work directory", file=path,
        found=f"a directory of user {stat.st_uid}" if S_ISDIR(stat.st_mode) else "something that is not a directory",
        expected="nothing, or a directory of your own",
        remedy="Move it away, or choose another OUT. Nothing was changed.",
    )  # fmt: skip


def _of_dead_processes(path: str) -> list[str]:
    """The directories that processes left where there are no locks, and that have certainly ended."""
    parent, name = os.path.split(path)
    found: list[str] = []
    for entry in os.listdir(parent):
        text, _, _ = entry.removeprefix(f"{name}-").rpartition("-")
        process = processes.parse(text) if entry.startswith(f"{name}-") else None
        if process is not None and process.is_dead():
            found.append(os.path.join(parent, entry))
    return found


def left_by_others(out: str, but: str) -> list[str]:
    """Other places where an earlier run may have left work on this output: it was a mount point then, or was none."""
    return [
        path for path in (beside(out), inside(out)) if path != but and os.path.isfile(os.path.join(path, "journal"))
    ]


def is_unfinished(out: str) -> bool:
    """Whether an earlier run left work on this output."""
    return os.path.isfile(os.path.join(directory_for(out), "journal")) or bool(left_by_others(out, directory_for(out)))


def left_bytes(out: str) -> int:
    """Bytes on disk that an earlier run left: they will be used, or removed."""
    total = 0
    for root, _, names in os.walk(directory_for(out)):
        for name in names:
            with contextlib.suppress(OSError):
                stat = os.lstat(os.path.join(root, name))
                total += stat.st_blocks * 512 if stat.st_nlink == 1 else 0
    return total
