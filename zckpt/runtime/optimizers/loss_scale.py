"""Scales losses in fp16: by a fixed number, or by one that follows the gradients.

For `training_run`. A step with gradients that overflow is skipped on every rank; each overflow uses up one of `hysteresis`
chances, and the last one halves the scale. `loss_scale_window` steps without overflow double it and give the chances back.
Source: DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py. tests/runtime/test_precision.py runs both side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zckpt.base.errors import CastError
from zckpt.runtime.config.sections import FP16


class LossScaler:
    """The scale that losses are multiplied with before backward; `dynamic`: it follows the gradients."""

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = scale
        self.dynamic = False

    def update(self, overflow: bool) -> str | None:
        """Counts a step. Returns what happened to the scale after an overflow, as part of a sentence."""
        return "the loss scale is fixed" if overflow and self.cur_scale != 1.0 else None

    def state(self) -> dict[str, float | int | bool]:
        """Everything that a resumed run needs."""
        return {"cur_scale": self.cur_scale}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned; names that are missing keep their values."""
        for name in self.state():
            setattr(self, name, state.get(name, getattr(self, name)))


class DynamicLossScaler(LossScaler):
    """A scale that follows the gradients."""

    def __init__(self, config: FP16) -> None:
        super().__init__(2.0**config.initial_scale_power)
        self.dynamic = True
        self.window = config.loss_scale_window
        self.min_scale = float(config.min_loss_scale)
        self.hysteresis = config.hysteresis
        self.consecutive_hysteresis = config.consecutive_hysteresis
        self.cur_hysteresis = config.hysteresis
        self.cur_iter = 0
        self.last_overflow_iter = -1

    def update(self, overflow: bool) -> str | None:
        """Adjusts the scale after a step; says how, after an overflow. Raises CastError for one at the least scale."""
        stable, self.cur_iter = self.cur_iter - self.last_overflow_iter - 1, self.cur_iter + 1
        if not overflow:
            grows = stable > 0 and stable % self.window == 0
            if self.consecutive_hysteresis or grows:
                self.cur_hysteresis = self.hysteresis
            self.cur_scale *= 2 if grows else 1
            return None
        self.last_overflow_iter = self.cur_iter - 1
        if self.cur_hysteresis > 1 and self.hysteresis > 1:
            self.cur_hysteresis -= 1
            return f"the loss scale stays {self.cur_scale:g}, hysteresis falls to {self.cur_hysteresis}"
        if self.cur_scale == self.min_scale:
            raise CastError(
                "the gradients overflow fp16 at the smallest loss scale",
                found=f"loss scale {self.cur_scale:g}, which is fp16.min_loss_scale",
                remedy="Check the loss and the learning rate of the last steps, or train in bf16.",
            )
        before, self.cur_scale = self.cur_scale, max(self.cur_scale / 2, self.min_scale)
        return f"the loss scale falls from {before:g} to {self.cur_scale:g}"

    def state(self) -> dict[str, float | int | bool]:
        """Everything that a resumed run needs."""
        return {
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
            "last_overflow_iter": self.last_overflow_iter,
            "cur_hysteresis": self.cur_hysteresis,
        }


def loss_scaler(config: FP16) -> LossScaler:
    """The scaler for the section `fp16`; without fp16, one of scale 1."""
    if not config.enabled:
        return LossScaler()
    return LossScaler(config.loss_scale) if config.loss_scale else DynamicLossScaler(config)
