"""The private directory beside an output: who may use it, and what a dead run left in it.

For `publish`. It is `.OUT.zckpt`, so that the next run finds it. Whoever holds the lock in it owns it; a lock dies with its
process, so what nobody holds was left by a dead run. Where the file system has no locks, every run has a directory of its
own, with its process in the name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from stat import S_ISDIR

from zckpt.errors import OutputError

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class PrivateDirectory:
    """The private directory of one run.

    Args:
        out: the output's path.

    Attributes:
        path: of the directory.
        is_locked: whether nobody else can use it, and the next run can find it.
        was_there: whether a dead run left it.
    """

    def __init__(self, out: str) -> None:
        self.path = directory_for(out)
        self.is_locked = False
        self.was_there = False
        self._lock = -1

    def take(self) -> None:
        """Makes the directory, or takes it over.

        Raises:
            OutputError: another run has it, or it is not ours to use.
        """
        while self._lock < 0:
            try:
                self.was_there = not _made(self.path)
                self._lock = self._take_lock()
            except FileNotFoundError:  # the run that had it has ended, and removed it
                continue
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                if not self.was_there:
                    self._remove()
                _remove_dead(self.path)
                self.path += f"-{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}"
                os.mkdir(self.path, 0o700)
                self.was_there = False
                return
        self.is_locked = True

    def _take_lock(self) -> int:
        import fcntl

        path = os.path.join(self.path, "lock")
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), os.stat(path)):
                raise FileNotFoundError(path)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        except BlockingIOError as error:
            holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
            os.close(lock)
            raise OutputError(
                "an output that another run is writing", file=self.path, found=holder or "its lock is held",
                remedy="Nothing was changed. Wait until that run has ended, or choose another OUT.",
            ) from error  # fmt: skip
        except BaseException:
            os.close(lock)
            raise
        return lock

    def release(self, *, remove: bool) -> None:
        """Lets go of the directory; removes it before, or leaves it to the next run."""
        if remove:
            self._remove()
        if self._lock >= 0:
            lock, self._lock = self._lock, -1
            with contextlib.suppress(OSError):
                os.close(lock)

    def _remove(self) -> None:
        """The lock goes last, so that nobody takes over half a directory."""
        for name in ("files", "old"):
            shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)
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
        "something that stands where work is kept until it is complete", file=path,
        found=f"a directory of user {stat.st_uid}" if S_ISDIR(stat.st_mode) else "no directory",
        remedy="Nothing was changed. Move it away, or choose another OUT.",
    )  # fmt: skip


def directory_for(out: str) -> str:
    """Where work on an output lies until it is complete."""
    parent, name = os.path.split(os.path.abspath(out))
    return os.path.join(parent, f".{name}.zckpt")


def board_for(out: str, job: str) -> str:
    """Where several processes that write an output leave each other notes."""
    return f"{directory_for(out)}-together-{job}"


def remove_boards(out: str, but: str = "") -> None:
    """Removes what earlier runs of several processes left; for who holds the output's lock."""
    parent, name = os.path.split(board_for(out, ""))
    for entry in os.listdir(parent):
        path = os.path.join(parent, entry)
        if entry.startswith(name) and path != but and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)


def is_unfinished(out: str) -> bool:
    """Whether an earlier run left work on this output."""
    return os.path.isfile(os.path.join(directory_for(out), "journal"))


def left_bytes(out: str) -> int:
    """Bytes on disk that an earlier run left: they will be used, or removed."""
    total = 0
    for root, _, names in os.walk(directory_for(out)):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total


def _remove_dead(path: str) -> None:
    """Removes the directories that processes of this machine left where there are no locks, and that have ended since."""
    parent, name = os.path.split(path)
    pattern = re.compile(re.escape(f"{name}-{os.uname().nodename}-") + r"(\d+)-[0-9a-f]{8}")
    for entry in os.listdir(parent):
        match = pattern.fullmatch(entry)
        if match is None:
            continue
        try:
            os.kill(int(match[1]), 0)
        except ProcessLookupError:
            shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)
        except OSError:
            pass
