"""A short run by one library on one rank, for `gpu_check`: losses, what step, save and load take, and memory; as JSON.

python benchmarks/gpu_beside.py zckpt.runtime|deepspeed [--cpu]
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_bench import ADAMW, STEPS, Bench, config, train

CASES = (
    (0, "bf16", ""), (1, "bf16", ""), (2, "bf16", ""), (3, "bf16", ""), (3, "fp16", ""), (3, "fp32", ""), (2, "bf16", "cpu"),
)  # fmt: skip
"""Stage, precision, and where the optimizer's states are if not on the device."""


def main() -> None:
    """Prints the figures of all cases."""
    import torch

    library, on_cpu = sys.argv[1], "--cpu" in sys.argv
    # DeepSpeed speaks on the standard output.
    stdout, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    device = torch.device("cpu" if on_cpu else torch.accelerator.current_accelerator().type)
    home = Path(tempfile.mkdtemp(prefix="zckpt-gpu-beside-"))
    bench = Bench(device, home, 0, *((32, 2, 32) if on_cpu else (768, 6, 512)))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    backend = torch.distributed.get_default_backend_for_device(device)
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        rows = [_measured(bench, library, *case) for case in CASES if not on_cpu or case[1] != "fp16"]
    finally:
        shutil.rmtree(home)
    print(json.dumps(rows), file=stdout)


def _measured(bench: Bench, library: str, stage: int, precision: str, offload: str) -> dict[str, Any]:
    zero = {"offload_optimizer": {"device": offload}} if offload else {}
    settings = config(stage, precision, zero=zero)
    if library == "deepspeed":  # its own kernels for optimizers have to be compiled
        settings["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}
        settings["zero_force_ds_cpu_optimizer"] = False
    batches = list(bench.batches(4, STEPS))

    def steps() -> tuple[Any, list[float], float]:
        engine = importlib.import_module(library).initialize(model=bench.model(), config=settings)[0]
        losses = train(engine, bench.batches(STEPS))
        took = [_milliseconds(bench, lambda: train(engine, iter(batches))) for _ in range(3)]
        return engine, losses, statistics.median(took) / len(batches)

    (engine, losses, step), memory = bench.peak(steps, bench.held())
    saves = [_milliseconds(bench, lambda tag=tag: engine.save_checkpoint(bench.home / "run", tag=tag)) for tag in "abc"]
    first, *loads = [
        _milliseconds(bench, lambda: engine.load_checkpoint(bench.home / "run", tag="c")) for _ in range(4)
    ]
    engine.destroy()
    shutil.rmtree(bench.home / "run")
    return {
        "case": f"stage {stage}, {precision}{', optimizer on the CPU' if offload else ''}", "losses": losses,
        "step": step, "memory": memory / 2**20, "save": statistics.median(saves), "first load": first,
        "load": statistics.median(loads),
    }  # fmt: skip


def _milliseconds(bench: Bench, job: Callable[[], Any]) -> float:
    bench.sync()
    began = time.perf_counter()
    job()
    bench.sync()
    return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    main()
