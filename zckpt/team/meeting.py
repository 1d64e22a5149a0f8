"""Where the ranks of a run meet: everybody says a word and hears everybody's, or learns who is absent.

For saving and loading, here and in `runtime`. It goes through the store that the process group was made with, not through a
collective: a collective that some ranks never enter hangs until a watchdog ends the run, half an hour later and without a name.
Rank 0 collects the words and posts the minutes; so a meeting costs each other rank two requests. A meeting that some did not
come to is held again, under the same number, when all call it; minutes that a rank has read, or that call it absent, are of
the first time.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import DistError, distributed_c10d

from zckpt.base.errors import InconsistentError, OutputError
from zckpt.base.words import ranges

ENTRY_S = 45.0
"""How long a meeting waits for ranks that should come at the same moment."""

LOAD_S = 600.0
"""How long it waits for ranks that are still building their model."""

WORK_S = 1800.0
"""How long it waits for ranks that have work to do first: as long as torch's own collectives."""

_EXTRA_S = 10.0
"""How much longer the others wait than rank 0, which says who is absent."""


_UNCHANGED = "Nothing was published; what was there before is as it was."


class Meetings:
    """A series of meetings, the same on every rank.

    Args:
        name: of the series; no other may have it.
        rank: of this process.
        size: of the world.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._name, self._place, self._number = name, "", 0
        self._old: list[str] = []
        self._read = b""
        store: Any = distributed_c10d._get_default_store() if size > 1 else None
        self._store = None if store is None else store.clone()  # other threads have their own connection

    def begin(self, place: str) -> None:
        """Meetings from now on are those of a place in the run, such as a step: ranks that missed some find each other."""
        if place != self._place:
            self._place, self._number = place, 0

    def server(self) -> object:
        """Whoever has it keeps the store that ranks meet in, even when the process group is destroyed meanwhile."""
        return None if self._store is None else distributed_c10d._get_default_store()

    def meet(self, what: str, word: Any = None, *, within_s: float = WORK_S) -> list[Any]:
        """Waits for all.

        Args:
            what: everybody is about to do, for errors.
            word: what this rank says, as JSON has it.
            within_s: after so many seconds without some ranks it fails.

        Returns:
            The words, by rank.

        Raises:
            InconsistentError: some ranks did not come; it names them.
            OutputError: the store is gone.
        """
        if self._store is None:
            return [word]
        try:
            return self._meet(what, word, within_s)
        except DistError as error:
            raise OutputError(
                f"{what} that lost touch with the other ranks", found=str(error).splitlines()[0],
                remedy="The process that their store lay in has ended, which is rank 0's or torchrun's.",
            ) from error  # fmt: skip

    def _meet(self, what: str, word: Any, within_s: float) -> list[Any]:
        assert self._store is not None
        prefix = f"zckpt/{self._name}/{self._place}/{self._number}"
        minutes, keys = f"{prefix}/minutes", [f"{prefix}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(word))
        if self.rank == 0:
            absent = self._missing(keys, within_s)
            words = [] if absent else [json.loads(self._store.get(key)) for key in keys]
            self._store.set(minutes, json.dumps([absent, words, time.time()]))
            for key in (*self._old, *keys):
                self._store.delete_key(key)
            self._old = [] if absent else [minutes]  # by the next meeting all will have read it
        else:
            absent, words = self._minutes(minutes, within_s + _EXTRA_S)
            if not words:
                absent = absent or [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                self._store.delete_key(keys[self.rank])
        if not words:
            raise InconsistentError(
                f"{what} that not every rank takes part in",
                found=f"ranks {ranges(absent)} did not come within {within_s:.0f} s",
                expected=f"all {self.size} ranks call it, at the same step",
                remedy="Call it outside of any `if rank == 0`. Nothing was changed, and the run may go on.",
            )
        self._number += 1
        return words

    def _minutes(self, key: str, within_s: float) -> tuple[list[int], list[Any]]:
        """Who was absent, and the words, as rank 0 posts them; nothing where it does not in time."""
        assert self._store is not None
        until = time.monotonic() + within_s
        while not self._missing([key], until - time.monotonic()):
            posted = self._store.get(key)
            absent, words, _ = json.loads(posted)
            if posted != self._read and self.rank not in absent:
                self._read = posted
                return absent, words
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        return [], []

    def _missing(self, keys: Sequence[str], within_s: float) -> list[int]:
        """The numbers of the keys that do not appear in time.

        It looks again and again: a store that waits serves nobody else.
        """
        assert self._store is not None
        until, pause_s = time.monotonic() + within_s, 0.001
        missing = list(range(len(keys)))
        while missing := [number for number in missing if not self._store.check([keys[number]])]:
            if time.monotonic() > until:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        return missing

    def part(self) -> None:
        """After the last meeting of a piece of work: rank 0, whose process may hold the store, leaves last."""
        if self._store is None:
            return
        keys = [f"zckpt/{self._name}/{self._place}/left {rank}" for rank in range(1, self.size)]
        with contextlib.suppress(DistError):
            if self.rank:
                self._store.set(keys[self.rank - 1], "")
            else:
                self._missing(keys, _EXTRA_S)
                for key in keys:
                    self._store.delete_key(key)

    def agree(
        self,
        what: str,
        error: BaseException | None,
        word: Any = None,
        *,
        within_s: float = WORK_S,
        state: str = _UNCHANGED,
    ) -> list[Any]:
        """A meeting after work that may have failed: if it did anywhere, it did everywhere.

        Args:
            what: everybody has done, for errors.
            error: that this rank's work ended with.
            word: what this rank says otherwise.
            within_s: as for `meet`.
            state: what a failure leaves behind, and what to do then, as sentences.

        Returns:
            The words, by rank.

        Raises:
            BaseException: this rank's own error.
            OutputError: another rank's.
        """
        said = self.meet(what, {"error": None if error is None else f"{error}", "word": word}, within_s=within_s)
        if error is not None:
            raise error
        failed = [rank for rank, one in enumerate(said) if one["error"] is not None]
        if failed:
            raise OutputError(
                f"{what} that failed on another rank",
                found=f"ranks {ranges(failed)}: {said[failed[0]]['error']}",
                remedy=state,
            )
        return [one["word"] for one in said]
