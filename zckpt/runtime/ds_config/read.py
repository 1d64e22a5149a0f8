"""Reads a DeepSpeed config: what is asked for, checked as a whole before anything is built.

For `initialize` and `zero.Init`. The order: JSON; unknown keys, at every depth; `"auto"`; values (pydantic); features
that are not built; contradictions; the batch sizes. Everything that is wrong of one kind is told at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from zckpt.base.errors import UsageError
from zckpt.base.words import examples
from zckpt.runtime.config_checks import refuse_contradictions, refuse_unbuilt
from zckpt.runtime.config_fields import Section, kind_of, named, section_of
from zckpt.runtime.config_names import unknown_keys, without_use
from zckpt.runtime.config_sections import BF16, Config
from zckpt.runtime.config_zero import Zero

Json = dict[str, Any]

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OWN_AUTO = frozenset(("data_types.keep_in_fp32_modules",))


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Samples per optimizer step: `total` = `micro` x `accumulation` x world size."""

    total: int
    micro: int
    accumulation: int


@dataclass(frozen=True, slots=True)
class Settings:
    """A config that was read.

    Attributes:
        config: the values.
        raw: the JSON, with every "auto" filled in.
        unused: keys that were given and change nothing, each with the reason.
        file: where it was read from, for messages.
    """

    config: Config
    raw: Json
    unused: tuple[tuple[str, str], ...]
    file: str

    @property
    def zero(self) -> Zero:
        """The section `zero_optimization`."""
        return self.config.zero_optimization

    @property
    def bf16(self) -> BF16:
        """The section `bf16`, by whichever name it was given."""
        return self.config.bfloat16 or self.config.bf16


def read_config(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    auto: Mapping[str, Any] | None = None,
    hidden_size: int | None = None,
    allow_unknown: bool = False,
) -> Settings:
    """Reads and checks a config.

    Args:
        config: a path, JSON text, or what `json.load` gives.
        auto: values for keys that say "auto": nested as the config is, or by dotted name (`optimizer.params.lr`).
        hidden_size: the model's, for the keys that transformers computes from it.
        allow_unknown: leave out unknown keys and say so, instead of refusing them.

    Raises:
        UsageError: not a config, unknown keys, "auto" without a value, wrong values, contradictions.
        UnsupportedError: it asks for what is not built.
    """
    raw, file = _load(config)
    unknown = list(unknown_keys(raw, Config, ""))
    if unknown and not allow_unknown:
        raise UsageError(
            f"unknown keys ({len(unknown):,})" if len(unknown) > 1 else "an unknown key",
            file=file,
            found=examples((path for path, _ in unknown), 10),
            expected=examples((nearest for _, nearest in unknown), 10),
            remedy="Correct or remove it: a key that is not read would train another model than you think.",
        )
    for path, _ in unknown:
        _drop(raw, path)
    notes = [(path, "not known, left out as asked") for path, _ in unknown]
    _fill_auto(raw, file, _flat(auto or {}) | _computed(hidden_size))
    try:
        values = Config.model_validate(raw)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, e['loc']))} = {e['input']!r}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        raise UsageError(
            "values that do not fit",
            file=file,
            found="; ".join(wrong),
            remedy="docs/config.md has the types.",
        ) from error
    refuse_unbuilt(values, raw, file)
    refuse_contradictions(values, raw, file)
    return Settings(values, raw, (*notes, *without_use(raw, Config, "")), file)


def batch_of(settings: Settings, world_size: int) -> BatchSizes:
    """The batch sizes: two of the three give the third, one gives the others with an accumulation of 1.

    Raises:
        UsageError: they contradict each other, do not divide, or none is given; the sum is in the message.
    """
    config = settings.config
    total, micro, accumulation = (getattr(config, name) for name in _BATCH)
    if total is None and micro is None:
        raise UsageError(
            "no batch size",
            file=settings.file,
            expected="train_batch_size or train_micro_batch_size_per_gpu",
            remedy="train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size.",
        )
    if total is None:
        accumulation = accumulation or 1
        total = micro * accumulation * world_size
    elif micro is None:
        accumulation = accumulation or 1
        micro = total // (accumulation * world_size)
    elif accumulation is None:
        accumulation = total // (micro * world_size)
    if micro * accumulation * world_size != total or not micro or not accumulation:
        raise UsageError(
            "batch sizes that do not multiply",
            file=settings.file,
            found=f"train_batch_size {total:,}",
            expected=f"train_micro_batch_size_per_gpu {micro:,} x gradient_accumulation_steps {accumulation:,} x "
            f"world size {world_size:,} = {micro * accumulation * world_size:,}",
            remedy="Give two of the three, or make them agree.",
        )
    return BatchSizes(total, micro, accumulation)


def _load(config: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Json, str]:
    if isinstance(config, Mapping):
        return json.loads(json.dumps(dict(config), default=_refuse_value)), "config"
    text, file = os.fspath(config), "config"
    if not text.lstrip().startswith("{"):
        file = text
        try:
            with open(file, encoding="utf-8") as handle:
                text = handle.read()
        except OSError as error:
            raise UsageError(
                "no config", file=file, found=error.strerror or str(error), expected="a path, a dict or JSON text"
            ) from error
    try:
        raw = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise UsageError(
            "not JSON", file=file, found=f"{error.msg} in line {error.lineno}, column {error.colno}"
        ) from error
    if not isinstance(raw, dict):
        raise UsageError("not a config", file=file, found=f"a {type(raw).__name__}", expected="an object")
    return raw, file


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise UsageError("keys given twice", found=examples(twice), remedy="Remove one of each.")
    return dict(pairs)


def _refuse_value(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise UsageError("a value that JSON does not have", found=repr(value))


def _drop(raw: Json, path: str) -> None:
    *outer, last = path.split(".")
    for key in outer:
        raw = raw[key]
    raw.pop(last, None)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Json:
    flat: Json = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _computed(hidden_size: int | None) -> Json:
    """What transformers computes from a model's width (integrations/deepspeed.py)."""
    if hidden_size is None:
        return {}
    square = hidden_size * hidden_size
    return {
        "zero_optimization.reduce_bucket_size": square,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * square),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }


def _fill_auto(raw: Json, file: str, values: Json) -> None:
    """Puts values in place of "auto". What arithmetic gives, a width would give, or nothing reads, may stay without."""
    missing = []
    for path in [path for path, value in _flat(raw).items() if value == "auto" and path not in _OWN_AUTO]:
        *outer, last = path.split(".")
        place = raw
        for key in outer:
            place = place[key]
        if path in values:
            place[last] = values[path]
        elif path in _BATCH or path in _computed(0) or _has_no_use(path):
            del place[last]
        else:
            missing.append(path)
    if missing:
        raise UsageError(
            'keys that say "auto" and have no value',
            file=file,
            found=examples(missing, 20),
            remedy=f"Pass their values: initialize(..., auto={{{missing[0]!r}: ...}}), or write them into the config.",
        )


def _has_no_use(path: str) -> bool:
    section: type[Section] | None = Config
    for key in path.split("."):
        field = dict(named(section))[key] if section is not None else None
        if field is None or kind_of(field) == "unused":
            return field is not None
        section = section_of(field)
    return False
