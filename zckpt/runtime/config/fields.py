"""Declares what a key of the config is: used, accepted without use, missed with a warning, or refused.

For the models in `sections`; `read` reads by them, and docs/config.md is made from them. One line of a
model is one key of DeepSpeed's JSON, and holds everything that is known about it.

Here are also the sections of what a run shows of itself, and of activations that are computed again. Source: DeepSpeed 0.19.8,
monitor/config.py, profiling/config.py, utils/config.py, comm/config.py and runtime/activation_checkpointing/config.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

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


class TensorBoardSection(Section):
    """Rank 0 writes losses, learning rates and loss scales for TensorBoard (`pip install tensorboard`)."""

    enabled: bool = used_key(False, "write them")
    output_path: str = used_key("", "files go into `output_path`/`job_name`; by default where the script runs")
    job_name: str = used_key("DeepSpeedJobName", "a directory in `output_path`")


class WandbSection(Section):
    """Rank 0 sends losses, learning rates and loss scales to Weights & Biases (`pip install wandb`)."""

    enabled: bool = used_key(False, "send them; with WANDB_MODE=offline they are kept in files")
    group: str | None = used_key(None, "of runs")
    team: str | None = used_key(None, "wandb's entity")
    project: str = used_key("deepspeed", "wandb's project")


class CSVSection(TensorBoardSection):
    """Rank 0 writes losses, learning rates and loss scales into CSV files, one for each name."""


class CometSection(Section):
    """Rank 0 sends losses, learning rates and loss scales to Comet (`pip install 'comet_ml>=3.41'`)."""

    enabled: bool = used_key(False, "send them")
    samples_log_interval: int = used_key(100, "samples that pass at least between two values of one name", ge=0)
    project: str | None = used_key(None, "for `comet_ml.start`; Comet's variables or its config file hold without it")
    workspace: str | None = used_key(None, "for `comet_ml.start`")
    api_key: str | None = used_key(None, "for `comet_ml.start`")
    experiment_name: str | None = used_key(None, "name of the experiment")
    experiment_key: str | None = used_key(None, "for `comet_ml.start`: 32 to 50 letters and digits")
    online: bool | None = used_key(None, "false keeps the experiment in a file")
    mode: Literal["get", "create", "get_or_create"] | None = used_key(None, "for `comet_ml.start`")


class FlopsProfilerSection(Section):
    """Rank 0 counts the operations of the forward of one step, and prints a table."""

    enabled: bool = used_key(False, "count them")
    recompute_fwd_factor: float = used_key(0.0, "share of the forward that backward repeats, for its FLOPS", ge=0.0)
    profile_step: int = used_key(1, "the step that is counted, from 0", ge=0)
    module_depth: int = used_key(-1, "the table has modules down to this depth; -1: all", ge=-1)
    top_modules: int = used_key(1, "modules of each depth, without `detailed`", ge=0)
    detailed: bool = used_key(True, "all modules in the table; otherwise the costliest of each depth")
    output_file: str | None = used_key(None, "a file for the table; by default stdout")


class ThroughputSection(Section):
    """Samples per second, logged with `steps_per_print`."""

    enabled: bool = used_key(True, "measure them")
    synchronized: bool = used_key(True, "wait for the device before and after a step")


class TimersSection(Section):
    """The parts that are timed."""

    throughput: ThroughputSection = used_key(ThroughputSection(), "see below")


class ActivationSection(Section):
    """The settings of `zckpt.runtime.checkpointing.checkpoint`, which recomputes activations in the backward."""

    partition_activations: bool = unshown_key(False, "there are no tensor-parallel ranks to share activations out over")
    number_checkpoints: int | None = unused_key(None, "only the buffer's size for `contiguous_memory_optimization`")
    contiguous_memory_optimization: bool = unshown_key(False, "kept activations are not copied into one buffer")
    synchronize_checkpoint_boundary: bool = used_key(False, "wait for the device around each call, in the backward too")
    profile: bool = used_key(False, "rank 0 prints the milliseconds of each call, and of each again in the backward")
    cpu_checkpointing: bool = used_key(False, "keep the arguments of a call in host memory until the backward")
