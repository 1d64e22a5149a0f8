"""Finds the rank that the others wait for: one that is stopped, killed, or still busy.

For `observer` and `train`. Ranks compute together, so one that does not come makes all wait, until a collective's timeout ends
the run without a name. [Note: the lookout] Every rank notes what it does (`at`). A thread of each puts this note and a count
that always grows into the store of the process group, every few seconds. A rank with a note that has not changed for a while
reads the notes of all: a count that no longer grows is a process that is stopped or gone; a rank that has noted less than
others is the one they wait for. The lowest rank that still runs says so. A process that the launcher started also writes its
note into a file, from which the launcher reads where a rank was when it died.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zckpt.base.dataclass import dataclass
from zckpt.base.words import join_words, ranks
from zckpt.runtime.world import World
from zckpt.team.rendezvous import default_store, own_connection

BEAT_S = 2.0
"""Seconds between two notes of a rank."""
SILENT_S = 7.0
"""The seconds after which a process with a count that has not grown counts as stopped."""
STILL_S = 6.0
"""The seconds without progress after which a rank looks at the others."""
LATE_S = 30.0
"""The seconds after which a rank that is behind the others is named."""
EQUAL_S = 120.0
"""The seconds without progress of all ranks after which each one's line is logged."""
NOTES = "ZCKPT_TRAIN_NOTES"
"""The variable with the directory for notes, which the launcher sets."""
WRITE_S = 0.05
"""The seconds between two notes in that directory."""
PHASES = ("in the script's own code", "in forward", "in backward", "in the optimizer step")
"""The phases of a rank with an engine, in this order for each micro batch."""

_log = logging.getLogger("zckpt.runtime")


@dataclass(frozen=True, slots=True)
class Doing:
    """The activity of a rank.

    Attributes:
        number: how many things it has begun, the same on all ranks that do the same.
        step: the optimizer step, from 1; 0 before the first.
        what: in words that follow "is": "in forward".
        since_s: for how long.
        beat: grows as long as the process runs.
        process: its number, and its machine.
        line: where its main thread is; empty until somebody waits.
    """

    number: int
    step: int
    what: str
    since_s: float
    beat: int
    process: str
    line: str = ""

    def __str__(self) -> str:
        at = f" of step {self.step:,}" if self.step else ""
        return f"{self.what}{at} for {self.since_s:.0f} s"


class Lookout(threading.Thread):
    """Notes what this rank does, and names the rank that all wait for. `say`: called with a sentence; by default logs it."""

    def __init__(self, world: World, say: Callable[[str], None] | None = None) -> None:
        super().__init__(name="zckpt lookout", daemon=True)
        self._rank, self._size = world.rank, world.size
        self._say = say or (lambda sentence: _log.error("%s", sentence))
        self._main = threading.current_thread().ident
        self._process = f"process {os.getpid()} on {socket.gethostname()}"
        self._now, self._began = Doing(0, 0, "starting", 0.0, 0, self._process), time.monotonic()
        self._over = threading.Event()
        self._file = os.path.join(os.environ[NOTES], str(world.rank)) if NOTES in os.environ else None
        self._grew: dict[int, tuple[int, float]] = {}
        self._said: str | None = None
        self._written = 0.0
        self._store: Any = None
        self._write()
        if self._size > 1 and dist.is_initialized():
            self._put(self._now)  # before training: a rank that stops in the first seconds is known too
            self.start()
            atexit.register(self.close)

    def at(self, step: int, what: str, number: int | None = None) -> None:
        """Notes the activity that begins now: `what` in words that follow "is", in the optimizer step `step`, from 1.
        `number` is the same on all ranks that do the same, and grows; by default it is the next one.
        """
        number = self._now.number + 1 if number is None else number
        self._now = replace(self._now, number=number, step=step, what=what, line="")
        self._began = time.monotonic()
        if self._began - self._written > WRITE_S:
            self._write()

    def enter(self, phase: int, micro_steps: int, step: int) -> None:
        """Notes the phase of `PHASES` that begins, and its micro batch; 16 other notes fit between two phases."""
        self.at(step, PHASES[phase], (micro_steps * len(PHASES) + phase) * 16)

    def failed(self, why: str) -> None:
        """Notes the reason why this rank ends."""
        self._now = replace(self._now, what=f"{self._now.what} ({' '.join(why.split())})")
        self._write()

    def close(self) -> None:
        """Ends the thread, and notes that this rank is done."""
        if self.is_alive() and not self._over.is_set():
            self._over.set()
            self.join(BEAT_S * 2)
            try:
                self._put(replace(self._now, beat=_DONE))
            except RuntimeError:  # the rank that had the store is gone
                pass

    def missing(self) -> dict[int, Doing]:
        """The ranks that no longer run, with their last notes; takes some seconds. Empty if the store is gone too."""
        try:
            store = own_connection(default_store())
            first = _read_notes(store, self._size)
            time.sleep(SILENT_S)
            last = _read_notes(store, self._size)
            return {rank: one for rank, one in last.items() if one.beat == first[rank].beat and rank != self._rank}
        except (RuntimeError, KeyError, ValueError):
            return {}

    def run(self) -> None:
        """Writes notes and looks at others until the run is over."""
        beat = 0
        while not self._over.wait(BEAT_S):
            beat += 1
            still_s = time.monotonic() - self._began
            self._now = replace(self._now, beat=beat, line=_line(self._main) if still_s > STILL_S else "")
            try:
                self._put(replace(self._now, since_s=still_s))
                if still_s > STILL_S and self._now.what != PHASES[0]:
                    self._look(_read_notes(self._store, self._size))
                elif self._said is not None:
                    self._tell(None)
            except (ValueError, KeyError):  # a rank has not begun
                continue
            except RuntimeError:  # the process group is gone
                return

    def _look(self, notes: Mapping[int, Doing]) -> None:
        """Reports the rank that others wait for, if this rank has to; one that is done counts only in `PHASES`."""
        notes = {rank: one for rank, one in notes.items() if one.beat != _DONE or self._now.what in PHASES}
        now = time.monotonic()
        for rank, one in notes.items():
            if self._grew.get(rank, (-1, 0.0))[0] != one.beat:
                self._grew[rank] = one.beat, now
        silent = [
            rank for rank, one in notes.items()
            if rank != self._rank and (now - self._grew[rank][1] > SILENT_S or one.beat == _DONE)
        ]  # fmt: skip
        if any(rank < self._rank and rank not in silent for rank in notes):
            return
        if silent:
            self._tell(sorted(silent), _silence({rank: notes[rank] for rank in silent}))
            return
        first, last = min(one.number for one in notes.values()), max(one.number for one in notes.values())
        behind = {rank: one for rank, one in notes.items() if one.number < last}
        behind = {rank: one for rank, one in behind.items() if one.number == first}
        if behind and min(one.since_s for one in behind.values()) > LATE_S:
            self._tell(sorted(behind), _lateness(behind, {r: one for r, one in notes.items() if r not in behind}))
        elif first == last and min(one.since_s for one in notes.values()) > EQUAL_S and "saving" not in self._now.what:
            self._tell([], _stillness(notes))

    def _tell(self, who: list[int] | None, sentence: str = "The ranks go on.") -> None:
        """Logs a sentence, once for the same ranks."""
        key = None if who is None else str(who)
        if key != self._said:
            self._said = key
            self._say(sentence)

    def _put(self, note: Doing) -> None:
        if self._store is None:
            self._store = own_connection(default_store())
        self._store.set(f"{_PREFIX}{self._rank}", json.dumps(asdict(note)))

    def _write(self) -> None:
        if self._file is not None:
            new = self._file + ".new"
            with open(new, "w", encoding="utf-8") as file:  # not synced: for the launcher of this run alone
                json.dump(asdict(self._now), file)
            os.replace(new, self._file)
            self._written = self._began


