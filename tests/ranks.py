"""Starts a script on several ranks of real torch.distributed."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, NamedTuple

from hangs import HANG_S
from standby import programs

OWN = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
BARE = (
    "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "zckpt.live", "zckpt.runtime.start", "zckpt.drop_in",
    "pytest",
)  # fmt: skip
"""What ranks of zckpt's trainer import, and `proofs` of their scripts."""
OURS = (*BARE, "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama")
"""And the models that some of them train; the hub's library has read its environment then."""
_REAL = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")  # which imports torch.compile's compiler
DEEPSPEED = (*OURS, *_REAL)
TRAINER = (*OURS, "transformers.trainer", "accelerate", "peft")
"""Of transformers; it imports DeepSpeed when it is asked for, which may be zckpt's trainer."""
DEEPSPEED_TRAINER = (*TRAINER, *_REAL)
MEGATRON = (*BARE[:3], "megatron.core.dist_checkpointing", "megatron.core.optimizer")


class Server(NamedTuple):
    """A process of `forked`: what it is asked, and what it answers."""

    asks: IO[str]
    answers: IO[str]
    process: subprocess.Popen[str] | None = None


@functools.cache
def server(modules: tuple[str, ...], preload: str) -> Server:
    """A process that has imported these, and the library before all.

    Those without a library are forked from one that has imported the beginning of what they import.
    """
    if modules != BARE and not preload:
        parent = OURS if modules != OURS and modules[: len(OURS)] == OURS else BARE
        with tempfile.TemporaryDirectory(prefix="zckpt-ranks-") as place:
            pipes = [f"{place}/{name}" for name in ("asks", "answers")]
            for pipe in pipes:
                os.mkfifo(pipe)
            path = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
            asked = {"modules": modules, "path": path, "asks": pipes[0], "answers": pipes[1]}
            print(json.dumps(asked), file=server(parent, "").asks, flush=True)
            return Server(open(pipes[0], "w"), open(pipes[1]))
    more = {"HF_HUB_OFFLINE": "1", **({"LD_PRELOAD": preload} if preload else {})}  # read when transformers is imported
    python = sys.executable if preload else f"{programs()}/python"
    process = subprocess.Popen(
        [python, str(Path(__file__).with_name("forked.py")), *modules], env={**os.environ, **OWN, **more},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    return Server(process.stdin, process.stdout, process)


def fork_ranks(
    world: int, command: list[str], log: Path, modules: tuple[str, ...], preload: str = "", **environment: str
) -> list[int]:
    """Runs a script on so many ranks, forked from a process with these modules; their exit codes. What they say is in `log`."""
    process = server(modules, preload)
    asked = {
        "world": world, "command": command, "environment": {**os.environ, **OWN, **environment}, "log": str(log),
        "seconds": HANG_S,
    }  # fmt: skip
    print(json.dumps(asked), file=process.asks, flush=True)
    return json.loads(process.answers.readline())


def run_ranks(
    world: int, path: Path, worker: Path, modules: tuple[str, ...] = DEEPSPEED, preload: str = "", **environment: str
) -> None:
    """Starts a worker's ranks, with the path of their jobs, and waits until all have ended well."""
    log = path.with_name(f"{path.name}.log")
    codes = fork_ranks(world, [str(worker), str(path)], log, modules, preload, **environment)
    lines = log.read_text().splitlines()
    told = [line for line in lines if re.search(r"rank|exitcode|terminate called|what\(\)|Error", line)]
    assert not any(codes), (codes, "\n".join([*told[-60:], *lines[-20:]]))
