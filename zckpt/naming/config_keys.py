"""Which keys of a model's config change what it computes, and which of them another program's form of the model can say.

For `megatron_arguments` and `gguf_metadata`. A config.json that leaves a key out means the default of transformers' class:
"defaults" of the family's file; its "names" are the class's other names of keys. Each key is one of these: it has no effect on
what the model computes (`FREE`), the tensors or the facts of the model say it (`SHOWN`), the writer says it (`Keys.said`), the
writer's form has only some values of it (`Keys.only`). Every other key must be at its default, and is an error otherwise.
Source: transformers 5.23, models/*/configuration_*.py and modeling_*.py; tests/naming/test_config_keys.py compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.base.words import join_words
from zckpt.naming.schemes import family_of
from zckpt.storage.json_files import read_table

_TABLES = {name: frozenset(keys) for name, keys in read_table(__file__).items()}

FREE = _TABLES["free"]
"""Keys of any config without effect on what a model computes: numbers of tokens, what is random, what training adds, how
text is made, forms of an answer, and how exactly it is computed."""

_FREE_BEGINNINGS = ("_attn_implementation", "_commit_hash", "_experts_implementation", "_unsloth", "unsloth_")

SHOWN = _TABLES["shown"]
"""Keys of any config that the tensors' shapes show, or that are facts of every model."""

ROTARY = _TABLES["rotary"]
"""Keys of rotary positions, which `rotary` reads; a model type has those that its class reads."""

WINDOW = _TABLES["window"]
"""Keys of how far attention looks back, which `windows` reads."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What a writer understands of the configs of a model type.

    Attributes:
        said: keys that it writes, whatever they are, or refuses itself.
        only: key -> the values that its form of the model has; what is not of the class may be missing, too.
    """

    said: frozenset[str] = frozenset()
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict[str, "tuple[object, ...]"])


def fields_of(model_type: object) -> Mapping[str, Any]:
    """The class's fields and their defaults; empty for a type that is not known."""
    family = family_of(model_type)
    return {} if family is None else family.defaults


def whole_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the class's defaults for what it leaves out, under the class's own keys, with the text model's at
    its top.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and "text_config" not in fields_of(config.get("model_type")):
        config = {**{key: value for key, value in config.items() if key != "text_config"}, **text}
    family = family_of(config.get("model_type"))
    if family is None:
        return dict(config)
    said = (*family.defaults.items(), *config.items())
    return {family.spellings.get(key, key): value for key, value in said}


def check_keys(config: Mapping[str, Any], keys: Mapping[str, Keys], writer: str, path: str, remedy: str) -> None:
    """Checks that a writer's form of the model can express all that changes what the model computes. `config` is from
    `whole_config`, `keys` says for each model type what the writer understands. Raises UnsupportedError, which names each
    key that it cannot say.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in keys:
        raise UnsupportedError(
            f"it is not known what {writer} of such a model", file=path, found=f"model_type {kind!r}",
            expected=f"one of {', '.join(sorted(keys))}", remedy=remedy,
        )  # fmt: skip
    wrong = [
        f"{key} {_as_text(value)}{why}"
        for key, value in sorted(config.items())
        if (why := _why_not(key, value, keys[kind], fields_of(kind))) is not None
    ]
    if wrong:
        raise UnsupportedError(
            f"the model's config says something that {writer}", file=path, found="; ".join(wrong), remedy=remedy,
        )  # fmt: skip


def _why_not(key: str, value: object, keys: Keys, fields: Mapping[str, Any]) -> str | None:
    """Why a value cannot be expressed, as the end of a sentence; None if it can."""
    if key in FREE or key in SHOWN or key in keys.said or key.startswith(_FREE_BEGINNINGS):
        return None
    if key in keys.only:
        wanted = keys.only[key]
        is_fit = (value is None and key not in fields) or any(_is_same(value, one) for one in wanted)
        return None if is_fit else f" (only {join_words([_as_text(one) for one in wanted], 'or')})"
    if key in fields:
        return None if _is_same(value, fields[key]) else f" (only {_as_text(fields[key])})"
    return None if value is None or value is False or value in ([], {}, "") else " (a key that zckpt does not know)"


def _is_same(value: object, other: object) -> bool:
    """Whether two values of a config are equal; true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _as_text(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else f"{text[:97]}..."
