"""The tables in the files of families, as JSON has them: a family that is like another one, and other spellings of names.

For `schemes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def add_to_table(base: Mapping[str, Any], data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The contents of a file, with those of the family that it is like."""
    base = dict(base)
    for key in ("family", "about", "like", "recognised", "defaults", "names", "under", "also", "memory", "stacks"):
        base.pop(key, None)
    base["tensors"] = [_move_line(line, data.get("under", {})) for line in base["tensors"]]
    own: dict[str, list[Any]] = {}
    for line in data.get("tensors", ()):
        own.setdefault(_key(line), []).append(line)
    said, lines = frozenset(own), list[Any]()
    for line in base["tensors"]:
        lines += own.pop(_key(line), []) if _key(line) in said else [line]
    lines += (line for more in own.values() for line in more)
    return {**_merge_objects(base, data), "tensors": [line for line in lines if line[0]]}


def _move_line(line: list[Any], under: Mapping[str, str]) -> list[Any]:
    """A line of a table, with the beginnings of its names replaced."""

    def moved(name: str) -> str:
        old = next((head for head in under if name.startswith(head)), "")
        return under.get(old, "") + name[len(old) :]

    names = moved(line[0]) if isinstance(line[0], str) else [moved(name) for name in line[0]]
    how = [{**one, "beside": moved(one["beside"])} if "beside" in one else one for one in line[2:]]
    return [names, line[1], *how]


def other_spellings(names: Iterable[str], said: Mapping[str, str | list[str]]) -> list[str]:
    """Other spellings of names, by their beginnings."""
    found: list[str] = []
    for name in names:
        head = next((head for head in said if name.startswith(head)), None)
        if head is not None:
            others = said[head]
            found += [other + name[len(head) :] for other in ([others] if isinstance(others, str) else others)]
    return found


def _merge_objects(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The objects merged key by key; null removes a key, but in "fixed" it is the config's value."""
    found = dict(base)
    for key, value in more.items():
        if key == "fixed":
            found[key] = {**found.get(key, {}), **value}
        elif isinstance(value, dict) and isinstance(found.get(key), dict):
            found[key] = _merge_objects(found[key], value)
        elif value is None:
            found.pop(key, None)
        else:
            found[key] = value
    return found


def parts_of_line(line: Any) -> list[str]:
    """The parts in a line of a table."""
    parts = line["parts"] if isinstance(line, dict) else line[1]
    return [parts] if isinstance(parts, str) else parts or []


def _key(line: Any) -> str:
    """The key of a line of a table: the first part, or the name if it has no part."""
    first = next(iter(parts_of_line(line)), "=")
    return str(line[0]) if first == "=" else first
