"""From one shape to another: a ZeRO checkpoint for another world size, stage or precision, ready to resume from.

For `zckpt reshard`, and in part for `to-universal`. Masters and optimizer states are moved byte by byte; counters,
schedules, settings and client state go along. The steps are those of every job: read, lay out, route, move, publish.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt import layouts
from zckpt.base.dataclass import dataclass
from zckpt.base.progress import Progress
from zckpt.core.catalog import Catalog, Source
from zckpt.core.dtypes import BF16, F16, DType
from zckpt.core.plan import Plan, literal_file
from zckpt.jobs.casting import to_dtype
from zckpt.jobs.declarations import RESHARD, Asked
from zckpt.jobs.open import Opened, open_asked
from zckpt.jobs.own_groups import TargetWorld
from zckpt.jobs.planned import Planned, Report, carry_out, protected_places
from zckpt.layouts.run.training import Training
from zckpt.layouts.run.values import step_of
from zckpt.layouts.save.companions import config_file, run_files
from zckpt.layouts.save.listing import ReadOptions, is_deepspeed_file
from zckpt.layouts.zero.write import DEFAULT_SUB_GROUP_SIZE, ZeroTarget, lay_out
from zckpt.output.checks import check_path
from zckpt.output.order import Order
from zckpt.storage.location import Location, locate

_STEP = re.compile(r"(?:checkpoint|global_step|step|iter)[-_]?(?P<step>\d{1,18})")


@dataclass(frozen=True, slots=True)
class PlannedReshard(Planned):
    """A checkpoint in another form that is planned but not begun; further attributes as in `Planned`.

    Attributes:
        tag: the name of its tag directory.
        precision: the dtype of the module's own weights.
        stage: of ZeRO; None for a universal checkpoint.
    """

    tag: str
    precision: DType
    stage: int | None = None


def opened_run(source: Location, out: Location, asked: Asked[object]) -> tuple[Opened, Training]:
    """Opens a checkpoint with all that a run needs to resume, after a check that `out` may be written.
    Raises a ZckptError that says what is wrong.
    """
    opened = open_asked(source, asked)
    training = layouts.read_training(opened.place.listing, allow_unknown=asked.reading.allow_unknown_layout)
    check_path(out, single=False, overwrite=asked.publishing.overwrite, protected=protected_places(opened, source))
    return opened, training


def prepare(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], asked: Asked[TargetWorld]
) -> PlannedReshard:
    """Plans a resharding; arguments as for `reshard`. Writes nothing."""
    source, place = locate(checkpoint), locate(out)
    opened, training = opened_run(source, place, asked)
    target, laid = laid_out(opened, training, asked.own)
    planned = plan_reshard(
        opened, laid, place, "latest", asked, target.tag, target.precision, target.as_json(), asked.own.world_size
    )
    return replace(planned, stage=target.stage)


def laid_out(opened: Opened, training: Training, world: TargetWorld) -> tuple[ZeroTarget, Plan]:
    """The save that is asked for, and its files. Raises a ZckptError that says why there can be none."""
    target = target_of(opened.catalog, training, world.world_size, world.stage, world.precision or training.precision)
    target = replace(target, no_frozen=_has_no_frozen(opened))
    training = replace(training, model=_with_config(training.model, target, training.precision))
    return target, lay_out(opened.catalog, training, target)


def plan_reshard(
    opened: Opened,
    laid: Plan,
    out: Location,
    pointer: str,
    asked: Asked[object],
    tag: str,
    precision: DType,
    recorded: Mapping[str, object],
    world_size: int | None = None,
) -> PlannedReshard:
    """A save with the file (`pointer`) that names its tag, the model's config with the dtype of the weights, and a
    trainer's own files; `recorded`: what the manifest says of it; `world_size`: ranks that will resume, None for any
    number.
    """
    home = opened.place.home
    config = config_file(opened.config(), precision)
    copies, notes = run_files(home, map(locate, asked.reading.also), world_size, opened.place.named)
    small, left_out = opened.companions()
    order = Order(
        plan=laid.with_files(literal_file(pointer, tag.encode()), config), out=out, catalog=opened.catalog,
        options=recorded, copies=(*small, *copies), overwrite=asked.publishing.overwrite,
        buffer=asked.pacing.buffer, pace=asked.pacing.pace, signing=asked.signing_key.signing(),
    )  # fmt: skip
    return PlannedReshard(opened, order, opened.catalog.source.notes + notes + left_out, tag, precision)


def _has_no_frozen(opened: Opened) -> bool:
    """Whether the save has no frozen parameters because the run saved none, though its model may have some, as with
    PEFT.

    DeepSpeed's engine looks for every frozen parameter in a dict, even an empty one; where there is no dict, it looks for none.
    Source: DeepSpeed 0.19.8, runtime/engine.py `load_module_state_dict`; transformers passes `exclude_frozen_parameters`.
    """
    if any(entry.role == "frozen" for entry in opened.catalog.tensors.values()):
        return False
    listing = opened.place.listing
    files = [name for name in listing.files if is_deepspeed_file(name) and name.endswith("model_states.pt")]
    return not any(isinstance(listing.entry(name, "frozen_param_fragments"), Mapping) for name in files[:1])


def tag_of(source: Source, training: Training) -> str:
    """The tag of a save; of one without, such as FSDP's, the one that DeepSpeed gives a save at this step."""
    if source.tag:
        return source.tag
    counted = source.global_steps or training.model.get("global_steps")
    if not counted:
        found = (step_of(group.scalars.get("step")) for group in training.groups)
        counted = max((step for step in found if step), default=0) or _step_in(source.path)
    return f"global_step{counted if isinstance(counted, int) else 0}"


