"""`zckpt reshard` and `zckpt to-universal`: a checkpoint for another number of ranks, and one for any number."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from zckpt.base.words import count
from zckpt.cli.declare import Checkpoint, DryRun, OutDirectory, ShownProgress, command
from zckpt.cli.written import Words, finish
from zckpt.jobs.declarations import RESHARD, TO_STATES, TO_UNIVERSAL

if TYPE_CHECKING:
    from zckpt.jobs.declarations import Asked
    from zckpt.jobs.own_groups import TargetWorld
    from zckpt.jobs.reshard import PlannedReshard


@command(
    "reshard",
    about="Write a ZeRO checkpoint for another world size, stage or precision. DeepSpeed resumes from it without changes.",
    job=RESHARD,
    example="zckpt reshard out/checkpoint-500 resumable/ --world-size 4 --stage 3",
)
def reshard(
    ckpt: Checkpoint, out: OutDirectory, asked: Asked[TargetWorld], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes a checkpoint of another shape."""
    from zckpt.core.dtypes import SHORT_NAMES

    planned = RESHARD.prepare(ckpt, out, asked)
    facts: dict[str, object] = {
        "tag": planned.tag, "precision": planned.precision.torch_name, "zero_stage": planned.stage,
        "world_size": asked.own.world_size,
    }  # fmt: skip
    ranks, dtype = count(asked.own.world_size, "rank"), SHORT_NAMES[planned.precision]
    what = f"ZeRO-{planned.stage} for {ranks} in {dtype}, tag {planned.tag}"
    finish(planned, Words(what, partial(_resuming, planned.out), facts), shown, dry_run=dry_run)


@command(
    "to-universal",
    about="Write a universal checkpoint. DeepSpeed resumes from it at any world size and any tensor or pipeline split.",
    job=TO_UNIVERSAL,
    example="zckpt to-universal out/checkpoint-500 universal/",
)
def to_universal(
    ckpt: Checkpoint, out: OutDirectory, asked: Asked[None], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes a universal checkpoint."""
    planned = TO_UNIVERSAL.prepare(ckpt, out, asked)
    facts: dict[str, object] = {
        "tag": planned.tag, "precision": planned.precision.torch_name, "resume": how_to_resume(planned),
    }  # fmt: skip
    what = f"a universal checkpoint of {count(len(planned.catalog), 'tensor')}, tag {planned.tag}"
    finish(planned, Words(what, lambda files: _loading(planned, files), facts), shown, dry_run=dry_run)


@command(
    "to-states",
    about="Write the optimizer's states as safetensors: tensors such as exp_avg/model.norm.weight, with steps and parameter "
    "groups as JSON.",
    job=TO_STATES,
    example="zckpt to-states out/checkpoint-500 states/ --include 'exp_avg/*'",
)
def to_states(
    ckpt: Checkpoint, out: OutDirectory, asked: Asked[None], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes optimizer states."""
    planned = TO_STATES.prepare(ckpt, out, asked)
    what = f"{count(len(planned.catalog), 'optimizer state')}"
    loader = f"safetensors.torch.load_file('{planned.out.rstrip('/')}/optimizer_states.safetensors')"
    several = f"safetensors.safe_open, by {planned.out.rstrip('/')}/optimizer_states.safetensors.index.json"
    finish(
        planned,
        Words(what, lambda files: f"load them with {several if any('-of-' in f for f in files) else loader}"),
        shown, dry_run=dry_run,
    )  # fmt: skip


def how_to_resume(planned: PlannedReshard) -> dict[str, object]:
    """What DeepSpeed needs to load the universal checkpoint: config entries, the call, and the tag."""
    from zckpt.core.dtypes import BF16, F16

    precision = planned.precision
    stage = planned.catalog.source.zero_stage
    enabled = {name: {"enabled": True} for name, dtype in {"bf16": BF16, "fp16": F16}.items() if dtype == precision}
    return {
        "config": {"checkpoint": {"load_universal": True}, "zero_optimization": {"stage": stage or 1}, **enabled},
        "stages": [3] if stage == 3 else [1, 2],
        "command": f"engine.load_checkpoint({planned.out!r}, tag={planned.tag!r})",
        "tag": planned.tag,
    }


def _loading(planned: PlannedReshard, files: set[str]) -> str:
    """The lines on how to resume, and on how the trainers that left the files load them."""
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
