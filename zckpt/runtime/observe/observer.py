"""Shows what a config asks for of a run: events for the monitors (TensorBoard, W&B, CSV, Comet), times, memory, operations.

For `engine`, which calls it at the beginning and end of forward, backward and step. Nothing that is switched off costs more than
the call. The events, their names, their order and the samples that they are counted in are DeepSpeed's (0.19.8,
runtime/engine.py), and `Train/Samples/train_loss`, which its pipeline engine writes, and its plain engine in older versions.

Scripts write events too (`engine.monitor.write_events`). An event is a tuple of
name, value (a number, or a tensor of one element) and the number of samples so far. A library is imported when it is used.
Source of names, places and formats: DeepSpeed 0.19.8, monitor/; a test compares CSV files byte by byte.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zckpt.base.errors import UnsupportedError
from zckpt.runtime.config.fields import CometSection, CSVSection, TensorBoardSection, WandbSection
from zckpt.runtime.config.sections import Config
from zckpt.runtime.observe import timer
from zckpt.runtime.observe.flops_profiler import FlopsProfiler
from zckpt.runtime.observe.lookout import of_process
from zckpt.runtime.observe.timer import see_memory_usage

if TYPE_CHECKING:
    from zckpt.runtime.training_run import TrainingRun


Event = tuple[str, Any, int]


class TensorBoardMonitor:
    """Writes events as scalars with torch's SummaryWriter. `summary_writer`: a script may add to it."""

    def __init__(self, section: TensorBoardSection) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.summary_writer: Any = SummaryWriter(log_dir=_make_directory(section))

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Adds a scalar for each event, and flushes the file if `flush` is set."""
        for event in event_list:
            self.summary_writer.add_scalar(*event)
        if flush:
            self.flush()

    def flush(self) -> None:
        """Writes what is still in memory into the file."""
        self.summary_writer.flush()


class WandbMonitor:
    """Logs events to this process's run, which the script began with `wandb.init`, or which begins here."""

    def __init__(self, section: WandbSection) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        if self._wandb.run is None:
            self._wandb.init(project=section.project, group=section.group, entity=section.team)

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Logs as `wandb.log` does."""
        self._wandb.log(dict(data), step=step, commit=commit)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Logs each event at its number of samples."""
        for name, value, samples in event_list:
            self.log({name: value}, step=samples)


class CSVMonitor:
    """Writes events into a file for each name: `Train/Samples/lr` into `Train_Samples_lr.csv`, under `step` and `lr`.

    Files of an earlier run are continued, without a second header. `log_dir`: the directory, which is made if need be.
    """

    def __init__(self, section: CSVSection) -> None:
        self.log_dir = _make_directory(section)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Adds a line for each event; the files are closed in between."""
        for name, value, samples in event_list:
            path = os.path.join(self.log_dir, name.replace("/", "_").replace(" ", "_") + ".csv")
            with open(path, "a", newline="", encoding="utf-8") as file:  # not synced, as any log
                writer = csv.writer(file)
                if file.tell() == 0:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([samples, value])


class CometMonitor:
    """Logs events to an `experiment` of comet_ml, which `comet_ml.start` begins or continues. Between two values of one name
    are `samples_log_interval` samples, at least; values in between are left out.
    """

    def __init__(self, section: CometSection) -> None:
        names = ("api_key", "workspace", "project", "experiment_key", "mode", "online")
        start = importlib.import_module("comet_ml").start
        self.experiment: Any = start(**{name: getattr(section, name) for name in names})
        if section.experiment_name is not None:
            self.experiment.set_name(section.experiment_name)
        self.samples_log_interval = section.samples_log_interval
        self._last: dict[str, int] = {}

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Logs those events with a name that has not been logged for the interval."""
        for name, value, samples in event_list:
            if samples - self._last.get(name, samples - self.samples_log_interval) >= self.samples_log_interval:
                self._last[name] = samples
                self.experiment.log_metric(name, value, step=samples)


_KINDS: dict[str, tuple[str, Any, str | None, str]] = {
    "tensorboard": ("tb_monitor", TensorBoardMonitor, "tensorboard", "tensorboard"),
    "wandb": ("wandb_monitor", WandbMonitor, "wandb", "wandb"),
    "csv_monitor": ("csv_monitor", CSVMonitor, None, ""),
    "comet": ("comet_monitor", CometMonitor, "comet_ml", "'comet_ml>=3.41'"),
}
"""Section -> its attribute of `MonitorMaster`, its monitor, the module that it needs, and what installs that."""


