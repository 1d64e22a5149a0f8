"""Finds unknown, unused, missed and refused keys of a config.

For `read`. Sections that a model describes are walked into; in those with keys known by name only, the
names are looked at.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from zckpt.runtime.config.fields import Section, is_off, keys_of, kind_of, names_of_fields, section_of
from zckpt.runtime.config.sections import Config

Pairs = Iterator[tuple[str, str]]


def unknown_keys(raw: Mapping[str, Any], section: type[Section] = Config, prefix: str = "") -> Pairs:
    """Dotted names that no model knows, each with the most similar one that is known."""
    fields = dict(names_of_fields(section))
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


def keys_of_kind(raw: Mapping[str, Any], kind: str) -> Pairs:
    """Dotted names that were given, each with the reason: `unused` keys, which change nothing; `missed`, which ask for
    something to be shown that is not; `refused`, which switch on what is not built.
    """
    for path, value, field in _given_keys(raw, Config, ""):
        if kind_of(field) == kind and (kind == "unused" or (not is_off(value) and value != field.default)):
            yield path, field.description or ""


def _given_keys(raw: Mapping[str, Any], section: type[Section], prefix: str) -> Iterator[tuple[str, Any, FieldInfo]]:
    """Every known key in a config, with its value; in sections that a model describes, also the keys inside."""
    fields = dict(names_of_fields(section))
    for key, value in raw.items():
        if key in fields:
            inner = section_of(fields[key])
            if isinstance(value, Mapping) and inner is not None:
                yield from _given_keys(value, inner, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value, fields[key]


_RENAMED = {
    "bfp16": "bf16",
    "cpu_offload_params": "zero_optimization.cpu_offload_param",
    "fp32_allreduce": "communication_data_type",
    "thread_count": "aio.intra_op_parallelism",
}
"""Keys of older DeepSpeed versions -> the key that replaced them."""


def _nearest(key: str, prefix: str, names: Collection[str]) -> str:
    if key in _RENAMED:
        return _RENAMED[key]
    everywhere = {path.rpartition(".")[2]: path for path in _all_names(Config, "")}
    if key in everywhere:
        return everywhere[key]
    for candidates in (list(names), list(everywhere)):
        close = difflib.get_close_matches(key, candidates, n=1, cutoff=0.6)
        if close:
            return f"{prefix}{close[0]}" if close[0] in names else everywhere[close[0]]
    return f"{prefix}{difflib.get_close_matches(key, list(names), n=1, cutoff=0.0)[0]}"


def _all_names(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in names_of_fields(section):
        yield f"{prefix}{name}"
        inner = section_of(field)
        if inner is not None:
            yield from _all_names(inner, f"{prefix}{name}.")
        yield from (f"{prefix}{name}.{key}" for key in keys_of(field) or ())
