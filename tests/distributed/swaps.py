"""Runs whose weights and states are in files, beside the same runs in memory: `python swaps.py OUT`, on each rank."""

from __future__ import annotations

import errno
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from proofs import IS_WHOLE
from torch import nn

from zckpt import _core, runtime
from zckpt.base.errors import InconsistentError, OutputError

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


class Model(nn.Module):
    """Blocks of odd sizes, which two ranks cannot cut evenly, a scalar, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(51, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 77), nn.GELU(), nn.Linear(77, 32), nn.LayerNorm(32)) for _ in range(3)
        )
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(32, 51, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.frozen(x) * self.scale)


def offloads(path: Path, kind: str) -> dict[str, Any]:
    """The keys of `zero_optimization`."""
    optimizer = {"device": "nvme", "nvme_path": str(path), "buffer_count": 2}
    param = {"device": "nvme", "nvme_path": str(path), "max_in_cpu": 0}
    sections = {"optimizer": {"offload_optimizer": optimizer}, "param": {"offload_param": param}}
    return {key: value for name in kind.split("+") for key, value in sections.get(name, {}).items()}


def begin(stage: int, precision: str, zero: dict[str, Any], optimizer: dict[str, Any] = ADAM) -> Any:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": optimizer,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "sub_group_size": 2048, **zero},
        "aio": {"block_size": 4096, "queue_depth": 3},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return runtime.initialize(model=Model(), config=config)[0]


def train(engine: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(2 * steps):
        generator = torch.Generator().manual_seed(1000 * engine.micro_steps + dist.get_rank())
        tokens = torch.randint(0, 51, (4, 7), generator=generator)
        loss = nn.functional.cross_entropy(engine(tokens).float().view(-1, 51), tokens.view(-1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def parity(path: Path) -> dict[str, Any]:
    """The losses of each kind of run, in memory and in files."""
    found = {}
    for stage, precision, kinds in (
        (1, "bf16", ["optimizer"]),
        (2, "fp32", ["optimizer"]),
        (3, "bf16", ["optimizer", "optimizer+param"] if IS_WHOLE else ["optimizer"]),
        (3, "fp32", ["optimizer+param", "param"]),
    ):
        wanted = train(begin(stage, precision, {}), 3)
        for kind in kinds:
            found[f"{stage} {precision} {kind}"] = [wanted, train(begin(stage, precision, offloads(path, kind)), 3)]
    others = {"Lion": {"lr": 1e-3}, "SGD": {"lr": 0.1, "momentum": 0.9}}
    if IS_WHOLE:
        others |= {"Adagrad": {}, "Rprop": {}}
    for name, params in others.items():
        optimizer = {"type": name, "params": params}
        wanted = train(begin(3, "bf16", {}, optimizer), 3)
        engine = begin(3, "bf16", offloads(path, "optimizer+param"), optimizer)
        found[f"3 bf16 {name}"] = [wanted, train(engine, 3)]
    return found


def resumes(path: Path) -> dict[str, Any]:
    """Losses after a save, of: the run in memory; runs in files, of the other's saves and of their own."""
    found = {}
    for stage, kind in ((2, "optimizer"), (3, "optimizer+param")):
        swap = offloads(path, kind)
        first, second = begin(stage, "bf16", {}), begin(stage, "bf16", swap)
        train(first, 2), train(second, 2)
        first.save_checkpoint(path / f"memory{stage}", tag="t")
        second.save_checkpoint(path / f"files{stage}", tag="t")
        wanted = train(first, 2)
        found[f"{stage} itself"] = [wanted, train(second, 2)]
        second.load_checkpoint(path / f"memory{stage}")
        found[f"{stage} back"] = [wanted, train(second, 2)]
        for save in ("memory", "files"):
            for name, zero in (("memory", {}), ("files", swap)):
                if name == save and not IS_WHOLE:
                    continue
                engine = begin(stage, "bf16", zero)
                engine.load_checkpoint(path / f"{save}{stage}")
                found[f"{stage} {save} {name}"] = [wanted, train(engine, 2)]
    return found


def changed(path: Path) -> list[list[float]]:
    """A weight is changed between steps: the files have it, and so has what was read ahead of a gather."""
    found = []
    for zero in ({}, offloads(path, "optimizer+param"), offloads(path, "optimizer")):
        engine = begin(3, "bf16", zero)
        losses = train(engine, 2)
        with torch.no_grad():
            engine(torch.zeros(1, 3, dtype=torch.long))
        with runtime.zero.GatheredParameters(engine.module.head.weight, modifier_rank=0) as (weight,):
            weight.data.mul_(0.5)
        found.append(losses + train(engine, 2))
    return found


def faults(path: Path) -> dict[str, Any]:
    """What a step says whose file cannot be read or written, what the next one says, and whether a load helps."""
    found: dict[str, Any] = {}
    for write in (False, True):
        engine = begin(3, "fp32", offloads(path, "optimizer+param"))
        train(engine, 1)
        engine.save_checkpoint(path / "whole", tag="t")
        wanted = train(engine, 1)
        swapped = engine.optimizer.step
        told = []

        def step(*arguments: Any, call: Any = swapped, wrong: bool = write) -> None:
            _core.inject(wrong, 4, errno.EIO)
            try:
                call(*arguments)
            finally:
                _core.inject(wrong, 0, 0)

        engine.optimizer.step = step
        for _ in range(2):
            try:
                train(engine, 1)
            except (OutputError, InconsistentError) as error:
                told.append([type(error).__name__, str(error)])
            engine.zero_grad()
            engine.optimizer.step = swapped
        if write:
            _core.inject(True, 3, errno.ENOSPC)
            try:
                engine.load_checkpoint(path / "whole")
            except OutputError as error:
                found["load"] = str(error)
            _core.inject(True, 0, 0)
        engine.load_checkpoint(path / "whole")
        found["write" if write else "read"] = [told, wanted, train(engine, 1)]
    return found


def main() -> None:
    """All of it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    dist.init_process_group("gloo")
    out = {work.__name__: work(path) for work in (parity, resumes, changed, faults)}
    out["left"] = sorted(one.name for one in path.glob("zckpt-swap-*"))
    (path / f"{dist.get_rank()}.json").write_text(json.dumps(out))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
