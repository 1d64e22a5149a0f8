"""Conversions that are killed, in a process of their own: forked from one that has imported zckpt, so that a hundred are quick.

    python killing.py CHECKPOINT WORK MODE COUNT SEED EVERY [overwrite] [single] [JOB]

JOB is one of computed.COMPUTED, which reads sources of its own, in place of a conversion.

MODE says when: "time" at COUNT random moments; "write" or "read" at the n-th of the engine's calls, "event" before the n-th
change that Python makes to a name under WORK, for each EVERYth n to COUNT kills or to where there are no more, and the last of
these moments. After each kill the
output's name must hold what it held before or the whole new output, and the same command must then finish; the result must
be the bytes of a run that nobody killed. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from computed import COMPUTED
from outputs import earlier_output

import zckpt
from zckpt._core import inject
from zckpt.engine import batches
from zckpt.jobs.options import Options

batches.LEAST_BYTES = 0  # every file is on record as soon as it is complete, however small
EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
KILL = -3


def contents(out: Path) -> dict[str, bytes] | None:
    """Everything under an output's name, or None where it is not there."""
    if out.is_dir():
        return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    return {out.name: out.read_bytes()} if out.exists() else None


class Trials:
    def __init__(self, checkpoint: str, work: str, *, overwrite: bool, single: bool, job: str = "") -> None:
        self.job = COMPUTED[job] if job else None
        self.checkpoint = checkpoint
        self.place = Path(work) / "place"
        self.overwrite = overwrite
        self.single = single
        self.out = self.place / (self.job.out if self.job else "out.bin" if single else "out")
        self.options = Options(max_shard_size=200_000, threads=2, overwrite=overwrite)
        self.old: dict[str, bytes] = {}
        for _ in range(2):
            self.prepare()
            began = time.perf_counter()
            assert os.waitstatus_to_exitcode(os.waitpid(self.start(), 0)[1]) == 0
            self.seconds = time.perf_counter() - began
        self.wanted = contents(self.out)
        self.all = contents(self.place)
        self.told = {"killed": 0, "done": 0, "kept": 0, "published": 0}

    def start(self, nth: int = 0, mode: str = "", report: int = -1) -> int:
        """A child that converts, and is killed at the n-th point of a kind, if there are so many."""
        child = os.fork()
        if child:
            return child
        status = 3
        try:
            if mode in ("read", "write"):
                inject(mode == "write", nth, KILL)
            elif mode == "event":
                self.die_at(nth)
            if self.job:
                done = self.job.make(self.out, "after", overwrite=self.overwrite)
            else:
                done = zckpt.convert(self.checkpoint, self.out, dtype="bf16", options=self.options)
            if report >= 0:
                os.write(report, str(done.kept).encode())
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(status)

    def die_at(self, nth: int) -> None:
        seen = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            if event in EVENTS and str(self.place) in str(arguments[0]):
                seen += 1
                if seen == nth:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)

    def prepare(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        if self.overwrite:
            earlier = earlier_output(
                self.out, {self.out.name if self.single else "precious": b"old"}, single=self.single
            )
            self.old = {self.out.name: b"old"} if self.single else earlier

    def trial(self, mode: str, nth: int, delay: float) -> bool:
        """One kill and what comes after it; whether there was one."""
        self.prepare()
        child = self.start(nth, mode)
        if mode == "time":
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL), code
        found = contents(self.out)
        assert found in (self.old if self.overwrite else None, self.wanted), "something incomplete under the final name"
        if code == 0:
            assert contents(self.place) == self.all
            self.told["done"] += 1
            return False
        self.told["killed"] += 1
        self.told["published"] += found == self.wanted
        reader, writer = os.pipe()
        child = self.start(report=writer)
        os.close(writer)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        kept = os.read(reader, 1000)
        os.close(reader)
        assert code == 0, (code, os.listdir(self.place))
        assert contents(self.place) == self.all, "the bytes are others, or something was left behind"
        self.told["kept"] += int(kept)
        return True


def main() -> None:
    checkpoint, work, mode, count, seed, every, *flags = sys.argv[1:]
    job = next((flag for flag in flags if flag in COMPUTED), "")
    is_single = "single" in flags or bool(job and COMPUTED[job].single)
    trials = Trials(checkpoint, work, overwrite="overwrite" in flags, single=is_single, job=job)
    chance = random.Random(int(seed))
    nth, step = 0, int(every)
    while trials.told["killed"] < int(count):
        nth += step
        was_killed = trials.trial(mode, nth, chance.uniform(0, trials.seconds))
        if mode != "time" and not was_killed:  # there are no more such points
            for one in range(max(nth - 2 * step, 0) + 1, nth):
                trials.trial(mode, one, 0.0)
            break
    print(json.dumps({**trials.told, "seconds": trials.seconds, "files": len(trials.all or ())}))


if __name__ == "__main__":
    main()
