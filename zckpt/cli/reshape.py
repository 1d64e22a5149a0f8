"""`zckpt reshard` and `zckpt to-universal`: a checkpoint for another number of ranks, and one for any number."""

from __future__ import annotations

import json
import time
from dataclasses import field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.base.dataclass import dataclass
from zckpt.base.words import count
from zckpt.cli import options as o
from zckpt.cli.declared import command
from zckpt.cli.written import Words, finish

if TYPE_CHECKING:
    from zckpt.jobs.reshard import PlannedReshard
    from zckpt.layouts.universal.write import UniversalTarget


class ModulePrecision(str, Enum):
    """Dtypes of the model's own weights."""

    keep = "keep"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


@dataclass(frozen=True, repr=False, eq=False)
class Shape(o.Group):
    """What the new checkpoint is for."""

    world_size: Annotated[
        int, o.what("--world-size", metavar="N", callback=o.positive, help="Data-parallel ranks.", show_default=False)
    ]
    stage: Annotated[
        int | None, o.what("--stage", metavar="1|2|3", min=1, max=3, help="ZeRO stage; by default CKPT's.")
    ] = None
    precision: Annotated[ModulePrecision, o.what("--precision", help="Dtype of the model's own weights.")] = (
        ModulePrecision.keep
    )

    def options(self) -> dict[str, object]:  # noqa: D102
        from zckpt.jobs.options import to_dtype

        precision = None if self.precision is ModulePrecision.keep else to_dtype(self.precision.value)
        return {"world_size": self.world_size, "stage": self.stage, "precision": precision}


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    command(
        app,
        "reshard",
        about="Write a ZeRO checkpoint for another world size, stage or precision. DeepSpeed resumes from it without changes.",
        example="zckpt reshard out/checkpoint-500 resumable/ --world-size 4 --stage 3",
    )(reshard)
    command(
        app,
        "to-universal",
        about="Write a universal checkpoint. DeepSpeed resumes from it at any world size and any tensor or pipeline split.",
        example="zckpt to-universal out/checkpoint-500 universal/",
    )(to_universal)
    command(
        app,
        "to-states",
        about="Write the optimizer's states as safetensors: tensors such as exp_avg/model.norm.weight, with steps and parameter "
        "groups as JSON.",
        example="zckpt to-states out/checkpoint-500 states/ --include 'exp_avg/*'",
    )(to_states)


def reshard(
    ckpt: o.Checkpoint,
    out: o.OutDirectory,
    shape: Shape,
    source: o.SourceOptions,
    speed: o.WriteSpeed,
    writing: o.Writing,
    shown: o.ShownProgress,
) -> None:
    """Writes a checkpoint of another shape."""
    from zckpt.core.dtypes import SHORT_NAMES
    from zckpt.jobs.options import ReshardOptions
    from zckpt.jobs.reshard import prepare

    began = time.perf_counter()
    planned = prepare(ckpt, out, o.chosen(ReshardOptions, shape, source, speed, writing))
    target = planned.target
    facts: dict[str, object] = {
        "tag": target.tag, "precision": target.precision.torch_name, "zero_stage": target.stage, "world_size": shape.world_size,
    }  # fmt: skip
    what = f"ZeRO-{target.stage} for {count(shape.world_size, 'rank')} in {SHORT_NAMES[target.precision]}, tag {target.tag}"
    finish(planned, Words(what, partial(_resuming, planned.out), facts), began, writing, shown)


def to_universal(
    ckpt: o.Checkpoint,
    out: o.OutDirectory,
    source: o.SourceOptions,
    speed: o.WriteSpeed,
    writing: o.Writing,
    shown: o.ShownProgress,
) -> None:
    """Writes a universal checkpoint."""
    from zckpt.jobs.options import WriteOptions
    from zckpt.jobs.to_universal import prepare

    began = time.perf_counter()
    planned = prepare(ckpt, out, o.chosen(WriteOptions, source, speed, writing))
    target = planned.target
    facts: dict[str, object] = {
        "tag": target.tag, "precision": target.precision.torch_name, "resume": how_to_resume(planned),
    }  # fmt: skip
    what = f"a universal checkpoint of {count(len(planned.catalog), 'tensor')}, tag {target.tag}"
    finish(planned, Words(what, lambda files: _loading(planned, files), facts), began, writing, shown)


