"""Python's garbage collector, which commands do without: a plan has millions of objects, and none of them is in a
cycle.

For the command line, and for loads of the trainer. What runs for weeks, such as training, has it switched on again.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


def switch_off() -> None:
    """Switches cycle collection off, also at the end of the process: each collection would take a tenth of the time."""
    gc.disable()
    atexit.register(gc.freeze)


def switch_on() -> None:
    """Switches cycle collection on again."""
    atexit.unregister(gc.freeze)
    gc.enable()


@contextmanager
def pause_collections() -> Iterator[None]:
    """Switches cycle collection off inside the context, if it is on: one that begins there looks at every object of a process
    that trains, for a few tenths of a second.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
