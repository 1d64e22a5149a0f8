"""Checkpoints of small models on CPU: milliseconds of processors that a rank takes for a save and a load, beside DeepSpeed.

    python benchmarks/small_checkpoints.py [--world N] [--rounds N] [--dir DIR]

Both engines hold the same model in the same processes and take turns. The first save and load of a size and stage are told by
themselves; of the later ones the median; of all ranks the mean. zckpt's saves are synced, DeepSpeed's are not.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints import make

SIZES = {"72": (8, 1), "1.7 M": (320, 17), "25 M": (1240, 16)}
"""Parameters: width and number of square layers."""

STAGES = (2, 3)


def main() -> None:
    """Launches the ranks and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--dir", default=os.environ.get("TMPDIR", "/tmp"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Path(options.worker), options.rounds)
        return
    home = Path(options.dir) / f"zckpt-small-{os.getpid()}"
    home.mkdir()
    try:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.world}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        command = [*launcher, __file__, "--worker", str(home), "--rounds", str(options.rounds)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        print("| parameters | stage | | zckpt, ms | DeepSpeed | ratio | first, ms | DeepSpeed | ratio |")
        print("|---|---|---|---|---|---|---|---|---|")
        for size, stage, what, ours, theirs in json.loads((home / "found.json").read_text()):
            cells = [f"{a:.1f} | {b:.1f} | **{a / b:.2f}**" for a, b in zip(ours, theirs, strict=True)]
            print(f"| {size} | {stage} | {what} | {cells[1]} | {cells[0]} |")
    finally:
        shutil.rmtree(home, ignore_errors=True)


def work(home: Path, rounds: int) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    import deepspeed
    import torch.distributed as dist

    from zckpt import runtime

    logging.disable(logging.WARNING)
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    import deepspeed_on_cpu

    deepspeed_on_cpu.initialize()
    found: list[Any] = []
    for size, (width, layers) in SIZES.items():
        for stage in STAGES:
            initializers = {"zckpt": runtime.initialize, "deepspeed": deepspeed.initialize}
            engines = {name: make(begin, stage, "bf16", width, layers) for name, begin in initializers.items()}
            times: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}}
            for number in range(rounds):
                for what, of in times.items():
                    for name, engine in engines.items():
                        where, tag = str(home / name), f"t{number}"
                        call = engine.save_checkpoint if what == "save" else engine.load_checkpoint
                        of.setdefault(name, []).append(spent(lambda call=call, at=where, tag=tag: call(at, tag=tag)))
                dist.barrier()
                if dist.get_rank() == 0:
                    for name in engines:
                        shutil.rmtree(home / name / f"t{number}")
            for what, of in times.items():
                ours, theirs = ([mean(of[name][0]), mean(statistics.median(of[name][1:]))] for name in engines)
                found.append([size, stage, what, ours, theirs])
            engines["deepspeed"].destroy()
            del engines
    if dist.get_rank() == 0:
        (home / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def spent(job: Callable[[], Any]) -> float:
    """Milliseconds of processors that this process takes for a job, in all its threads."""
    import torch.distributed as dist

    dist.barrier()
    before = time.process_time()
    job()
    return (time.process_time() - before) * 1e3


def mean(value: float) -> float:
    """The mean over ranks."""
    import torch
    import torch.distributed as dist

    found = torch.tensor(value)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


if __name__ == "__main__":
    main()
