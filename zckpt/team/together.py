"""Several processes at one job: who they are, how they agree, and how the others learn that one of them is gone.

For `delivery`, when torchrun or srun started more than one `zckpt`. Process 0 leads. There is no service of ours: notes lie
on a board (`boards`), which is torch.distributed's store under torchrun, and under SLURM a directory beside the output.

[Note: who is alive]
Every process renews a note with a number, once in a while, from a thread of its own. Process 0 watches all others, and all
others watch process 0: a note that stays the same for too long means that its process, or the machine, is gone. A process
on the same machine is also looked for by its number, which tells at once. Who fails says so in the same note. So nobody
waits for one who will not come; and as long as everybody lives, a wait may take as long as the work does.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from zckpt.base.errors import OutputError, UsageError, ZckptError, add_note
from zckpt.base.words import ranges
from zckpt.storage import processes
from zckpt.storage.output_places import board_for, remove_boards
from zckpt.team.rendezvous import Board, DirectoryBoard, StoreBoard

JOIN_S = 600.0
"""How long the processes wait for each other at the start: they read the checkpoint's indexes before they meet."""

LOST_S = {"store": 60.0, "files": 150.0}
"""How long a note may stay the same: network file systems show others' changes up to a minute late."""

BEAT_S = 2.0
LOOK_S = 1.0
LEAVE_S = 10.0

_ALONE = "To work alone, take RANK, or SLURM_STEP_ID, out of the environment."


@dataclass(frozen=True, slots=True)
class Seat:
    """This process's place among those that were started together.

    Attributes:
        rank: its number.
        size: how many they are.
        kind: what their board is.
        where: host and port of the store; or what tells these processes from others that write beside the same output.
    """

    rank: int
    size: int
    kind: Literal["store", "files"]
    where: str


def seat(environ: Mapping[str, str]) -> Seat:
    """What torchrun or srun says; one process alone where neither does.

    A SLURM batch script is no step of its job, so a `zckpt` that it runs without srun is alone.

    Raises:
        UsageError: it makes no sense.
    """
    if all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        size, rank = "WORLD_SIZE", "RANK"
        kind: Literal["store", "files"] = "store"
        where = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    elif environ.get("SLURM_STEP_ID") and environ.get("SLURM_PROCID"):
        size, rank = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS", "SLURM_PROCID"
        kind = "files"
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        where = "-".join("".join(c for c in environ.get(name, "0") if c.isalnum()) for name in names)
    else:
        return Seat(0, 1, "files", "")
    try:
        found = Seat(int(environ[rank]), int(environ.get(size, "1")), kind, where)
    except ValueError:
        found = Seat(-1, 0, kind, where)
    if not 0 <= found.rank < found.size:
        raise UsageError(
            "processes with impossible numbers", found=f"{rank}={environ.get(rank)}, {size}={environ.get(size)}"
        )
    return found


_asked = False


def allow() -> None:
    """From now on this process works with those that were started with it: the command line says so.

    A library call does not: in a training script, one rank alone may convert something.
    """
    global _asked
    _asked = True


def here() -> Seat:
    """This process's seat; alone unless `allow` was called."""
    return seat(os.environ if _asked else {})


def speaks() -> bool:
    """Whether results are this process's to print: of several, process 0's."""
    try:
        return here().rank == 0
    except UsageError:
        return True


def team(out: str) -> Team:
    """Those who write an output, to be used as a context manager.

    Args:
        out: the output's path.
    """
    mine = here()
    if mine.size == 1:
        return Team(0, 1)
    if mine.kind == "files":
        return Team(mine.rank, mine.size, DirectoryBoard(board_for(out, mine.where)), LOST_S["files"])
    host, _, port = mine.where.rpartition(":")
    serve = mine.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    prefix = f"zckpt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/"
    try:
        number = int(port)
    except ValueError as error:
        raise UsageError("a MASTER_PORT that is no number", found=repr(port)) from error
    return Team(mine.rank, mine.size, StoreBoard(host, number, prefix, serve=serve, within_s=JOIN_S), LOST_S["store"])


