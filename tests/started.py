"""Starts several zckpt processes as srun or a launcher would: forked from one that has imported zckpt, so it is quick.

    python started.py TRIALS

TRIALS is JSON: a list of {"size", "arguments", and perhaps "of": rank -> arguments of its own, "launcher": "slurm" (where torch
cannot be imported) or "env" (RANK and so on; rank 0 holds the store), "absent": ranks that are not started, "kill": [rank, n]
(SIGKILL at its n-th write), "constants": module -> name -> value}. Prints [{"codes", "out", "err", "seconds"}].
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
import tempfile
import time
from typing import Any

from hangs import HANG_S

import zckpt.cli
import zckpt.jobs.convert
import zckpt.jobs.reshard
import zckpt.jobs.to_universal
from zckpt._core import inject

KILL = -3


def environment(trial: dict[str, Any], rank: int, port: int) -> dict[str, str]:
    size = str(trial["size"])
    if trial.get("launcher", "slurm") == "slurm":
        return {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": size, "SLURM_PROCID": str(rank)}
    return {"RANK": str(rank), "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def start(trial: dict[str, Any], rank: int, port: int, outputs: tuple[int, int]) -> int:
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        os.environ.update(environment(trial, rank, port))
        for number, fd in zip((1, 2), outputs, strict=True):
            os.dup2(fd, number)
        if trial.get("launcher", "slurm") == "slurm":
            sys.modules["torch"] = None  # type: ignore[assignment]
        for module, constants in {"zckpt.team.partition": {"GRAIN": 16}, **trial.get("constants", {})}.items():
            for name, value in constants.items():
                setattr(importlib.import_module(module), name, value)
        if trial.get("kill", [-1])[0] == rank:
            inject(True, trial["kill"][1], KILL)
        arguments = trial.get("of", {}).get(str(rank), trial["arguments"])
        sys.argv[1:] = arguments
        zckpt.cli.main()
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def free_port() -> int:
    """A port below those that a system gives out by itself: rank 0 listens there only when it has imported torch."""
    while True:
        port = random.randrange(15_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def run(trial: dict[str, Any]) -> dict[str, Any]:
    if trial.get("launcher", "slurm") != "slurm":
        importlib.import_module("torch.distributed")  # once, not in each of them
    port = free_port()
    files = [(tempfile.TemporaryFile(), tempfile.TemporaryFile()) for _ in range(trial["size"])]  # noqa: SIM115
    began = time.monotonic()
    children = {
        start(trial, rank, port, (out.fileno(), err.fileno())): rank
        for rank, (out, err) in enumerate(files)
        if rank not in trial.get("absent", ())
    }
    codes: list[int | None] = [None] * trial["size"]
    while children and time.monotonic() < began + HANG_S:
        for child in list(children):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    texts = []
    for pair in files:
        for file in pair:
            file.seek(0)
        texts.append([file.read().decode() for file in pair])
    return {
        "codes": codes,
        "out": [out for out, _ in texts],
        "err": [err for _, err in texts],
        "seconds": time.monotonic() - began,
    }


if __name__ == "__main__":
    print(json.dumps([run(trial) for trial in json.loads(sys.argv[1])]))
