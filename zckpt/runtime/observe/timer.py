"""How long the parts of a step take, under DeepSpeed's names.

For `observer`, and for scripts (`engine.timers("fwd")`). Source of names and units: DeepSpeed 0.19.8, utils/timer.py.
On a device that works asynchronously, times are taken by its own events, and waited for when they are read.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zckpt.live.device import CPU, accelerator

FORWARD, BACKWARD, INNER, REDUCE, STEP = "fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"
GLOBAL_TIMERS = (FORWARD, BACKWARD, INNER, REDUCE, STEP)
"""Over all micro batches of a step."""
MICRO_TIMERS = tuple(f"{name}_microstep" for name in GLOBAL_TIMERS)
"""Of one micro batch."""


class WallClockTimer:
    """One timer, which may be started many times.

    Args:
        name: of the timer.
        device: what is timed.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name_ = name
        self.started_ = False
        self._device = device
        self._from: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Starts it; one that runs begins anew."""
        self._from, self.started_ = self._now(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stops it, and keeps the time since `start`; one that does not run stays as it is.

        Args:
            reset: drop the times before.
            record: without effect, as in DeepSpeed.
        """
        del record
        if reset:
            self._spans.clear()
        if self.started_:
            self._spans.append((self._from, self._now()))
        self.started_ = False

    def reset(self) -> None:
        """Drops all times."""
        self._spans.clear()
        self.started_ = False

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds of all times together, the one that runs included; `reset` drops them."""
        runs = self.started_
        self.stop()
        total = sum(self._milliseconds())
        if reset:
            self.reset()
        if runs:
            self.start()
        return total

    def mean(self) -> float:
        """Milliseconds of one time, in the middle eight of ten; 0 without any."""
        values = sorted(self._milliseconds())
        cut = round(len(values) * 0.1)
        kept = values[cut : len(values) - cut]
        return sum(kept) / len(kept) if kept else 0.0

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _milliseconds(self) -> list[float]:
        if self._device.type == "cpu":
            return [(end - begin) * 1000.0 for begin, end in self._spans]
        for _, end in self._spans:
            end.synchronize()
        return [begin.elapsed_time(end) for begin, end in self._spans]


class SynchronizedWallClockTimer:
    """Timers by their names: `timers("fwd").start()`.

    Args:
        device: what is timed; by default the accelerator that this process uses, or the CPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.timers: dict[str, WallClockTimer] = {}
        self._device = device or accelerator() or CPU

    def __call__(self, name: str) -> WallClockTimer:
        """The timer of a name, which is made if there is none."""
        if name not in self.timers:
            self.timers[name] = WallClockTimer(name, self._device)
        return self.timers[name]

    def get_timers(self) -> dict[str, WallClockTimer]:
        """All of them."""
        return self.timers

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, more: str = "") -> None:
        """Prints one line with the milliseconds of some timers, each divided by `normalizer`.

        Args:
            names: those without a timer are left out.
            normalizer: for example the number of steps since the last line.
            reset: drop the times.
            more: added to the line.
        """
        times = [(name, self.timers[name].elapsed(reset=reset) / normalizer) for name in names if name in self.timers]
        sys.stdout.write(
            "[Rank 0] time (ms)" + "".join(f" | {name}: {value:.2f}" for name, value in times) + more + "\n"
        )
        sys.stdout.flush()

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """The mean of each timer's times in milliseconds, divided by `normalizer`; `reset` drops them."""
        found = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in found:
                self.timers[name].reset()
        return found


class ThroughputTimer:
    """Samples per second, from the third step on; the first two warm up.

    Args:
        batch_size: samples of a step.
        synchronize: called before the clock is read.
    """

    WARM = 2

    def __init__(self, batch_size: int, synchronize: Callable[[], None]) -> None:
        self.batch_size = batch_size
        self.global_step_count = self.micro_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self._synchronize = synchronize
        self._from: float | None = None

    def start(self) -> None:
        """A micro batch begins."""
        if self.global_step_count >= self.WARM:
            self._synchronize()
            self._from = time.perf_counter()

    def stop(self, global_step: bool) -> float | None:
        """A micro batch is done.

        Args:
            global_step: it was the last of its step.

        Returns:
            At the end of a step the seconds that its micro batches took; None in between and while it warms up.
        """
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self._from is None:
            return None
        self._synchronize()
        self.step_elapsed_time += time.perf_counter() - self._from
        self._from = None
        if not global_step:
            return None
        spent, self.step_elapsed_time = self.step_elapsed_time, 0.0
        self.total_elapsed_time += spent
        return spent

    def avg_samples_per_sec(self) -> float:
        """Samples per second over all steps since the warm-up; -inf before."""
        steps = self.global_step_count - self.WARM
        return self.batch_size * steps / self.total_elapsed_time if self.total_elapsed_time else float("-inf")
