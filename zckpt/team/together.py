"""Lets several processes do one job: who they are, how they agree, and how the others learn that one of them is gone.

For `output.publish`, when torchrun or srun started more than one `zckpt`. Process 0 leads. They leave each other notes
(`rendezvous`): in torch.distributed's store under torchrun, under SLURM in a directory beside the output.

[Note: who is alive]
Every process renews a note with a number, once in a while, from a thread of its own. Process 0 watches all others, and all
others watch process 0: a note that stays the same for too long means that its process, or the machine, is gone. A process
on the same machine is also looked for by its number, which tells at once. A process that fails says so in the same note. So
nobody waits for a process that will not come; and as long as all are alive, a wait may take as long as the work does.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError, UsageError, ZckptError, add_note
from zckpt.base.words import ranges
from zckpt.storage.output_places import rendezvous_for

if TYPE_CHECKING:
    from zckpt.team.meeting import Meetings
    from zckpt.team.rendezvous import Rendezvous

JOIN_S = 600.0
"""The seconds for which the processes wait for each other at the start: they read the checkpoint's indexes first."""

LOST_S = {"store": 60.0, "files": 150.0}
"""The seconds for which a note may stay the same: network file systems show others' changes up to a minute late."""

BEAT_S = 2.0
LOOK_S = 1.0
LEAVE_S = 10.0

_RESUME = "Run the same command again to resume, with any number of processes."
_ALONE = "To work alone, take RANK, or SLURM_STEP_ID, out of the environment."


@dataclass(frozen=True, slots=True)
class Launched:
    """The launcher's facts on this process.

    Attributes:
        rank: its number among those that were started together.
        size: how many they are.
        kind: where they leave notes: in torch.distributed's store, or in files.
        where: host and port of the store; or what tells these processes from others that write beside the same output.
    """

    rank: int
    size: int
    kind: Literal["store", "files"]
    where: str


def detect_launcher(environ: Mapping[str, str]) -> Launched:
    """Detects torchrun or srun; without either, one process alone.

    A SLURM batch script is not a step of its job, so a `zckpt` that it runs without srun is alone. Raises UsageError if
    it makes no sense.
    """
    if all(map(environ.get, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))):
        size, rank = "WORLD_SIZE", "RANK"
        kind: Literal["store", "files"] = "store"
        where = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    elif environ.get("SLURM_STEP_ID") and environ.get("SLURM_PROCID"):
        size, rank = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS", "SLURM_PROCID"
        kind = "files"
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        where = "-".join("".join(c for c in environ.get(name, "0") if c.isalnum()) for name in names)
    else:
        return Launched(0, 1, "files", "")
    try:
        found = Launched(int(environ[rank]), int(environ.get(size, "1")), kind, where)
    except ValueError:
        found = Launched(-1, 0, kind, where)
    if not 0 <= found.rank < found.size:
        raise UsageError(
            "the launcher gave this process an impossible number",
            found=f"{rank}={environ.get(rank)}, {size}={environ.get(size)}",
            expected=f"0 <= {rank} < {size}", remedy=f"Start all processes with torchrun or srun. {_ALONE}",
        )  # fmt: skip
    return found


_asked = False


def allow() -> None:
    """Makes this process work with those that were started with it, as the command line asks.

    A library call does not: in a training script, one rank alone may convert something.
    """
    global _asked
    _asked = True


@contextmanager
def working_together(wanted: bool) -> Iterator[None]:
    """The same for a block of code, where it is wanted: a call that every rank makes."""
    global _asked
    before, _asked = _asked, _asked or wanted
    try:
        yield
    finally:
        _asked = before


def here() -> Launched:
    """The launcher's facts on this process; it is alone unless `allow` was called."""
    return detect_launcher(os.environ if _asked else {})


def speaks() -> bool:
    """Whether this process prints the results: among several, process 0 does."""
    try:
        return here().rank == 0
    except UsageError:
        return True


def team(out: str) -> Team | None:
    """The processes that write the output of path `out`, to be used as a context manager; None for one process alone."""
    mine = here()
    if mine.size == 1:
        return None
    from zckpt.team.rendezvous import DirectoryRendezvous, StoreRendezvous, tcp_store

    if mine.kind == "files":
        return Team(mine.rank, mine.size, DirectoryRendezvous(rendezvous_for(out, mine.where)), LOST_S["files"])
    host, _, port = mine.where.rpartition(":")
    serve = mine.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    prefix = f"zckpt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/"
    try:
        number = int(port)
    except ValueError as error:
        raise UsageError(
            "MASTER_PORT is not a number", found=repr(port), remedy=f"Set it to the port of process 0's store. {_ALONE}"
        ) from error
    store = tcp_store(host, number, serve=serve, within_s=JOIN_S)
    return Team(mine.rank, mine.size, StoreRendezvous(store, prefix), LOST_S["store"])


