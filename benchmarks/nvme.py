"""A step whose states are on disk, beside the same bytes read and written alone.

    python benchmarks/nvme.py DIRECTORY [--steps N] [--width N]

One process, stage 2, AdamW, bf16: each step reads and writes 12 bytes per parameter (the fp32 weight and two moments). Alone, as
many bytes of a file in the same directory are read and then written past the page cache, by eight threads in blocks of 1 MiB.
All take turns; medians. DeepSpeed's own path is not run: the last line is what it says of it on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import mmap
import os
import statistics
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BLOCK = 1 << 20
PER_PARAMETER = 12


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--width", type=int, default=2048)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from zckpt import runtime

    options.directory.mkdir(parents=True, exist_ok=True)
    engines = {
        "zckpt, states on disk": begin(runtime.initialize, options),
        "zckpt, in memory": begin(runtime.initialize, options, ""),
    }
    nbytes = PER_PARAMETER * 6 * (options.width + 1) * options.width
    alone = Alone(options.directory / "alone.bin", nbytes)
    seconds: dict[str, list[float]] = {name: [] for name in ("the same bytes alone", *engines)}
    for number in range(options.steps + 2):
        seconds["the same bytes alone"].append(alone.turn())
        for name, engine in engines.items():
            seconds[name].append(step(engine, options.width, number))
    alone.close()
    medians = {name: statistics.median(one[2:]) for name, one in seconds.items()}
    moved, load = f"{nbytes / 1e6:.0f} MB", os.getloadavg()[0]
    print(f"{moved} read and {moved} written per step, median of {options.steps}, load of the machine {load:.1f}\n")
    print("| | s | GB/s | of the same bytes alone |\n|---|---|---|---|")
    for name, one in medians.items():
        told = (
            f"{2 * nbytes / one / 1e9:.2f} | {medians['the same bytes alone'] / one:.0%}"
            if "memory" not in name
            else "|"
        )
        print(f"| {name} | {one:.3f} | {told} |")
    print(f"\nDeepSpeed's own path was not measured. DeepSpeed: {deepspeeds_word()}")


def begin(initialize: Any, options: argparse.Namespace, device: str = "nvme") -> Any:
    """An engine whose model is six square layers."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(6)))
    zero: dict[str, Any] = {"stage": 2}
    if device:
        zero["offload_optimizer"] = {"device": device, "nvme_path": str(options.directory)}
    config = {
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "bf16": {"enabled": True},
        "zero_optimization": zero, "aio": {"block_size": BLOCK, "queue_depth": 8},
    }  # fmt: skip
    return initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def step(engine: Any, width: int, number: int) -> float:
    """Seconds of one optimizer step."""
    import torch

    x = torch.randn(1, width, generator=torch.Generator().manual_seed(number)).bfloat16()
    engine.backward(engine(x).float().square().mean())
    begun = time.perf_counter()
    engine.step()
    return time.perf_counter() - begun


class Alone:
    """A file that is read and written past the page cache."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.blocks = path, -(-nbytes // BLOCK)
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
        os.posix_fallocate(self.fd, 0, self.blocks * BLOCK)
        self.pool = ThreadPoolExecutor(8)
        self.buffers = [mmap.mmap(-1, BLOCK) for _ in range(8)]
        for buffer in self.buffers:
            buffer.write(os.urandom(BLOCK))

    def turn(self) -> float:
        """Seconds to read all and to write all."""
        begun = time.perf_counter()
        for call in (os.preadv, os.pwritev):
            list(self.pool.map(lambda one, call=call: self._part(one, call), range(8)))  # type: ignore[misc]
        return time.perf_counter() - begun

    def _part(self, one: int, call: Any) -> None:
        for block in range(one, self.blocks, 8):
            call(self.fd, [self.buffers[one]], block * BLOCK)

    def close(self) -> None:
        """Removes the file."""
        os.close(self.fd)
        self.path.unlink()


def deepspeeds_word() -> str:
    """What DeepSpeed says of its own reads and writes on this machine."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        if importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder().is_compatible(verbose=True):
            return "async_io can be built here; this script does not run it."
    return next(
        (line.split("[0m")[-1].strip() for line in said.getvalue().splitlines() if "requires" in line), "it says no"
    )


if __name__ == "__main__":
    main()
