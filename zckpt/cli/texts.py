"""Parses the texts of options: sizes, counts, and pairs of a pattern and its replacement.

For `declare` and the commands.
"""

from __future__ import annotations

import re

import typer

from zckpt.base.errors import UsageError


def split_rename(text: str) -> tuple[str, str]:
    r"""`REGEX=REPL` at its first `=`; one that is escaped (`\=`) or opens a lookaround (`(?=`, `(?<=`) does not count.

    Raises:
        UsageError: there is no such `=`.
    """
    found = re.fullmatch(r"((?:\(\?<?=|\\.|[^\\=])*)=(.*)", text, re.DOTALL)
    if not found:
        remedy = r"Put '=' between pattern and replacement: --rename '^model\.='."
        raise UsageError(f"--rename {text!r} has no '='", expected="REGEX=REPL", remedy=remedy)
    return found[1], found[2]


def size_in_bytes(text: str | int) -> int:
    """A typer parser of sizes: `8MiB`, `500MB`, `1.5G`, `1GB/s` or a plain number, as bytes."""
    from zckpt.base.sizes import to_bytes

    try:
        nbytes = to_bytes(str(text).strip().upper().removesuffix("/S"))
    except UsageError:
        nbytes = 0
    if nbytes < 1:
        raise typer.BadParameter(f"{text!r} is not a size; use bytes or a form such as 12GB")
    return nbytes


def positive(value: int | None) -> int | None:
    """A typer callback for whole numbers."""
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} is less than 1")
    return value


def split_numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0.5,0.3,0.2") from error
