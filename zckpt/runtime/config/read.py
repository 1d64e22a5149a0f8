"""Reads a DeepSpeed config: what is asked for, checked as a whole before anything is built.

For `initialize` and `zero.Init`. The order: JSON; unknown keys, at every depth; `"auto"`; values (pydantic); features
that are not built; contradictions; the batch sizes. All that is wrong in one of these ways is reported at once. Sections that a
model describes are walked into; in those with keys known by name only, the names are looked at.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.base.words import count, examples
from zckpt.runtime.config.fields import (
    ActivationSection,
    Section,
    is_off,
    keys_of,
    kind_of,
    names_of_fields,
    section_of,
)
from zckpt.runtime.config.sections import BF16, Config, Zero

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


Json = dict[str, Any]

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OWN_AUTO = frozenset(("data_types.keep_in_fp32_modules",))


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Samples per optimizer step: `total` = `micro` x `accumulation` x world size."""

    total: int
    micro: int
    accumulation: int

    def by_key(self) -> dict[str, int]:
        """The sizes, by the config's keys."""
        return dict(zip(_BATCH, (self.total, self.micro, self.accumulation), strict=True))


@dataclass(frozen=True, slots=True)
class Settings:
    """A config that was read.

    Attributes:
        config: the values.
        raw: the JSON, with every "auto" filled in.
        unused: keys that were given and change nothing, each with the reason.
        missed: keys that ask for something to be shown that is not, each with the reason.
        file: where it was read from, for messages.
    """

    config: Config
    raw: Json
    unused: tuple[tuple[str, str], ...]
    missed: tuple[tuple[str, str], ...]
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
    early: bool = False,
) -> Settings:
    """Reads and checks a config.

    Args:
        config: a path, JSON text, or what `json.load` returns.
        auto: values for keys that say "auto": nested as the config is, or by dotted name (`optimizer.params.lr`).
        hidden_size: the model's width, for the keys that transformers computes from it.
        allow_unknown: leave out unknown keys and list them in `Settings.unused`, instead of raising an error.
        early: the values of "auto" may come later: keys without one have their defaults.

    Raises:
        UsageError: not a config, unknown keys, "auto" without a value, wrong values, contradictions.
        UnsupportedError: it switches on a feature that is not built.
    """
    raw, file = _load(config)
    for path in _keys_of_width(1):  # TRL puts them at the top, with dots, where DeepSpeed does not see them
        raw.pop(path, None)
    unknown = list(unknown_keys(raw))
    if unknown and not allow_unknown:
        raise _unknown(unknown, file)
    for path, _ in unknown:
        _pop(raw, path)
    _fill_auto(raw, file, flatten(auto or {}) | _keys_of_width(hidden_size), early=early)
    values = _values(raw, file)
    _refuse_unbuilt(raw, file)
    _refuse_contradictions(values, raw, file)
    left_out = ((path, "not known, left out as asked") for path, _ in unknown)
    return Settings(
        values, raw, (*left_out, *keys_of_kind(raw, "unused"), *_unused_at(values.zero_optimization)),
        tuple(keys_of_kind(raw, "missed")),
        file,
    )  # fmt: skip


def _unused_at(zero: Zero) -> Iterator[tuple[str, str]]:
    """Keys that change nothing at this stage, each with the reason."""
    if zero.stage < 3 and (zero.cpu_offload_param or (zero.offload_param and zero.offload_param.device != "none")):
        yield "zero_optimization.offload_param", f"stage {zero.stage} cuts no parameters; DeepSpeed leaves it out too"


def read_activations(config: str | os.PathLike[str] | Mapping[str, Any]) -> ActivationSection:
    """The section `activation_checkpointing` of a config; no other key is looked at. Raises UsageError if it is not a
    config, or the section has unknown keys or wrong values.
    """
    raw, file = _load(config)
    section = raw.get("activation_checkpointing", {})
    what = "the section activation_checkpointing is not valid"
    return _values({"activation_checkpointing": section}, file, what).activation_checkpointing


def _values(raw: Json, file: str, what: str = "") -> Config:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, e['loc']))} = {e['input']!r}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        raise UsageError(
            what or f"{count(len(wrong), 'value is', 'values are')} not valid", file=file, found="; ".join(wrong),
            remedy=f"Correct {'it' if len(wrong) == 1 else 'them'}; docs/config.md lists the values of each key.",
        ) from error  # fmt: skip


