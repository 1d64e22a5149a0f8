"""What a config wants to see of a run: events for the monitors, times, memory, operations.

For `engine`, which calls it at the beginning and end of forward, backward and step. Nothing that is switched off costs more than
the call. The events, their names, their order and the samples that they are counted in are DeepSpeed's (0.19.8,
runtime/engine.py), and `Train/Samples/train_loss`, which its pipeline engine writes, and its plain engine in older versions.
"""

from __future__ import annotations

import json
import logging
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from zckpt.live.device import synchronize
from zckpt.runtime.monitors.monitor import MonitorMaster
from zckpt.runtime.observe.flops_profiler import FlopsProfiler
from zckpt.runtime.observe.memory import device_memory, see_memory_usage
from zckpt.runtime.observe.timer import (
    BACKWARD,
    FORWARD,
    GLOBAL_TIMERS,
    INNER,
    MICRO_TIMERS,
    REDUCE,
    STEP,
    SynchronizedWallClockTimer,
    ThroughputTimer,
)

if TYPE_CHECKING:
    from zckpt.runtime.training_run import TrainingRun

_log = logging.getLogger("zckpt.runtime")
_GB = 1 << 30


class Observer:
    """Watches a run.

    Attributes:
        monitor: writes events.
        timers: of forward, backward and step; they have times only if the config asks for them.
        flops_profiler: None if it is off.
        wall_clock: the times of the last step in milliseconds, by name; empty without `wall_clock_breakdown`.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run: Any = weakref.proxy(run)  # a TrainingRun, which the observer does not keep alive
        config = run.settings.config
        self._config, self._first, self._device = config, run.global_rank == 0, run.device
        self.monitor = MonitorMaster(config)
        self.timers = SynchronizedWallClockTimer(run.device)
        self.flops_profiler: FlopsProfiler | None = None
        profile = config.flops_profiler
        if profile.enabled:
            self.flops_profiler = FlopsProfiler(run.module, self._run, profile.recompute_fwd_factor)
        self._timed: dict[str, tuple[str, ...]] = {
            name: ((f"{name}_microstep",) if config.wall_clock_breakdown else ())
            + ((name,) if config.wall_clock_breakdown or profile.enabled else ())
            for name in GLOBAL_TIMERS
        }
        self.wall_clock: dict[str, float] = {}
        throughput = config.timers.throughput
        wait = self._synchronize if throughput.synchronized else (lambda: None)
        self.throughput = (
            ThroughputTimer(run.batch.total, wait) if throughput.enabled and config.steps_per_print else None
        )
        self._loss: torch.Tensor | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward. One without gradients, such as an evaluation, is not a part of any step."""
        if not torch.is_grad_enabled():
            yield
            return
        self._direct_ended()
        self._memory("before forward")
        profiled = self._profiled
        if profiled is not None:
            profiled.start_profile()
        if self.throughput is not None:
            self.throughput.start()
        self._start(FORWARD)
        try:
            yield
        finally:
            self._stop(FORWARD)
            if profiled is not None:
                profiled.stop_profile()
        self._memory("after forward")

    def backward_begins(self, loss: torch.Tensor | None) -> None:
        """Before the gradients of a micro batch are computed.

        Args:
            loss: its part of the step's mean loss; None if the script has begun the backward itself.
        """
        self._start(BACKWARD)
        self._memory("before backward")
        if loss is not None and self._first and self.monitor.enabled:
            part = loss.detach().float()
            self._loss = part if self._loss is None else self._loss + part
        self._start(INNER)

    def backward_reduces(self) -> None:
        """After autograd, whose reductions overlap with it, and before what the engine reduces itself."""
        self._stop(INNER)
        self._start(REDUCE)

    def backward_ended(self) -> None:
        """After a backward."""
        self._memory("after backward")
        self._stop(REDUCE)
        self._stop(BACKWARD)

    def step_begins(self) -> None:
        """Before `step`."""
        self._direct_ended()
        self._memory("before step")
        self._start(STEP)

    def step_ended(self, last: bool, profiled_step: int) -> None:
        """After `step`.

        Args:
            last: it was called for the last micro batch, so the weights were updated.
            profiled_step: the steps before this one.
        """
        if self.throughput is not None:
            self._log_throughput(self.throughput.stop(last))
        self._stop(STEP)
        if last and self.monitor.enabled:
            self._write_step()
        if last and self.flops_profiler is not None and self.flops_profiler.started:
            self._print_profile(self.flops_profiler, profiled_step)
        if self._config.wall_clock_breakdown:
            self.wall_clock = {name: self.timers(name).elapsed(reset=False) for name in (*MICRO_TIMERS, *GLOBAL_TIMERS)}
            self._log_times(MICRO_TIMERS)
        if last and self._timed[STEP]:
            if self.monitor.enabled:
                self._write_times()
            self._log_times(GLOBAL_TIMERS)
        self._memory("after step")

    def describe(self, state: dict[str, Any]) -> None:
        """Prints the run's attributes and its config on rank 0, if `dump_state` is set.

        Args:
            state: the attributes, by name.
        """
        if not (self._config.dump_state and self._first):
            return
        lines = ["Engine:", *(f"  {name} {'.' * max(1, 29 - len(name))} {state[name]}" for name in sorted(state))]
        lines += [f"  config = {json.dumps(self._run.settings.raw, indent=4, sort_keys=True)}"]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()

    @property
    def _profiled(self) -> FlopsProfiler | None:
        """The profiler, if this is the step and the rank that it measures."""
        wanted = self._first and self._run.global_steps == self._config.flops_profiler.profile_step
        return self.flops_profiler if wanted else None

    def _direct_ended(self) -> None:
        """Ends the time of a backward that the script has begun itself, whose end the engine does not see."""
        for part in (INNER, REDUCE, BACKWARD):
            self._stop(part)

    def _start(self, part: str) -> None:
        for name in self._timed[part]:
            self.timers(name).start()

    def _stop(self, part: str) -> None:
        for name in self._timed[part]:
            self.timers(name).stop()

    def _memory(self, moment: str) -> None:
        if self._config.memory_breakdown:
            see_memory_usage(f"Engine {moment}", force=True)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            synchronize()

    def _write_step(self) -> None:
        loss, self._loss = self._loss, None
        run, samples = self._run, self._run.global_samples
        if not self._first:
            return
        events: list[tuple[str, Any, int]] = []
        if loss is not None:
            events.append(("Train/Samples/train_loss", loss.item(), samples))
        if run.groups:
            events.append(("Train/Samples/lr", run.get_lr()[0], samples))
        if self._config.fp16.enabled:
            events.append(("Train/Samples/loss_scale", run.cur_scale, samples))
        self.monitor.write_events(events)

    def _write_times(self) -> None:
        labels = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
        samples = self._run.global_samples
        times = [self.timers(name).elapsed(reset=False) for name in GLOBAL_TIMERS]
        self.monitor.write_events(
            [
                (f"Train/Samples/elapsed_time_ms_{label}", value, samples)
                for label, value in zip(labels, times, strict=True)
            ]
        )

    def _log_times(self, names: tuple[str, ...]) -> None:
        if self._first:
            self.timers.log(names)
        else:
            for name in names:
                self.timers(name).reset()

    def _print_profile(self, profiler: FlopsProfiler, step: int) -> None:
        section = self._config.flops_profiler
        profiler.print_model_profile(
            step, section.module_depth, section.top_modules, section.detailed, section.output_file
        )
        profiler.end_profile()

    def _log_throughput(self, spent_s: float | None) -> None:
        every, timer = self._config.steps_per_print, self.throughput
        if spent_s is None or timer is None or not every or timer.global_step_count % every or not self._first:
            return
        memory = device_memory()
        _log.info(
            "epoch=0/micro_step=%d/global_step=%d, RunningAvgSamplesPerSec=%.6g, CurrSamplesPerSec=%.6g, MemAllocated=%.2fGB, "
            "MaxMemAllocated=%.2fGB",
            timer.micro_step_count, timer.global_step_count, timer.avg_samples_per_sec(), timer.batch_size / (spent_s or 1e-6),
            memory.allocated / _GB, memory.most_allocated / _GB,
        )  # fmt: skip
