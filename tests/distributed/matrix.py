"""Runs of many kinds: each trains, saves and trains on; a fresh process loads and trains on; `test_matrix.py` compares.

[Note: cells] A cell is a choice of stage, number of ranks, precision, accumulation and model. All 504 would take too long:
nearly all defects show when two choices meet, or a third beside stage and number of ranks, which decide together where
everything lies. So `CELLS` are chosen such that every stage at every number of ranks meets every other choice, and these
meet each other. Beside them stand kinds of sharding that only some stages have.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from proofs import covering
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import Dataset

from zckpt import runtime
from zckpt.runtime.saves import run_state

WORDS, WIDTH = 11, 6
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}},
}
WHEN = {"each batch": (1, 0), "after a step": (2, 0), "between micro batches": (2, 1)}
"""Micro batches per step, and how many of a step are done when the run is saved."""

MODELS = ("plain", "wrapped", "tied", "frozen", "scalar", "buffers", "loader")


class Cell(NamedTuple):
    stage: int
    world: int
    precision: str
    when: str
    model: str
    zero: str = ""


AXES = (tuple(itertools.product(range(4), (1, 2))), tuple(PRECISIONS), tuple(WHEN), MODELS)
CELLS = [
    *(Cell(*place, *rest) for place, *rest in covering(*AXES)),
    Cell(3, 2, "bf16", "between micro batches", "buffers", "mics"),
    Cell(3, 2, "fp32", "between micro batches", "scalar", "mics"),
    Cell(3, 2, "fp32", "between micro batches", "tied", "init"),
    Cell(3, 2, "bf16", "between micro batches", "plain", "offload"),
]
ZERO: dict[str, dict[str, Any]] = {
    "": {},
    "init": {},
    "mics": {"mics_shard_size": 1},
    "offload": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


class Running(nn.Module):
    """What BatchNorm does: each rank subtracts the running mean of what it has seen itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().float().mean((0, 1)), alpha=0.1)
            self.count += 1
        return x - self.mean.to(x.dtype)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 7), nn.Dropout(0.2), nn.Linear(7, WIDTH)) for _ in range(2)
        )
        self.middle = Running() if kind == "buffers" else nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.9)) if kind == "scalar" else 1.0
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "frozen":
            self.middle.requires_grad_(False)
        if kind == "wrapped":
            for number, block in enumerate(self.blocks):
                self.blocks[number] = checkpoint_wrapper(block)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.embed(tokens))
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.gain
        return nn.functional.cross_entropy(self.head(x).float()[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1))


class Only(nn.Module):
    """A model whose only child is called `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module(tokens)


class Texts(Dataset[torch.Tensor]):
    """Drawn anew, from the global generators, whenever one is asked for."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> torch.Tensor:
        return (torch.randint(0, WORDS, (5,)) + number + random.randrange(3)) % WORDS


def settings_of(cell: Cell) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": WHEN[cell.when][0],
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 30, "warmup_num_steps": 7}},
        "zero_optimization": {"stage": cell.stage, **ZERO[cell.zero]},
        **PRECISIONS[cell.precision],
    }


def begin(cell: Cell, seed: int) -> tuple[runtime.Engine, Iterator[torch.Tensor]]:
    """An engine, and its micro batches from where the run will be when the first is asked for."""
    torch.manual_seed(seed)
    with runtime.zero.Init(config=settings_of(cell), enabled=cell.zero == "init"):
        model: nn.Module = Net(cell.model)
    if cell.model == "wrapped":
        model = Only(model)
    data = Texts() if cell.model == "loader" else None
    engine, _, loader, _ = runtime.initialize(model=model, config=settings_of(cell), training_data=data)
    for draw in (torch.manual_seed, random.seed, numpy.random.seed):
        draw(seed + 7 + engine.global_rank)

    def drawn() -> Iterator[torch.Tensor]:
        while loader is not None:
            yield from loader
        for number in itertools.count(engine.micro_steps):
            generator = torch.Generator().manual_seed(1000 * engine.global_rank + number)
            yield torch.randint(0, WORDS, (2, 5), generator=generator)

    return engine, drawn()


def train(engine: runtime.Engine, batches: Iterator[torch.Tensor], count: int) -> list[float]:
    """The losses of so many micro batches."""
    losses = []
    for tokens in itertools.islice(batches, count):
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def found(engine: runtime.Engine, losses: list[float]) -> dict[str, Any]:
    """All that must be equal to the last bit, as plain values."""
    state = run_state.capture(engine)
    return {
        "losses": losses,
        "masters": {part.name: part.weight.reshape(-1).clone() for part in state.parts},
        "states": {part.name: {n: s.reshape(-1).clone() for n, s in part.states.items()} for part in state.parts},
        "scalars": {part.name: part.scalars for part in state.parts},
        "buffers": {name: buffer.clone() for name, buffer in state.buffers.items()},
        "generators": {**state.rng, "numpy": numpy.random.get_state()[1].tolist()},
        "loss scale": state.scaler,
        "schedule": state.scheduler,
        "settings": [group.settings for group in state.groups],
        "counters": state.counters,
        "data": state.data,
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def place(home: Path, cell: Cell) -> Path:
    return home / "-".join(str(part).replace(" ", "_") for part in cell if part != "")
