"""Activations that are computed again: what the config's section makes of `checkpointing.checkpoint`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from zckpt import runtime
from zckpt.base.errors import UsageError
from zckpt.runtime import activations as checkpointing
from zckpt.runtime.config.fields import ActivationSection
from zckpt.runtime.config.read import read_config


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpointing, "_options", None)
    yield


class Block(torch.nn.Module):
    """One layer, computed again in the backward; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(4, 4), 0

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpointing.checkpoint(self.body, x).sum()


def initialize(**section: object) -> Block:
    torch.manual_seed(0)
    model = Block()
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    runtime.initialize(model=model, config={**config, "activation_checkpointing": section})
    return model


def test_the_config_of_an_engine_says_what_checkpoint_does(capsys: pytest.CaptureFixture[str]) -> None:
    model = initialize(profile=True, synchronize_checkpoint_boundary=True)
    model(torch.ones(2, 4)).backward()
    assert model.calls == 2 and checkpointing.is_configured()
    names = re.findall(r"^\[Rank 0\] time \(ms\) \| (.*): [0-9.]+$", capsys.readouterr().out, re.MULTILINE)
    assert names == ["forward", "forward again, in backward"]


def test_a_call_of_configure_wins_over_the_config() -> None:
    checkpointing.configure(None, deepspeed_config={"activation_checkpointing": {"profile": True}}, profile=False)
    assert checkpointing._options == ActivationSection()
    initialize(cpu_checkpointing=True)
    assert checkpointing._options == ActivationSection()
    checkpointing.configure(None, deepspeed_config={"activation_checkpointing": {"cpu_checkpointing": True}})
    assert checkpointing._options.cpu_checkpointing
    with pytest.raises(UsageError, match="activation_checkpointing is not valid"):
        checkpointing.configure(None, deepspeed_config={"activation_checkpointing": {"cpu": True}})


def test_arguments_alone_are_kept_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with an accelerator is imitated: what it would copy to host memory is noted, and copied."""
    kept: list[list[int]] = []

    class Noted(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            assert pin_memory
            super().__init__(lambda tensor: (kept.append(list(tensor.shape)), tensor.clone())[1], lambda tensor: tensor)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Noted)
    grads = {}
    for with_device in (False, True):
        monkeypatch.setattr(checkpointing, "pins", lambda found=with_device: found)
        checkpointing.configure(None, checkpoint_in_cpu=True)
        torch.manual_seed(0)
        model = Block()
        argument = torch.ones(2, 4, requires_grad=True) * 1.0
        loss = model(argument)
        if with_device:
            with torch.no_grad():
                argument.zero_()
        loss.backward()
        grads[with_device] = model.layer.weight.grad
    assert [2, 4] in kept and [4, 4] not in kept, "the weight is not an argument"
    assert torch.equal(grads[True], grads[False])


def test_what_has_no_effect_is_a_warning() -> None:
    asked = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 4}
    settings = read_config({"train_batch_size": 1, "activation_checkpointing": asked})
    assert [key for key, _ in settings.missed] == [
        "activation_checkpointing.partition_activations", "activation_checkpointing.contiguous_memory_optimization",
    ]  # fmt: skip
    off = {"partition_activations": False, "contiguous_memory_optimization": False}
    assert read_config({"train_batch_size": 1, "activation_checkpointing": off}).missed == ()
