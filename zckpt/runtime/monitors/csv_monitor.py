"""Events as CSV files: one file for each name, one line for each event.

For `monitor`. `Train/Samples/lr` is in `Train_Samples_lr.csv`, with the columns `step` (samples) and `lr`.
Source of names and format: DeepSpeed 0.19.8, monitor/csv_monitor.py; a test compares files byte by byte.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence

from zckpt.runtime.config.reports import CSVSection
from zckpt.runtime.monitors.events import Event


class CSVMonitor:
    """Writes events into files of a directory, which is made if need be.

    Files of an earlier run are continued, without a second header.

    Attributes:
        log_dir: the directory.
    """

    def __init__(self, section: CSVSection) -> None:
        self.log_dir = os.path.join(section.output_path, section.job_name)
        os.makedirs(self.log_dir, exist_ok=True)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Adds a line for each event; the files are closed in between."""
        for name, value, samples in event_list:
            path = os.path.join(self.log_dir, name.replace("/", "_").replace(" ", "_") + ".csv")
            with open(path, "a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if file.tell() == 0:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([samples, value])
