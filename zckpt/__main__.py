"""The command `zckpt`, also as `python -m zckpt`."""

import os
import sys
from collections.abc import Sequence

from zckpt.base import collector

_CHANGE_NO_READS = frozenset(("--deep", "--quiet", "--json"))
"""Options of `verify --deep` with which it reads the same bytes in the same way."""


def main() -> None:
    """Runs the command line in a process of its own."""
    collector.switch_off()
    fill_standard_places()
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
