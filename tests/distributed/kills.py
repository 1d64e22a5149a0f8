"""Runs that are killed while they save, again and again: afterwards there is always a checkpoint to go on from.

    python kills.py HOME TIMES SEED

Two ranks, forked from this process, save without a pause, over an old tag and under new ones. Every number that they save is
the step at which they do, so that a load can tell what it loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zckpt import runtime
from zckpt.runtime.saves import run_state

WORLD = 2


def begin(world: int, **checkpoint: object) -> runtime.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 301, bias=False))
    config = {
        "train_batch_size": 2, "train_micro_batch_size_per_gpu": 2 // world, "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2 if world == 2 else 3}, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"}, "checkpoint": checkpoint,
    }  # fmt: skip
    return runtime.initialize(model=model, config=config)[0]


def mark(engine: runtime.Engine, step: int) -> None:
    """Makes every number of the run its step."""
    engine.global_steps = engine.micro_steps = step
    for one in engine.sharded.parameters:
        assert one.master is not None and engine.optimizer is not None
        with torch.no_grad():
            one.master.fill_(step)
        states = {name: torch.full_like(one.master, step) for name in ("exp_avg", "exp_avg_sq")}
        engine.optimizer.state[one.master].update(states, step=torch.tensor(float(step)))


def saver(home: Path, rank: int, first: int, port: int, pipe: int) -> None:
    """Saves until it is killed; tells of each save that is done."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    engine = begin(WORLD, keep_last=3, async_save=first % 3 == 0)
    for step in range(first, first + 10_000):
        mark(engine, step)
        engine.save_checkpoint(home / "run", tag="again" if step % 2 else f"step{step}", client_state={"step": step})
        if rank == 0:
            os.write(pipe, step.to_bytes(8, "little"))


def loader(home: Path, least: int, most: int, pipe: int) -> None:
    """Goes on from what is there, and tells of which step it is."""
    engine = begin(1)
    path, client = engine.load_checkpoint(home / "run")
    assert path is not None and client is not None, "nothing to load"
    step = engine.global_steps
    assert least <= step <= most and client["step"] == step, (least, step, most, client)
    for part in run_state.capture(engine).parts:
        for numbers in (part.weight, *part.states.values()):
            assert bool((numbers == step).all()), (part.name, step)
        assert len(part.states) == 2 and part.scalars == {"step": step}
    os.write(pipe, step.to_bytes(8, "little"))


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def steps_in(pipe: int) -> list[int]:
    data = b""
    while block := os.read(pipe, 1 << 16):
        data += block
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]


def once(home: Path, first: int, delay_s: float, before: int) -> tuple[int, int]:
    """One run, killed some time after its first save: the step of its last finished save, and that which was loaded."""
    read, write = os.pipe()
    port = free_port()
    pids = [forked(lambda rank=rank: saver(home, rank, first, port, write)) for rank in range(WORLD)]
    os.close(write)
    head = os.read(read, 8)
    assert head, "the run never saved"
    time.sleep(delay_s)
    for pid in random.sample(pids, WORLD):
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    done = [int.from_bytes(head, "little"), *steps_in(read)]
    os.close(read)
    read, write = os.pipe()
    # A save in the background is told of when it is begun; the one before it is done then.
    least = done[-1] if first % 3 else done[-2] if done[1:] else before
    pid = forked(lambda: loader(home, least, done[-1] + 1, write))
    os.close(write)
    _, status = os.waitpid(pid, 0)
    loaded = steps_in(read)
    os.close(read)
    assert status == 0 and len(loaded) == 1, f"killed after {delay_s:.3f} s: nothing to load"
    return done[-1], loaded[0]


def scout(home: Path, pipe: int) -> None:
    """Tells which modules a run imports on its way."""
    before = set(sys.modules)
    engine = begin(1)
    mark(engine, 1)
    engine.save_checkpoint(home / "scouted")
    engine.load_checkpoint(home / "scouted")
    os.write(pipe, json.dumps(sorted(set(sys.modules) - before)).encode())


def import_early(home: Path) -> None:
    """What every run would import again; nothing else may happen before a fork."""
    read, write = os.pipe()
    pid = forked(lambda: scout(home, write))
    os.close(write)
    names = b"".join(iter(lambda: os.read(read, 1 << 16), b""))
    os.waitpid(pid, 0)
    for name in json.loads(names):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def main() -> None:
    warnings.simplefilter("ignore")
    home, times, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    import_early(home)
    random.seed(seed)
    found: list[tuple[int, int]] = []
    for number in range(times):
        before = found[-1][1] if found else 1
        found.append(once(home, 1 + number * 10_000, random.uniform(0, 0.15), before))
        for left in (home / "run").glob(".*"):
            assert ".zckpt-" in left.name
    left = len(list((home / "run").glob(".*")))
    print(json.dumps({"killed": len(found), "newer": sum(b > a for a, b in found), "left": left}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
