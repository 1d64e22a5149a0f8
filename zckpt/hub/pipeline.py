"""Shards are made and sent at the same time, in bounded scratch room.

For `transfer`. Shards are made on the caller's thread, which gets interrupts, and sent on other threads. A shard is made when
the scratch directory has room for it, and removed as soon as it is sent.

[Note: scratch] Each page has its own directory, under a lock. Its journal has one line for each shard, written and synced when
the shard is made, before any of it is sent. So an interrupted push knows the hashes of all shards it made, asks the hub which of
them it has, and makes only the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError, UsageError
from zckpt.base.progress import JobWatch
from zckpt.hub.cargo import Progress, Shard
from zckpt.hub.client import Hub
from zckpt.hub.target import Page, PageTarget, SentFile
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
    """The scratch directory for a page (endpoint, repository, revision and path), for this process alone, in `directory`, which
    holds those of all pages. Raises UsageError if another push to the same page is running, OutputError if it cannot be made.
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
    except BlockingIOError as error:
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


SENDER = "zckpt-sender"
"""Name of the threads that send."""

_MOST_SENDERS = 5


class Stopped(BaseException):
    """Ends a sender after its push has ended. It is no `Exception`, so that the call is not retried."""


class Pipeline:
    """Makes and sends the shards of one push, in order, to a target where `page` is. `room`: the most bytes of shards in the
    scratch directory; `progress`: called with the bytes that are done, half of a shard's when it is made, half when it is sent.

    Attributes:
        made: bytes of the shards that were made.
        sent: bytes of the shards that were sent.
        not_sent: names of the shards that were not sent, because the hub had them.
    """

    def __init__(
        self, shards: Sequence[Shard], hub: Hub, target: PageTarget, page: Page, scratch: Scratch, room: int, progress: Progress
    ) -> None:  # fmt: skip
        self._shards, self._hub, self._target, self._page, self._scratch = shards, hub, target, page, scratch
        self._room, self._progress = room, progress
        self._changed = threading.Condition()
        self._waiting: queue.SimpleQueue[tuple[Shard, str, str] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._over = False
        self._used = 0
        self._done: dict[str, SentFile] = {}
        self._on_the_way: dict[str, int] = {}
        self._skipped_bytes = 0
        self.made = self.sent = 0
        self.not_sent: set[str] = set()

    def again(self) -> list[SentFile]:
        """Makes and sends the shards that were skipped, for a hub that does not have them after all."""
        lost, self.not_sent = self.not_sent, set()
        for name in lost:
            del self._done[name]
        self._skipped_bytes, self._over = 0, False
        return self._run([shard for shard in self._shards if shard.name in lost], {})

    def run(self) -> list[SentFile]:
        """Makes and sends all shards; returns them in order, as they are at the hub then. None is left in the scratch
        directory. Raises ZckptError if a shard could not be made or sent.
        """
        journal = self._scratch.known
        known = [(s, sha256) for s in self._shards if (sha256 := journal.get(s.identity))] if journal else []
        present = self._hub.present(self._target.repo_id, [(sha256, s.nbytes) for s, sha256 in known]) if known else ()
        return self._run(self._shards, {shard.name: sha256 for shard, sha256 in known if sha256 in present})

    def _run(self, shards: Sequence[Shard], present: Mapping[str, str]) -> list[SentFile]:
        """Makes and sends some shards; `present` is name -> hash of those that the hub has."""
        largest = max((shard.scratch_bytes for shard in shards), default=0)
        senders = max(1, min(_MOST_SENDERS, self._room // largest if largest else _MOST_SENDERS, len(shards)))
        for _ in range(senders):
            threading.Thread(target=self._send_all, name=SENDER, daemon=True).start()
        try:
            for number, shard in enumerate(shards, 1):
                self._check()
                if isinstance(self._progress, JobWatch):
                    self._progress.at(f"{shard.name} ({number} of {len(shards)})")
                if shard.name in present:
                    self._skipped_bytes += shard.nbytes
                    self.not_sent.add(shard.name)
                    self._arrived(shard, present[shard.name])
                    continue
                self._wait_for_room(shard.scratch_bytes)
                self._scratch.lay_out(shard.name)
                path, sha256 = shard.make(self._scratch.path, self._report)
                self.made += shard.nbytes
                self._scratch.remember(shard.identity, shard.name, sha256)
                self._waiting.put((shard, path, sha256))
            with self._changed:
                while len(self._done) < len(self._shards):
                    self._report()
                    self._changed.wait(0.1)
            self._report()
        finally:
            self._over = True
            for _ in range(senders):
                self._waiting.put(None)
            self._scratch.clear()
        return [self._done[shard.name] for shard in self._shards]

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _report(self, making: int = 0) -> None:
        """Raises a sender's error, or reports progress; `making` is bytes of the shard that is being made."""
        self._check()
        if self._progress is not None:
            with self._changed:
                sending = sum(self._on_the_way.values())
            self._progress((self.made + making + sending) // 2 + self._skipped_bytes)

    def _wait_for_room(self, nbytes: int) -> None:
        with self._changed:
            while self._used and self._used + nbytes > self._room:
                self._check()
                self._changed.wait(0.1)
            self._used += nbytes

    def _send_all(self) -> None:
        while (item := self._waiting.get()) is not None and not self._over:
            try:
                self._send(*item)
            except Stopped:
                return
            except BaseException as error:  # re-raised on the caller's thread
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                return

    def _send(self, shard: Shard, file: str, sha256: str) -> None:
        def watch(done: int) -> None:
            if self._over:
                raise Stopped
            with self._changed:
                self._on_the_way[shard.name] = max(done, self._on_the_way.get(shard.name, 0))

        sent = self._described(shard, sha256)
        went = self._hub.send(
            self._target.repo_id, self._target.revision, sent, file, watch, create_pr=self._target.create_pr
        )
        if shard.scratch_bytes:
            self._scratch.put_away(file)
        with self._changed:
            self._used -= shard.scratch_bytes
            self._on_the_way[shard.name] = shard.nbytes
            if went:
                self.sent += shard.nbytes
            else:
                self.not_sent.add(shard.name)
            self._arrived(shard, sha256)

    def _described(self, shard: Shard, sha256: str) -> SentFile:
        path = self._target.place(shard.name)
        _, old = self._page.files.get(path, (0, ""))
        return SentFile(path, shard.nbytes, sha256, old)

    def _arrived(self, shard: Shard, sha256: str) -> None:
        with self._changed:
            self._done[shard.name] = self._described(shard, sha256)
            self._changed.notify_all()
