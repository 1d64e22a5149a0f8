"""How forks of a process end that has imported much: as an interpreter does, but they do not free every object one by one.

That would copy all the memory that a fork shares with its parent: with torch up to a second for each fork, more than most
of what tests start do themselves. So would a collection of garbage that looks at what the parent has imported.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import NoReturn

WHOLE = "ZCKPT_WHOLE_END"
"""In the environment of what ends with the interpreter's own end all the same: tests of just that."""


def share_imports() -> None:
    """What is imported by now is no garbage to any fork, and what torch has registered of operators stays so to the end.

    To take all that back cost each fork that had imported torch 40 ms.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = finalizer.peek()
        if alive is not None and alive[1].__module__ == "torch.library":
            finalizer.atexit = False
    gc.collect()
    gc.freeze()


def run_to_the_end(work: Callable[[], object]) -> NoReturn:
    """Does this and ends the process: threads are waited for and what was left to the end of the interpreter is done."""
    code = 0
    try:
        work()
    except SystemExit as stop:
        if WHOLE in os.environ:
            raise
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
        code = 0 if stop.code is None else stop.code if isinstance(stop.code, int) else 1
    except BaseException as error:
        if WHOLE in os.environ:
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if WHOLE in os.environ:
        sys.exit()
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # as the interpreter tells it
            code = code if code or stream is sys.stderr else 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)
