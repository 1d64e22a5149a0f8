"""What `initialize` takes: optimizers and schedules as objects, classes and functions."""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, StepLR

from zckpt import runtime
from zckpt.base.errors import IncompleteError, UsageError
from zckpt.runtime.config.read import read_config
from zckpt.runtime.train.train import TrainingJob, _config_of

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


def test_a_model_without_anything_to_train(caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer of the config is left aside, with a word; one that is passed, and stage 2 (as for DeepSpeed), are errors."""
    frozen = nn.Linear(2, 1).requires_grad_(False)
    wanted = frozen(torch.ones(1, 2))
    sharded = {**CONFIG, "zero_optimization": {"stage": 2}}
    for config, arguments in ((CONFIG, {"optimizer": lambda groups: torch.optim.SGD(groups)}), (sharded, {})):
        with pytest.raises(UsageError, match="no parameter to train") as caught:
            runtime.initialize(model=nn.Linear(2, 1).requires_grad_(False), config=config, **arguments)
        assert "et requires_grad of some parameters" in caught.value.remedy
    engine, optimizer, _, schedule = runtime.initialize(
        model=frozen, config={**CONFIG, "scheduler": {"type": "WarmupLR"}, "zero_optimization": {"stage": 3}}
    )
    assert torch.equal(engine(torch.ones(1, 2)), wanted) and optimizer is schedule is None
    assert any(one.startswith("No parameter requires gradients: the optimizer of") for one in caplog.messages)
    with pytest.raises(UsageError, match="optimizer"):
        engine.step()


def test_a_model_has_one_engine() -> None:
    engine = runtime.initialize(model=nn.Linear(2, 1), config=CONFIG)[0]
    for model, what in ((engine, "got an engine as its model"), (engine.module, "the model is sharded already")):
        with pytest.raises(UsageError, match=what) as caught:
            runtime.initialize(model=model, config=CONFIG)
        assert caught.value.remedy == "Use the engine that there is, or make a new model."


def test_inference_with_the_config_of_a_training(caplog: pytest.LogCaptureFixture) -> None:
    """A schedule without an optimizer is left aside, as DeepSpeed leaves it: the config's and the script's."""
    caplog.set_level(logging.INFO, "zckpt.runtime")
    model, rows = nn.Linear(2, 1), torch.ones(1, 2)
    wanted = model(rows)
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 3},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    }
    engine, optimizer, _, schedule = runtime.initialize(model=model, config=config, lr_scheduler=ConstantLR)
    with torch.no_grad():
        assert torch.equal(engine(rows), wanted) and optimizer is schedule is None
    assert "There is no optimizer, so the schedule is left aside." in caplog.messages


def test_without_the_engine_in_cpp_a_run_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "zckpt's C++ engine was not built, so saves are slower: install zckpt with a C++ compiler."
    runtime.initialize(model=nn.Linear(2, 1), config=CONFIG)
    assert said not in caplog.messages
    monkeypatch.setitem(sys.modules, "zckpt._core", None)
    runtime.initialize(model=nn.Linear(2, 1), config=CONFIG)
    assert caplog.messages.count(said) == 1


def test_what_is_logged_of_a_run(caplog: pytest.LogCaptureFixture) -> None:
    """The config once, whole; which of two optimizers is taken; a step that nothing went before."""
    caplog.set_level(logging.INFO, "zckpt.runtime")
    model = nn.Linear(2, 1)
    config = {**CONFIG, "gradient_clipping": "auto"}
    optimizer = torch.optim.Adam(model.parameters())
    engine = runtime.initialize(model=model, config=config, optimizer=optimizer, auto={"gradient_clipping": 0.5})[0]
    [line] = [one for one in caplog.messages if one.startswith("The config with what was computed")]
    assert '"gradient_clipping": 0.5' in line and '"train_micro_batch_size_per_gpu": 1' in line
    assert "initialize was given its own optimizer, so that of the config (SGD) is left aside." in caplog.messages
    caplog.clear()
    engine.step()
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert [one[:51] for one in caplog.messages] == ["engine.step() without a backward since the last step"[:51]]


def test_wrong_arguments_of_the_engines_calls(tmp_path: Path) -> None:
    engine = runtime.initialize(model=nn.Linear(2, 1), config=CONFIG)[0]
    with pytest.raises(UsageError, match="a loss that is a tensor; found a float"):
        engine.backward(1.0)  # type: ignore[arg-type]
    engine.save_checkpoint(tmp_path)
    with pytest.raises(IncompleteError, match=r"tag 'x'.*the tags global_step0\. Choose one with the argument tag"):
        engine.load_checkpoint(tmp_path, tag="x")


def test_gathering_passes_over_what_is_no_parameter() -> None:
    """As DeepSpeed does: libraries give it buffers too."""
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    with runtime.zero.Init(config_dict_or_path=config):
        model = nn.Linear(2, 1)
    with runtime.zero.GatheredParameters([torch.ones(2), *model.parameters()], modifier_rank=0) as given:
        assert [one is mine for one, mine in zip(given, model.parameters(), strict=True)] == [True, True]
        model.bias.data.fill_(7.0)
    with runtime.zero.GatheredParameters([torch.ones(2)]) as given:
        assert given == []
    with runtime.zero.GatheredParameters(model.bias):
        assert model.bias.item() == 7.0


def test_a_command_has_values_for_auto_and_a_batch_size(tmp_path: Path) -> None:
    """The defaults of transformers' Trainer; a config that needs none is taken as it is."""
    path, job = tmp_path / "config.json", TrainingJob(str(tmp_path / "config.json"), "text", "out", 7)
    rates = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": "auto"}},
        "fp16": {"enabled": "auto"},
    }
    path.write_text(json.dumps({**config, "scheduler": {"type": "WarmupDecayLR", "params": rates}}))
    found = read_config(_config_of(job)).config
    assert found.optimizer.params == {"lr": 0.01, "eps": 1e-8} and found.train_micro_batch_size_per_gpu == 8
    assert list(found.scheduler.params.values()) == [0.0, 0.01, 1, 7] and found.precision == "fp32"
    path.write_text(json.dumps(CONFIG))
    assert _config_of(job) == str(path)


