"""Scripts that end while a save is still written in the background.

    python ends.py HOME

Every way of `WAYS` is tried by two ranks, forked from this process, which end as scripts do: by their last line or by an
exception. Rank 0 has the store in which they meet. Prints their exit statuses as JSON; what they say is in HOME/WAY.RANK.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kills import free_port, import_early
from torch import nn

from zckpt import runtime
from zckpt.base.errors import OutputError
from zckpt.runtime.saves.rounds import Rounds

WAYS = ("well", "exception", "destroyed", "failed", "failed and exception")
WORLD = 2


def save_and_end(home: Path, how: str, rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"},
        "checkpoint": {"async_save": True},
    }  # fmt: skip
    engine = runtime.initialize(model=nn.Linear(30, 30), config=config)[0]
    write = Rounds.carry_out

    def slowly(prepared: Any, directory: str) -> None:
        time.sleep(0.3 * (1 + rank))
        write(prepared, directory)
        if rank and "failed" in how:
            raise OutputError("a disk that broke", file="x")

    Rounds.carry_out = slowly
    engine.save_checkpoint(home / how)
    if how == "destroyed":
        dist.destroy_process_group()
    if "exception" in how and rank == 0:
        raise ValueError("the script is wrong")


def main() -> None:
    home = Path(sys.argv[1])
    import_early(home / "scouted")
    statuses: dict[str, list[int]] = {}
    for how in WAYS:
        port, pids = free_port(), []
        for rank in range(WORLD):
            pid = os.fork()
            if not pid:
                said = os.open(home / f"{how}.{rank}", os.O_WRONLY | os.O_CREAT)
                os.dup2(said, 2)
                save_and_end(home, how, rank, port)
                return
            pids.append(pid)
        statuses[how] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(json.dumps(statuses))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
