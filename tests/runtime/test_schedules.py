"""Every schedule, step by step the numbers of real DeepSpeed."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch

from zckpt.base.errors import UsageError
from zckpt.runtime.optimizers.schedules import SCHEDULES, build_schedule

CASES: list[tuple[str, dict[str, Any]]] = [
    ("LRRangeTest", {}),
    ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 7, "lr_range_test_step_rate": 3.0}),
    ("LRRangeTest", {"lr_range_test_step_size": 5, "lr_range_test_staircase": True}),
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_num_steps": 10, "warmup_type": "linear", "warmup_min_lr": 0.01, "warmup_max_lr": [0.1, 0.5]}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_num_steps": 10}),
    ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 10, "warmup_type": "linear", "warmup_min_lr": 0.02}),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 10}),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 8, "warmup_type": "linear", "cos_min_ratio": 0.2,
                        "warmup_min_ratio": 0.3}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 10}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": [0.1, 0.3], "cycle_first_step_size": 7, "cycle_second_step_size": 11,
                  "decay_step_size": 3, "decay_lr_rate": 0.5, "decay_mom_rate": 0.1}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 12, "cycle_first_stair_count": 4,
                  "cycle_second_step_size": 9, "cycle_second_stair_count": 3}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 6, "cycle_momentum": False,
                  "cycle_first_stair_count": 3}),
]  # fmt: skip


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    return kind([{"params": [parameters[0]], "lr": 0.3}, {"params": [parameters[1]]}], lr=0.05)  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def theirs() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
        from deepspeed.runtime import lr_schedules
    return lr_schedules


def seen(kind: Any, params: dict[str, Any], base: type[torch.optim.Optimizer]) -> list[Any]:
    over = optimizer(base)
    schedule = kind(over, **params)
    out = [[dict(group, params=None) for group in over.param_groups]]
    for _ in range(50):
        schedule.step()
        out.append([schedule.get_last_lr(), [dict(group, params=None) for group in over.param_groups]])
    out.append(schedule.state_dict())
    return out


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(("name", "params"), CASES)
def test_the_same_numbers_as_deepspeed(theirs: Any, name: str, params: dict[str, Any], base: Any) -> None:
    assert seen(SCHEDULES[name], params, base) == seen(getattr(theirs, name), params, base)


@pytest.mark.parametrize(("name", "params"), CASES)
def test_a_state_takes_up_where_it_was(name: str, params: dict[str, Any]) -> None:
    a, b = optimizer(), optimizer()
    first, second = build_schedule(name, params, a), build_schedule(name, params, b)
    for _ in range(13):
        first.step()
    second.load_state_dict(first.state_dict())
    for _ in range(5):
        first.step(), second.step()
        assert first.get_last_lr() == second.get_last_lr()
        assert [g["betas"] for g in a.param_groups] == [g["betas"] for g in b.param_groups]


def test_torchs_own_schedules_by_name() -> None:
    schedule = build_schedule("CosineAnnealingLR", {"T_max": 5}, optimizer())
    assert type(schedule) is torch.optim.lr_scheduler.CosineAnnealingLR


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="WarmUpLR"):
        build_schedule("WarmUpLR", {}, optimizer())
    with pytest.raises(UsageError, match="total_num_steps"):
        build_schedule("WarmupDecayLR", {}, optimizer())
    with pytest.raises(UsageError, match="warmup_steps"):
        build_schedule("WarmupLR", {"warmup_steps": 3}, optimizer())
    with pytest.raises(UsageError, match="3 values of warmup_max_lr; expected one number, or 2 values"):
        build_schedule("WarmupLR", {"warmup_max_lr": [1, 2, 3]}, optimizer())
    with pytest.raises(UsageError, match=r"warmup_num_steps must be positive.*pass --warmup_steps"):
        build_schedule("WarmupLR", {"warmup_num_steps": 0}, optimizer())
    with pytest.raises(UsageError, match=r"warmup_type .* is not known"):
        build_schedule("WarmupLR", {"warmup_type": "logarithmic"}, optimizer())
