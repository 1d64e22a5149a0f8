"""The command `zckpt`, also as `python -m zckpt`."""

import contextlib
import os
import sys
from collections.abc import Sequence

from zckpt.base import collector

_CHANGE_NO_READS = frozenset(("--deep", "--quiet", "--json"))
"""Options of `verify --deep` with which it reads the same bytes in the same way."""

_M_MMAP_THRESHOLD = -3
"""From malloc.h: the size from which a block is a mapping of its own."""


def main() -> None:
    """Runs the command line in a process of its own."""
    collector.switch_off()
    fill_standard_places()
    if any("://" in word for word in sys.argv[1:]):
        give_back_blocks()
    begin_early(sys.argv[1:])
    from zckpt.cli import main as run

    run()


def fill_standard_places() -> None:
    """Opens what the shell has closed of stdin, stdout and stderr: otherwise the next file gets its number, and what is printed.

    What is printed to a closed stdout still fails.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)


def give_back_blocks() -> None:
    """Has the C library give every freed block of a MiB or more back to the system; without glibc, does nothing.

    By itself glibc keeps such blocks once the first has been freed. The pieces of files that come from and go to addresses are
    such blocks, in many threads: kept, they take 70 MiB more.
    """
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def begin_early(arguments: Sequence[str]) -> None:
    """Begins to read for `verify --deep CKPT` before the command line is imported, if it says no more than this."""
    if "--deep" not in arguments:
        return
    named = [one for one in arguments if one not in _CHANGE_NO_READS]
    if len(named) == 2 and named[0] == "verify":
        from zckpt.engine.early import begin

        begin(named[1])


if __name__ == "__main__":
    main()