@dataclass(frozen=True, repr=False, eq=False)
class StateFiles(o.Group):
    """The files of optimizer states, and which are written."""

    max_shard_size: o.MaxShardSize = o.SHARD_BYTES
    include: Annotated[
        list[str], o.what("--include", metavar="GLOB", help="Write only states that match, as exp_avg/*. Repeatable.")
    ] = field(default_factory=list)
    exclude: Annotated[
        list[str], o.what("--exclude", metavar="GLOB", help="Leave out states that match. Repeatable.")
    ] = field(default_factory=list)


def to_states(
    ckpt: o.Checkpoint,
    out: o.OutDirectory,
    files: StateFiles,
    source: o.SourceOptions,
    speed: o.WriteSpeed,
    writing: o.Writing,
    shown: o.ShownProgress,
) -> None:
    """Writes optimizer states."""
    from zckpt.jobs.options import Options
    from zckpt.jobs.to_states import prepare

    began = time.perf_counter()
    planned = prepare(ckpt, out, o.chosen(Options, files, source, speed, writing))
    what = f"{count(len(planned.catalog), 'optimizer state')}"
    loader = f"safetensors.torch.load_file('{planned.out.rstrip('/')}/optimizer_states.safetensors')"
    several = f"safetensors.safe_open, by {planned.out.rstrip('/')}/optimizer_states.safetensors.index.json"
    finish(
        planned,
        Words(what, lambda files: f"load them with {several if any('-of-' in f for f in files) else loader}"),
        began, writing, shown,
    )  # fmt: skip


def how_to_resume(planned: PlannedReshard[UniversalTarget]) -> dict[str, object]:
    """What DeepSpeed needs to load the universal checkpoint: entries of its config, the call, and the tag."""
    from zckpt.core.dtypes import BF16, F16

    precision = planned.target.precision
    stage = planned.catalog.source.zero_stage
    enabled = {name: {"enabled": True} for name, dtype in {"bf16": BF16, "fp16": F16}.items() if dtype == precision}
    return {
        "config": {"checkpoint": {"load_universal": True}, "zero_optimization": {"stage": stage or 1}, **enabled},
        "stages": [3] if stage == 3 else [1, 2],
        "command": f"engine.load_checkpoint({planned.out!r}, tag={planned.target.tag!r})",
        "tag": planned.target.tag,
    }


def _loading(planned: PlannedReshard[UniversalTarget], files: set[str]) -> str:
    """The same in lines, and how the trainers whose files are there call it."""
    found = how_to_resume(planned)
    stages = "at stage 3" if found["stages"] == [3] else "at stage 1 or 2"
    lines = [
        f"resume with {found['command']}, on any number of ranks {stages}",
        f"with this in DeepSpeed's config: {json.dumps(found['config'])}",
    ]
    if "trainer_state.json" in files:
        lines.append(f"of transformers' Trainer: trainer.train(resume_from_checkpoint={planned.out!r})")
    if any(name.startswith("random_states_") for name in files):
        lines.append(f"of accelerate: accelerator.load_state({planned.out!r})")
    return "\n".join(lines)


def _resuming(out: str, files: set[str]) -> str:
    if "trainer_state.json" in files:
        return f"resume with trainer.train(resume_from_checkpoint={out!r}), or engine.load_checkpoint({out!r})"
    if any(name.startswith("random_states_") for name in files):
        return f"resume with accelerator.load_state({out!r})"
    return f"resume with engine.load_checkpoint({out!r})"
