"""What all checks on a GPU need: the model and its batches, configs, clocks, and the rows of the table."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 6
TOLERANCES = {"fp32": 2e-4, "bf16": 1e-2, "fp16": 1e-2}
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
LARGE = {"n_positions": 1024, "n_embd": 2048, "n_layer": 12, "n_head": 16}
"""604 million parameters."""
Row = tuple[str, str, str]  # what, "right", "WRONG" or "left out", figures or reason


@dataclass
class Bench:
    """What all checks need.

    Attributes:
        device: of this rank.
        home: a directory for files, on all ranks.
        size: bytes of the weights of live export and loading.
        width: of the model whose losses are compared; `LARGE` is the one whose steps are timed.
        rows: what was found, of rank 0.
    """

    device: Any
    home: Path
    size: int
    width: int
    layers: int
    positions: int
    large: bool = False
    rows: list[Row] = field(default_factory=list)

    def add(self, *row: str) -> None:
        """Keeps a row, and prints it on rank 0."""
        what, result, figures = row
        self.rows.append((what, result, figures))
        if os.environ["RANK"] == "0":
            print("| " + " | ".join(row) + " |", flush=True)

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def model(self) -> Any:
        """The same for every call."""
        import torch

        from zckpt.runtime.train.models import TinyConfig, TinyGPT

        torch.manual_seed(7)
        size = {"n_positions": self.positions, "n_embd": self.width, "n_layer": self.layers, "n_head": 4}
        with self.device if self.large else nullcontext():
            return TinyGPT(TinyConfig(**(LARGE if self.large else size)))

    def batches(self, steps: int, start: int = 0) -> Iterator[Any]:
        """The same tokens on every rank, so that one process in plain torch is what all ranks do."""
        import torch

        for step in range(start, start + steps):
            generator = torch.Generator().manual_seed(step)
            yield torch.randint(0, 64, (2, self.positions), generator=generator).to(self.device)

    def sync(self) -> None:
        """Waits for the device."""
        import torch

        if self.on_gpu:
            torch.accelerator.synchronize()

    def held(self) -> int:
        """Bytes of the device that tensors have; 0 on CPUs."""
        import torch

        gc.collect()
        return torch.get_device_module(self.device).memory_allocated() if self.on_gpu else 0

    def peak(self, job: Callable[[], Any], before: int) -> tuple[Any, int]:
        """What a job returns, and the most bytes of the device that tensors had in it, less those `before`; 0 on CPUs."""
        import torch

        if not self.on_gpu:
            return job(), 0
        module = torch.get_device_module(self.device)
        module.reset_peak_memory_stats()
        result = job()
        self.sync()
        return result, module.max_memory_allocated() - before

    def seconds(self, job: Callable[[], Any], times: int = 3) -> float:
        """The median time of a job, on the slowest rank."""
        import torch
        import torch.distributed as dist

        taken = []
        for _ in range(times):
            dist.barrier()
            began = time.perf_counter()
            job()
            self.sync()
            longest = torch.tensor(time.perf_counter() - began, device=self.device)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            taken.append(longest.item())
        return statistics.median(taken)


def config(stage: int, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    """A DeepSpeed config. Every rank trains on the same samples, so more ranks are the same run."""
    import torch.distributed as dist

    half: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        half["fp16"]["initial_scale_power"] = 12
    zero = {"stage": stage, **more.pop("zero", {})}
    batch = {"train_batch_size": 2 * dist.get_world_size(), "train_micro_batch_size_per_gpu": 2}
    optimizer = {"type": "AdamW", "params": ADAMW}
    return {**batch, "optimizer": optimizer, "zero_optimization": zero, "gradient_clipping": 1.0, **half, **more}


def train(engine: Any, batches: Iterator[Any]) -> list[float]:
    """Losses of steps."""
    losses = []
    for tokens in batches:
        loss = engine(tokens, labels=tokens)["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
    return [loss.item() for loss in losses]


def start(bench: Bench, settings: dict[str, Any]) -> Any:
    """An engine on the model."""
    import zckpt.runtime

    return zckpt.runtime.initialize(model=bench.model(), config=settings)[0]


def distance(found: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in zip(found, expected, strict=True))
