"""The places in zckpt where something is synced, found in its source: every call of a function that syncs, and what it syncs.

`sync_all((a, b))` is two places. So is a call with `durable=True`, for what it makes durable.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import zckpt
from zckpt.output import durable

ROOT = Path(zckpt.__file__).parent
_SYNCS = re.compile(r"f(data)?sync|make_durable|_?sync(_\w+)?")


class Site(NamedTuple):
    """One place.

    Attributes:
        module: its file, relative to the package.
        first: line of the call.
        last: its last line.
        text: the call.
        element: which of several things that are synced there, as Python; "" for all.
        asked: whether the call asks for it by `durable=True`.
    """

    module: str
    first: int
    last: int
    text: str
    element: str = ""
    asked: bool = False

    def __str__(self) -> str:
        return f"{self.module}:{self.element or self.text}"


@cache
def sites() -> list[Site]:
    """All of zckpt's."""
    found: list[Site] = []
    for path in sorted(ROOT.rglob("*.py")):
        module, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if not re.search(r"sync|durable", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                found += _of_call(module, node)
    return found


def _of_call(module: str, node: ast.Call) -> Iterator[Site]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    is_asked = any(word.arg == "durable" for word in node.keywords)
    if not is_asked and not _SYNCS.fullmatch(name):
        return
    lines = (module, node.lineno, node.end_lineno or node.lineno, ast.unparse(node))
    if any(word.arg == "durable" and getattr(word.value, "value", False) is True for word in node.keywords):
        yield Site(*lines, asked=True)
    elif _SYNCS.fullmatch(name):
        several = node.args[0].elts if node.args and isinstance(node.args[0], ast.Tuple) else ()
        yield from (Site(*lines, ast.unparse(element)) for element in several)
        if not several:
            yield Site(*lines)


@cache
def _by_module() -> dict[str, list[Site]]:
    found: dict[str, list[Site]] = {}
    for site in sites():
        found.setdefault(os.path.join(ROOT, site.module), []).append(site)
    return found


def sites_of(frames: list[FrameType]) -> set[Site]:
    """Which of the sites have led to a sync, given the frames of the calls that did."""
    found: set[Site] = set()
    path = next((frame.f_locals["path"] for frame in frames if frame.f_code is durable.sync.__code__), None)
    asked = any(frame.f_locals.get("durable") is True and frame.f_code.co_name == "_append" for frame in frames)
    for frame in frames:
        for site in _by_module().get(frame.f_code.co_filename, ()):
            here = site.first <= frame.f_lineno <= site.last
            if here and (asked or not site.asked) and (not site.element or path in _values(site.element, frame)):
                found.add(site)
    return found


def _values(element: str, frame: FrameType) -> tuple[Any, ...]:
    """The paths that an element of a tuple stands for."""
    return tuple(eval(f"({element},)", frame.f_globals, frame.f_locals))


_WRITES = re.compile(r"[wax]")


def writers() -> list[str]:
    """Modules of zckpt that write a file by Python's own functions, and sync nothing themselves."""
    found: list[str] = []
    syncing = {site.module for site in sites()}
    for path in sorted(ROOT.rglob("*.py")):
        module, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if module in syncing or not re.search(r"open\(|write_text|write_bytes", text):
            continue
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        if any(map(_is_writing, calls)):
            found.append(module)
    return found


def _is_writing(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("write_text", "write_bytes"):
        return True
    text = ast.unparse(call)
    if name == "open" and ast.unparse(call.func) == "os.open":
        return "O_CREAT" in text
    modes = [arg.value for arg in call.args[1:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return name == "open" and any(_WRITES.search(mode) for mode in modes)
