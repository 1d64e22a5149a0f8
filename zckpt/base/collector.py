"""Python's garbage collector, which commands do without: a plan has millions of objects, and none of them is in a
cycle.

For the command line. What runs for weeks, such as training, has it switched on again.
"""

from __future__ import annotations

import atexit
import gc


def switch_off() -> None:
    """Switches cycle collection off, also at the end of the process: each collection would take a tenth of the time."""
    gc.disable()
    atexit.register(gc.freeze)


def switch_on() -> None:
    """Switches cycle collection on again."""
    atexit.unregister(gc.freeze)
    gc.enable()
