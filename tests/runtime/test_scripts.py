"""Scripts as DeepSpeed's examples are written: the same calls in the same order, on small models and made-up data."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import zckpt.runtime.comm as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from zckpt.runtime.accelerator import get_accelerator
from zckpt.runtime.moe.utils import split_params_into_different_moe_groups_for_optimizer
from zckpt.runtime.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zckpt.runtime.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from zckpt.runtime.utils import RepeatingLoader, safe_get_full_fp32_param

import zckpt.runtime as deepspeed
from zckpt.base.errors import UsageError


class Points(torch.utils.data.Dataset[Any]):
    """64 points of 4 classes, which a linear layer tells apart."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(64) % 4
        self.points = torch.randn(64, 6, generator=generator) * 0.1 + nn.functional.one_hot(self.labels, 6) * 2

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[place], self.labels[place]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args(words)


def net(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (2, "bf16"), (3, "fp16")])
def test_a_classifier_with_a_loader_of_the_engine(stage: int, dtype: str) -> None:
    deepspeed.init_distributed()
    get_accelerator().set_device(0)
    model = net()
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )
    config = {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.05, "betas": [0.8, 0.999], "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 2}},
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 8},
        "zero_optimization": {"stage": stage, "cpu_offload": False},
    }
    engine, _, loader, _ = deepspeed.initialize(
        args=parsed("--deepspeed"), model=model, model_parameters=groups, training_data=Points(), config=config
    )
    target = torch.bfloat16 if engine.bfloat16_enabled() else torch.half if engine.fp16_enabled() else None
    device = get_accelerator().device_name(engine.local_rank)
    losses = []
    for _ in range(4):
        for inputs, labels in loader:
            inputs = inputs.to(device) if target is None else inputs.to(target)
            loss = nn.functional.cross_entropy(engine(inputs), labels.to(device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        right = (engine(Points().points.to(target or torch.float32)).argmax(1) == Points().labels).float().mean()
    assert losses[-1] < losses[0] / 2 and right > 0.9


def test_two_engines_of_one_loss(tmp_path: Path) -> None:
    """A generator and a discriminator: the modules are called, not the engines, and each has an optimizer of the script's."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 2e-4}}}))
    args = parsed("--deepspeed_config", str(file))
    torch.manual_seed(0)
    maker, judge = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1), nn.Sigmoid())
    of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
    judges, _, _, _ = deepspeed.initialize(
        args=args, model=judge, model_parameters=judge.parameters(), optimizer=of_judge
    )
    makers, _, _, _ = deepspeed.initialize(
        args=args, model=maker, model_parameters=maker.parameters(), optimizer=of_maker
    )
    criterion, said = nn.BCELoss(), []
    for _ in range(5):
        judge.zero_grad()
        real, label = torch.ones(8, 6), torch.ones(8, 1)
        output = judge(real)
        judges.backward(criterion(output, label))
        fake = maker(torch.randn(8, 3))
        judges.backward(criterion(judge(fake.detach()), torch.zeros(8, 1)))
        judges.step()
        maker.zero_grad()
        loss = criterion(judge(fake), label)
        makers.backward(loss)
        makers.step()
        said.append((output.mean().item(), loss.item()))
    assert said[-1][0] > said[0][0] and len({loss for _, loss in said}) == 5


def test_an_optimizer_and_a_schedule_of_the_script() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = StepLR(optimizer, step_size=1, gamma=0.1)
    config = {"train_batch_size": 16, "cuda_visible_devices": 0, "optimizer": {"type": "Adam"}, "gradient_clipping": 0}
    engine, returned, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, lr_scheduler=None, dist_init_required=True
    )
    loader = engine.deepspeed_io(Points(), route="eval")
    before = None
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(engine(inputs), labels)
        before = before or loss.item()
        engine.backward(loss)
        engine.step()
    assert loss.item() < before and engine.client_optimizer is optimizer
    schedule.step()
    assert engine.get_lr() == pytest.approx([0.05])
    state = returned.state_dict()
    returned.load_state_dict(state)


def test_a_checkpoint_every_few_steps_and_states_that_leave(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }

    def made() -> Any:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = net()
        assert all(hasattr(p, "ds_id") and p.ds_numel == p.ds_shape.numel() for p in model.parameters())
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    engine = made()
    data = RepeatingLoader([Points()[place : place + 8] for place in (0, 8)])
    dist.barrier()
    for step in range(1, 5):
        inputs, labels = next(data)
        engine.backward(nn.functional.cross_entropy(engine(inputs.bfloat16()), labels))
        engine.step()
        assert get_accelerator().memory_allocated() > 0
        include = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]
        engine.offload_states(include=include, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False)
        engine.reload_states()
        if step % 2 == 0:
            engine.save_checkpoint(save_dir=str(tmp_path), client_state={"checkpoint_step": step})
    again = made()
    _, client_state = again.load_checkpoint(load_dir=str(tmp_path))
    assert client_state["checkpoint_step"] == 4 and again.global_steps == 4
    weights = [[safe_get_full_fp32_param(p) for p in one.module.parameters()] for one in (engine, again)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    engine.destroy()


@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_by_deepspeeds_names_is_torchs(kind: type[torch.optim.Optimizer], decoupled: bool) -> None:
    mode = "adam_w_mode" if kind is FusedAdam else "adamw_mode"
    plain = torch.optim.AdamW if decoupled else torch.optim.Adam
    weights = []
    for make in (
        lambda p: kind(p, lr=0.1, weight_decay=0.1, **{mode: decoupled}),
        lambda p: plain(p, lr=0.1, weight_decay=0.1),
    ):
        model = net()
        engine = deepspeed.initialize(model=model, optimizer=make(model.parameters()), config={"train_batch_size": 16})[
            0
        ]
        for _ in range(3):
            engine.backward(nn.functional.cross_entropy(engine(Points().points), Points().labels))
            engine.step()
        weights.append([safe_get_full_fp32_param(p) for p in engine.module.parameters()])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)


def test_adam_without_bias_correction() -> None:
    """One step from zero averages: lr x (1 - beta1) g / (sqrt(1 - beta2) |g| + eps) on top of the decay."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = FusedAdam([weight], lr=0.1, bias_correction=False, weight_decay=0.5, betas=(0.9, 0.99), eps=0.0)
    weight.grad = torch.tensor([3.0, -4.0])
    optimizer.step()
    expected = torch.tensor([1.0, -2.0]) * (1 - 0.1 * 0.5) - 0.1 * (0.1 / 0.1) * torch.tensor([1.0, -1.0])
    torch.testing.assert_close(weight.data, expected)
    assert optimizer.param_groups[0]["params"] == [weight] and optimizer.state[weight]["step"] == 1


def test_a_config_in_two_places_is_an_error(tmp_path: Path) -> None:
    args = parsed("--deepspeed_config", os.fspath(tmp_path / "ds.json"))
    with pytest.raises(UsageError, match="two configs"):
        deepspeed.initialize(args=args, model=net(), config={"train_batch_size": 1})
