"""Shards are made and sent at the same time, in bounded scratch room.

For `transfer`. Shards are made on the caller's thread, which gets interrupts, and sent on other threads. A shard is made when
the scratch directory has room for it, and removed as soon as it is sent.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence

from zckpt.base.progress import JobWatch
from zckpt.hub.cargo import Progress, Shard
from zckpt.hub.client import Hub
from zckpt.hub.operations import SentFile
from zckpt.hub.scratch import Scratch
from zckpt.hub.target import Page, PageTarget

SENDER = "zckpt-sender"
"""Name of the threads that send."""

_MOST_SENDERS = 5


class Stopped(BaseException):
    """Ends a sender after its push has ended. It is no `Exception`, so that the call is not retried."""


class Pipeline:
    """Makes and sends the shards of one push.

    Args:
        shards: what to send, in order.
        hub: the hub.
        target: where to send them.
        page: what is there.
        scratch: the directory for shards that are not sent yet.
        room: the most bytes of shards in it.
        progress: called with the bytes that are done: half of a shard's when it is made, half when it is sent.

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
        old = self._page.files.get(path)
        return SentFile(path, shard.nbytes, sha256, old.oid if old else "")

    def _arrived(self, shard: Shard, sha256: str) -> None:
        with self._changed:
            self._done[shard.name] = self._described(shard, sha256)
            self._changed.notify_all()
