"""Times the parts of a step, under DeepSpeed's names; prints how much memory this process and its machine use, in two lines.

For `observer`, and for scripts (`engine.timers("fwd")`, `engine.tput_timer`). Source: DeepSpeed 0.19.8, utils/timer.py.
On a device that works asynchronously, times are taken by its own events, and waited for when they are read.
The lines on memory are for `observer` (`memory_breakdown`), and for scripts as `see_memory_usage`.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from zckpt.live.device import CPU, accelerator, synchronize

GIB = 1 << 30


def device_memory() -> dict[str, int]:
    """Bytes on the device (CPU: of this process): `MA` of tensors, `CA` of torch's allocator, and the peak of each."""
    kind = accelerator()
    if kind is None:
        facts = _read_kilobytes("/proc/self/status")
        now, most = facts.get("VmRSS", 0), facts.get("VmHWM", 0)
        return {"MA": now, "Max_MA": most, "CA": now, "Max_CA": most}
    module: Any = torch.get_device_module(kind)
    return {
        "MA": module.memory_allocated(),
        "Max_MA": module.max_memory_allocated(),
        "CA": module.memory_reserved(),
        "Max_CA": module.max_memory_reserved(),
    }


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints on rank 0, after a message, what the device and the machine have in use, and forgets the device's peak; without
    `force` does nothing, as in DeepSpeed.
    """
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    machine = _read_kilobytes("/proc/meminfo")
    total = machine.get("MemTotal", 1)
    used = total - machine.get("MemAvailable", 0)
    lines = [message, " ".join(f"{name} {round(value / GIB, 2)} GB" for name, value in device_memory().items())]
    lines += [f"CPU Virtual Memory: used = {round(used / GIB, 2)} GB, percent = {100 * used / total:.1f}%"]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    kind = accelerator()
    if kind is not None:
        torch.get_device_module(kind).reset_peak_memory_stats()


def _read_kilobytes(path: str) -> dict[str, int]:
    """Name -> bytes, from lines "name: number kB" of a file of the kernel."""
    with open(path, encoding="ascii", errors="replace") as file:
        parts = [line.replace(":", " ").split() for line in file]
    return {words[0]: int(words[1]) * 1024 for words in parts if len(words) == 3 and words[2] == "kB"}


_log = logging.getLogger("zckpt.runtime")

FORWARD, BACKWARD, INNER, REDUCE, STEP = "fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"
GLOBAL_TIMERS = (FORWARD, BACKWARD, INNER, REDUCE, STEP)
"""Timers over all micro batches of a step."""
MICRO_TIMERS = tuple(f"{name}_microstep" for name in GLOBAL_TIMERS)
"""Timers of one micro batch."""


class WallClockTimer:
    """One timer, which may be started many times."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name_ = name
        self.started_ = False
        self._device = device
        self._from: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Starts the timer; a running one begins from zero."""
        self._from, self.started_ = self._now(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stops the timer and adds its time. `reset` drops those before; `record` has no effect, as in DeepSpeed."""
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
        """The mean of the middle eight tenths of all times, in milliseconds; 0 without any."""
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
    """Timers by name: `timers("fwd").start()`. `device`: what is timed; by default the accelerator, or the CPU."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.timers: dict[str, WallClockTimer] = {}
        self._device = device or accelerator() or CPU

    def __call__(self, name: str) -> WallClockTimer:
        """The timer with this name, which the first call creates."""
        if name not in self.timers:
            self.timers[name] = WallClockTimer(name, self._device)
        return self.timers[name]

    def get_timers(self) -> dict[str, WallClockTimer]:
        """All timers by their names."""
        return self.timers

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, more: str = "") -> None:
        """Prints one line with the milliseconds of some timers, each divided by `normalizer`, such as the number of steps since
        the last line. `names`: those without a timer are left out; `reset`: drop the times; `more`: added to the line.
        """
        times = [(name, self.timers[name].elapsed(reset=reset) / normalizer) for name in names if name in self.timers]
        line = "".join(f" | {name}: {value:.2f}" for name, value in times)
        sys.stdout.write(f"[Rank 0] time (ms){line}{more}\n")
        sys.stdout.flush()

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """The mean of each timer's times in milliseconds, divided by `normalizer`; `reset` drops them."""
        timers = {name: self.timers[name] for name in names if name in self.timers}
        means = {name: timer.mean() / normalizer for name, timer in timers.items()}
        for timer in timers.values() if reset else ():
            timer.reset()
        return means


class ThroughputTimer:
    """Samples per second of the steps from `start_step` on: the first ones warm up.

    `config` is the section `timers.throughput`: `enabled`, and `synchronized`, which waits for the device. A step has
    `batch_size` samples. After each `steps_per_output` steps (None: never) `logging_fn`, by default the trainer's log, gets
    a line. `monitor_memory` is for DeepSpeed's sake; `device` is what is timed, by default the accelerator, or the CPU.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.config, self.batch_size, self.start_step = config, batch_size or 1, start_step
        self.steps_per_output, self.monitor_memory = steps_per_output, monitor_memory
        self.logging = logging_fn or _log.info
        self.started = False
        self.epoch_count = self.global_step_count = self.micro_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self._device = device or accelerator() or CPU
        self._from: float | None = None

    def update_epoch_count(self) -> None:
        """Begins the next epoch, in which micro batches are counted from 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Marks the begin of a micro batch."""
        if self.config.enabled:
            self.started = True
            if self.global_step_count >= self.start_step:
                self._from = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Marks the end of a micro batch. `global_step`: of a step too; `report_speed`: log the speed, if it is time."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self._from is None:
            return
        spent, self._from = self._now() - self._from, None
        self.total_elapsed_time += spent
        self.step_elapsed_time += spent
        if not global_step:
            return
        if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
            memory = device_memory()
            self.logging(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec():.6g}, "
                f"CurrSamplesPerSec={self.batch_size / (self.step_elapsed_time + 1e-6):.6g}, "
                f"MemAllocated={memory['MA'] / GIB:.2f}GB, MaxMemAllocated={memory['Max_MA'] / GIB:.2f}GB"
            )
        self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Samples per second over all steps since the warm-up; -inf before."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if self.total_elapsed_time else float("-inf")

    def _now(self) -> float:
        if self.config.synchronized and self.steps_per_output and self._device.type != "cpu":
            synchronize()
        return time.perf_counter()
