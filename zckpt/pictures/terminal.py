"""The same in small: bars in a terminal, with colours where rich is installed. For `zckpt inspect` and `zckpt map`.

rich is imported when something is drawn, and only then: it takes longer than all the rest of `inspect`.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TextIO

from zckpt.base.words import count, size
from zckpt.pictures.pieces import OTHER
from zckpt.pictures.rows import STATES, FileGrid, FileRow, MappedFile, RowGroup

Line = list[tuple[str, str]]
"""A line: texts with their styles, as rich names these."""

LEAST_WIDTH = 72
"""The least columns of a terminal for a picture."""
_MOST_ROWS = 16
_MOST_LABEL = 34
_EIGHTHS = " ▏▎▍▌▋▊▉"
_FULL, _LACKING = "█", "░"
_STYLES = {"model": "cyan", "optimizer": "magenta", "other": "bright_black"}
_CONTENTS = ("blue", "cyan", "magenta", "bright_magenta", "yellow", "green", "bright_blue")
_WRONG = {"extra": "yellow", "other save": "yellow"}


def visible(text: str) -> str:
    """A text with control characters, which a terminal would obey, written as escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def can_draw(stream: TextIO, width: int) -> bool:
    """Whether a stream is a terminal that shows pictures: wide enough, not a dumb one, with rich at hand."""
    if not stream.isatty() or width < LEAST_WIDTH or os.environ.get("TERM") == "dumb" or not _can_encode(stream):
        return False
    return find_spec("rich") is not None


def _can_encode(stream: TextIO) -> bool:
    try:
        (_EIGHTHS + _FULL + _LACKING).encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def draw(lines: Sequence[Line], stream: TextIO | None = None) -> None:
    """Prints lines: in colours on a terminal that `can_draw`, otherwise as plain text, with # for bars if necessary."""
    stream = stream or sys.stdout
    if can_draw(stream, LEAST_WIDTH):
        from rich.console import Console
        from rich.text import Text

        console = Console(file=stream, highlight=False, emoji=False, markup=False)
        for line in lines:
            console.print(Text.assemble(*line, no_wrap=True), soft_wrap=True)
        return
    plain = "\n".join("".join(text for text, _ in line).rstrip() for line in lines) + "\n"
    if not _can_encode(stream):
        table = {ord(character): "#" for character in _EIGHTHS[1:] + _FULL} | {ord(_LACKING): "?"}
        plain = plain.translate(table)
    stream.write(plain)
    stream.flush()


def picture(grid: FileGrid, width: int, contents: Mapping[str, int] | None = None, *, lead: str = "") -> list[Line]:
    """The files in rows, with bars as long as the files are large, in `width` columns; all lines begin with `lead`. `contents`:
    what files hold -> bytes of it in all; a bar is then in parts. None: a colour for each kind of file.
    """
    held: Mapping[str, int] = contents or {}
    styles = {name: _CONTENTS[n % len(_CONTENTS)] for n, name in enumerate(held)} | {OTHER: "bright_black"}
    shown = list(_rows_to_show(grid))
    labels = max((min(len(visible(label)), _MOST_LABEL) for _, rows, _ in shown for label, _ in rows), default=0)
    room = width - len(lead) - labels - 2
    scale = _scale(grid, room)
    lines: list[Line] = []
    for group, rows, more in shown:
        lines.append([(lead, ""), *_heading(grid, group, labels, scale, len(grid.groups) > 1)])
        for label, cells in rows:
            label = visible(label)
            label = label if len(label) <= _MOST_LABEL else f"{label[: _MOST_LABEL - 1]}…"
            lines.append(
                [(f"{lead}{label:<{labels}}  ", ""), *_cells(grid, group, cells, scale, styles if held else None)]
            )
        if more:
            lines.append([(f"{lead}{'':<{labels}}  and {count(more, 'more row')} like these", "bright_black")])
    keys = {name: f"{name} {size(n)}" for name, n in held.items() if n} or {file.kind: file.kind for file in grid.files}
    lines.append([(lead, "")])
    line: Line = [(lead, "")]
    wrong = dict.fromkeys(STATES.get(file.state, "missing or damaged") for file in grid.files if file.state != "ok")
    keys |= {said: said for said in wrong}
    for key, said in keys.items():
        if len(line) > 1 and sum(len(text) for text, _ in line) + len(said) + 2 > width:
            lines.append(line)
            line = [(lead, "")]
        sign = _LACKING if key in wrong else _FULL
        style = (
            ("yellow" if key in STATES.values() else "red") if key in wrong else styles[key] if held else _style(key)
        )
        line += [(f"{sign} ", style), (f"{said}   ", "")]
    lines.append(line)
    return lines


