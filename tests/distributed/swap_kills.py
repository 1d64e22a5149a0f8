"""Runs with device nvme that are killed in the update of a step and in a save: what is left, and how the next run goes on.

    python swap_kills.py HOME

Two ranks, forked from this process, load what the ranks before have left, compare their losses with those of a run that nobody
kills, and then rank 0 is killed at some read or write of the C++ engine: in a step those are of the swap file, in a save of the
swap file and of the checkpoint's files. Prints as JSON where the runs were killed, and after which step each one began.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
import torch.distributed as dist
from calls import at_each
from kills import forked, free_port, import_early
from proofs import IS_WHOLE
from swaps import begin, offloads, train

from zckpt import _core
from zckpt.checks.verify import verify

WORLD, KILL = 2, -3
POINTS = [
    (kind, at, part)
    for kind, at, parts in (
        ("step", "write", (0.0, 0.5, 0.9) if IS_WHOLE else (0.5,)),
        ("step", "read", (0.5,)),
        ("save", "read", (0.0,) if IS_WHOLE else ()),
        ("save", "write", (0.5,)),
        ("save", "call", (0.6, 0.95)),
    )
    for part in parts
]
"""In what; at what: a call is one that changes a name, syncs, makes or truncates; how many of them are done by then."""


def engine_of(home: Path) -> Any:
    return begin(3, "bf16", offloads(home, "optimizer+param"))


def stepped(engine: Any, before: Callable[[], None], after: Callable[[], None] = lambda: None) -> list[float]:
    """Trains one step; these are called around the optimizer's update."""
    swapped = engine.optimizer.step

    def step(*arguments: Any) -> None:
        before()
        swapped(*arguments)
        after()

    engine.optimizer.step = step
    losses = train(engine, 1)
    engine.optimizer.step = swapped
    return losses


def straight(home: Path) -> dict[str, Any]:
    """The run that nobody kills: its losses after its first save, and the reads and writes of a step and of a save."""
    told: dict[str, Any] = {}

    def begins() -> None:
        for write in (False, True):
            _core.inject(write, 0, 0)

    def ends(kind: str) -> None:
        told[kind] = {"read": _core.calls(False), "write": _core.calls(True)}

    engine = engine_of(home)
    train(engine, 1)
    engine.save_checkpoint(home / "run", tag="again")
    told["losses"] = stepped(engine, begins, lambda: ends("step"))
    begins()
    with at_each(lambda *_: None) as seen:
        engine.save_checkpoint(home / "other", tag="again")
    ends("save")
    told["save"]["call"] = len(seen)
    told["losses"] += train(engine, len(POINTS))
    return told


def goes_on(home: Path, wanted: list[float], kind: str, at: str, nth: int) -> int:
    """Goes on from what is there, and is killed on rank 0, if there is an `nth`; gives the step after which it began."""
    found = verify(home / "run", deep=True)
    assert found.ok, str(found)
    engine = engine_of(home)
    pids: list[Any] = [0] * WORLD
    dist.all_gather_object(pids, os.getpid())
    held = {int(path.name.split("-")[-2]) for path in home.glob("zckpt-swap-*")}
    assert held == set(pids), "the swap files of killed runs are still there"
    path, _ = engine.load_checkpoint(home / "run")
    assert path is not None
    step = engine.global_steps
    losses = train(engine, 1)
    assert losses == wanted[2 * (step - 1) : 2 * step], (step, losses, wanted)
    dist.barrier()

    def inject() -> None:
        if dist.get_rank() == 0 and nth:
            (home / "began").write_text(str(step))
            if at != "call":
                _core.inject(at == "write", nth, KILL)

    def happens(number: int, *_: object) -> None:
        if dist.get_rank() == 0 and at == "call" and number == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    if kind == "step":
        stepped(engine, inject)
    else:
        inject()
        with at_each(happens):
            engine.save_checkpoint(home / "run", tag="again" if step % 2 else "other")
    return step


def ranks(work: Callable[[], Any], home: Path, *, kill: bool) -> Any:
    """What rank 0 gives; None where it is killed. The others are killed with it."""
    port, out = free_port(), home / "out"

    def rank(number: int) -> None:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=WORLD)
        given = [None] * WORLD
        dist.all_gather_object(given, work())
        if not number:
            out.write_text(json.dumps(given))
        dist.barrier()

    pids = [forked(lambda number=number: rank(number)) for number in range(WORLD)]  # type: ignore[misc]
    first = os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])
    for pid in pids[1:]:
        if first:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert first == (-signal.SIGKILL if kill else 0), first
    return None if kill else json.loads(out.read_text())


def main() -> None:
    warnings.simplefilter("ignore")
    home = Path(sys.argv[1])
    import_early(home)
    given = ranks(lambda: straight(home), home, kill=False)
    told: dict[str, Any] = {"counts": {kind: given[0][kind] for kind in ("step", "save")}, "began": []}

    def next_run(kind: str, at: str, nth: int) -> Any:
        return ranks(lambda: goes_on(home, given[dist.get_rank()]["losses"], kind, at, nth), home, kill=bool(nth))

    for kind, at, part in POINTS:
        nth = 1 + int(part * given[0][kind][at])
        next_run(kind, at, nth)
        assert len(list(home.glob("zckpt-swap-*"))) >= WORLD
        told["began"].append(int((home / "began").read_text()))
    told["began"].append(next_run("save", "call", 0)[0])
    print(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
