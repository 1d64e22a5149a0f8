"""Boards: places where processes leave each other short notes. Without a server of ours: torch's store, or a directory.

For `together`. A note has a key and is put there whole; who looks for one that is not there yet gets None, and looks again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from datetime import timedelta
from stat import S_ISDIR
from typing import Any, Protocol

from zckpt.base.errors import OutputError, UsageError

GONE = "a place where processes meet that went away"


class Board(Protocol):
    """What both kinds can do."""

    def open(self) -> None:
        """Makes it, empty; one process does so."""

    def put(self, key: str, note: bytes) -> bool:
        """Leaves a note, in place of an earlier one; False where there is no board yet."""

    def get(self, key: str) -> bytes | None:
        """The note, if it is there."""

    def drop(self, key: str) -> None:
        """Takes a note off."""

    def close(self) -> None:
        """Removes the board; the process that made it does so, as the last one."""


class StoreBoard:
    """Notes in the key-value store of torch.distributed, which torchrun's agent holds, or else rank 0.

    Args:
        host: where the store is.
        port: of it there.
        prefix: of all keys.
        serve: whether this process holds the store.
        within_s: how long to try to reach it.
    """

    def __init__(self, host: str, port: int, prefix: str, *, serve: bool, within_s: float) -> None:
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]
        except ImportError as error:
            raise UsageError(
                "processes of torchrun in an environment without torch", found=str(error),
                remedy="Install torch, or start them with srun; or take RANK out of the environment to work alone.",
            ) from error  # fmt: skip
        self._prefix = prefix
        try:
            self._store: Any = TCPStore(
                host, port, is_master=serve, timeout=timedelta(seconds=within_s), wait_for_workers=False
            )
        except RuntimeError as error:
            raise OutputError(
                "a store of torch.distributed that cannot be reached", found=f"{host}:{port}, {_first_line(error)}",
                remedy="Nothing was changed. Check MASTER_ADDR and MASTER_PORT, and that process 0 has started.",
            ) from error  # fmt: skip

    def open(self) -> None:
        """Nothing is to be made."""

    def put(self, key: str, note: bytes) -> bool:
        """Leaves a note."""
        with _told():
            self._store.set(self._prefix + key, note)
        return True

    def get(self, key: str) -> bytes | None:
        """The note, if it is there. It looks and does not wait: a store that waits serves nobody else."""
        with _told():
            return bytes(self._store.get(self._prefix + key)) if self._store.check([self._prefix + key]) else None

    def drop(self, key: str) -> None:
        """Takes a note off."""
        with _told():
            self._store.delete_key(self._prefix + key)

    def close(self) -> None:
        """Nothing is to be removed."""


@contextlib.contextmanager
def _told() -> Any:
    try:
        yield
    except RuntimeError as error:
        raise OutputError(
            GONE, found=f"torch.distributed's store: {_first_line(error)}",
            remedy="The process that held it has ended, or its machine. Nothing was published; the same command goes on.",
        ) from error  # fmt: skip


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class DirectoryBoard:
    """Notes as files of a directory that all processes see. It is the owner's own.

    Args:
        path: of the directory.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._number = 0

    def open(self) -> None:
        """Makes the directory, instead of one that an earlier run left."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        if self._is_ours():
            old = f"{self.path}-{os.urandom(4).hex()}"  # under its own name others may still be putting notes into it
            os.rename(self.path, old)
            shutil.rmtree(old)
        os.mkdir(self.path, 0o700)

    def put(self, key: str, note: bytes) -> bool:
        """Leaves a note: who looks sees all of it or nothing."""
        if not self._is_ours():
            return False
        self._number += 1
        fresh = os.path.join(self.path, f".{os.uname().nodename}-{os.getpid()}-{id(self)}-{self._number}")
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(note)
            os.rename(fresh, self._place(key))
        except FileNotFoundError:
            return False
        return True

    def get(self, key: str) -> bytes | None:
        """The note, if it is there."""
        try:
            with open(self._place(key), "rb") as file:
                return file.read()
        except FileNotFoundError:
            with contextlib.suppress(
                OSError
            ):  # a network file system looks anew for names when the directory is opened
                os.close(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            return None

    def drop(self, key: str) -> None:
        """Takes a note off."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._place(key))

    def close(self) -> None:
        """Removes the directory."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _place(self, key: str) -> str:
        return os.path.join(self.path, key.replace("/", "."))

    def _is_ours(self) -> bool:
        """Whether the directory is there.

        Raises:
            OutputError: it is somebody else's.
        """
        try:
            stat = os.lstat(self.path)
        except FileNotFoundError:
            return False
        if not S_ISDIR(stat.st_mode) or stat.st_uid != os.geteuid():
            raise OutputError(
                "something that stands where processes meet", file=self.path,
                remedy="Nothing was changed. Move it away, or choose another OUT.",
            )  # fmt: skip
        return True
