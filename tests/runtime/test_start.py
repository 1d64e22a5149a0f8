"""What `initialize` takes: optimizers and schedules as objects, classes and functions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, StepLR

from zckpt import runtime
from zckpt.base.errors import UsageError

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}


def rates(lr_scheduler: Any, **arguments: Any) -> list[float]:
    """The learning rate before and after one step."""
    engine, optimizer, _, schedule = runtime.initialize(
        model=nn.Linear(2, 1), config=CONFIG, lr_scheduler=lr_scheduler, **arguments
    )
    assert engine.lr_scheduler is schedule and schedule.optimizer is optimizer
    found = engine.get_lr()
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    return found + engine.get_lr()


def test_a_schedule_is_made_by_a_class_or_a_function() -> None:
    assert rates(ConstantLR) == pytest.approx([1 / 3, 1 / 3])
    assert rates(partial(StepLR, step_size=1)) == [1.0, 0.1]
    assert rates(lambda optimizer: StepLR(optimizer, 1, gamma=0.5)) == [1.0, 0.5]


def test_a_schedule_over_the_given_optimizer() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = StepLR(optimizer, 1)
    engine = runtime.initialize(model=model, config=CONFIG, optimizer=optimizer, lr_scheduler=schedule)[0]
    assert engine.lr_scheduler is schedule and engine.basic_optimizer is optimizer


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"lr_scheduler": StepLR}, "StepLR cannot be made from an optimizer alone"),
        ({"lr_scheduler": object()}, "lr_scheduler is neither a schedule nor a function"),
        ({"optimizer": 0.1}, "optimizer is neither an optimizer nor a function"),
        ({"lr_scheduler": StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1)}, "that initialize did not get"),
    ],
)
def test_what_is_no_optimizer_or_schedule(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        runtime.initialize(model=nn.Linear(2, 1), config=CONFIG, **arguments)
    assert what in caught.value.what and caught.value.found and caught.value.remedy


def test_a_model_without_anything_to_train() -> None:
    with pytest.raises(UsageError, match="no parameter to train"):
        runtime.initialize(model=nn.Linear(2, 1).requires_grad_(False), config=CONFIG)
