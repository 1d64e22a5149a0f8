"""Forwards that sharding makes difficult, in one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from zckpt import runtime
from zckpt.base.errors import UsageError
from zckpt.runtime.parameters import safe_get_full_fp32_param


def start(model: nn.Module, stage: int, *, bf16: bool = False, **more: int) -> runtime.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD"},
        "bf16": {"enabled": bf16}, **more,
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


def recomputed(model: Borrower, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(multiplied, model, x, use_reentrant=False)


@pytest.mark.parametrize("use", [multiplied, of_a_variable, recomputed])
@pytest.mark.parametrize("direct", [False, True])
def test_a_parameter_whose_unit_is_not_called(
    use: Callable[[Borrower, torch.Tensor], torch.Tensor], direct: bool
) -> None:
    """Weights and losses are those of the model without sharding, also where the script begins the backward."""
    found = []
    for stage in (0, 3):
        torch.manual_seed(0)
        model, x = Borrower(use), torch.ones(1, 8)
        engine = start(model, stage, gradient_accumulation_steps=2)
        for number in range(4):
            loss = engine(x + number).square().sum()
            loss.backward() if direct else engine.backward(loss)
            engine.step()
        found.append((loss.item(), safe_get_full_fp32_param(model.blocks[1].lin.weight)))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    assert type(copy.copy(model.blocks[1].lin._parameters)) is dict
    runtime.zero.register_external_parameter(model, model.blocks[1].lin.weight)


class Remembering(nn.Linear):
    """Has a state of its own for copies."""

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "copied": True}


def test_copies_are_plain_and_torchs_modules_are_left_alone() -> None:
    """Of the model, of a module in it and through a pickle; hooks of scripts stay."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Dropout(0.0), Remembering(8, 8)), nn.Tanh())
    calls: list[int] = []
    model[1][0].register_forward_hook(lambda *_: calls.append(1))
    engine = start(model, 1)
    assert "zckpt" not in nn.Module.__getstate__.__module__
    x = torch.ones(1, 8)
    right = engine(x)
    for made in (copy.deepcopy(engine.module), copy.copy(engine.module[1][0]), copy.deepcopy(engine.module[1][0])):
        for module in made.modules():
            assert not [name for name in vars(module) if "zckpt" in name or name == "__getstate__" or "fsdp" in name]
    copied, before = copy.deepcopy(engine.module), len(calls)
    assert torch.equal(copied(x), right) and len(calls) == before + 1
    assert copied[1][1].copied and type(copied[1][1]) is Remembering and not hasattr(model[1][1], "copied")
    assert vars(pickle.loads(pickle.dumps(engine.module[2]))).keys() == vars(nn.Tanh()).keys()


def test_a_part_that_was_taken_before_the_forward() -> None:
    engine = start(Borrower(lambda model, x: x @ taken), 3)
    taken = engine.module.blocks[1].lin.weight
    with pytest.raises(UsageError) as caught:
        engine(torch.ones(1, 8))
    assert "'blocks.1.lin.weight'" in str(caught.value) and "call 'blocks.1'," in caught.value.remedy
    assert "line" in caught.value.found and "mixed" in str(caught.value.__context__)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parts_called_by_themselves_train_as_the_forward_does(stage: int) -> None:
    """A part of a unit, parts of the model, a unit before the model; by the engine's backward and by the script's own."""
    ways: list[Callable[[runtime.Engine, torch.Tensor], torch.Tensor]] = [
        lambda engine, x: engine(x),
        lambda engine, x: engine.module.blocks[1].lin(engine.module[1](engine.module[0](x))),
        lambda engine, x: engine.module.blocks[1].lin(engine.module[1](engine.module.first(x))),
    ]
    x, losses = torch.ones(1, 8), []
    for way in ways:
        for direct in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
            model.blocks = nn.ModuleList(Block() for _ in range(2))
            model.first = model[0]
            model.forward = lambda x, model=model: called_inside(model, model[1](model[0](x)))  # type: ignore[method-assign,misc]
            engine = start(model, stage)
            for _ in range(3):
                loss = way(engine, x).square().sum()
                loss.backward() if direct else engine.backward(loss)
                engine.step()
            losses.append(loss.item())
    assert losses == losses[:1] * 6 and losses[0] > 0
    fresh = start(Borrower(called_inside), stage)
    assert torch.equal(fresh.module.blocks[0](x), fresh.module.blocks[0](x)) and fresh(x).shape == (1, 8)


def test_a_state_dict_of_stage_3_has_no_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be saved, as DeepSpeed's scripts do on rank 0, and this is said; any other use of its numbers is an error."""
    engine = start(Borrower(called_inside), 3, bf16=True)
    state = engine.module.state_dict()
    weight = state["blocks.0.lin.weight"]
    assert (weight.shape, weight.dtype, weight.numel()) == ((8, 8), torch.bfloat16, 64) and "8" in repr(weight)
    for use in (weight.cpu, weight.tolist, lambda: weight + 1, lambda: save_file(state, tmp_path / "x.safetensors")):
        with pytest.raises(UsageError, match="has no numbers") as caught:
            use()
        assert "dtype='fp32'" in caught.value.remedy
    torch.save(state, tmp_path / "x.bin")
    assert torch.load(tmp_path / "x.bin")["blocks.0.lin.weight"].shape == (0,) and "empty" in caplog.text
    with pytest.raises(UsageError, match="finds a part"):
        engine.module.load_state_dict(state)
    with runtime.zero.GatheredParameters(held := dict(engine.module.named_parameters()).values()):
        seen = [one.detach().cpu() for one in held]
        assert all(
            torch.equal(one, value.bfloat16())
            for one, value in zip(seen, engine.module.state_dict().values(), strict=True)
        )
    assert type(seen[0]) is torch.Tensor and {str(one.data.dtype) for one in seen} == {"torch.bfloat16"}


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
