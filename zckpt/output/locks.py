"""Locks a directory by a file in it. The lock ends with its process.

For work directories and for the scratch directory of a push.
"""

from __future__ import annotations

import contextlib
import fcntl
import os


def take(path: str) -> int:
    """Locks a file, and makes it if it is missing. The lock lasts until `release`, or until all processes that have it open end.

    Returns:
        The lock's descriptor, for `release`.

    Raises:
        BlockingIOError: another process holds the lock; the text names it if it is known.
        FileNotFoundError: the directory or the file was removed meanwhile, so the lock would keep no process out. Try again.
        OSError: the file system has no locks, or the file cannot be made.
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
        raise BlockingIOError(holder or "its lock is held") from error
    except BaseException:
        os.close(lock)
        raise
    return lock


def release(lock: int) -> None:
    """Unlocks and closes what `take` returned.

    Closing alone is not enough: a child that was forked meanwhile, such as a worker of a DataLoader, has the same open file.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        os.close(lock)