def _step_in(path: str) -> int:
    """The step in the name of a save's directory or its parent's, as trainers name these; 0 if there is none."""
    for name in path.rstrip("/").split("/")[:-3:-1]:
        if match := _STEP.fullmatch(name):
            return int(match["step"])
    return 0


def target_of(catalog: Catalog, training: Training, world_size: int, stage: int | None, precision: DType) -> ZeroTarget:
    """The save that DeepSpeed's engine would write from the same config at this world size and stage."""
    config = training.model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    zero = zero if isinstance(zero, Mapping) else {}
    stage = stage or catalog.source.zero_stage or 1
    size = zero.get("sub_group_size", DEFAULT_SUB_GROUP_SIZE)
    return ZeroTarget(
        tag=tag_of(catalog.source, training),
        stage=stage,
        world_size=world_size,
        precision=precision,
        form="bf16" if training.form == "bf16" and stage == 1 and precision == BF16 else "zero",
        round_robin=zero.get("round_robin_gradients") is True,
        align=zero.get("parameter_alignment") is True,
        sub_group_size=int(size) if isinstance(size, int | float) and size >= 1 else DEFAULT_SUB_GROUP_SIZE,
    )


def _with_config(model: Mapping[str, object], target: ZeroTarget, before: DType) -> dict[str, object]:
    """The config in the files, adapted to the target."""
    config = model.get("ds_config")
    if not isinstance(config, Mapping):
        return dict(model)
    zero = config.get("zero_optimization")
    config = {**config, "zero_optimization": {**(zero if isinstance(zero, Mapping) else {}), "stage": target.stage}}
    if target.precision != before:
        for key, dtype in {"bf16": BF16, "fp16": F16}.items():
            section = config.get(key)
            kept = section if isinstance(section, Mapping) else {}
            if kept or target.precision == dtype:
                config[key] = {**kept, "enabled": target.precision == dtype}
    return {**model, "ds_config": config}


def reshard(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    world_size: int,
    stage: int | None = None,
    precision: str = "keep",
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    allow_unknown_layout: bool = False,
    read_options: ReadOptions | None = None,
    progress: Progress = None,
) -> Report:
    """Writes a ZeRO checkpoint for another world size, stage or precision, from which DeepSpeed and zckpt's trainer resume.

    Weights, optimizer states, step counts, schedule, loss scale and client state are kept byte for byte.

    Args:
        checkpoint: a checkpoint with optimizer states, in any layout that zckpt resumes from.
        out: the directory for the new one: `latest`, a tag directory, and the small files beside the old one.
        world_size: data-parallel ranks that will resume, at least 1.
        stage: 1, 2 or 3; None for the stage that the checkpoint has.
        precision: of the module's own weights: "fp32", "fp16" or "bf16"; "keep" for the one they have.
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        overwrite: replace an existing output: the files that its `zckpt.json` lists.
        allow_unknown_layout: continue although an optimizer file holds keys that zckpt does not know.
        read_options: how tensor- and pipeline-parallel files are joined, where they do not say it themselves.
        progress: as for `zckpt.convert`, with the bytes written so far.

    Returns:
        What was written: files, tensors, bytes, seconds, and notes for a person.

    Raises:
        UsageError: a world size or stage that does not exist.
        UnsupportedError: the checkpoint has no optimizer states that zckpt reads.
        OutputError: `out` exists, cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> zckpt.reshard("run", "run-of-4", world_size=4, progress=False).out
        'run-of-4'
    """
    dtype = None if precision == "keep" else to_dtype(precision)
    asked = RESHARD.ask(
        world_size=world_size, stage=stage, precision=dtype, tag=tag, also=also, overwrite=overwrite,
        allow_unknown_layout=allow_unknown_layout, read_options=read_options,
    )  # fmt: skip
    return carry_out(lambda: prepare(checkpoint, out, asked), progress, "reshard")
