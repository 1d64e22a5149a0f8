"""How a public function reports its progress: to a function of the caller's, or with a bar.

For every public function that takes `progress`. tqdm is imported when a bar is shown.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[..., object] | bool | None
"""None: a bar where a person watches; False: nothing; True: a bar; a function: called with the bytes done so far, and
with the total number of bytes (None where it is not known) if it takes a second argument."""

_BETWEEN_LINES_S = 0.5


class JobWatch:
    """A job's progress: the job calls it with the bytes done so far, and it shows them with the total, as far as that
    is known.

    Args:
        total: bytes of the whole job; None while that is not known.
        show: called with the bytes done, the total, and what is being worked on (or nothing).
    """

    def __init__(self, total: int | None, show: Callable[[int, int | None, str], object]) -> None:
        self._total, self._show, self._item = total, show, ""

    def __call__(self, done: int) -> None:
        """Shows that `done` bytes are done; a total that is less was a guess, and is raised."""
        if self._total is not None:
            self._total = max(self._total, done)
        self._show(done, self._total, self._item)

    def expect(self, total: int) -> None:
        """Says how many bytes the whole job has, as far as is known now."""
        self._total = total

    def at(self, item: str) -> None:
        """Says what is being worked on, such as a shard."""
        self._item = item


@contextmanager
def watch_progress(progress: Progress, total_bytes: int | None, label: str) -> Iterator[JobWatch | None]:
    """Gives the `JobWatch` of a job; None where nobody watches.

    Args:
        progress: what the caller passed.
        total_bytes: of the whole job, where it is known.
        label: of the bar.
    """
    if isinstance(progress, JobWatch):
        if total_bytes is not None:
            progress.expect(total_bytes)
        yield progress
    elif callable(progress):
        function, wants_total = progress, takes_total(progress)
        yield JobWatch(total_bytes, lambda done, total, _: function(done, *([total] if wants_total else [])))
    elif progress or (progress is None and (sys.stderr.isatty() or _in_notebook())):
        with bar(total_bytes, label) as watch:
            yield watch
    else:
        yield None


@contextmanager
def bar(total_bytes: int | None, label: str) -> Iterator[JobWatch]:
    """Shows a bar on stderr, or in a notebook's cell, that disappears at the end; with percentage, rate and time left."""
    from tqdm import tqdm

    if _in_notebook():
        try:
            import ipywidgets  # noqa: F401  # without it the notebook's bar is an error
            from tqdm.notebook import tqdm
        except ImportError:
            pass
    with tqdm(total=total_bytes, desc=label, unit="B", unit_scale=True, leave=False, file=sys.stderr) as shown:

        def show(done: int, total: int | None, item: str) -> None:
            shown.total = total
            if item:
                shown.set_postfix_str(item, refresh=False)
            shown.update(done - shown.n)

        yield JobWatch(total_bytes, show)


@contextmanager
def lines(total_bytes: int | None, label: str, clock: Callable[[], float] = time.monotonic) -> Iterator[JobWatch]:
    """Writes one JSON object a line to stderr, for programs: at the beginning, then at most two a second, and at the
    end.
    """
    last: tuple[int, int | None, str] = (0, total_bytes, "")
    began = next_at = clock()

    def show(done: int, total: int | None, item: str) -> None:
        nonlocal last, next_at
        last = done, total, item
        if clock() >= next_at:
            write()

    def write(*, ended: bool = False) -> None:
        nonlocal next_at
        done, total, item = last
        seconds = clock() - began
        rate = done / seconds if seconds > 0 and done else None
        left = None if rate is None or total is None else max(0, total - done) / rate
        facts = {
            "progress": label,
            "done_bytes": done,
            "total_bytes": total,
            "item": item or None,
            "seconds": round(seconds, 3),
            "bytes_per_second": rate and round(rate),
            "seconds_left": left if left is None else round(left, 1),
            "ended": ended,
        }
        sys.stderr.write(json.dumps(facts) + "\n")
        sys.stderr.flush()
        next_at = clock() + _BETWEEN_LINES_S

    write()
    yield JobWatch(total_bytes, show)
    write(ended=True)


def takes_total(function: Callable[..., object]) -> bool:
    """Whether a progress function takes the total as well: a second positional parameter without a default, or named `total`.

    `lambda done, bar=bar: bar.update(done)` has a second parameter for a purpose of its own, and gets one argument.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function of C without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return True
    return any(p.default is inspect.Parameter.empty or p.name == "total" for p in positional[1:2])


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: stderr is not a terminal there, and yet somebody watches."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
