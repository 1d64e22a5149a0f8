"""Where processes leave each other short notes, without a server of ours: torch.distributed's store, or a directory.

For `meeting` and `together`. A note has a key and appears whole. Nobody is notified of one: who waits for it looks again and
again (`wait_for_notes`), for a store that waits serves nobody else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from stat import S_ISDIR
from typing import Any

from zckpt.base.errors import OutputError, UsageError


def wait(condition: Callable[[], bool], within_s: float | None, check: Callable[[], object] | None = None) -> bool:
    """Waits until a condition holds.

    Args:
        condition: is looked at ever less often, at last ten times a second.
        within_s: for so many seconds; None without end.
        check: called between two looks; an error that it raises ends the wait.

    Returns:
        Whether it holds.
    """
    began, pause_s = time.monotonic(), 0.001
    while not condition():
        if within_s is not None and time.monotonic() - began > within_s:
            return False
        if check is not None:
            check()
        time.sleep(pause_s)
        pause_s = min(1.25 * pause_s, 0.1)  # what is waited for is seen at most a quarter later than it comes
    return True


def wait_for_notes(
    rendezvous: Rendezvous,
    keys: Collection[str],
    within_s: float | None,
    *,
    check: Callable[[], object] | None = None,
    valid: Callable[[bytes], bool] = bool,
) -> dict[str, bytes]:
    """Waits for the notes of these keys, and returns those that come in time; notes that are not valid do not count.

    `within_s` and `check` are as for `wait`.
    """
    found: dict[str, bytes] = {}

    def complete() -> bool:
        for key in keys:
            if key not in found and (note := rendezvous.get(key)) is not None and valid(note):
                found[key] = note
        return len(found) == len(keys)

    wait(complete, within_s, check)
    return found


class StoreRendezvous:
    """Notes in a key-value store of torch.distributed.

    Args:
        store: see `tcp_store` and `default_store`.
        prefix: of all keys.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def open(self) -> None:
        """Does nothing: the store is there."""

    def put(self, key: str, note: bytes) -> bool:
        """Leaves a note, in place of an earlier one with its key."""
        with _in_touch():
            self._store.set(self._prefix + key, note)
        return True

    def get(self, key: str) -> bytes | None:
        """The note; None where there is none."""
        with _in_touch():
            return bytes(self._store.get(self._prefix + key)) if self._store.check([self._prefix + key]) else None

    def drop(self, key: str) -> None:
        """Removes a note."""
        with _in_touch():
            self._store.delete_key(self._prefix + key)

    def close(self) -> None:
        """Does nothing: the store ends with the process that holds it."""


def tcp_store(host: str, port: int, *, serve: bool, within_s: float) -> Any:
    """The store that torchrun's agent holds, or else rank 0.

    Args:
        host: where the store is.
        port: of it there.
        serve: whether this process holds the store.
        within_s: how long to try to reach it.

    Raises:
        UsageError: torch is not installed. OutputError: the store cannot be reached.
    """
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
    except ImportError as error:
        raise UsageError(
            "processes of torchrun need torch, which cannot be imported", found=str(error),
            remedy="Install torch, or start them with srun; or take RANK out of the environment to work alone.",
        ) from error  # fmt: skip
    try:
        return TCPStore(host, port, is_master=serve, timeout=timedelta(seconds=within_s), wait_for_workers=False)
    except RuntimeError as error:
        raise OutputError(
            "the store of torch.distributed cannot be reached", found=f"{host}:{port}, {_first_line(error)}",
            remedy="Nothing was changed. Check MASTER_ADDR and MASTER_PORT, and that process 0 has started.",
        ) from error  # fmt: skip


def default_store() -> Any:
    """The store that this process's default process group was made with. It is kept while something refers to it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def own_connection(store: Any) -> Any:
    """A store with the same notes, over a connection that no other thread waits on.

    Source: torch 2.6 to 2.13, distributed/distributed_c10d.py; stores clone themselves from some version after 2.8 on.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    if hasattr(store, "clone"):
        return store.clone()
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, TCPStore):
        return store
    space = bytes(store.compare_set("zckpt space", "", uuid.uuid4().hex)).decode()  # the prefixes are not to be read
    return PrefixStore(f"zckpt {space}", TCPStore(inner.host, inner.port, is_master=False, timeout=inner.timeout))  # type: ignore[attr-defined]


@contextlib.contextmanager
def _in_touch() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise OutputError(
            "lost touch with the other processes", found=f"torch.distributed's store: {_first_line(error)}",
            remedy="The process that holds the store (rank 0 or torchrun) may have ended, or is out of reach. See what it "
            "printed, and start again. Nothing was published.",
        ) from error  # fmt: skip


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class DirectoryRendezvous:
    """Notes as files of a directory that all processes see and nobody else may open. `path`: of the directory."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._number = 0

    def open(self) -> None:
        """Makes the directory, instead of one that an earlier run left; one process does so."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        if self._is_ours():
            old = f"{self.path}-{os.urandom(4).hex()}"  # under its own name others may still be putting notes into it
            os.rename(self.path, old)
            shutil.rmtree(old)
        os.mkdir(self.path, 0o700)

    def put(self, key: str, note: bytes) -> bool:
        """Leaves a note; readers see all of it or nothing. Returns False if the rendezvous is not open yet."""
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
        """The note; None where there is none."""
        try:
            with open(self._place(key), "rb") as file:
                return file.read()
        except FileNotFoundError:
            # A network file system looks again for names when the directory is opened.
            with contextlib.suppress(OSError):
                os.close(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            return None

    def drop(self, key: str) -> None:
        """Removes a note."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._place(key))

    def close(self) -> None:
        """Removes the directory; the process that made it does so, as the last one."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _place(self, key: str) -> str:
        return os.path.join(self.path, key.replace("/", "."))

    def _is_ours(self) -> bool:
        """Returns whether the directory exists. Raises OutputError if it is not a directory, or another user's."""
        try:
            stat = os.lstat(self.path)
        except FileNotFoundError:
            return False
        if not S_ISDIR(stat.st_mode) or stat.st_uid != os.geteuid():
            raise OutputError(
                "is in the way: the processes meet in a directory of this name", file=self.path,
                found="something else, or another user's directory",
                remedy="Nothing was changed. Move it away, or choose another OUT.",
            )  # fmt: skip
        return True


Rendezvous = StoreRendezvous | DirectoryRendezvous
"""A place where processes leave each other notes."""
