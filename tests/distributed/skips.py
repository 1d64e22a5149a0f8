"""Two ranks, one of which leaves a unit out: they hang, and rank 0 says which unit it is.

    python skips.py HOME

Ends when something is said, or after ten minutes. Prints what was said, and after how many seconds.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from kills import forked, free_port
from torch import nn

from zckpt import runtime
from zckpt.runtime.sharding import watch

watch.STILL_S, watch.LOOK_S = 2.0, 0.5
logging.getLogger("zckpt.runtime.config").setLevel(logging.WARNING)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, skipped: int = -1) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = block(x)
        return x


def run(home: Path, rank: int, port: int) -> None:
    os.dup2(os.open(home / f"said {rank}", os.O_WRONLY | os.O_CREAT), 2)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD"}}
    engine = runtime.initialize(model=Skipping(), config=config)[0]
    for step in range(3):
        if step == 1:
            time.sleep(3 + 3 * rank)  # slow ranks are not taken for lost ones
        engine.backward(engine(torch.ones(1, 8), skipped=2 if step == 2 and rank else -1).sum())
        engine.step()


def main() -> None:
    home, port = Path(sys.argv[1]), free_port()
    pids = [forked(lambda rank=rank: run(home, rank, port)) for rank in range(2)]  # type: ignore[misc]
    began, said = time.monotonic(), ""
    while not said and time.monotonic() < began + 600:
        time.sleep(0.2)
        said = (home / "said 0").read_text() if (home / "said 0").exists() else ""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(json.dumps([said, time.monotonic() - began]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