def _style(kind: str) -> str:
    return _STYLES.get(kind, "blue")


def _rows_to_show(grid: FileGrid) -> Iterator[tuple[RowGroup, list[FileRow], int]]:
    """The rows that are printed: the first ones of each group, and all bad ones as far as there is room."""
    groups = [group for group in grid.groups if group.columns != ("other",)] or list(grid.groups)
    each = max(2, _MOST_ROWS // max(1, len(groups)))
    for group in groups[: _MOST_ROWS // 2]:
        wrong = [row for row in group.rows if any(n is not None and grid.files[n].state != "ok" for n in row[1])]
        first = list(group.rows[: max(2, each - len(wrong))]) if len(group.rows) > each else list(group.rows)
        chosen = {id(row) for row in (*first, *wrong[:each])}
        rows = [row for row in group.rows if id(row) in chosen]
        yield group, rows, len(group.rows) - len(rows)


def _scale(grid: FileGrid, room: int) -> float:
    """The number of columns per byte, so that the widest row fits."""
    most, cells = 1, 1
    for group in grid.groups:
        if group.columns:
            nbytes = sum(_widest(grid, group, at) for at in range(len(group.columns)))
            most, cells = max(most, nbytes), max(cells, len(group.columns))
        else:
            for _, held in group.rows:
                most = max(most, sum(_length(grid.files[n]) for n in held if n is not None))
                cells = max(cells, len(held))
    return max(0.0, room - 12 * min(cells, 3)) / most


def _length(file: MappedFile) -> int:
    return file.nbytes or file.expected


def _widest(grid: FileGrid, group: RowGroup, at: int) -> int:
    return max((_length(grid.files[n]) for _, cells in group.rows if (n := cells[at]) is not None), default=0)


def _columns(grid: FileGrid, group: RowGroup, scale: float) -> list[int]:
    """The width of each column of a group, with room for sizes."""
    return [max(len(title) + 2, int(_widest(grid, group, at) * scale) + 12) for at, title in enumerate(group.columns)]


def _heading(grid: FileGrid, group: RowGroup, labels: int, scale: float, named: bool) -> Iterator[tuple[str, str]]:
    title = visible(group.title) if named else ""
    if len(title) > labels or not group.columns:
        yield title, "bold"
        return
    yield f"{title:<{labels}}  ", "bold"
    for name, width in zip(group.columns, _columns(grid, group, scale), strict=True):
        yield f"{name:<{width}}", "bright_black"


def _cells(
    grid: FileGrid, group: RowGroup, cells: Sequence[int | None], scale: float, styles: Mapping[str, str] | None
) -> Iterator[tuple[str, str]]:
    if not group.columns:  # many files in a row: one after the other, then what they come to
        for number in cells:
            if number is not None:
                yield from _bar(grid.files[number], scale, styles)[0]
        own = [grid.files[number] for number in cells if number is not None]
        yield f" {count(len(own), 'file')}, {size(sum(file.nbytes for file in own))}", "bright_black"
        return
    for number, width in zip(cells, _columns(grid, group, scale), strict=True):
        if number is None:
            yield " " * width, ""
            continue
        file = grid.files[number]
        bar, taken = _bar(file, scale, styles)
        yield from bar
        said = size(file.nbytes) if file.state == "ok" else file.state
        yield (
            f" {said:<{max(0, width - taken - 1)}}",
            "bright_black" if file.state == "ok" else _WRONG.get(file.state, "red"),
        )


def _bar(file: MappedFile, scale: float, styles: Mapping[str, str] | None) -> tuple[Line, int]:
    """The bar of a file, and the columns that it takes."""
    wide = _length(file) * scale
    if file.state != "ok":
        taken = max(1, round(wide))
        return [(_LACKING * taken, _WRONG.get(file.state, "red"))], taken
    if styles is None or not file.contents:
        eighths = max(1, round(wide * 8))
        text = _FULL * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        return [(text, _style(file.kind) if styles is None else "bright_black")], len(text)
    taken = max(1, round(wide))
    rest = file.nbytes - sum(file.contents.values())
    shares = [(name, file.contents.get(name, 0)) for name in styles if name != OTHER] + [(OTHER, max(0, rest))]
    ends = itertools.accumulate(nbytes for _, nbytes in shares)
    all_bytes = sum(nbytes for _, nbytes in shares) or 1
    found: Line = []
    at = 0
    for (name, _), end in zip(shares, ends, strict=True):
        to = round(taken * end / all_bytes)
        if to > at:
            found.append((_FULL * (to - at), styles[name]))
        at = to
    return found, taken
