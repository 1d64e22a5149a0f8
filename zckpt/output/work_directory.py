"""The work directory of an output: makes it, locks it, and finds those that dead runs left.

Its name is `.OUT.zckpt`, so that the next run finds it. The process that holds the lock in it owns it. A lock ends with its
process, so a directory with a free lock was left by a dead run. On file systems without locks, each run has a
directory of
its own, with its process in the name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from stat import S_ISDIR

from zckpt.base.errors import OutputError
from zckpt.output import journal, locks
from zckpt.storage.output_places import beside, directory_for, inside

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class WorkDirectory:
    """The work directory of one run.

    Args:
        out: the output's path.
        path: of the directory, if it is not the usual one.

    Attributes:
        path: of the directory.
        files: where the output's files are staged.
        aside: where a commit moves what it replaces.
        journal: the journal's path.
        is_locked: whether this process holds its lock, so that the next run can find it and no other run can use it.
        was_there: whether a dead run left it.
        dead: directories of runs that have ended, on file systems without locks.
    """

    def __init__(self, out: str, path: str = "") -> None:
        self._use(path or directory_for(out))
        self.is_locked = False
        self.was_there = False
        self.dead: tuple[str, ...] = ()
        self._lock = -1

    def _use(self, path: str) -> None:
        self.path = path
        self.files = os.path.join(path, "files")
        self.aside = os.path.join(path, "aside")
        self.journal = os.path.join(path, "journal")

    def take(self) -> None:
        """Makes the directory, or takes it over. Raises OutputError if another run uses it, or it belongs to another
        user.
        """
        while self._lock < 0:
            try:
                self.was_there = not _make_or_check(self.path)
                self._lock = locks.take(os.path.join(self.path, "lock"))
            except FileNotFoundError:  # the run that had it ended and removed it
                continue
            except BlockingIOError as error:
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
        from zckpt.storage import processes

        self._use(f"{common}-{processes.this_process()}-{os.urandom(4).hex()}")
        os.mkdir(self.path, 0o700)
        self.was_there = False

    def release(self, *, remove: bool) -> None:
        """Releases the lock; with `remove`, removes the directory first."""
        if remove:
            self.remove()
        if self._lock >= 0:
            lock, self._lock = self._lock, -1
            locks.release(lock)

    def remove(self) -> None:
        """Removes the directory, unless an unfinished commit needs its files.

        Removes the lock last, so that no run takes over half a directory.
        """
        try:
            if journal.read(self.journal).seal is not None:
                return
        except OutputError:  # zckpt did not write the journal, so it does not know these files
            return
        for directory in (self.files, self.aside):  # after a power failure, `aside` may still have what was deleted
            shutil.rmtree(directory, ignore_errors=True)
        for name in ("journal.new", "journal", "lock"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, name))
        with contextlib.suppress(OSError):
            os.rmdir(self.path)


def _make_or_check(path: str) -> bool:
    """Makes the directory, or checks that an existing one belongs to this user: another user could put links in it.
    Returns whether it was made. Raises OutputError if it belongs to another user, or is not a directory.
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
    """Work directories that dead processes left on a file system without locks."""
    parent, name = os.path.split(path)
    found: list[str] = []
    from zckpt.storage import processes

    for entry in os.listdir(parent):
        text, _, _ = entry.removeprefix(f"{name}-").rpartition("-")
        process = processes.parse(text) if entry.startswith(f"{name}-") else None
        if process is not None and process.is_dead():
            found.append(os.path.join(parent, entry))
    return found


def left_by_others(out: str, but: str) -> list[str]:
    """Work directories of earlier runs in the other place: OUT was a mount point then and is not now, or the reverse."""
    return [
        path for path in (beside(out), inside(out)) if path != but and os.path.isfile(os.path.join(path, "journal"))
    ]


def is_unfinished(out: str) -> bool:
    """Whether an earlier run left work on this output."""
    return os.path.isfile(os.path.join(directory_for(out), "journal")) or bool(left_by_others(out, directory_for(out)))


def left_bytes(out: str) -> int:
    """Bytes on disk that an earlier run left; a new run uses or removes them."""
    total = 0
    for root, _, names in os.walk(directory_for(out)):
        for name in names:
            with contextlib.suppress(OSError):
                stat = os.lstat(os.path.join(root, name))
                total += stat.st_blocks * 512 if stat.st_nlink == 1 else 0
    return total
