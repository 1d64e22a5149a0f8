"""Starts ranks as torchrun does, forked from this process, which has imported what they need: torch and DeepSpeed take seconds.

    python forked.py MODULE..

Reads one line of JSON for each start, {"world", "command": script and arguments, "environment", "log", "seconds"}, and answers
with the exit codes of all ranks, when all have ended; a rank that fails ends the others. Asked for {"modules", "path", "asks",
"answers"} it forks a process that imports more, from these directories too, and reads and answers at these named pipes. As under
torchrun, ranks find its names in the environment, and a store that outlives each of them. But sets have the same order in all,
as they are forked; under torchrun they have not: tests/distributed/test_api.py and tests/interop/test_trainer.py start theirs by
it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ending import run_to_the_end, share_imports
from hangs import HANG_S


def main() -> None:
    serve(sys.argv[1:], sys.stdin)


def serve(modules: Iterable[str], lines: Iterable[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    share_imports()
    for line in lines:
        asked = json.loads(line)
        child = os.fork()
        if child:
            if "modules" not in asked:
                os.waitpid(child, 0)
        elif "modules" in asked:
            lines = open(asked["asks"])  # noqa: SIM115
            os.dup2(os.open(asked["answers"], os.O_WRONLY), 1)
            sys.path[1:1] = [place for place in asked["path"] if place not in sys.path]
            return serve(asked["modules"], lines)
        else:
            launch(asked)


def launch(asked: dict[str, Any]) -> None:
    """Forks the ranks of one start and waits for them."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, world = listener.getsockname()[1], asked["world"]
    answers = os.dup(1)
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ranks: dict[int, int] = {}
    for rank in range(world):
        child = os.fork()
        if not child:
            os.close(answers)
            listener.close()
            run_to_the_end(lambda rank=rank: become(rank, port, log, asked))  # type: ignore[misc]
        ranks[child] = rank
    store = dist.TCPStore(
        "127.0.0.1", port, world, True, timedelta(seconds=HANG_S), False, master_listen_fd=listener.detach()
    )
    codes = wait(ranks, asked["seconds"])
    del store
    os.write(answers, json.dumps(codes).encode() + b"\n")
    os._exit(0)


def become(rank: int, port: int, log: int, asked: dict[str, Any]) -> None:
    """Runs the script as this rank; what it leaves to the end of the interpreter comes then."""
    world, (script, *arguments) = asked["world"], asked["command"]
    os.environ.clear()
    os.environ.update(asked["environment"])
    for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
        os.environ[name] = str(world)
    more = {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update({**more, **store, "TORCHELASTIC_RUN_ID": str(port)})
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.argv[:] = [script, *arguments]
    sys.path[:1] = [str(Path(script).parent), str(Path(__file__).parent)]
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    exec(compile(Path(script).read_bytes(), script, "exec"), module.__dict__)


def wait(ranks: dict[int, int], seconds: float) -> list[int]:
    """Their exit codes, in their order."""
    codes, until, is_over = [0] * len(ranks), time.monotonic() + seconds, False
    while ranks:
        for child in list(ranks):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[ranks.pop(child)] = os.waitstatus_to_exitcode(status)
        if not is_over and (any(codes) or time.monotonic() > until):
            is_over = True
            time.sleep(1)  # the others say why they fail, if they do
            for child in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return codes


if __name__ == "__main__":
    run_to_the_end(main)
