"""Events for Comet, whose step is the number of samples.

For `monitor`. Of each name, values are left out until `samples_log_interval` samples have passed since the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zckpt.runtime.config.reports import CometSection
from zckpt.runtime.monitors.events import Event


class CometMonitor:
    """Logs events to an experiment that `comet_ml.start` begins or continues.

    Attributes:
        experiment: of comet_ml.
        samples_log_interval: samples between two values of one name, at least.
    """

    def __init__(self, section: CometSection) -> None:
        import comet_ml

        self.experiment: Any = comet_ml.start(
            api_key=section.api_key,
            project=section.project,
            workspace=section.workspace,
            experiment_key=section.experiment_key,
            mode=section.mode,
            online=section.online,
        )
        if section.experiment_name is not None:
            self.experiment.set_name(section.experiment_name)
        self.samples_log_interval = section.samples_log_interval
        self._last: dict[str, int] = {}

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Logs those events whose name has not been logged for the interval."""
        for name, value, samples in event_list:
            last = self._last.get(name)
            if last is None or samples - last >= self.samples_log_interval:
                self._last[name] = samples
                self.experiment.log_metric(name, value, step=samples)
