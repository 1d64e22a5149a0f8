"""Forwards that sharding makes difficult, in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from zckpt import runtime
from zckpt.base.errors import UsageError


def start(model: nn.Module, stage: int, *, bf16: bool = False) -> runtime.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD"},
        "bf16": {"enabled": bf16},
    }  # fmt: skip
    return runtime.initialize(model=model, config=config)[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


class Borrower(nn.Module):
    """Uses something of a block that it does not call."""

    def __init__(self, use: Callable[[Borrower, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.use(self, x)


def multiplied(model: Borrower, x: torch.Tensor) -> torch.Tensor:
    return x @ model.blocks[1].lin.weight


def of_a_variable(model: Borrower, x: torch.Tensor) -> torch.Tensor:
    taken = model.blocks[1].lin.weight
    return nn.functional.linear(
        x,
        taken,
    )


def called_inside(model: Borrower, x: torch.Tensor) -> torch.Tensor:
    return model.blocks[1].lin(x)


@pytest.mark.parametrize("use", [multiplied, of_a_variable, called_inside])
def test_a_parameter_whose_unit_is_not_called(use: Callable[[Borrower, torch.Tensor], torch.Tensor]) -> None:
    engine = start(Borrower(use), 3)
    with pytest.raises(UsageError) as caught:
        engine(torch.ones(1, 8))
    assert "'blocks.1.lin.weight'" in str(caught.value) and "Call 'blocks.1'," in caught.value.remedy
    assert "line" in caught.value.found and "mixed" in str(caught.value.__context__)


def test_other_errors_are_the_models_own() -> None:
    engine = start(Borrower(lambda model, x: x.view(7)), 3)
    with pytest.raises(RuntimeError, match="shape"):
        engine(torch.ones(1, 8))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_first_forward_under_inference_mode(stage: int, bf16: bool) -> None:
    """And the training that follows is that of a model which nobody looked at before."""
    losses = []
    for looks in (True, False):
        torch.manual_seed(0)
        engine = start(nn.Sequential(Block(), nn.ReLU(), Block()), stage, bf16=bf16)
        x = torch.ones(1, 8, dtype=torch.bfloat16 if bf16 else torch.float32)
        for _ in range(2):
            if looks:
                with torch.inference_mode():
                    engine(x)
                    engine.module(x)
            loss = engine(x).float().square().sum()
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]
