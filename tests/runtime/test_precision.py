"""The loss scale, step by step that of real DeepSpeed."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import pytest

from zckpt.base.errors import CastError
from zckpt.runtime.config.sections import FP16
from zckpt.runtime.optimizers.handle import LossScaler, loss_scaler


@pytest.fixture(scope="module")
def theirs() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
        from deepspeed.runtime.fp16 import loss_scaler as module
    module.dist.get_rank = lambda *_: 1  # it logs on rank 0, and asks for a process group to know
    return module


@pytest.mark.parametrize("seed", range(40))
def test_the_same_scale_as_deepspeed(theirs: Any, seed: int) -> None:
    draw = random.Random(seed)
    config = FP16(
        enabled=True,
        initial_scale_power=draw.choice([4, 16]),
        loss_scale_window=draw.choice([1, 2, 5]),
        hysteresis=draw.choice([1, 2, 3]),
        consecutive_hysteresis=draw.choice([True, False]),
        min_loss_scale=draw.choice([1, 8]),
    )
    ours = loss_scaler(config)
    other = theirs.DynamicLossScaler(
        init_scale=2**config.initial_scale_power,
        scale_window=config.loss_scale_window,
        min_scale=config.min_loss_scale,
        delayed_shift=config.hysteresis,
        consecutive_hysteresis=config.consecutive_hysteresis,
    )
    for _ in range(60):
        overflow = draw.random() < 0.3
        try:
            other.update_scale(overflow)
        except Exception as error:
            assert "already at minimum" in str(error)
            with pytest.raises(CastError, match="smallest loss scale"):
                ours.update(overflow)
            return
        told = ours.update(overflow)
        assert (told is not None) == overflow
        state = ours.state()
        assert state == {name: getattr(other, name) for name in state}
        fresh = loss_scaler(config)
        fresh.load_state(state)
        ours = fresh  # the state is all there is


def test_a_fixed_scale_and_none() -> None:
    fixed = loss_scaler(FP16(enabled=True, loss_scale=128))
    assert type(fixed) is LossScaler and not fixed.dynamic
    assert fixed.update(True) and fixed.cur_scale == 128 and fixed.update(False) is None
    assert loss_scaler(FP16()).cur_scale == 1.0 and loss_scaler(FP16()).update(True) is None
