"""All monitors of a run as one: an event that is written to it goes to each that the config switches on.

For `observe.observer`, which writes the engine's events, and for scripts (`engine.monitor.write_events`). An event is a tuple
of name, value and number of samples. Source of names and places: DeepSpeed 0.19.8, monitor/.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist

from zckpt.base.errors import UnsupportedError
from zckpt.runtime.monitors.events import Event

_LIBRARIES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "'comet_ml>=3.41'"),
}


class Monitors(Protocol):
    """The sections of a config that switch monitors on."""

    tensorboard: Any
    wandb: Any
    csv_monitor: Any
    comet: Any


def check_libraries(config: Monitors, file: str) -> None:
    """Raises if a monitor is switched on whose library is not installed. No library is imported.

    Args:
        config: the sections.
        file: of the config, for the message.

    Raises:
        UnsupportedError: the message names the libraries.
    """
    missing = [
        (section, package)
        for section, (module, package) in _LIBRARIES.items()
        if getattr(config, section).enabled and importlib.util.find_spec(module) is None
    ]
    if missing:
        names = " and ".join(section for section, _ in missing)
        raise UnsupportedError(
            f"switches on {names}, and what {'it needs' if len(missing) == 1 else 'they need'} is not installed",
            file=file,
            remedy=f"Run pip install {' '.join(package for _, package in missing)}, or remove the section.",
        )


class MonitorMaster:
    """The monitors that a config switches on. Rank 0 alone writes; on other ranks `write_events` does nothing.

    Args:
        config: an object with the sections `tensorboard`, `wandb`, `csv_monitor` and `comet`.

    Attributes:
        enabled: whether any is switched on, on all ranks alike.
        tb_monitor, wandb_monitor, csv_monitor, comet_monitor: each; None if it is off, and on ranks other than 0.
    """

    def __init__(self, config: Monitors) -> None:
        check_libraries(config, "config")
        self.tb_monitor: Any = None
        self.wandb_monitor: Any = None
        self.csv_monitor: Any = None
        self.comet_monitor: Any = None
        sections = (config.tensorboard, config.wandb, config.csv_monitor, config.comet)
        self.enabled = any(section.enabled for section in sections)
        if not self.enabled or (dist.is_initialized() and dist.get_rank() != 0):
            return
        # Each library is imported only where it is asked for.
        if config.tensorboard.enabled:
            from zckpt.runtime.monitors.tensorboard import TensorBoardMonitor

            self.tb_monitor = TensorBoardMonitor(config.tensorboard)
        if config.wandb.enabled:
            from zckpt.runtime.monitors.wandb import WandbMonitor

            self.wandb_monitor = WandbMonitor(config.wandb)
        if config.csv_monitor.enabled:
            from zckpt.runtime.monitors.csv_monitor import CSVMonitor

            self.csv_monitor = CSVMonitor(config.csv_monitor)
        if config.comet.enabled:
            from zckpt.runtime.monitors.comet import CometMonitor

            self.comet_monitor = CometMonitor(config.comet)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes events to all monitors.

        Args:
            event_list: each a name such as "Train/Samples/lr", a number, and the samples so far.
        """
        for monitor in (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor):
            if monitor is not None:
                monitor.write_events(event_list)
