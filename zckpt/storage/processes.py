"""Identifies a process across machines, containers and restarts, and finds out whether it has ended.

For work directories on file systems without locks. A process number is not enough: containers have process numbers of their
own, machines may share a host name, and the system uses numbers again.
"""

from __future__ import annotations

import os

from zckpt.base.dataclass import dataclass
from zckpt.base.patterns import compile_late


@dataclass(frozen=True, slots=True)
class Process:
    """One process.

    Attributes:
        boot: identifies the last start of its machine; "0" if not known.
        space: the namespace of its number; "0" if not known.
        number: of the process.
        started: start time in clock ticks since the machine was started; "0" if not known.
    """

    boot: str
    space: str
    number: int
    started: str

    def __str__(self) -> str:
        return f"{self.boot}-{self.space}-{self.number}-{self.started}"

    def is_dead(self) -> bool:
        """Whether the process has ended; False also for one on another machine or in another container, for which this
        is not known.
        """
        if (self.boot, self.space) != (_boot(), _space()) or "0" in (self.boot, self.space):
            return False
        return _start_time(self.number) not in (self.started, "0")


NAME = compile_late(r"([0-9a-f]+)-(\d+)-(\d+)-(\d+)")
"""A process as written in the name of a directory."""


def this_process() -> Process:
    """Identifies the calling process."""
    return Process(_boot(), _space(), os.getpid(), _start_time(os.getpid()) or "0")


def parse(text: str) -> Process | None:
    """The inverse of `str(process)`; None for any other text."""
    found = NAME.fullmatch(text)
    return Process(found[1], found[2], int(found[3]), found[4]) if found else None


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(8)
    except OSError:
        return "0"


def _space() -> str:
    try:
        return "".join(c for c in os.readlink("/proc/self/ns/pid") if c.isdecimal()) or "0"
    except OSError:
        return "0"


def _start_time(number: int) -> str:
    """Start time of a process; "" if there is no process of this number, "0" if the time cannot be read."""
    try:
        with open(f"/proc/{number}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "" if os.path.exists("/proc/self/stat") else "0"
    except OSError:
        return "0"
