"""Walks over a config by the names of its keys: which are unknown, without use, refused.

For `config`. A section that a model describes is walked into; one whose keys are known by name only is looked at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from zckpt.runtime.config_fields import Section, is_off, keys_of, kind_of, named, section_of
from zckpt.runtime.config_sections import Config


def unknown_keys(raw: Mapping[str, Any], section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    """Dotted names that no model knows, each with the nearest that one does."""
    fields = dict(named(section))
    for key, value in raw.items():
        path = f"{prefix}{key}"
        if key not in fields:
            yield path, _nearest(key, prefix, fields)
            continue
        inner, keys = section_of(fields[key]), keys_of(fields[key])
        if isinstance(value, Mapping) and inner is not None:
            yield from unknown_keys(value, inner, f"{path}.")
        elif isinstance(value, Mapping) and keys is not None:
            yield from ((f"{path}.{name}", _nearest(name, f"{path}.", keys)) for name in value if name not in keys)


def _nearest(key: str, prefix: str, names: Collection[str]) -> str:
    everywhere = {path.rpartition(".")[2]: path for path in _all_names(Config, "")}
    if key in everywhere:
        return everywhere[key]
    for candidates in (list(names), list(everywhere)):
        close = difflib.get_close_matches(key, candidates, n=1, cutoff=0.6)
        if close:
            return f"{prefix}{close[0]}" if close[0] in names else everywhere[close[0]]
    return f"{prefix}{difflib.get_close_matches(key, list(names), n=1, cutoff=0.0)[0]}"


def _all_names(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in named(section):
        yield f"{prefix}{name}"
        inner = section_of(field)
        if inner is not None:
            yield from _all_names(inner, f"{prefix}{name}.")
        yield from (f"{prefix}{name}.{key}" for key in keys_of(field) or ())


def without_use(raw: Mapping[str, Any], section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    """Dotted names that were given and change nothing, each with the reason."""
    fields = dict(named(section))
    for key, value in raw.items():
        field, inner = fields[key], section_of(fields[key])
        if kind_of(field) == "unused":
            yield f"{prefix}{key}", field.description or ""
        elif isinstance(value, Mapping) and inner is not None:
            yield from without_use(value, inner, f"{prefix}{key}.")


def refused_keys(raw: Mapping[str, Any], section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    """Dotted names that switch on what is not built, each with a word on it."""
    fields = dict(named(section))
    for key, value in raw.items():
        field, inner = fields[key], section_of(fields[key])
        if kind_of(field) == "refused" and not is_off(value) and value != field.default:
            yield f"{prefix}{key}", field.description or ""
        elif isinstance(value, Mapping) and inner is not None:
            yield from refused_keys(value, inner, f"{prefix}{key}.")