def test_a_forward_at_stage_3_finds_deepspeeds_attributes_on_whole_parameters() -> None:
    """TRL asks `ds_status` of the head inside the model's forward, and gathers what is not there."""
    said = []

    class Asking(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            said.append((self.weight.ds_status, self.weight.ds_id, self.weight.ds_shape, self.weight.ds_numel))
            with runtime.zero.GatheredParameters([self.weight]):
                return super().forward(rows)

    config = {**CONFIG, "zero_optimization": {"stage": 3}}
    engine = runtime.initialize(model=Asking(2, 1), config=config)[0]
    outside, status = engine.module.weight, runtime.runtime.zero.partition_parameters.ZeroParamStatus
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    assert said == [(status.AVAILABLE, outside.ds_id, torch.Size([1, 2]), 2)] * 2
    assert outside.ds_status is status.NOT_AVAILABLE


def test_keys_with_dots_that_trl_adds_are_passed_over() -> None:
    names = ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
    config = {**CONFIG, **{f"zero_optimization.{name}": 10.0 for name in names}}
    assert runtime.initialize(model=nn.Linear(2, 1), config=config)[0].zero_reduce_bucket_size() == 500_000_000
    assert len(config) == len(CONFIG) + 3


def test_parameters_on_nvme_are_left_out_below_stage_3(tmp_path: Path) -> None:
    """Beside an optimizer on nvme: no path is needed for what no stage below 3 cuts, and the weights are as without it."""
    weights = []
    for more in ({}, {"offload_param": {"device": "nvme", "max_in_cpu": 0}}):
        torch.manual_seed(0)
        zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, **more}
        adam = {"type": "AdamW", "params": {"lr": 0.1}}
        config = {"train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": adam, "zero_optimization": zero}
        engine = runtime.initialize(model=nn.Linear(64, 64), config=config)[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum())
            engine.step()
        weights.append(engine.module.weight.detach().clone())
    assert torch.equal(*weights)
