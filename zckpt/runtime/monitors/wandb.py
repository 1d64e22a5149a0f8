"""Events for Weights & Biases, whose step is the number of samples.

For `monitor`. A run that the script has begun with `wandb.init` is used; otherwise one is begun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zckpt.runtime.config.reports import WandbSection
from zckpt.runtime.monitors.events import Event


class WandbMonitor:
    """Logs events to the run of this process."""

    def __init__(self, section: WandbSection) -> None:
        import wandb

        self._wandb: Any = wandb
        if wandb.run is None:
            wandb.init(project=section.project, group=section.group, entity=section.team)

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """As `wandb.log`."""
        self._wandb.log(dict(data), step=step, commit=commit)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Logs each event at its number of samples."""
        for name, value, samples in event_list:
            self.log({name: value}, step=samples)