class Team:
    """The processes of a job, as one of them sees them.

    Args:
        rank: of this process; 0 leads.
        size: how many there are.
        rendezvous: where notes are left.
        lost_s: a process that was silent for so many seconds is gone.
    """

    def __init__(self, rank: int, size: int, rendezvous: Rendezvous, lost_s: float = 60.0) -> None:
        self.rank, self.size = rank, size
        self._rendezvous = rendezvous
        self._lost_s = lost_s
        self._session = ""
        self._meetings: Meetings | None = None
        self._posted = 0
        self._heard = [0] * size
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._moved = [0] * size
        self._next_look = 0.0
        self._end: dict[str, str] | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Team:
        self._session = f"{self._join(self._rendezvous)}/"
        from zckpt.team.meeting import Meetings

        self._meetings = Meetings(f"{self._session}meeting", self.rank, self.size, self._rendezvous, self.check_alive)
        self._seen = {rank: (b"", time.monotonic()) for rank in range(self.size)}
        self._beat(0)
        self._thread = threading.Thread(target=self._beats, name="zckpt-beat", daemon=True)
        self._thread.start()
        return self

    # ---- joining ------------------------------------------------------------------------------------------------------

    def _join(self, rendezvous: Rendezvous) -> str:
        """Finds the other processes; returns the name of this session.

        A process that waits says a random word, and joins the session with the welcome that repeats it: notes of an
        earlier run do not.
        """
        word = os.urandom(8).hex()
        if self.rank == 0:
            rendezvous.open()
            greetings = {f"hello/{rank}": rank for rank in range(1, self.size)}
            from zckpt.team.rendezvous import wait_for_notes

            came = {
                greetings[key]: note.decode() for key, note in wait_for_notes(rendezvous, greetings, JOIN_S).items()
            }
            absent = sorted(set(greetings.values()) - came.keys())
            welcome: dict[str, Any] = {"session": word, "words": {str(r): w for r, w in came.items()}, "absent": absent}
            rendezvous.put("welcome", json.dumps(welcome).encode())
            if absent:
                wait_for_notes(rendezvous, [f"farewell/{rank}" for rank in came], LEAVE_S)
                rendezvous.close()
        else:
            welcome = self._welcomed(rendezvous, word)
            if welcome["absent"]:
                rendezvous.put(f"farewell/{self.rank}", b"farewell")
        if welcome["absent"]:
            raise OutputError(
                "not every process of the job came",
                found=f"processes {ranges(welcome['absent'])} of {self.size} did not come within {JOIN_S:.0f} s",
                remedy=f"Nothing was changed. See what those processes printed, and start all again. {_ALONE}",
            )
        return str(welcome["session"])

    def _welcomed(self, rendezvous: Rendezvous, word: str) -> dict[str, Any]:
        """The answer of process 0 to this process's word."""
        again = 0.0

        def greet() -> None:
            nonlocal again
            if time.monotonic() >= again:  # where process 0 had not opened the rendezvous, the last greeting is lost
                rendezvous.put(f"hello/{self.rank}", word.encode())
                again = time.monotonic() + 1

        def answers(note: bytes) -> bool:
            return bool(json.loads(note).get("words", {}).get(str(self.rank)) == word)

        from zckpt.team.rendezvous import wait_for_notes

        found = wait_for_notes(rendezvous, ["welcome"], JOIN_S + LEAVE_S, check=greet, valid=answers)
        return dict(json.loads(found["welcome"])) if found else {"absent": [0]}

    # ---- who is alive -------------------------------------------------------------------------------------------------

    def _beats(self) -> None:
        number = 0
        while not self._over.wait(BEAT_S):
            number += 1
            with contextlib.suppress(ZckptError, OSError):  # the next call that needs the rendezvous raises it
                self._beat(number)

    def _beat(self, number: int) -> None:
        from zckpt.storage import processes

        state = {
            "beat": number,
            "host": os.uname().nodename,
            "process": str(processes.this_process()),
            "moved": self._moved[self.rank],
            "end": self._end,
        }
        self._rendezvous.put(f"{self._session}state/{self.rank}", json.dumps(state).encode())

    def check_alive(self, *, now: bool = False) -> None:
        """Checks that the processes which this one depends on are alive; looks once a second, or now. Raises ZckptError
        if another process failed; of the kind that it failed with, OutputError if a process is gone.
        """
        if time.monotonic() < self._next_look and not now:
            return
        self._next_look = time.monotonic() + LOOK_S
        from zckpt.storage import processes

        for rank in range(1, self.size) if self.rank == 0 else (0,):
            state = self._state(rank)
            end, host, process = state.get("end"), state.get("host"), processes.parse(state.get("process", ""))
            if end and end["text"]:
                kinds = {kind.code: kind for kind in ZckptError.__subclasses__()}
                raise kinds.get(end["code"], OutputError)(
                    "another process of the job failed", found=f"process {rank} on {host}: {end['text']}"
                )
            silent = time.monotonic() - self._seen[rank][1]
            if end is None and (silent > self._lost_s or self._is_dead(rank)):
                raise OutputError(
                    "another process of the job is gone",
                    found=f"process {rank} of {self.size}"
                    + (f", number {process.number} on {host}, " if process else " ")
                    + (f"was silent for {silent:.0f} s" if silent > self._lost_s else "has ended without a word"),
                    remedy=f"Nothing was published. {_RESUME}",
                )

    def _state(self, rank: int) -> dict[str, Any]:
        note = self._rendezvous.get(f"{self._session}state/{rank}") or b""
        if note != self._seen[rank][0]:
            self._seen[rank] = (note, time.monotonic())
        state: dict[str, Any] = json.loads(note) if note else {}
        self._moved[rank] = state.get("moved", 0) if rank != self.rank else self._moved[rank]
        return state

    def _is_dead(self, rank: int) -> bool:
        """Whether a process of this machine has ended without a word."""
        from zckpt.storage import processes

        process = processes.parse(self._state(rank).get("process", ""))
        # It may have said its end a moment ago.
        return process is not None and process.is_dead() and self._state(rank).get("end") is None

    def watched(self, progress: Callable[[int], None] | None) -> Callable[[int], None]:
        """`progress` for what all processes have moved, which also checks who is alive.

        It is called with the bytes that this process has moved so far, or with 0 just to check.
        """

        def moved(nbytes: int) -> None:
            self._moved[self.rank] = max(nbytes, self._moved[self.rank])
            self.check_alive()
            if progress is not None:
                progress(sum(self._moved))

        return moved

    # ---- talking ------------------------------------------------------------------------------------------------------

    def meet(self, word: Any = None) -> list[Any]:
        """Exchanges a word, which JSON can hold, with all processes; waits as long as all are alive. Returns the words,
        by rank. Raises ZckptError as `check_alive` does.
        """
        assert self._meetings is not None
        return self._meetings.meet("zckpt", word, within_s=None)

    def post(self, word: Any) -> None:
        """Leaves a word for process 0, which finds it among its `news`."""
        self._rendezvous.put(f"{self._session}post/{self.rank}/{self._posted}", json.dumps(word).encode())
        self._posted += 1

    def news(self) -> Iterator[tuple[int, Any]]:
        """(process, word) of what was posted since the last call; for process 0."""
        for rank in range(1, self.size):
            while (note := self._rendezvous.get(key := f"{self._session}post/{rank}/{self._heard[rank]}")) is not None:
                self._rendezvous.drop(key)
                self._heard[rank] += 1
                yield rank, json.loads(note)

    # ---- leaving ------------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if error is not None and not isinstance(error, ZckptError):
            self._explain(error)
        text = "" if error is None else str(error) or "it was interrupted."
        self._end = {"code": error.code if isinstance(error, ZckptError) else "", "text": text}
        with contextlib.suppress(ZckptError, OSError):
            self._beat(-1)
            if self.rank == 0:  # whose process may hold the store
                from zckpt.team.rendezvous import wait

                wait(self._others_ended, LEAVE_S)
        if self.rank == 0:
            self._rendezvous.close()

    def _others_ended(self) -> bool:
        return all(self._state(rank).get("end") is not None or self._is_dead(rank) for rank in range(1, self.size))

    def _explain(self, error: BaseException) -> None:
        """Prints why a process is asked to end: launchers end all processes when one has ended."""
        try:
            self.check_alive(now=True)
        except ZckptError as cause:
            add_note(error, f"{cause}")
        else:
            add_note(
                error, f"This was process {self.rank} of {self.size}. Where one ends, torchrun and srun end the others: "
                f"see what the others say. {_RESUME}"
            )  # fmt: skip
