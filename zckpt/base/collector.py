"""Python's collector of garbage, which commands do without: plans are millions of objects in no cycle.

For the command line. What runs for weeks, such as training, has it switched on again.
"""

from __future__ import annotations

import atexit
import gc


def switch_off() -> None:
    """Looks for no cycles, neither while a command runs nor at the end of the process: each would take a tenth of the time."""
    gc.disable()
    atexit.register(gc.freeze)


def switch_on() -> None:
    """Takes `switch_off` back."""
    atexit.unregister(gc.freeze)
    gc.enable()
