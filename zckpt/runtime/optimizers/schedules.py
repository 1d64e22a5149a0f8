"""Learning rate schedules that DeepSpeed defines, step by step the same numbers.

For `initialize`, by the config's `scheduler.type`; classes of torch.optim.lr_scheduler go by their own names. A schedule is
a function of one number, `last_batch_iteration`, which is all its state: -1 before the first step.
Source: DeepSpeed 0.19.8, runtime/lr_schedules.py. tests/runtime/test_schedules.py runs both side by side.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from zckpt.base.errors import UsageError
from zckpt.base.words import count, examples

Rates = float | Sequence[float]


class Schedule:
    """Sets the learning rate of every group after each optimizer step."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr = [group["lr"] for group in optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """The rates for `last_batch_iteration`, one per group."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advances by one step, or to a given step, and sets the rates."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, int]:
        """The whole state."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Restores the state; the rates themselves are in the optimizer's groups."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _warm_up(self, steps: int, kind: str) -> None:
        """Sets the course of a warm-up."""
        self.warmup_steps, self._by_log = max(2, int(_positive(steps, "warmup_num_steps"))), kind == "log"
        if kind not in ("log", "linear"):
            raise UsageError(
                f"warmup_type {kind!r} is not known", expected="'log' or 'linear'",
                remedy="Correct it in scheduler.params.",
            )  # fmt: skip

    def _warmed(self) -> float | None:
        """How far the warm-up is, from 0 to 1; None after it."""
        step = self.last_batch_iteration
        if step >= self.warmup_steps:
            return None
        return (1.0 / math.log(self.warmup_steps)) * math.log(step + 1) if self._by_log else step / self.warmup_steps

    def _per_group(self, value: Rates, name: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, Sequence):
            return [value] * groups
        if len(value) != groups:
            raise UsageError(
                "scheduler.params does not fit the number of parameter groups",
                found=count(len(value), f"value of {name}", f"values of {name}"),
                expected=f"one number, or {count(groups, 'value')}: one per parameter group",
                remedy=f"Correct {name} in scheduler.params.",
            )
        return list(value)


class LRRangeTest(Schedule):
    """The rate grows from `lr_range_test_min_lr`, by `step_rate` times that in each `step_size` steps, to find the largest
    that still trains; with `staircase` at the end of each such interval, not in between.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _positive(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[float]:
        """The rates for `last_batch_iteration`, one per group."""
        interval = float(self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * growth for rate in self.min_lr]


class WarmupLR(Schedule):
    """From `warmup_min_lr` to `warmup_max_lr`, by default the groups' own, in `warmup_num_steps`, at least 2; then
    constant. `warmup_type` is `log` or `linear`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = [group["lr"] for group in optimizer.param_groups]
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._per_group(warmup_max_lr, "warmup_max_lr")
        self._warm_up(warmup_num_steps, warmup_type)
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[float]:
        """The rates for `last_batch_iteration`, one per group."""
        if self.last_batch_iteration < 0:
            return self.min_lrs
        gamma = self._gamma()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _gamma(self) -> float:
        warmed = self._warmed()
        return 1.0 if warmed is None else warmed


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, and then down to `warmup_min_lr` in a straight line, reached at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _gamma(self) -> float:
        if (warmed := self._warmed()) is not None:
            return warmed
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_steps)))


class WarmupCosineLR(Schedule):
    """A factor on the groups' own rates: up from `warmup_min_ratio` to 1, then along a cosine down to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self._warm_up(warmup_num_steps, warmup_type)
        self.org_lrs = [group["lr"] for group in optimizer.param_groups]
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[float]:
        """The rates for `last_batch_iteration`, one per group."""
        return [rate * self._ratio() for rate in self.org_lrs]

    def _ratio(self) -> float:
        step = self.last_batch_iteration
        if step < 0:
            return 0.0
        if (warmed := self._warmed()) is not None:
            return self.warmup_min_ratio + warmed * (1.0 - self.warmup_min_ratio)
        progress = min(1.0, (step - self.warmup_steps + 1) / max(1, self.total_num_steps - self.warmup_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


class OneCycle(Schedule):
    """Up to `cycle_max_lr` and back to `cycle_min_lr` once, then a decay; momentum runs the other way.

    Args:
        optimizer: its groups are set: `lr`, and `betas` where it has them.
        cycle_min_lr, cycle_max_lr: one or one per group.
        decay_lr_rate: after the cycle the rate is divided by 1 + this x intervals of `decay_step_size`.
        cycle_first_step_size, cycle_second_step_size: steps of the way up and down; as many as up if not given.
        cycle_first_stair_count, cycle_second_stair_count: likewise stairs; 0 is a slope.
        decay_step_size: 0 never decays.
        cycle_momentum: move the first beta too.
        cycle_min_mom, cycle_max_mom: one or one per group.
        decay_mom_rate: as `decay_lr_rate`, but multiplied.
        last_batch_iteration: where to begin.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.first = float(_positive(cycle_first_step_size, "cycle_first_step_size"))
        self.second = self.first if cycle_second_step_size is None else float(cycle_second_step_size)
        self.total = self.first + self.second
        second = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.stairs = cycle_first_stair_count, second
        self.decay_step_size = decay_step_size
        self.decay_rates = (decay_lr_rate, decay_mom_rate)
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self.min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
            self._set_momentum(self.min_moms)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advances by one step, or to a given step, and sets rates and momenta."""
        super().step(last_batch_iteration)
        self._set_momentum(self.get_mom())

    def get_lr(self) -> list[float]:
        """The rates for `last_batch_iteration`, one per group."""
        if self.last_batch_iteration < self.total:
            scale = self._scale()
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [rate / self._decay(self.decay_rates[0]) for rate in self.min_lrs]

    def get_mom(self) -> list[float]:
        """The first betas for `last_batch_iteration`, one per group."""
        if self.last_batch_iteration < self.total:
            scale = self._scale()
            return [high - (high - low) * scale for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        return [momentum * self._decay(self.decay_rates[1]) for momentum in self.max_moms]

    def _set_momentum(self, momenta: Sequence[float]) -> None:
        if self.cycle_momentum:
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, 0.99)

    def _decay(self, rate: float) -> float:
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * ((self.last_batch_iteration - self.total + 1) / self.decay_step_size)

    def _scale(self) -> float:
        """The height within the cycle, from 0 to 1."""
        step = self.last_batch_iteration + 1
        x = 1.0 + step / self.total - math.floor(1 + step / self.total)
        turn = self.first / self.total
        scale, stairs = (x / turn, self.stairs[0]) if x <= turn else ((x - 1) / (turn - 1), self.stairs[1])
        if stairs > 0:  # counted in whole steps: a float just under a stair would fall down one
            within = step % self.total
            up = within <= self.first
            stair = within * stairs / self.first if up else (self.total - within) * stairs / self.second
            scale = math.floor(stair) / stairs
        return scale


def _positive(value: float, name: str) -> float:
    if isinstance(value, bool) or value <= 0:
        remedy = f"Correct {name} in scheduler.params."
        if name == "warmup_num_steps":
            remedy += ' For "auto" older transformers take their warmup_steps, which is 0 unless you set it: pass --warmup_steps.'
        raise UsageError(f"{name} must be positive", found=repr(value), remedy=remedy)
    return value


SCHEDULES = {cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def build_schedule(kind: str, params: Mapping[str, Any], optimizer: Optimizer) -> Any:
    """The schedule of a config. Raises UsageError for an unknown one, and for an unknown or missing argument."""
    known = SCHEDULES | {
        name: cls
        for name, cls in vars(lr_scheduler).items()
        if isinstance(cls, type) and issubclass(cls, lr_scheduler.LRScheduler) and cls is not lr_scheduler.LRScheduler
    }
    if kind not in known:
        raise UsageError(
            f"scheduler.type {kind!r} is not known",
            expected=f"{', '.join(SCHEDULES)}, or the name of a class of torch.optim.lr_scheduler",
            remedy="Choose one of these, or pass lr_scheduler to initialize.",
        )
    try:
        inspect.signature(known[kind]).bind(optimizer, **params)
    except TypeError as error:
        accepted = list(inspect.signature(known[kind]).parameters)[1:]
        raise UsageError(
            f"{kind} does not take these scheduler.params", found=f"{error}", expected=examples(accepted, 20),
            remedy="Correct the names of the arguments, and add those that are missing.",
        ) from error  # fmt: skip
    try:
        return known[kind](optimizer, **params)
    except UsageError:
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{kind} does not accept these values of scheduler.params", found=f"{dict(params)}: {error}",
            remedy="Correct the value.",
        ) from error  # fmt: skip
