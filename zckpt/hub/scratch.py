"""The scratch directory of a push: shards on their way, and a journal of those whose bytes are known.

For `transfer`. A directory of its own for each page, under a lock; what was sent makes room at once. The journal is one line
a shard, written and synced when the shard is made, before any of it is sent: an interrupted push knows the hash of all it
made, asks the hub which of them it has, and makes only the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from zckpt.base.errors import OutputError, UsageError
from zckpt.output import locks
from zckpt.output.durable import make_directories
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

    def lay_out(self, name: str) -> None:
        """Gives the file of a shard that is through to the next one: pages that are written over cost half of new ones."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(self.path, _SPARE), os.path.join(self.path, name))

    def put_away(self, path: str) -> None:
        """A shard is through. One such file is kept for the next; a second one goes."""
        with contextlib.suppress(OSError):  # renaming onto a file would have ext4 write it out first
            os.link(path, os.path.join(self.path, _SPARE))
        os.unlink(path)

    def remember(self, identity: str, name: str, sha256: str) -> None:
        """Notes a shard's hash, so that it survives whatever comes."""
        with open(os.path.join(self.path, _JOURNAL), "a", encoding="utf-8") as file:
            file.write(f"\n{_line(identity, name, sha256)}\n")  # a first newline ends a line that was cut short
            file.flush()
            make_durable(file.fileno())
        self.known[identity] = sha256

    def clear(self) -> None:
        """Removes whatever shards are there, whole or not."""
        for name in os.listdir(self.path):
            if name not in (_JOURNAL, _LOCK):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.path, name))

    def finish(self, identities: Collection[str]) -> None:
        """The push is done: everything goes but the hashes of its shards, by which the same push knows that it is."""
        self.clear()
        journal = os.path.join(self.path, _JOURNAL)
        lines = [_line(identity, "", self.known[identity]) for identity in identities if identity in self.known]
        with open(f"{journal}.new", "w", encoding="utf-8") as file:
            file.write("\n".join([*lines, ""]))
        os.replace(f"{journal}.new", journal)


def _line(identity: str, name: str, sha256: str) -> str:
    return json.dumps({"name": name, "sha256": sha256, "identity": identity})


def known(directory: str, *page: object) -> dict[str, str]:
    """Identity -> SHA-256 of the shards that earlier pushes to a page made; a look, without the lock."""
    return _read(os.path.join(_path(directory, page), _JOURNAL))


def default_directory() -> str:
    """Where pushes work unless told otherwise: beside the hub's cache, which is on a disk made for models."""
    from huggingface_hub import constants

    return os.path.join(constants.HF_HOME, "zckpt")


@contextlib.contextmanager
def opened(directory: str, *page: object) -> Iterator[Scratch]:
    """The scratch directory for a page, for this process alone.

    Args:
        directory: where scratch directories lie.
        page: what tells one page from another: endpoint, repository, revision, path.

    Raises:
        UsageError: another push to the same page is running.
        OutputError: the directory cannot be made.
    """
    path = _path(directory, page)
    lock = _locked(path)
    try:
        scratch = Scratch(path, _read(os.path.join(path, _JOURNAL)))
        scratch.clear()  # of a push that was killed
        yield scratch
    finally:
        os.close(lock)


def _path(directory: str, page: tuple[object, ...]) -> str:
    return os.path.join(directory, "push-" + hashlib.sha256(repr(page).encode()).hexdigest()[:16])


def _locked(path: str) -> int:
    """The lock of a directory, which is made where there is none; a push that has just ended may remove it at any moment."""
    while True:
        try:
            make_directories(path)
            return locks.take(os.path.join(path, _LOCK))
        except FileNotFoundError:
            continue
        except locks.HeldError as error:
            raise UsageError(
                "two pushes to the same page",
                file=path,
                found="another one is running",
                remedy="Wait until it is done.",
            ) from error
        except OSError as error:
            raise OutputError(
                "a scratch directory that cannot be made", file=path, found=error.strerror or str(error)
            ) from error


def _read(path: str) -> dict[str, str]:
    """The journal; a last line that was cut short counts for nothing."""
    known: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if len(bytes.fromhex(entry["sha256"])) == 32:
                    known[str(entry["identity"])] = str(entry["sha256"])
    return known
