"""Saves that are made while the script trains: no error is lost, and the process waits for them when it ends.

For `saving`.
[Note: the end of a process] When its script has ended, well or not, Python first calls what `threading._register_atexit` was
given, the last first, and then refuses new work to every pool of threads; writing needs such pools. So `_wait` is registered
there, after `concurrent.futures` has registered its own. What `atexit` calls would come too late.
Source: CPython 3.10 to 3.14, Lib/threading.py `_shutdown`, Lib/concurrent/futures/thread.py, Python/pylifecycle.c
`Py_FinalizeEx` (an error of the last flush of standard output makes the exit status 120).
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # registers first; see [Note: the end of a process]
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("zckpt.runtime")
_under_way: set[Saving] = set()


class Saving(threading.Thread):
    """A save in the background. It begins when it is made. `what` is saved, for messages; `work` saves it; `keep` must live as
    long: the store that ranks meet in may have its server in this process.
    """

    def __init__(self, what: str, work: Callable[[], None], keep: object) -> None:
        super().__init__(name=f"zckpt {what}")
        self.what = what
        self._work: Callable[[], None] | None = work
        self._keep = keep
        self._error: Exception | None = None
        _under_way.add(self)
        self.start()

    def run(self) -> None:
        """Saves, and logs at once that it failed."""
        try:
            assert self._work is not None
            self._work()
            _under_way.discard(self)
        except Exception as error:
            self._error = error
            _log.error("The %s failed: %s", self.what, error)
        finally:
            self._work = self._keep = None  # the copy in memory is freed

    def result(self) -> None:
        """Waits until the save is done. Raises Exception if that it failed with."""
        self.join()
        _under_way.discard(self)
        if self._error is not None:
            raise self._error

    def end(self) -> bool:
        """Waits for the save at the end of the process; returns whether it succeeded."""
        if self.is_alive():
            _log.info("The process waits for the %s, and then ends.", self.what)
        try:
            self.result()
        except Exception as error:
            if sys.stderr is not None:
                sys.stderr.write(f"zckpt: the {self.what} failed: {error}\n")
            return False
        return True


def _wait() -> None:
    """Waits for saves that the script did not wait for; if one failed, the process gets another exit status than 0."""
    ended_well = [saving.end() for saving in tuple(_under_way)]
    if not all(ended_well) and sys.stdout is not None:
        _fail_last_flush(sys.stdout)


def _fail_last_flush(stream: Any) -> None:
    """Makes the last flush of standard output fail; see [Note: the end of a process]."""
    flush = stream.flush

    def fail_at_end() -> None:
        flush()
        if sys.is_finalizing():
            raise RuntimeError("a save has failed")

    stream.flush = fail_at_end


threading._register_atexit(_wait)  # type: ignore[attr-defined]
