"""How hard to work: threads, buffers, the page cache, and a limit to it all.

For everything that reads or writes whole checkpoints. `benchmarks/tuning.py` measures what the defaults are compared with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TypedDict

from zckpt.base.errors import ResourceError, UsageError


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

MOST_THREADS = 256

MOST_WINDOW_BYTES = 1 << 30

_BLOCK = 4096


def thread_count(wanted: int | None) -> int:
    """How many threads: what was wanted, or the default.

    Raises:
        UsageError: fewer than one, or more than `MOST_THREADS`.
    """
    if wanted is None:
        return THREADS
    if not 1 <= wanted <= MOST_THREADS:
        raise UsageError("an impossible number of threads", found=f"{wanted:,}", expected=f"1 to {MOST_THREADS}")
    return wanted


def window_bytes(wanted: int | None) -> int:
    """A buffer's size in bytes: what was wanted, as direct I/O needs it, or the default.

    Raises:
        UsageError: nothing, or more than `MOST_WINDOW_BYTES`.
    """
    if wanted is None:
        return WINDOW_BYTES
    if not 1 <= wanted <= MOST_WINDOW_BYTES:
        raise UsageError(
            "an impossible size of a buffer", found=f"{wanted:,} bytes", expected=f"1 to {MOST_WINDOW_BYTES:,}",
            remedy="Each thread has one. More than 64 MiB brings nothing.",
        )  # fmt: skip
    return max(_BLOCK, wanted // _BLOCK * _BLOCK)


def engine_error(kind: str, text: str) -> ResourceError:
    """The error for an engine that could not go on; `kind` is "memory", "threads", or what nobody foresaw."""
    if kind == "memory":
        return ResourceError(
            "too little memory", found="the buffers of the threads that move data do not fit",
            remedy="Nothing was published. Use a smaller --buffer, or fewer --threads.",
        )  # fmt: skip
    if kind == "threads":
        return ResourceError(
            "no thread could be started", found=text,
            remedy="Nothing was published. Raise the limits of this user or container (ulimit -u, ulimit -v).",
        )  # fmt: skip
    return ResourceError("an error in the engine", found=text, remedy="Nothing was published. Please report it.")


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
