"""Which descriptors and threads this process has."""

from __future__ import annotations

import os
from pathlib import Path

FILES, THREADS = Path("/proc/self/fd"), Path("/proc/self/task")


def open_below(directory: Path) -> list[str]:
    """What is open in a directory, files without a name as well; others, which the collector may close at any time, are not."""
    found = []
    for fd in os.listdir(FILES):
        try:
            found.append(os.readlink(FILES / fd))
        except FileNotFoundError:  # that of this listing
            continue
    return sorted(path for path in found if Path(path).is_relative_to(directory.resolve()))


def threads() -> set[str]:
    """The numbers of the threads, which other tests' threads may leave at any time."""
    return set(os.listdir(THREADS))