def _unknown(unknown: Sequence[tuple[str, str]], file: str) -> UsageError:
    remedy = "Correct or remove it, or pass allow_unknown=True to train without it."
    if len(unknown) == 1:
        [(path, nearest)] = unknown
        return UsageError(f"unknown key {path!r}; did you mean {nearest!r}?", file=file, remedy=remedy)
    return UsageError(
        f"{len(unknown)} unknown keys", file=file, found=examples((path for path, _ in unknown), 10),
        expected=f"perhaps {examples((nearest for _, nearest in unknown), 10)}", remedy=remedy.replace(" it", " them"),
    )  # fmt: skip


def batch_of(settings: Settings, world_size: int) -> BatchSizes:
    """The batch sizes: two of the three give the third, one gives the others with an accumulation of 1. Raises
    UsageError if they contradict each other, do not divide, or none is given; the sum is in the message.
    """
    config = settings.config
    total, micro, accumulation = (getattr(config, name) for name in _BATCH)
    if total is None and micro is None:
        raise UsageError(
            "has no batch size", file=settings.file, expected="train_batch_size or train_micro_batch_size_per_gpu",
            remedy="Add one of the two. train_batch_size is train_micro_batch_size_per_gpu x gradient_accumulation_steps x "
            "the number of processes.",
        )  # fmt: skip
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
            "the batch sizes contradict each other", file=settings.file, found=f"train_batch_size {total:,}",
            expected=f"train_micro_batch_size_per_gpu {micro:,} x gradient_accumulation_steps {accumulation:,} x "
            f"world size {world_size:,} = {micro * accumulation * world_size:,}",
            remedy="Give two of the three, or correct one.",
        )  # fmt: skip
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
                "the config cannot be read", file=file, found=error.strerror or str(error),
                remedy="Pass the path of a JSON file, a dict, or JSON text.",
            ) from error  # fmt: skip
    try:
        raw = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise UsageError(
            "is not JSON", file=file, found=f"{error.msg} in line {error.lineno}, column {error.colno}",
            remedy="Correct that place.",
        ) from error  # fmt: skip
    if not isinstance(raw, dict):
        raise UsageError(
            "is not a config", file=file, found=f"a {type(raw).__name__}", expected="a JSON object",
            remedy="Pass DeepSpeed's config: {...}.",
        )  # fmt: skip
    return raw, file


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise UsageError("the config has keys twice", found=examples(twice), remedy="Remove one of each.")
    return dict(pairs)


def _refuse_value(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise UsageError(
        "the config has a value that JSON does not have", found=repr(value),
        remedy="Use numbers, text, true and false, lists and dicts.",
    )  # fmt: skip


def _pop(raw: Json, path: str) -> Any:
    """Removes a key by its dotted name and returns its value; None for a key that is already removed."""
    place, _, last = path.rpartition(".")
    return _section(raw, place).pop(last, None)


def _section(raw: Json, path: str) -> Json:
    for key in filter(None, path.split(".")):
        raw = raw[key]
    return raw


def flatten(values: Mapping[str, Any], prefix: str = "") -> Json:
    """All values of a config, by dotted name."""
    flat: Json = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _keys_of_width(hidden_size: int | None) -> Json:
    """The values that transformers computes from a model's width (integrations/deepspeed.py)."""
    if hidden_size is None:
        return {}
    square = hidden_size * hidden_size
    return {
        "zero_optimization.reduce_bucket_size": square,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * square),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }


def _fill_auto(raw: Json, file: str, values: Json, *, early: bool) -> None:
    """Replaces "auto" by values. A key that is computed from others or a width, or never read, may stay without one."""
    unused = tuple(f"{path}." for path, _ in (*keys_of_kind(raw, "unused"), *keys_of_kind(raw, "missed")))
    missing = []
    for path in [path for path, value in flatten(raw).items() if value == "auto" and path not in _OWN_AUTO]:
        place, _, last = path.rpartition(".")
        if path in values:
            _section(raw, place)[last] = values[path]
        elif early or path in (*_BATCH, *_keys_of_width(0)) or f"{path}.".startswith(unused):
            _pop(raw, path)
        else:
            missing.append(path)
    if missing:
        raise UsageError(
            f'{count(len(missing), "key says", "keys say")} "auto", and no value was given', file=file,
            found=examples(missing, 20),
            remedy=f"Pass values: initialize(..., auto={{{missing[0]!r}: ...}}). Or write them into the config. "
            "transformers' Trainer fills them in from its arguments; initialize by itself has none.",
        )  # fmt: skip