def check_libraries(config: Any, file: str) -> None:
    """Raises UnsupportedError if a monitor is switched on without its library installed, and names it. No library is
    imported. `config`: the sections; `file`: of the config, for the message.
    """
    missing = {
        section: package
        for section, (_, _, module, package) in _KINDS.items()
        if getattr(config, section).enabled and module is not None and importlib.util.find_spec(module) is None
    }
    if missing:
        raise UnsupportedError(
            f"switches on {' and '.join(missing)}, and what {'it needs' if len(missing) == 1 else 'they need'} is not installed",
            file=file, remedy=f"Run pip install {' '.join(missing.values())}, or remove the section.",
        )  # fmt: skip


class MonitorMaster:
    """The monitors that a config, or an object with its four sections, switches on. Rank 0 alone writes; on other ranks
    `write_events` does nothing.

    Attributes:
        enabled: whether any is switched on, on all ranks alike.
        tb_monitor, wandb_monitor, csv_monitor, comet_monitor: each; None if it is off, and on ranks other than 0.
    """

    def __init__(self, config: Any) -> None:
        check_libraries(config, "config")
        sections = {name: getattr(config, name) for name in _KINDS}
        self.enabled = any(section.enabled for section in sections.values())
        writes = not dist.is_initialized() or dist.get_rank() == 0
        for name, (attribute, kind, _, _) in _KINDS.items():
            setattr(self, attribute, kind(sections[name]) if writes and sections[name].enabled else None)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes events to all monitors: each a name such as "Train/Samples/lr", a number, and the samples so far."""
        for monitor in (getattr(self, attribute) for attribute, *_ in _KINDS.values()):
            if monitor is not None:
                monitor.write_events(event_list)


def get_monitor_config(param_dict: Mapping[str, Any]) -> Any:
    """The sections of a config that is still JSON, for a `MonitorMaster`; those that it does not have are switched off.
    `enabled` says whether any is on. Raises ValueError if a section has a key or a value that it cannot have.
    """
    given = {name: param_dict[name] for name in _KINDS if name in param_dict}
    sections = {name: getattr(Config(**given), name) for name in _KINDS}
    return SimpleNamespace(**sections, enabled=any(section.enabled for section in sections.values()))


def _make_directory(section: TensorBoardSection | CSVSection) -> str:
    directory = os.path.join(section.output_path, section.job_name)
    os.makedirs(directory, exist_ok=True)
    return directory


_EVENTS = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
"""What events call the times of `GLOBAL_TIMERS`."""


class Observer:
    """Watches a run.

    Attributes:
        monitor: writes events.
        timers: of forward, backward and step; they have times only if the config asks for them.
        tput_timer: samples per second.
        flops_profiler: None if it is off.
        wall_clock: the times of the last step in milliseconds, by name; empty without `wall_clock_breakdown`.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run: Any = weakref.proxy(run)  # a TrainingRun, which the observer does not keep alive
        config = run.settings.config
        profile, breakdown = config.flops_profiler, config.wall_clock_breakdown
        self._config, self._first = config, run.global_rank == 0
        self.monitor = MonitorMaster(config)
        self.timers = timer.SynchronizedWallClockTimer(run.device)
        self.tput_timer = timer.ThroughputTimer(
            config.timers.throughput, run.batch.total, steps_per_output=config.steps_per_print, device=run.device
        )
        profiler = FlopsProfiler(run.module, self._run, profile.recompute_fwd_factor)
        self.flops_profiler = profiler if profile.enabled else None
        self._micro = timer.MICRO_TIMERS if breakdown else ()
        self._global = timer.GLOBAL_TIMERS if breakdown or profile.enabled else ()
        self.wall_clock: dict[str, float] = {}
        self._loss: torch.Tensor | None = None
        self._lookout = of_process(run.world)
        self._enter(0)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Watches a forward. One without gradients, such as an evaluation, is not a part of any step."""
        self._enter(1)
        if not torch.is_grad_enabled():
            yield
            self._enter(0)
            return
        self._stop_backward()
        self._show_memory("before forward")
        wanted = self._first and self._run.global_steps == self._config.flops_profiler.profile_step
        profiler = self.flops_profiler if wanted else None
        if profiler is not None:
            profiler.start_profile()
        self.tput_timer.start()
        self._start(timer.FORWARD)
        try:
            yield
        finally:
            self._stop(timer.FORWARD)
            if profiler is not None:
                profiler.stop_profile()
        self._show_memory("after forward")

    def begin_backward(self, loss: torch.Tensor | None) -> None:
        """Begins to watch a backward. `loss`: its part of the step's mean loss; None if the script began it itself."""
        self._enter(2)
        self._start(timer.BACKWARD)
        self._show_memory("before backward")
        if loss is not None and self._first and self.monitor.enabled:
            part = loss.detach().float()
            self._loss = part if self._loss is None else self._loss + part
        self._start(timer.INNER)

    def begin_reductions(self) -> None:
        """Begins to watch the reductions that the engine makes itself after autograd, with overlap."""
        self._stop(timer.INNER)
        self._start(timer.REDUCE)

    def end_backward(self) -> None:
        """Ends what `begin_backward` has begun."""
        self._show_memory("after backward")
        self._stop(timer.REDUCE, timer.BACKWARD)

    def begin_step(self) -> None:
        """Watches a call of `step`."""
        self._enter(3)
        self._stop_backward()
        self._show_memory("before step")
        self._start(timer.STEP)

    def end_step(self, last: bool, step: int) -> None:
        """Ends what `begin_step` began, and shows what the config asks for. `last`: it was called for the last micro batch,
        so the weights were updated; `step`: the steps before this one.
        """
        self._enter(0, 1)
        self.tput_timer.stop(last, report_speed=self._first)
        self._stop(timer.STEP)
        if last and self.monitor.enabled:
            self._write_step()
        profiler, section = self.flops_profiler, self._config.flops_profiler
        if last and profiler is not None and profiler.started:
            depth, top = section.module_depth, section.top_modules
            profiler.print_model_profile(step, depth, top, section.detailed, section.output_file)
            profiler.end_profile()
        if self._micro:
            names = (*timer.MICRO_TIMERS, *timer.GLOBAL_TIMERS)
            self.wall_clock = {name: self.timers(name).elapsed(reset=False) for name in names}
        self._show_times(self._micro)
        if last and self._global:
            if self.monitor.enabled:
                samples, times = self._run.global_samples, [self.timers(name).elapsed(False) for name in self._global]
                pairs = zip(_EVENTS, times, strict=True)
                self.monitor.write_events([(f"Train/Samples/elapsed_time_ms_{n}", time, samples) for n, time in pairs])
            self._show_times(self._global)
        self._show_memory("after step")

    def describe(self, state: dict[str, Any]) -> None:
        """Prints the run's attributes (`state`, by name) and its config on rank 0, if `dump_state` is set."""
        if not (self._config.dump_state and self._first):
            return
        lines = ["Engine:", *(f"  {name} {'.' * max(1, 29 - len(name))} {state[name]}" for name in sorted(state))]
        lines += [f"  config = {json.dumps(self._run.settings.raw, indent=4, sort_keys=True)}"]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()

    def _enter(self, phase: int, ended: int = 0) -> None:
        self._lookout.enter(phase, self._run.micro_steps + ended, self._run.global_steps + 1)

    def _timers_of(self, part: str) -> list[str]:
        return [name for name in (*self._micro, *self._global) if name.removesuffix("_microstep") == part]

    def _start(self, part: str) -> None:
        for name in self._timers_of(part):
            self.timers(name).start()

    def _stop(self, *parts: str) -> None:
        for name in (name for part in parts for name in self._timers_of(part)):
            self.timers(name).stop()

    def _stop_backward(self) -> None:
        self._stop(timer.INNER, timer.REDUCE, timer.BACKWARD)  # nobody sees the end of one that the script has begun

    def _show_memory(self, moment: str) -> None:
        if self._config.memory_breakdown:
            see_memory_usage(f"Engine {moment}", force=True)

    def _show_times(self, names: tuple[str, ...]) -> None:
        if names and self._first:
            self.timers.log(names)
        for name in names:
            self.timers(name).reset()

    def _write_step(self) -> None:
        loss, self._loss = self._loss, None
        if not self._first:
            return
        run, samples = self._run, self._run.global_samples
        events: list[tuple[str, Any, int]] = []
        if loss is not None:
            events.append(("Train/Samples/train_loss", loss.item(), samples))
        if run.groups:
            events.append(("Train/Samples/lr", run.get_lr()[0], samples))
        if self._config.fp16.enabled:
            events.append(("Train/Samples/loss_scale", run.cur_scale, samples))
        self.monitor.write_events(events)