class Team:
    """The processes of a job, as one of them sees them.

    Args:
        rank: of this process; 0 leads.
        size: how many there are.
        board: where notes are left; None for one process alone.
        lost_s: a process that was silent for so many seconds is gone.
    """

    def __init__(self, rank: int, size: int, board: Board | None = None, lost_s: float = 60.0) -> None:
        self.rank, self.size = rank, size
        self._board = board
        self._lost_s = lost_s
        self._session = ""
        self._meetings = 0
        self._posted = 0
        self._heard = [0] * size
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._moved = [0] * size
        self._next_look = 0.0
        self._end: dict[str, str] | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Team:
        if self._board is not None:
            self._join(self._board)
            self._seen = {rank: (b"", time.monotonic()) for rank in range(self.size)}
            self._beat(0)
            self._thread = threading.Thread(target=self._beats, name="zckpt-beat", daemon=True)
            self._thread.start()
        return self

    def sweep(self, out: str) -> None:
        """Process 0 alone holds the output's lock: what dead processes left beside it can go."""
        remove_boards(out, self._board.path if isinstance(self._board, DirectoryBoard) else "")

    # ---- joining ------------------------------------------------------------------------------------------------------

    def _join(self, board: Board) -> None:
        """All find each other. Notes of an earlier run answer nobody: each process knows its own by a word of chance."""
        word = os.urandom(8).hex()
        until = time.monotonic() + JOIN_S
        if self.rank == 0:
            board.open()
            came: dict[int, str] = {}
            for pause_s in _pauses(until):
                for rank in set(range(1, self.size)) - came.keys():
                    if (hello := board.get(f"hello/{rank}")) is not None:
                        came[rank] = hello.decode()
                if len(came) == self.size - 1:
                    break
                time.sleep(pause_s)
            absent = sorted(set(range(1, self.size)) - came.keys())
            welcome: dict[str, Any] = {"session": word, "words": {str(r): w for r, w in came.items()}, "absent": absent}
            board.put("welcome", json.dumps(welcome).encode())
            if absent:
                for pause_s in _pauses(time.monotonic() + LEAVE_S):
                    if all(board.get(f"farewell/{rank}") is not None for rank in came):
                        break
                    time.sleep(pause_s)
                board.close()
        else:
            welcome = self._welcomed(board, word, until + LEAVE_S)
            if welcome["absent"]:
                board.put(f"farewell/{self.rank}", b"")
        if welcome["absent"]:
            raise OutputError(
                "a job that not every process came to",
                found=f"processes {ranges(welcome['absent'])} of {self.size} did not come within {JOIN_S:.0f} s",
                remedy=f"Nothing was changed. See what they say, and start all again. {_ALONE}",
            )
        self._session = f"{welcome['session']}/"

    def _welcomed(self, board: Board, word: str, until: float) -> dict[str, Any]:
        again = 0.0
        for pause_s in _pauses(until):
            if time.monotonic() >= again:
                board.put(f"hello/{self.rank}", word.encode())
                again = time.monotonic() + 1
            note = board.get("welcome")
            welcome = {} if note is None else json.loads(note)
            if welcome.get("words", {}).get(str(self.rank)) == word:
                return dict(welcome)
            time.sleep(pause_s)
        return {"absent": [0]}

    # ---- who is alive -------------------------------------------------------------------------------------------------

    def _beats(self) -> None:
        number = 0
        while not self._over.wait(BEAT_S):
            number += 1
            with contextlib.suppress(ZckptError, OSError):  # whoever needs the board next will say so
                self._beat(number)

    def _beat(self, number: int) -> None:
        assert self._board is not None
        state = {
            "beat": number,
            "host": os.uname().nodename,
            "process": str(processes.this_process()),
            "moved": self._moved[self.rank],
            "end": self._end,
        }
        self._board.put(f"{self._session}state/{self.rank}", json.dumps(state).encode())

    def look(self, *, now: bool = False) -> None:
        """Makes sure that those are alive whom this process depends on.

        Raises:
            ZckptError: of the kind that another process failed with.
            OutputError: one is gone.
        """
        if self._board is None or (time.monotonic() < self._next_look and not now):
            return
        self._next_look = time.monotonic() + LOOK_S
        for rank in range(1, self.size) if self.rank == 0 else (0,):
            state = self._state(rank)
            end, host, process = state.get("end"), state.get("host"), processes.parse(state.get("process", ""))
            if end and end["text"]:
                raise _KINDS.get(end["code"], OutputError)(
                    "a job that another process could not go on with", found=f"process {rank} on {host}: {end['text']}"
                )
            silent = time.monotonic() - self._seen[rank][1]
            if end is None and (silent > self._lost_s or self._is_dead(rank)):
                raise OutputError(
                    "a job that lost a process",
                    found=f"process {rank} of {self.size}"
                    + (f", number {process.number} on {host}, " if process else " ")
                    + (f"was silent for {silent:.0f} s" if silent > self._lost_s else "has ended without a word"),
                    remedy="Nothing was published. The same command goes on, with any number of processes.",
                )

    def _state(self, rank: int) -> dict[str, Any]:
        assert self._board is not None
        note = self._board.get(f"{self._session}state/{rank}") or b""
        if note != self._seen[rank][0]:
            self._seen[rank] = (note, time.monotonic())
        state: dict[str, Any] = json.loads(note) if note else {}
        self._moved[rank] = state.get("moved", 0) if rank != self.rank else self._moved[rank]
        return state

    def _is_dead(self, rank: int) -> bool:
        """Whether a process of this machine has ended, and left no word."""
        process = processes.parse(self._state(rank).get("process", ""))
        # It may have said its end a moment ago.
        return process is not None and process.is_dead() and self._state(rank).get("end") is None

    def watched(self, progress: Callable[[int], None] | None) -> Callable[[int], None]:
        """`progress`, told of what all processes have moved; on the way, it looks who is alive.

        It is called with this process's bytes so far, or with 0 just to have it look.
        """

        def moved(nbytes: int) -> None:
            self._moved[self.rank] = max(nbytes, self._moved[self.rank])
            self.look()
            if progress is not None:
                progress(sum(self._moved))

        return moved

    # ---- talking ------------------------------------------------------------------------------------------------------

    def meet(self, word: Any = None) -> list[Any]:
        """Everybody says a word, as JSON has it, and hears everybody's; waits as long as all live.

        Raises:
            ZckptError: see `look`.
        """
        if self._board is None:
            return [word]
        self._meetings += 1
        place = f"{self._session}meeting/{self._meetings}"
        if self.rank:
            self._board.put(f"{place}/{self.rank}", json.dumps(word).encode())
            return list(self._awaited(f"{place}/all"))
        words = [word, *(self._awaited(f"{place}/{rank}") for rank in range(1, self.size))]
        self._board.put(f"{place}/all", json.dumps(words).encode())
        return words

    def _awaited(self, key: str) -> Any:
        assert self._board is not None
        for pause_s in _pauses(None):
            if (note := self._board.get(key)) is not None:
                return json.loads(note)
            self.look()
            time.sleep(pause_s)
        raise AssertionError("pauses have no end")

    def post(self, word: Any) -> None:
        """Leaves process 0 a word that it reads when it likes."""
        assert self._board is not None
        self._board.put(f"{self._session}post/{self.rank}/{self._posted}", json.dumps(word).encode())
        self._posted += 1

    def news(self) -> Iterator[tuple[int, Any]]:
        """(process, word) of what came since; for process 0."""
        assert self._board is not None
        for rank in range(1, self.size):
            while (note := self._board.get(key := f"{self._session}post/{rank}/{self._heard[rank]}")) is not None:
                self._board.drop(key)
                self._heard[rank] += 1
                yield rank, json.loads(note)

    # ---- leaving ------------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._board is None:
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if error is not None and not isinstance(error, ZckptError):
            self._explain(error)
        text = "" if error is None else str(error) or "it was interrupted."
        self._end = {"code": error.code if isinstance(error, ZckptError) else "", "text": text}
        with contextlib.suppress(ZckptError, OSError):
            self._beat(-1)
            if self.rank == 0:  # whose process may hold the board
                for pause_s in _pauses(time.monotonic() + LEAVE_S):
                    others = range(1, self.size)
                    if all(self._state(rank).get("end") is not None or self._is_dead(rank) for rank in others):
                        break
                    time.sleep(pause_s)
        if self.rank == 0:
            self._board.close()

    def _explain(self, error: BaseException) -> None:
        """Says why a process is asked to end: launchers end all when one has ended."""
        try:
            self.look(now=True)
        except ZckptError as cause:
            add_note(error, f"{cause}")
        else:
            add_note(
                error, f"This was process {self.rank} of {self.size}. Where one ends, torchrun and srun end the others: "
                "see what the others say. The same command goes on, with any number of processes."
            )  # fmt: skip


_KINDS = {kind.code: kind for kind in ZckptError.__subclasses__()}


def _pauses(until: float | None) -> Iterator[float]:
    """Seconds to wait before looking again, longer and longer, up to a time."""
    pause_s = 0.002
    while until is None or time.monotonic() < until:
        yield pause_s
        pause_s = min(2 * pause_s, 0.2)