_by_group: dict[int, Lookout] = {}


def of_process(world: World) -> Lookout:
    """The lookout of this process, which lasts as long as the process group."""
    group = id(dist.group.WORLD)
    if group not in _by_group:
        for old in _by_group.values():
            old.close()
        _by_group.clear()
        _by_group[group] = Lookout(world)
    return _by_group[group]


def last_note(directory: str | os.PathLike[str], rank: int) -> Doing | None:
    """The last note of one of the launcher's ranks; its `since_s` is 0."""
    try:
        return Doing(**json.loads(Path(directory, str(rank)).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


_PREFIX, _DONE = "zckpt/lookout/", -1


def _read_notes(store: Any, size: int) -> dict[int, Doing]:
    """The notes of all ranks. Raises KeyError if a rank has not noted anything yet."""
    keys = [f"{_PREFIX}{rank}" for rank in range(size)]
    if not store.check(keys):
        raise KeyError
    return {rank: Doing(**json.loads(text)) for rank, text in enumerate(store.multi_get(keys))}


def _silence(silent: Mapping[int, Doing]) -> str:
    verb = "does" if len(silent) == 1 else "do"
    was = "; ".join(
        f"rank {rank} was {note.what} of step {note.step:,} ({note.process})"
        for rank, note in sorted(silent.items())[:5]
    )
    return (
        f"The ranks wait for {ranks(sorted(silent))}, which {verb} not run: ended, stopped or killed, or the machine does not "
        f"answer. When it last did, {was}."
    )


def _lateness(behind: Mapping[int, Doing], others: Mapping[int, Doing]) -> str:
    late = "; ".join(
        f"rank {rank} is {note}{f', at {note.line}' if note.line else ''} ({note.process})"
        for rank, note in sorted(behind.items())[:5]
    )
    waiting = join_words(sorted({note.what for note in others.values()}))
    return f"The ranks wait for {ranks(sorted(behind))}: {late}. The others are {waiting} by now."


def _stillness(notes: Mapping[int, Doing]) -> str:
    places: dict[str, list[int]] = {}
    for rank, note in notes.items():
        places.setdefault(note.line or "an unknown line", []).append(rank)
    note = next(iter(notes.values()))
    where = "; ".join(f"{ranks(who)} at {line}" for line, who in places.items())
    return f"All ranks are {note}: {where}."


def _line(thread: int | None) -> str:
    """The innermost line of a thread that is not torch's own: `data.py, line 12, in read`."""
    frame, found = sys._current_frames().get(thread or 0), ""
    while frame is not None:  # no file is read meanwhile: the thread would run on, and leave these frames
        file = frame.f_code.co_filename
        is_own = f"{os.sep}torch{os.sep}" not in file
        if is_own or not found:
            found = f"{os.path.basename(file)}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        if is_own:
            break
        frame = frame.f_back
    return found
