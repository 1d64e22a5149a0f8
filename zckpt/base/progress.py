"""How a public function reports its progress: to a function of the caller's, or with a bar.

For every public function that takes `progress`. tqdm is imported when a bar is shown.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[..., object] | bool | None
"""None: a bar where a person watches; False: nothing; True: a bar; a function: called with the bytes done so far, and
with the total number of bytes (None where it is not known) if it takes a second argument."""


@contextmanager
def reported(progress: Progress, total_bytes: int | None, label: str) -> Iterator[Callable[[int], None] | None]:
    """What a job calls with the bytes done so far; None where nobody wants to know.

    Args:
        progress: what the caller passed.
        total_bytes: of the whole job, where it is known.
        label: of the bar.
    """
    if callable(progress):
        function = progress
        if takes_total(function):
            yield lambda done: _ignore(function(done, total_bytes))
        else:
            yield lambda done: _ignore(function(done))
    elif progress or (progress is None and (sys.stderr.isatty() or _in_notebook())):
        with bar(total_bytes, label) as advance:
            yield advance
    else:
        yield None


@contextmanager
def bar(total_bytes: int | None, label: str) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, or in a notebook's cell, that disappears at the end; moved by calls with the bytes done so far."""
    from tqdm import tqdm

    if _in_notebook():
        try:
            import ipywidgets  # noqa: F401  # without it the notebook's bar is an error
            from tqdm.notebook import tqdm
        except ImportError:
            pass
    with tqdm(total=total_bytes, desc=label, unit="B", unit_scale=True, leave=False, file=sys.stderr) as shown:
        yield lambda done: _ignore(shown.update(done - shown.n))


def takes_total(function: Callable[..., object]) -> bool:
    """Whether a progress function wants the total too: a second positional parameter without a default, or named `total`.

    `lambda done, bar=bar: bar.update(done)` has a second parameter for a purpose of its own, and gets one argument.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function of C without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return True
    return len(positional) > 1 and (positional[1].default is inspect.Parameter.empty or positional[1].name == "total")


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, where stderr is no terminal and yet somebody watches."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def _ignore(value: object) -> None:
    """So that a function of the caller's may return anything."""
