"""Saves that end at every call that changes a name, syncs, makes or truncates: by SIGKILL, or because the call fails.

    python save_kill_points.py HOME

One rank saves a tag again that `latest` names, and prunes an older one; with directories that change places in one step, and
on a file system that cannot do that. After every end `latest` must name a whole save, the old one or the new one, which
verifies and loads, and the next save must work and leave nothing behind. The same for two ranks, the first of which is killed
around every renaming. Prints what happened as JSON. In `make test` it is killed on the one file system, and calls fail on the
other.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import proofs
import torch
import torch.distributed as dist
from calls import at_each
from kills import begin, free_port, import_early, mark

from zckpt.base.errors import ZckptError
from zckpt.checks.verify import verify
from zckpt.output import commit
from zckpt.runtime import Engine
from zckpt.runtime.saves import run_state

OLD, NEW, NEXT = 2, 3, 4


def save(engine: Engine, run: Path, tag: str, step: int) -> None:
    mark(engine, step)
    engine.save_checkpoint(run, tag=tag, client_state={"step": step})


def look(engine: Engine, run: Path, *steps: int) -> int:
    """What `latest` names is whole, and loads: as it was at one of these steps."""
    found = verify(run, deep=True)
    assert found.ok, str(found)
    mark(engine, 0)
    path, client = engine.load_checkpoint(run)
    step = engine.global_steps
    assert path is not None and step in steps and client["step"] == step, (path, step, client)
    for part in run_state.capture(engine).parts:
        for numbers in (part.weight, *part.states.values()):
            assert bool((numbers == step).all()), (part.name, step)
    return step


def started(work: Callable[[], object]) -> int:
    """A child that does this."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


def ended(pid: int) -> int:
    """How a child has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forked(work: Callable[[], object]) -> int:
    """How a child ended that did this."""
    return ended(started(work))


class Trials:
    def __init__(self, home: Path, engine: Engine, *, exchange: bool) -> None:
        self.engine = engine
        self.template, self.run = home / "template", home / "run"
        if not exchange:
            commit.exchange = lambda a, b: False
        assert forked(self.make) == 0
        self.told = {"ends": 0, "new": 0}

    def make(self) -> None:
        shutil.rmtree(self.template, ignore_errors=True)
        save(self.engine, self.template, "older", OLD - 1)
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.template / "older", self.run)
        save(self.engine, self.template, "again", OLD)
        os.rename(self.run, self.template / "older")
        (self.template / "again" / "notes.md").write_text("mine")

    def prepare(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.template, self.run)

    def afterwards(self) -> None:
        """What must be true however the save has ended."""
        step = look(self.engine, self.run, OLD, NEW)
        save(self.engine, self.run, "next", NEXT)
        look(self.engine, self.run, NEXT)
        names = sorted(path.name for path in self.run.iterdir())
        assert names == ["README.txt", "again", "latest", "next", "zero_to_fp32.py"], names
        assert (self.run / "again" / "notes.md").read_text() == "mine"
        os._exit(10 + step)

    def end(self, nth: int, *, kill: bool) -> bool:
        """One save that ends at the n-th call; whether there was one."""
        self.prepare()

        def happens(number: int, *_: object) -> None:
            if number == nth and kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == nth:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        def one() -> None:
            with at_each(happens) as seen:
                try:
                    save(self.engine, self.run, "again", NEW)
                except ZckptError:
                    os._exit(0 if not kill else 3)
            os._exit(2 if len(seen) < nth else 0)

        code = forked(one)
        assert code in (2, -signal.SIGKILL if kill else 0), (nth, code)
        step = forked(self.afterwards) - 10
        assert step in (OLD, NEW), f"{'killed' if kill else 'failed'} at call {nth}"
        if code == 2:
            assert step == NEW
            return False
        self.told["ends"] += 1
        self.told["new"] += step == NEW
        return True


def of_two(run: Path, nth: int = 0) -> list[str]:
    """Two ranks save a tag twice; the first is killed at the n-th call of the second time. Gives its calls, where it was not."""
    port, calls = free_port(), run.parent / "calls"

    def rank(number: int) -> None:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
        engine = begin(2)
        save(engine, run, "again", OLD)
        commit.exchange = lambda a, b: False

        def happens(at: int, *_: object) -> None:
            if at == nth and not number:
                os.kill(os.getpid(), signal.SIGKILL)

        with at_each(happens) as seen:
            try:
                save(engine, run, "again", NEW)
            except ZckptError as error:
                assert nth and number and "lost touch" in str(error), error
        if not number:
            calls.write_text(" ".join(seen))

    pids = [started(lambda number=number: rank(number)) for number in range(2)]  # type: ignore[misc]
    codes = [ended(pid) for pid in pids]
    assert codes == [-signal.SIGKILL if nth else 0, 0], codes
    return calls.read_text().split()


def two_ranks(home: Path) -> list[Path]:
    """Directories in which the first of two ranks was killed while it saved: before and after every renaming."""
    home.mkdir()
    renamed = [number for number, name in enumerate(of_two(home / "whole"), 1) if name == "rename"]
    points = sorted({number + more for number in renamed for more in (0, 1)})
    for nth in points:
        of_two(home / f"{nth}", nth)
    return [home / f"{nth}" for nth in points]


def main() -> None:
    warnings.simplefilter("ignore")
    home = Path(sys.argv[1])
    import_early(home)
    of_two_ranks = two_ranks(home / "two")
    engine = begin(1, keep_last=1)
    for run in of_two_ranks:
        assert forked(lambda run=run: look(engine, run, OLD, NEW)) == 0, run  # type: ignore[misc]
        assert forked(lambda run=run: save(engine, run, "next", NEXT)) == 0, run  # type: ignore[misc]
        assert not list(run.glob(".*")), run
    told: dict[str, dict[str, int]] = {"two ranks": {"ends": len(of_two_ranks)}}
    for exchange in (True, False):
        trials = Trials(home, engine, exchange=exchange)
        for kill in (True, False) if proofs.IS_WHOLE else (exchange,):
            trials.told = {"ends": 0, "new": 0}
            nth = 1
            while trials.end(nth, kill=kill):
                nth += 1
            told[f"{'killed' if kill else 'failed'}{'' if exchange else ', no exchange'}"] = trials.told
    print(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