def _refuse_unbuilt(raw: Mapping[str, Any], file: str) -> None:
    """Raises UnsupportedError if features are switched on that this engine does not have; it names all of them."""
    found = [f"{path} ({why})" for path, why in keys_of_kind(raw, "refused")]
    if found:
        raise UnsupportedError(
            f"switches on {count(len(found), 'feature that is', 'features that are')} not built", file=file,
            found="; ".join(found), remedy=f"Remove {'it' if len(found) == 1 else 'them'} from the config.",
        )  # fmt: skip


def _refuse_contradictions(config: Config, raw: Mapping[str, Any], file: str) -> None:
    """Raises UsageError if there are keys that cannot both be meant; it names all of them."""
    found = list(_contradictions(config, raw))
    if found:
        raise UsageError(
            "keys contradict each other", file=file, found="; ".join(found), remedy="Change one key of each pair."
        )


def _contradictions(config: Config, raw: Mapping[str, Any]) -> Iterator[str]:
    zero = config.zero_optimization
    stage, precision = zero.stage, config.precision
    if config.fp16.enabled and (config.bfloat16 or config.bf16).enabled:
        yield "fp16.enabled and bf16.enabled"
    if "bf16" in raw and "bfloat16" in raw:
        yield "bf16 and bfloat16, its old name"
    if config.data_types.param_dtype not in (None, precision):
        yield f"data_types.param_dtype {config.data_types.param_dtype} and the precision {precision}"
    if config.fp16.enabled and not config.fp16.loss_scale:
        first = 2.0**config.fp16.initial_scale_power
        if first < config.fp16.min_loss_scale:
            yield f"fp16.initial_scale_power (scale {first:g}) and fp16.min_loss_scale {config.fp16.min_loss_scale:g}"
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if getattr(zero, old) is not None and getattr(zero, new) is not None:
            yield f"zero_optimization.{old} and zero_optimization.{new}"
    if zero.offload_optimizer is not None and zero.offload_optimizer.ratio not in (0.0, 1.0):
        yield "offload_optimizer.ratio between 0 and 1: shards are offloaded whole"
    for name, section in zero.nvme.items():
        if not section.nvme_path:
            yield f"{name}.device 'nvme' and no {name}.nvme_path, the directory for its file"
    if zero.nvme and config.checkpoint.async_save:
        yield "device 'nvme' and checkpoint.async_save, which copies everything into memory first"
    if zero.offloads_optimizer and stage == 0:
        yield "zero_optimization.stage 0 and offload_optimizer (stages 1 to 3)"
    if zero.zero_hpz_partition_size > 1 and stage != 3:
        yield f"zero_optimization.stage {stage} and zero_hpz_partition_size (stage 3)"
    if zero.mics_shard_size > 0 and stage != 3:
        yield f"zero_optimization.stage {stage} and mics_shard_size (stage 3)"
    if zero.mics_shard_size > 0 and zero.zero_hpz_partition_size > 1:
        yield "mics_shard_size and zero_hpz_partition_size"
    if config.gradient_allreduce_op == "sum" and stage == 3:
        yield "gradient_allreduce_op 'sum' and zero_optimization.stage 3"
    if not zero.compute_grad_norm:
        if stage not in (1, 2):
            yield f"compute_grad_norm false and zero_optimization.stage {stage} (1 or 2)"
        if config.gradient_clipping > 0:
            yield f"compute_grad_norm false and gradient_clipping {config.gradient_clipping:g} (0 never clips; 1 is the default)"
        if config.fp16.enabled:
            yield "compute_grad_norm false and fp16.enabled"
    if "max_grad_norm" in config.optimizer.params:
        yield "optimizer.params.max_grad_norm and gradient_clipping, which is the one that is read"
