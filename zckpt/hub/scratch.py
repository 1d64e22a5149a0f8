"""The scratch directory of a push: shards that are not sent yet, and a journal of the hashes of all that were made.

For `transfer`. Each page has its own directory, under a lock; a shard is removed as soon as it is sent. The journal has one
line for each shard, written and synced when the shard is made, before any of it is sent. So an interrupted push knows the
hashes of all shards it made, asks the hub which of them it has, and makes only the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Collection, Iterator
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError, UsageError
from zckpt.output import locks
from zckpt.output.durable import make_directories, replace_file, sync
from zckpt.storage.fsync_queue import make_durable

_JOURNAL, _LOCK, _SPARE = "journal.jsonl", "lock", "spare"


@dataclass(frozen=True, slots=True)
class Scratch:
    """One push's directory.

    Attributes:
        path: of the directory.
        known: identity of a shard -> SHA-256 of its bytes.
    """

    path: str
    known: dict[str, str]
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def lay_out(self, name: str) -> None:
        """Reuses the file of a shard that was sent for the next one: writing over cached pages takes half as long as new ones."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(self.path, _SPARE), os.path.join(self.path, name))

    def put_away(self, path: str) -> None:
        """Removes the file of a shard that was sent, if it is there; one such file is kept for `lay_out`."""
        with self._lock:  # a file that is linked while `clear` lists the directory would stay
            with contextlib.suppress(OSError):  # a rename onto a file would make ext4 write it out first
                os.link(path, os.path.join(self.path, _SPARE))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def remember(self, identity: str, name: str, sha256: str) -> None:
        """Records a shard's hash, durably."""
        journal = os.path.join(self.path, _JOURNAL)
        is_new = not os.path.exists(journal)
        with open(journal, "a", encoding="utf-8") as file:
            file.write(f"\n{_line(identity, name, sha256)}\n")  # the first newline ends a line that was cut short
            file.flush()
            make_durable(file.fileno())
        if is_new:
            sync(self.path)
        self.known[identity] = sha256

    def clear(self) -> None:
        """Removes all shards, complete or not."""
        with self._lock:
            for name in os.listdir(self.path):
                if name not in (_JOURNAL, _LOCK):
                    os.unlink(os.path.join(self.path, name))

    def finish(self, identities: Collection[str]) -> None:
        """Ends a push: removes everything but the hashes of its shards, by which the same push finds that it is done."""
        self.clear()
        journal = os.path.join(self.path, _JOURNAL)
        lines = [_line(identity, "", self.known[identity]) for identity in identities if identity in self.known]
        replace_file(journal, "\n".join([*lines, ""]).encode())


def _line(identity: str, name: str, sha256: str) -> str:
    return json.dumps({"name": name, "sha256": sha256, "identity": identity})


def read_known_shards(directory: str, *page: object) -> dict[str, str]:
    """Identity -> SHA-256 of the shards that earlier pushes to a page made; read without the lock."""
    return _read(os.path.join(_path(directory, page), _JOURNAL))


def default_directory() -> str:
    """The default scratch directory: beside the hub's cache, which is on a disk with room for models."""
    from huggingface_hub import constants

    return os.path.join(constants.HF_HOME, "zckpt")


@contextlib.contextmanager
def open_scratch(directory: str, *page: object) -> Iterator[Scratch]:
    """The scratch directory for a page, for this process alone.

    Args:
        directory: the one that holds all scratch directories.
        page: the endpoint, repository, revision and path of the page.

    Raises:
        UsageError: another push to the same page is running.
        OutputError: the directory cannot be made.
    """
    path = _path(directory, page)
    lock = _lock_directory(path)
    try:
        scratch = Scratch(path, _read(os.path.join(path, _JOURNAL)))
        scratch.clear()  # shards of a push that was killed
        yield scratch
    finally:
        locks.release(lock)


def _path(directory: str, page: tuple[object, ...]) -> str:
    return os.path.join(directory, "push-" + hashlib.sha256(repr(page).encode()).hexdigest()[:16])


def _lock_directory(path: str) -> int:
    """Makes a directory, if it does not exist, and takes its lock."""
    try:
        while True:
            with contextlib.suppress(FileNotFoundError):  # a push that has just ended removed it
                make_directories(path)
                return locks.take(os.path.join(path, _LOCK))
    except locks.HeldError as error:
        raise UsageError(
            "another push to the same page is running", file=path, found=str(error), remedy="Wait until it has ended."
        ) from error
    except OSError as error:
        raise OutputError(
            "the scratch directory cannot be made", file=path, found=error.strerror or str(error),
            remedy="Pass a --scratch directory that you can write to.",
        ) from error  # fmt: skip


def _read(path: str) -> dict[str, str]:
    """The entries of the journal, without lines that were cut short."""
    known: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if len(bytes.fromhex(entry["sha256"])) == 32:
                    known[str(entry["identity"])] = str(entry["sha256"])
    return known
