"""Numbers, sizes, lists and rows as a person reads them, for messages of every room. Programs get exact numbers from `--json`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

PAGE = 100
"""Characters in a line of what is printed where no terminal says its width."""

_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: `1 tensor`, `1,024 tensors`.

    Args:
        number: how many; 0 takes the plural.
        noun: for one; a verb can follow it ("file is").
        plural: for any other number ("files are"); None for `noun` with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def short_count(number: int) -> str:
    """A number as people say it: `232`, `124 M`, `6.74 B`."""
    for unit, power in (("T", 12), ("B", 9), ("M", 6), ("k", 3)):
        if number >= 10**power:
            return f"{float(f'{number / 10**power:.3g}'):g} {unit}"
    return str(number)


def size(nbytes: float) -> str:
    """Bytes in decimal units, with at most three significant digits: `1 byte`, `42.5 kB`, `498 MB`, `1.2 GB`."""
    if nbytes < 1000:
        return count(round(nbytes), "byte")
    power = 0
    value = nbytes / 1000
    while value >= 999.5 and power < len(_UNITS) - 1:
        value /= 1000
        power += 1
    return f"{float(f'{value:.3g}'):,g} {_UNITS[power]}"


def duration(seconds: float) -> str:
    """A time for a person: `0.06 s`, `12.3 s`, `5 min 20 s`."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    return f"{seconds // 60:,.0f} min {seconds % 60:.0f} s"


def rate(nbytes: int, seconds: float) -> str:
    """`, 1.2 GB/s` for a job that was long enough for a rate to mean something; otherwise nothing."""
    return f", {size(nbytes / seconds)}/s" if seconds >= 1 and nbytes >= 10**8 else ""


def join_words(words: Sequence[str], last: str = "and") -> str:
    """Words as a sentence lists them: `a, b and c`."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def examples(names: Iterable[object], limit: int = 3) -> str:
    """At most `limit` quoted names, then how many more there are: `'a', 'b', 'c' and 41 more`."""
    quoted = [repr(str(name)) for name in names]
    text = ", ".join(quoted[:limit])
    more = len(quoted) - limit
    return f"{text} and {more:,} more" if more > 0 else text


def ranks(numbers: Sequence[int]) -> str:
    """Ranks by their numbers: `rank 3`, `ranks 0-5, 7`."""
    return f"rank{'' if len(numbers) == 1 else 's'} {ranges(numbers)}"


def ranges(numbers: Sequence[int]) -> str:
    """Whole numbers as ranges: `0-5, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def wrap_text(text: str, width: int | None, indent: str = "") -> list[str]:
    """A text in lines of at most `width` characters; all but the first begin with `indent`.

    Words are not cut: one that is longer than a line keeps a line of its own. With None for `width` there is one line.
    """
    if width is None or len(text) <= width:
        return [text]
    from textwrap import TextWrapper

    wrapper = TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def escape_controls(text: str) -> str:
    """A text without control codes, which a terminal would obey: those in a file's or tensor's name are spelled out."""
    if text.isprintable():
        return text
    return "".join(ch if ch == "\n" or ch.isprintable() else repr(ch)[1:-1] for ch in text)


def row(label: str, text: str, width: int | None = None) -> list[str]:
    """A fact under a heading: its label, and beside it the text, wrapped in a column of its own."""
    return wrap_text(f"  {label:<11} {text}", width, " " * 14)


def shorten_text(text: str, limit: int = 120) -> str:
    """The end of a text that has more than `limit` characters, such as a path; any other text as it is."""
    return text if len(text) <= limit else "..." + text[3 - limit :]


def as_html(lines: Iterable[str]) -> str:
    """Lines as a notebook shows them: in columns, and with nothing in them taken for HTML."""
    from html import escape

    return f"<pre>{escape(chr(10).join(lines))}</pre>"


class Printed:
    """A result that `print` and a notebook show as the command prints it: by its `lines`."""

    __slots__ = ()

    def lines(self, *, width: int | None = None) -> Iterable[str]:
        """The lines for a person, of at most `width` characters except for longer words."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(self.lines(width=PAGE))

    def _repr_html_(self) -> str:
        """The same lines, for a notebook."""
        return as_html(self.lines())


def matches(name: str, globs: Sequence[str]) -> bool:
    """Whether a name matches one of the globs."""
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)
