"""How hard the engines work: threads, buffers, the page cache, and a limit on bytes per second.

For everything that reads or writes whole checkpoints. `benchmarks/tuning.py` compares the defaults with other values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TypedDict

from zckpt.base.errors import ResourceError, UsageError
from zckpt.base.words import count


class Pace(TypedDict):
    """How hard an engine works; None for each default.

    Attributes:
        threads: that move data.
        keep_cache: whether the page cache keeps what was read and written; by default unless the job is larger than memory.
        bytes_per_s: the most that are read and written, together; by default as many as possible.
    """

    threads: int | None
    keep_cache: bool | None
    bytes_per_s: int | None


DEFAULT_PACE: Pace = {"threads": None, "keep_cache": None, "bytes_per_s": None}

THREADS = min(4, max(2, os.cpu_count() or 1))
"""The default number of threads. Two keep a local disk busy, four a slow one; more are not faster."""

DISTANT_THREADS = 16
"""The default number of threads where files lie on a mount of another machine, such as NFS, which limits the rate of
one request.
"""

WINDOW_BYTES = 4 << 20
"""The default size of the buffer with which a thread gathers and writes an output file, in bytes."""

MOST_THREADS = 256

MOST_WINDOW_BYTES = 1 << 30

_BLOCK = 4096


def thread_count(wanted: int | None) -> int:
    """The number of threads: `wanted`, or the default for None. Raises UsageError if it is less than 1, or
    more than `MOST_THREADS`.
    """
    if wanted is None:
        return THREADS
    if not 1 <= wanted <= MOST_THREADS:
        raise UsageError(
            f"{count(wanted, 'thread')} cannot be started", expected=f"1 to {MOST_THREADS}", remedy="Change --threads."
        )
    return wanted


def window_bytes(wanted: int | None) -> int:
    """The size of a thread's buffer in bytes: `wanted`, rounded down to what direct I/O needs, or the default for None.
    Raises UsageError if it is less than 1, or more than `MOST_WINDOW_BYTES`.
    """
    if wanted is None:
        return WINDOW_BYTES
    if not 1 <= wanted <= MOST_WINDOW_BYTES:
        raise UsageError(
            f"a buffer cannot have {count(wanted, 'byte')}", expected=f"1 to {MOST_WINDOW_BYTES:,} bytes",
            remedy="Change --buffer. Each thread has a buffer; more than 64 MiB is not faster.",
        )  # fmt: skip
    return max(_BLOCK, wanted // _BLOCK * _BLOCK)


def engine_error(kind: str, text: str) -> ResourceError:
    """The error for an engine that failed; `kind` is "memory", "threads", or anything else for a failure of zckpt itself."""
    if kind == "memory":
        return ResourceError(
            "there is too little memory", found="no room for the buffers of the threads that move data",
            remedy="Use a smaller --buffer, or fewer --threads. The output was not changed.",
        )  # fmt: skip
    if kind == "threads":
        return ResourceError(
            "no thread could be started", found=text,
            remedy="Raise the limits of this user or container (ulimit -u, ulimit -v). The output was not changed.",
        )  # fmt: skip
    return ResourceError("the engine failed", found=text, remedy="Report this message. The output was not changed.")


def gives_back(keep_cache: bool | None, nbytes: int) -> bool:
    """Whether the page cache should drop data as soon as it is no longer needed.

    Args:
        keep_cache: as in `Pace`. A job larger than memory would push everything else out of the cache.
        nbytes: bytes that will be read and written.
    """
    return nbytes > memory_bytes() if keep_cache is None else not keep_cache


@lru_cache(maxsize=1)
def memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or the container's limit."""
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
    """Returns a function that the Python engines call with each number of bytes read or written: it sleeps to keep the
    rate.
    """
    began, spent = time.monotonic(), 0

    def spend(nbytes: int) -> None:
        nonlocal spent
        spent += nbytes
        if bytes_per_s:
            time.sleep(max(0.0, began + spent / bytes_per_s - time.monotonic()))

    return spend
