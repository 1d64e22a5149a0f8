"""Saves and loads of an engine in one process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import Dataset, IterableDataset

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


@pytest.mark.parametrize("stage", range(4))
def test_random_generators_of_one_process(stage: int, tmp_path: Path) -> None:
    engine = start(Net(), config(stage))
    train(engine, 1)
    torch.manual_seed(5)
    random.seed(6)
    numpy.random.seed(7)
    engine.save_checkpoint(tmp_path)

    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), numpy.random.rand(3).tolist()]

    wanted = draw()
    again = start(Net(), config(stage))
    again.load_checkpoint(tmp_path)
    assert draw() == wanted


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> torch.Tensor:
        return number + torch.rand(())


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(12):
            yield number + torch.rand(())


@pytest.mark.parametrize("data", [Items, Stream])
@pytest.mark.parametrize("seen", [0, 2, 6, 8])  # batches, of epochs of six
def test_samples_after_a_resume(data: type, seen: int, tmp_path: Path) -> None:
    """Inside an epoch, at its end and in the next one: the same samples, though they are drawn at random."""

    def begin() -> tuple[runtime.Engine, Iterator[torch.Tensor]]:
        torch.manual_seed(3)
        engine, _, loader, _ = runtime.initialize(model=Net(), config=config(), training_data=data())
        assert loader is not None
        return engine, itertools.chain.from_iterable(itertools.repeat(loader))

    engine, batches = begin()
    for _ in range(seen):
        next(batches)
    engine.save_checkpoint(tmp_path)
    wanted = [next(batches).tolist() for _ in range(9)]
    again, batches = begin()
    torch.manual_seed(4)
    again.load_checkpoint(tmp_path)
    assert [next(batches).tolist() for _ in wanted] == wanted


@pytest.mark.parametrize("stage", range(4))
def test_zero_grad_forgets_the_micro_batches_before(stage: int) -> None:
    found = []
    for forgets in (True, False):
        engine = start(Net(), config(stage, accumulation=2))
        train(engine, 2)
        if forgets:
            engine.backward(engine(torch.full((2, 4), 3.0)))
            engine.step()
            engine.zero_grad()
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(torch.full((2, 4), 0.1)))
        engine.step()
        found.append([value.clone() for value in whole(engine).values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("stage", range(4))
def test_a_load_forgets_gradients(stage: int, tmp_path: Path) -> None:
    engine = start(Net(), config(stage, accumulation=2))
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    wanted = train(engine, 4, 2)
    engine.backward(engine(torch.full((2, 4), 3.0)))
    engine.step()
    engine.load_checkpoint(tmp_path)
    assert train(engine, 4, 2) == wanted


def whole(engine: runtime.Engine) -> dict[str, torch.Tensor]:
    with runtime.zero.GatheredParameters(engine.module.parameters()):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}
