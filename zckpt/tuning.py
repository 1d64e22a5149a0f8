"""How hard to work: threads, buffers, the page cache, and a limit to it all.

For everything that reads or writes whole checkpoints. `benchmarks/tuning.py` measures what the defaults are compared with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TypedDict


class Pace(TypedDict):
    """How hard to work, as every engine takes it; None for the default."""

    threads: int | None
    keep_cache: bool | None
    bytes_per_s: int | None


DEFAULT_PACE: Pace = {"threads": None, "keep_cache": None, "bytes_per_s": None}

THREADS = min(4, max(2, os.cpu_count() or 1))
"""More bring nothing on a local disk: two keep it busy, four do where the disk answers slowly."""

WINDOW_BYTES = 4 << 20
"""Bytes of an output file that are gathered and written at once, per thread."""

_BLOCK = 4096


def window_bytes(wanted: int | None) -> int:
    """A buffer's size: what was wanted, as direct I/O needs it."""
    return WINDOW_BYTES if wanted is None else max(_BLOCK, wanted // _BLOCK * _BLOCK)


def gives_back(keep_cache: bool | None, nbytes: int) -> bool:
    """Whether the page cache is to forget what was read or written, once it is done with.

    Args:
        keep_cache: what was asked for; None for the default: kept, unless the job is larger than memory. It would then push
            out everything else and keep nothing of use.
        nbytes: bytes that will be read and written.
    """
    return nbytes > memory_bytes() if keep_cache is None else not keep_cache


@lru_cache(maxsize=1)
def memory_bytes() -> int:
    """Memory that this process may fill: the machine's, or the container's share of it."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, "rb") as file:
                text = file.read(64).strip()
        except OSError:
            continue
        if text.isdigit():
            found.append(int(text))
    return min(found)


def pace(bytes_per_s: int | None) -> Callable[[int], None]:
    """What the Python engines call with bytes that they read or wrote: it waits where that was faster than allowed."""
    began, spent = time.monotonic(), 0

    def spend(nbytes: int) -> None:
        nonlocal spent
        spent += nbytes
        if bytes_per_s:
            time.sleep(max(0.0, began + spent / bytes_per_s - time.monotonic()))

    return spend
