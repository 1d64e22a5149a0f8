"""How long training stops for a save in the background, beside a save that it waits for: four ranks, 1 GB of state, on CPU.

    python benchmarks/stops.py [--width N] [--layers N] [--world N] [--rounds N] [--dir DIR]

A stop is the call of `save_checkpoint` and what the next step waits for the copy of the optimizer's states, of the slowest rank;
forward and backward lie between. Both kinds take turns, medians; the first of each warms up and does not count. Writes
results_stops.md.
"""

from __future__ import annotations

import argparse
import json
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

PAGE = Path(__file__).with_name("results_stops.md")


def main() -> None:
    """Launches the ranks and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=os.environ.get("TMPDIR", "/tmp"))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Path(options.worker), options.width, options.layers, options.rounds)
        return
    home = Path(options.dir) / f"zckpt-stops-{os.getpid()}"
    home.mkdir()
    try:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.world}"]
        sizes = ["--width", str(options.width), "--layers", str(options.layers), "--rounds", str(options.rounds)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [*launcher, __file__, "--worker", str(home), *sizes]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        page = table(json.loads((home / "found.json").read_text()), options.world)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    options.page.write_text(page)
    print(page)


def table(found: dict[str, Any], world: int) -> str:
    """The page."""
    lines = [
        "# How long training stops for a save in the background", "",
        f"`python benchmarks/stops.py`: {world} ranks on {os.cpu_count()} cores, bf16 with fp32 masters and Adam's states, load "
        f"{found['load']:.1f} before. CPU is the processor time of the slowest rank's training thread.", "",
        "| stage | MB | save that is waited for, s | stop, s | of the save | CPU of the stop, s |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for stage, case in found["cases"].items():
        whole, stop = case["whole"], case["stop"]
        part = f"**{100 * stop / whole:.0f} %**"
        lines.append(
            f"| {stage} | {case['bytes'] / 1e6:,.0f} | {whole:.3f} | {stop:.3f} | {part} | {case['cpu']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def work(home: Path, width: int, layers: int, rounds: int) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    load = os.getloadavg()[0]
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"load": load, "cases": {}}
    for stage in (1, 2, 3):
        engines = {kind: make(stage, width, layers, kind == "stop") for kind in ("whole", "stop")}
        times: dict[str, list[float]] = {"whole": [], "stop": [], "cpu": []}
        for _ in range(rounds + 1):
            for kind, engine in engines.items():
                dist.barrier()
                wall, cpu = clocks(lambda engine=engine: engine.save_checkpoint(str(home / "run"), tag="t"))
                step(engine, width, backward_only=True)
                if kind == "stop":
                    more_wall, more_cpu = clocks(engine.optimizer._wait)
                    times["cpu"].append(most(cpu + more_cpu))
                    wall += more_wall
                times[kind].append(most(wall))
                engine.step()
                engine.wait_for_checkpoint()
                dist.barrier()
                nbytes = sum(path.stat().st_size for path in (home / "run" / "t").iterdir())
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(home / "run")
        found["cases"][stage] = {kind: statistics.median(took[1:]) for kind, took in times.items()} | {"bytes": nbytes}
        del engines
    if dist.get_rank() == 0:
        (home / "found.json").write_text(json.dumps(found))
    dist.barrier()
    torch.set_num_threads(1)
    dist.destroy_process_group()


def make(stage: int, width: int, layers: int, background: bool) -> Any:
    """An engine after one step."""
    import torch
    from torch import nn

    from zckpt import runtime

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "checkpoint": {"async_save": background},
    }
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    engine = runtime.initialize(model=model, config=config)[0]
    step(engine, width)
    return engine


def step(engine: Any, width: int, *, backward_only: bool = False) -> None:
    """Forward and backward, and the optimizer's step."""
    import torch

    engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().mean())
    if not backward_only:
        engine.step()


def clocks(job: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and the processor's seconds of this thread."""
    began, cpu = time.perf_counter(), time.thread_time()
    job()
    return time.perf_counter() - began, time.thread_time() - cpu


def most(value: float) -> float:
    """The largest of all ranks."""
    import torch
    import torch.distributed as dist

    found = torch.tensor(value)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


if __name__ == "__main__":
    main()
