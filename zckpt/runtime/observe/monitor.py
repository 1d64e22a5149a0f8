"""Sends a run's numbers while it trains: to TensorBoard, Weights & Biases, CSV files, Comet.

For `observer`, which writes the engine's events, and for scripts (`engine.monitor.write_events`). An event is a tuple of
name, value (a number, or a tensor of one element) and the number of samples so far. A library is imported when it is used.
Source of names, places and formats: DeepSpeed 0.19.8, monitor/; a test compares CSV files byte by byte.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from zckpt.base.errors import UnsupportedError
from zckpt.runtime.config.fields import CometSection, CSVSection, TensorBoardSection, WandbSection
from zckpt.runtime.config.sections import Config

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
