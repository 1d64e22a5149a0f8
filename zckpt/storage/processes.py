"""Which process: told apart from one of another machine, another container or another time that has the same number.

For directories that several runs may leave beside each other, where the file system has no locks. A process number alone
says nothing: containers have process numbers of their own, machines may share a host name, and numbers are given again.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Process:
    """One process.

    Attributes:
        boot: of its machine since it was last started; "0" where that is not known.
        space: the namespace of its number; "0" where that is not known.
        number: of the process.
        started: when, in clock ticks since the machine was started; "0" where that is not known.
    """

    boot: str
    space: str
    number: int
    started: str

    def __str__(self) -> str:
        return f"{self.boot}-{self.space}-{self.number}-{self.started}"

    def is_dead(self) -> bool:
        """Whether it has certainly ended; False for processes that cannot be seen from here."""
        if (self.boot, self.space) != (_boot(), _space()) or "0" in (self.boot, self.space):
            return False
        return _started(self.number) not in (self.started, "0")


NAME = re.compile(r"([0-9a-f]+)-(\d+)-(\d+)-(\d+)")
"""How a process is written in the name of a directory."""


def this_process() -> Process:
    """The one that calls."""
    return Process(_boot(), _space(), os.getpid(), _started(os.getpid()) or "0")


def parse(text: str) -> Process | None:
    """The process that `str` wrote; None for any other text."""
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


def _started(number: int) -> str:
    """When a process was started; "" where there is none of this number, "0" where that cannot be read."""
    try:
        with open(f"/proc/{number}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "" if os.path.exists("/proc/self/stat") else "0"
    except OSError:
        return "0"
