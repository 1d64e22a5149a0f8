"""Where a command prints: results to stdout, everything else to stderr, progress only on a terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, TextIO

import typer

from zckpt.base.progress import JobWatch, bar, lines
from zckpt.base.words import escape_controls, wrap_text
from zckpt.cli.streams import UnprintedError
from zckpt.team.together import speaks

if TYPE_CHECKING:
    from zckpt.pictures.terminal import Line


_PIECE, _ROWS = 1 << 20, 1 << 10
"""Characters, and objects of a list, that are printed at a time: a stream copies them, and a million tensors take 100 million."""


def _pieces(facts: dict[str, object]) -> Iterator[str]:
    """The JSON of an object; of an iterator among its values, it makes a list."""
    yield "{"
    for number, (key, value) in enumerate(facts.items()):
        yield f"{', ' if number else ''}{json.dumps(key)}: "
        if isinstance(value, Iterator):
            yield "["
            for n, batch in enumerate(iter(lambda rows=value: list(islice(rows, _ROWS)), [])):  # type: ignore[misc]
                yield f"{', ' if n else ''}{json.dumps(batch)[1:-1]}"
            yield "]"
        else:
            text = json.dumps(value)
            yield from (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
    yield "}"


class Console:
    """Where a command prints. Of several processes at one job, only the first prints.

    Args:
        as_json: print the result as one JSON object instead of lines.
        quiet: print no notes, progress or lines; JSON is printed all the same.
        progress_lines: print progress as JSON lines, whether or not stderr is a terminal.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, progress_lines: bool = False) -> None:
        self.as_json = as_json and speaks()
        self.quiet = quiet or not speaks()
        self._progress_lines = progress_lines and speaks()
        self._said: set[str] = set()

    @property
    def width(self) -> int:
        """Columns for tables and sentences of a result: the terminal's, or 80 if there is no terminal."""
        return shutil.get_terminal_size().columns

    def result(
        self, facts: Callable[[], dict[str, object]], lines: Callable[[], Iterable[str]], *, done: str = ""
    ) -> None:
        """Prints the result as JSON or as lines; only the one that is printed is computed.

        Args:
            facts: the JSON object.
            lines: the lines.
            done: of a command that has changed something: what is true now even if nobody can read the result, as a sentence.

        Raises:
            UnprintedError: stdout is full or closed.
        """
        try:
            if self.as_json:
                sys.stdout.writelines(_pieces(facts()))
                sys.stdout.write("\n")
            elif not self.quiet:
                sys.stdout.writelines(f"{escape_controls(line)}\n" for line in lines())
            sys.stdout.flush()
        except UnprintedError as error:
            raise error.after(done) from None

    def picture(self, lines: Callable[[int], Sequence[Line]]) -> None:
        """Prints lines in colours where stdout is a terminal that shows them, otherwise nothing; called with its columns."""
        if self.as_json or self.quiet or not sys.stdout.isatty():
            return
        from zckpt.pictures.terminal import can_draw, draw

        if can_draw(sys.stdout, self.width):
            draw(lines(self.width))

    def notes(self, notes: Iterable[str]) -> None:
        """Prints sentences for a person, each once; above the bar, if there is one."""
        if not self.quiet:
            for note in notes:
                if note in self._said:
                    continue
                self._said.add(note)
                first, *others = wrap_text(escape_controls(f"note: {note}"), stderr_width(), " " * 6)
                lines = [label("note:", "yellow", sys.stderr) + first.removeprefix("note:"), *others]
                if (tqdm := sys.modules.get("tqdm")) is not None:  # a bar may be there
                    tqdm.tqdm.write("\n".join(lines), file=sys.stderr)
                else:
                    sys.stderr.writelines(f"{line}\n" for line in lines)

    def line(self, text: str) -> None:
        """Prints a line on stderr, above the bar if there is one; none with --json, which is for programs."""
        if self.quiet or self.as_json:
            return
        text = escape_controls(text)
        if (tqdm := sys.modules.get("tqdm")) is not None and sys.stderr.isatty():
            tqdm.tqdm.write(text, file=sys.stderr)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    @contextmanager
    def progress(self, total: int | None, label: str) -> Iterator[JobWatch | None]:
        """A bar on stderr, or lines for programs, moved by calls with the bytes done so far; None if nobody watches.

        `total` is the bytes to do, None if that is not known yet.
        """
        if not self._progress_lines and (self.quiet or not sys.stderr.isatty()):
            yield None
            return
        with lines(total, label) if self._progress_lines else bar(total, label) as watch:
            yield watch

    @contextmanager
    def steps(self, total: int) -> Iterator[Callable[[int, dict[str, str]], None]]:
        """A bar on stderr of steps, called with the steps done so far and facts to show; it does nothing without a terminal."""
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


def stderr_width() -> int | None:
    """The columns of stderr's terminal; None if it is not a terminal, so that logs have one line for each sentence."""
    return shutil.get_terminal_size().columns if sys.stderr.isatty() else None


def label(text: str, colour: str, stream: TextIO) -> str:
    """A word in a colour, on a terminal and unless NO_COLOR is set."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return typer.style(text, fg=colour, bold=True)


def peak_rss_bytes() -> int:
    """The most memory that this process has had, in bytes."""
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
