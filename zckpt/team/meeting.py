"""Where processes meet: each says a word and hears everybody's, or learns who is absent or has failed.

For processes that convert together (`together`), and for ranks that train, save and load (`live`, `runtime`). It goes through
notes (`rendezvous`), not through a collective: a collective that some ranks never enter hangs until a watchdog ends the run,
half an hour later and without a name. Rank 0 collects the words and posts the minutes, so a meeting costs each other rank two
notes; the minutes say a word once that ranks in a row say alike, so what most meetings post does not grow with the ranks. A
meeting that some did not come to is held again, under the same number, when all call it; minutes that a rank has read, or that
call it absent, are of the first time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from zckpt.base.errors import InconsistentError, OutputError
from zckpt.base.words import ranks
from zckpt.team.rendezvous import Rendezvous, StoreRendezvous, default_store, own_connection, wait_for_notes

ENTRY_S = 45.0
"""The seconds for which a meeting waits for ranks that should come at the same moment."""

LOAD_S = 600.0
"""The seconds for which it waits for ranks that still build their model."""

WORK_S = 1800.0
"""The seconds for which it waits for ranks that have work to do first: as long as torch's own collectives."""

_EXTRA_S = 10.0
"""The seconds by which the others wait longer than rank 0, which reports who is absent."""

_UNCHANGED = "Nothing was published; what was there before is as it was."

Value = TypeVar("Value")


def attempt(function: Callable[[], Value]) -> Value | Exception:
    """The result of a function, or the error it ends with."""
    try:
        return function()
    except Exception as error:
        return error


class Attempt:
    """A `with` block with an error that is kept instead of raised: a rank that fails has to come to the next meeting all the
    same, and `Meetings.agree` raises its error on every rank. `error`: that the block ended with; None if it succeeded.
    """

    error: Exception | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None


def first_error(values: Sequence[Value | Exception]) -> list[Value]:
    """The values of all ranks; raises the error of the first rank that has one."""
    found: list[Value] = []
    for value in values:
        if isinstance(value, Exception):
            raise value
        found.append(value)
    return found


class Meetings:
    """A series of meetings, the same on every rank.

    Args:
        name: of the series; no other may have it.
        rank: of this process.
        size: of the world.
        rendezvous: where notes are left; by default the store of the default process group.
        check: called while this rank waits; an error that it raises ends the wait.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        rendezvous: Rendezvous | None = None,
        check: Callable[[], object] | None = None,
    ) -> None:
        self.rank, self.size, self.name = rank, size, name
        self._place, self._number = "", 0
        self._old: list[str] = []
        self._read = b""
        self._check = check
        self._rendezvous = rendezvous
        if rendezvous is None and size > 1:  # other threads have their own connection
            self._rendezvous = StoreRendezvous(own_connection(default_store()), "zckpt/")

    def begin(self, place: str) -> None:
        """Begins the meetings of a place in the run, such as a step: ranks that missed some find each other."""
        if place != self._place:
            self._place, self._number = place, 0

    def server(self) -> object:
        """The object that keeps the store of meetings alive, even when the process group is destroyed meanwhile."""
        return None if self._rendezvous is None else default_store()

    def meet(self, what: str, word: Any = None, *, within_s: float | None = WORK_S) -> list[Any]:
        """Waits for all ranks.

        Args:
            what: the call that brings everybody here, for errors.
            word: what this rank says, as JSON has it.
            within_s: after so many seconds without some ranks it fails; None: it waits as long as `check` lets it.

        Returns:
            The words, by rank.

        Raises:
            InconsistentError: some ranks did not come; it names them.
            OutputError: the store is gone.
        """
        if self._rendezvous is None:
            return [word]
        place = f"{self.name}/{self._place}/{self._number}"
        minutes, keys = f"{place}/minutes", [f"{place}/{rank}" for rank in range(self.size)]
        said = json.dumps(word)
        if self.rank == 0:  # its own word needs no note: the others read the minutes
            came = {keys[0]: said.encode(), **wait_for_notes(self._rendezvous, keys[1:], within_s, check=self._check)}
            absent = [rank for rank, key in enumerate(keys) if key not in came]
            words = [] if absent else [json.loads(came[key]) for key in keys]
            self._rendezvous.put(minutes, json.dumps([absent, _fold_repeats(words), time.time()]).encode())
            for key in (*self._old, *keys[1:]):
                self._rendezvous.drop(key)
            self._old = [] if absent else [minutes]  # by the next meeting all will have read it
        else:
            self._rendezvous.put(keys[self.rank], said.encode())
            absent, words = self._minutes(self._rendezvous, minutes, within_s)
            if not words:
                absent = absent or [rank for rank, key in enumerate(keys) if self._rendezvous.get(key) is None]
                self._rendezvous.drop(keys[self.rank])
        if not words:
            raise InconsistentError(
                f"not every rank called {what}",
                found=f"{ranks(absent)} did not come within {within_s or 0:.0f} s",
                expected=f"all {self.size} ranks call it, at the same step",
                remedy="Call it outside of any `if rank == 0`. Nothing was changed, and the run may go on.",
            )
        self._number += 1
        return words

    def _minutes(self, rendezvous: Rendezvous, key: str, within_s: float | None) -> tuple[list[int], list[Any]]:
        """The absent ranks and the words, as rank 0 posts them; empty if it does not post them in time."""

        def of_this_meeting(note: bytes) -> bool:
            return note != self._read and self.rank not in json.loads(note)[0]

        patience_s = None if within_s is None else within_s + _EXTRA_S
        posted = wait_for_notes(rendezvous, [key], patience_s, check=self._check, valid=of_this_meeting)
        if not posted:
            return [], []
        self._read = posted[key]
        absent, words, _ = json.loads(self._read)
        return absent, [word for word, number in words for _ in range(number)]

    def part(self) -> None:
        """Ends the meetings of some work: rank 0 leaves last, since its process may hold the store."""
        if self._rendezvous is None:
            return
        keys = [f"{self.name}/{self._place}/left {rank}" for rank in range(1, self.size)]
        with contextlib.suppress(OutputError):
            if self.rank:
                self._rendezvous.put(keys[self.rank - 1], b"left")
            else:
                wait_for_notes(self._rendezvous, keys, _EXTRA_S)
                for key in keys:
                    self._rendezvous.drop(key)

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
            what: the call that everybody is in, for errors.
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
                f"{what} failed on another rank",
                found=f"{ranks(failed)}: {said[failed[0]]['error']}",
                remedy=state,
            )
        return [one["word"] for one in said]


def _fold_repeats(words: Sequence[Any]) -> list[tuple[Any, int]]:
    """The words, each with the number of times that it occurs in succession."""
    return [(json.loads(said), len(list(alike))) for said, alike in itertools.groupby(map(json.dumps, words))]
