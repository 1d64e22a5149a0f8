"""Saves and loads of an engine in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from zckpt import runtime


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one for each test, which `initialize` makes."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def config(stage: int = 2, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        **more,
    }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


class Only(nn.Module):
    """A model whose only child is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def compiled() -> nn.Module:
    return torch.compile(Net(), backend="eager")


def in_blocks(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    net = Net()
    for number, block in enumerate(net.blocks):
        net.blocks[number] = wrap(block)
    return net


FORMS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "compiled": compiled,
    "compiled blocks": lambda: in_blocks(lambda block: torch.compile(block, backend="eager")),
    "checkpointed blocks": lambda: in_blocks(checkpoint_wrapper),
    "only child": Only,
}


def start(model: nn.Module, settings: dict[str, Any], **arguments: Any) -> runtime.Engine:
    return runtime.initialize(model=model, config=settings, **arguments)[0]


def train(engine: runtime.Engine, steps: int, first: int = 0) -> list[float]:
    """Losses of micro batches from that number on."""
    losses = []
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        loss = engine(torch.rand(2, 4, generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("before", FORMS)
def test_a_wrapped_model_is_loaded(before: str, stage: int, tmp_path: Path) -> None:
    """Into itself and into the plain model, and the plain one's save into it: to the last bit."""
    for saved, loaded in {(before, before), (before, "plain"), ("plain", before)}:
        engine = start(FORMS[saved](), config(stage))
        train(engine, 2)
        engine.save_checkpoint(tmp_path / saved)
        wanted = train(engine, 2, 2)
        again = start(FORMS[loaded](), config(stage))
        again.load_checkpoint(tmp_path / saved)
        assert train(again, 2, 2) == wanted
        for options in ({"load_module_only": True}, {"load_module_strict": False}):
            other = start(FORMS[loaded](), config(stage))
            other.load_checkpoint(tmp_path / saved, **options)
            assert train(other, 1, 2) == wanted[:1]
