"""Declares what a key of the config is: used, accepted without use, missed with a warning, or refused.

For the models in `zero` and `sections`; `read` reads by them, and docs/config.md is made from them. One line of a
model is one key of DeepSpeed's JSON, and holds everything that is known about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """One JSON object of the config. `read` has looked for unknown keys before pydantic sees the values."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, frozen=True, protected_namespaces=())


def _key(kind: str, default: Any, about: str, **constraints: Any) -> Any:
    return Field(default, description=about, json_schema_extra={"kind": kind}, **constraints)


used_key = partial(_key, "used")
"""A key that this engine acts on."""
own_key = partial(_key, "own")
"""A key that DeepSpeed does not have."""
unused_key = partial(_key, "unused")
"""A key that is accepted and changes nothing; what it says is logged when a config has it."""
unshown_key = partial(_key, "missed")
"""A key that asks for something to be shown, and shows nothing: a warning where a config switches it on."""
refused_key = partial(_key, "refused")
"""A key that would change the training in a way this engine does not know: only values that switch it off pass."""


_LINES = Path(__file__).with_name("foreign_keys_0_19_8.txt").read_text(encoding="utf-8").splitlines()
_FOREIGN = {name: keys.split() for name, _, keys in (line.partition(":") for line in _LINES)}
"""Section of DeepSpeed's -> its keys."""


def foreign(name: str, why: str, kind: str = "unused") -> Any:
    """A section of DeepSpeed's with keys known by name only; below them nothing is looked at."""
    return Field(None, description=why, json_schema_extra={"kind": kind, "keys": [*_FOREIGN[name]]})


def kind_of(field: FieldInfo) -> str:
    """The kind of a key: `used_key`, `own_key`, `unused_key`, `unshown_key` or `refused_key`."""
    extra = field.json_schema_extra
    return str(extra.get("kind", "used")) if isinstance(extra, dict) else "used"


def keys_of(field: FieldInfo) -> list[str] | None:
    """The known names inside a foreign section; None if any name is accepted or there is nothing inside."""
    extra = field.json_schema_extra
    keys = extra.get("keys") if isinstance(extra, dict) else None
    return [str(key) for key in keys] if isinstance(keys, list) else None


def section_of(field: FieldInfo) -> type[Section] | None:
    """The model of a key that is an object itself; None for other keys."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def names_of_fields(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Every accepted name of a section (names and aliases) with its field."""
    for name, field in section.model_fields.items():
        yield field.alias or name, field
        if field.alias and field.alias != name:
            yield name, field


def is_off(value: object) -> bool:
    """Whether a value leaves a refused feature switched off."""
    if isinstance(value, dict):
        return value.get("enabled") is False or all(is_off(inner) for inner in value.values())
    return value is None or value is False or value == 0
