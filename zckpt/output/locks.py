"""A lock on a file in a directory, which dies with its process: who holds it owns the directory.

For work directories and for the scratch directory of a push.
"""

from __future__ import annotations

import contextlib
import fcntl
import os


class HeldError(Exception):
    """Another process holds the lock; the text says which, if it is known."""


def take(path: str) -> int:
    """Locks a file, which is made where there is none, until `release`, or until every process that has it has ended.

    Raises:
        HeldError: another process has it.
        FileNotFoundError: the directory, or the file that was locked, has gone away meanwhile: the lock of a file that has
            no name any more keeps nobody out. Whoever wants it begins again.
        OSError: there are no locks here, or the file cannot be made.
    """
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
        raise HeldError(holder or "its lock is held") from error
    except BaseException:
        os.close(lock)
        raise
    return lock


def release(lock: int) -> None:
    """Unlocks and closes what `take` returned.

    A child that was forked meanwhile, such as a worker of a DataLoader, has the same open file: without unlocking, it would
    keep the lock until it ends.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        os.close(lock)
