"""Shards are made and sent at the same time, in bounded room.

For `transfer`. They are made on the caller's thread, where an interrupt arrives and a live engine's collectives belong, and
sent on others. One is made only when the scratch directory has room for it, and goes as soon as it is sent.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping, Sequence

from zckpt.hub.cargo import Made, Progress, Shard
from zckpt.hub.checks import PageTarget
from zckpt.hub.client import Hub, Page
from zckpt.hub.operations import Sent
from zckpt.hub.scratch import Scratch

SENDER = "zckpt-sender"
"""Name of the threads that send."""

_MOST_SENDERS = 5


class Stopped(BaseException):
    """Ends a sender whose push has ended; no failure, so nobody tries again."""


class Pipeline:
    """One push's shards.

    Args:
        shards: what goes up, in order.
        hub: the hub.
        target: where to.
        page: what is there.
        scratch: where shards lie on their way.
        room: bytes of them that may lie there.
        progress: called with the bytes that are through, half when they are made and half when they are sent.

    Attributes:
        made: bytes of shards that were made.
        sent: bytes of shards that were sent.
        skipped: names of shards that were not made, because the hub had them.
        found: names of shards that were made and then not sent, because the hub had them.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        hub: Hub,
        target: PageTarget,
        page: Page,
        scratch: Scratch,
        room: int,
        progress: Progress,
    ) -> None:
        self._shards, self._hub, self._target, self._page, self._scratch = shards, hub, target, page, scratch
        self._room, self._progress = room, progress
        self._changed = threading.Condition()
        self._waiting: queue.SimpleQueue[tuple[Shard, Made] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._over = False
        self._used = 0
        self._done: dict[str, Sent] = {}
        self._on_the_way: dict[str, int] = {}
        self.made = self.sent = 0
        self.skipped: list[str] = []
        self.found: list[str] = []

    def again(self) -> list[Sent]:
        """Makes and sends whatever was not sent: the hub does not have it after all."""
        lost = {*self.skipped, *self.found}
        for name in lost:
            del self._done[name]
        self.skipped, self.found = [], []
        self._over = False
        return self._run([shard for shard in self._shards if shard.name in lost], {})

    def run(self) -> list[Sent]:
        """Makes and sends all; returns what is then at the hub, in order.

        Raises:
            ZckptError: a shard could not be made or sent. No shard is left in the scratch directory.
        """
        journal = self._scratch.known
        known = [(s, sha256) for s in self._shards if (sha256 := journal.get(s.identity))] if journal else []
        present = self._hub.present(self._target.repo_id, [(sha256, s.nbytes) for s, sha256 in known]) if known else ()
        return self._run(self._shards, {shard.name: sha256 for shard, sha256 in known if sha256 in present})

    def _run(self, shards: Sequence[Shard], present: Mapping[str, str]) -> list[Sent]:
        """`present`: name -> hash, of shards that the hub has."""
        largest = max((shard.scratch_bytes for shard in shards), default=0)
        senders = max(1, min(_MOST_SENDERS, self._room // largest if largest else _MOST_SENDERS, len(shards)))
        for _ in range(senders):
            threading.Thread(target=self._send_all, name=SENDER, daemon=True).start()
        try:
            for shard in shards:
                self._check()
                if shard.name in present:
                    self.skipped.append(shard.name)
                    self._arrived(shard, present[shard.name])
                    continue
                self._wait_for_room(shard.scratch_bytes)
                self._scratch.lay_out(shard.name)
                made = shard.make(self._scratch.path, self._tell)
                self.made += shard.nbytes
                self._scratch.remember(shard.identity, shard.name, made.sha256)
                self._waiting.put((shard, made))
            with self._changed:
                while len(self._done) < len(self._shards):
                    self._tell()
                    self._changed.wait(0.1)
        finally:
            self._over = True
            for _ in range(senders):
                self._waiting.put(None)
            self._scratch.clear()
        return [self._done[shard.name] for shard in self._shards]

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _tell(self, making: int = 0) -> None:
        """Tells of progress, and of a sender's error, while a shard is made."""
        self._check()
        if self._progress is not None:
            with self._changed:
                skipped = sum(s.nbytes for s in self._shards if s.name in self.skipped)
                through = sum(self._on_the_way.values())
            self._progress((self.made + making + through + 2 * skipped) // 2)

    def _wait_for_room(self, nbytes: int) -> None:
        with self._changed:
            while self._used and self._used + nbytes > self._room:
                self._check()
                self._changed.wait(0.1)
            self._used += nbytes

    def _send_all(self) -> None:
        while (item := self._waiting.get()) is not None and not self._over:
            shard, made = item
            try:
                self._send(shard, made)
            except Stopped:
                return
            except BaseException as error:  # re-raised on the caller's thread
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                return

    def _send(self, shard: Shard, made: Made) -> None:
        def watch(done: int) -> None:
            if self._over:
                raise Stopped
            with self._changed:
                self._on_the_way[shard.name] = max(done, self._on_the_way.get(shard.name, 0))

        sent = self._described(shard, made.sha256)
        went = self._hub.send(
            self._target.repo_id, self._target.revision, sent, made.path, watch, create_pr=self._target.create_pr
        )
        if made.scratch:
            with contextlib.suppress(FileNotFoundError):
                self._scratch.put_away(made.path)
        with self._changed:
            self._used -= shard.scratch_bytes
            self._on_the_way[shard.name] = shard.nbytes
            if went:
                self.sent += shard.nbytes
            else:
                self.found.append(shard.name)
            self._arrived(shard, made.sha256)

    def _described(self, shard: Shard, sha256: str) -> Sent:
        path = self._target.place(shard.name)
        old = self._page.files.get(path)
        return Sent(path, shard.nbytes, sha256, old.oid if old else "")

    def _arrived(self, shard: Shard, sha256: str) -> None:
        with self._changed:
            self._done[shard.name] = self._described(shard, sha256)
            self._changed.notify_all()
