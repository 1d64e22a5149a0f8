"""Events for TensorBoard, as scalars against samples.

For `monitor`. Written with torch's SummaryWriter, which needs the package tensorboard.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from zckpt.runtime.config.reports import TensorBoardSection
from zckpt.runtime.monitors.events import Event


class TensorBoardMonitor:
    """Writes events with a SummaryWriter.

    Attributes:
        summary_writer: torch's; a script may add to it.
    """

    def __init__(self, section: TensorBoardSection) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = os.path.join(section.output_path, section.job_name)
        os.makedirs(directory, exist_ok=True)
        self.summary_writer: Any = SummaryWriter(log_dir=directory)

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Adds a scalar for each event, and flushes the file if `flush` is set."""
        for name, value, samples in event_list:
            self.summary_writer.add_scalar(name, value, samples)
        if flush:
            self.flush()

    def flush(self) -> None:
        """Writes what is still in memory into the file."""
        self.summary_writer.flush()
