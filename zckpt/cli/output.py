"""The one sink: results to stdout, everything else to stderr, progress only on a terminal."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from zckpt.base.errors import OutputError
from zckpt.base.progress import bar
from zckpt.team.together import speaks


class Console:
    """Where a command's words go.

    Args:
        as_json: the result is one JSON object instead of lines.
        quiet: no notes, no progress, and no lines; JSON that was asked for is still printed.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json and speaks()
        self.quiet = quiet or not speaks()

    @property
    def width(self) -> int:
        """Columns for tables and sentences of a result: the terminal's, or 80 where there is no terminal."""
        return shutil.get_terminal_size().columns

    def result(self, facts: Callable[[], dict[str, object]], lines: Callable[[], Iterable[str]]) -> None:
        """Prints the result, in the form that was asked for; only that form is made."""
        if self.as_json:
            sys.stdout.write(json.dumps(facts()) + "\n")
        elif not self.quiet:
            sys.stdout.writelines(f"{line}\n" for line in lines())
        sys.stdout.flush()

    def notes(self, notes: Iterable[str]) -> None:
        """Sentences a person should see."""
        if not self.quiet:
            sys.stderr.writelines(f"note: {note}\n" for note in notes)

    @contextmanager
    def progress(self, total: int | None, label: str) -> Iterator[Callable[[int], None] | None]:
        """A bar on stderr, moved by calls with the bytes done so far; None where nobody watches.

        `total` is None where nobody knows yet how much there is to do.
        """
        if self.quiet or not sys.stderr.isatty():
            yield None
            return
        with bar(total, label) as advance:
            yield advance

    @contextmanager
    def steps(self, total: int) -> Iterator[Callable[[int, dict[str, str]], None]]:
        """A bar on stderr of steps; called with the steps done so far and facts to show. Nothing where nobody watches."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda done, facts: None
            return
        from tqdm import tqdm

        with tqdm(total=total, desc="training", unit="step", leave=True, file=sys.stderr, dynamic_ncols=True) as bar:

            def show(done: int, facts: dict[str, str]) -> None:
                bar.set_postfix(facts, refresh=False)
                _advance(bar, done)

            yield show


def _advance(bar: object, done: int) -> None:
    bar.update(done - bar.n)  # type: ignore[attr-defined]


def lack_of_space(out: str, needed_bytes: int) -> list[str]:
    """What a dry run says of a disk that is too full; nothing otherwise."""
    from zckpt.output.checks import check_space
    from zckpt.storage.paths import is_remote

    if not is_remote(out):
        try:
            check_space(out, needed_bytes)
        except OutputError as error:
            return [str(error)]
    return []


def already_done(out: str) -> str:
    """What a command says that finds its own work done."""
    return f"{out}: already done by this very command; every file matches its checksum, and nothing was written"


def peak_rss_bytes() -> int:
    """The most memory this process has held, in bytes."""
    try:
        with open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith(b"VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
