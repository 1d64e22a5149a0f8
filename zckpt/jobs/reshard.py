"""From one shape to another: a ZeRO checkpoint for another world size, stage or precision, ready to resume from.

For `zckpt reshard`, and in part for `to-universal`. Masters and optimizer states are moved byte by byte; counters,
schedules, settings and client state go along. The steps are those of every job: read, lay out, route, move, publish.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypedDict, TypeVar, Unpack

from zckpt import layouts
from zckpt.base.errors import UsageError
from zckpt.base.pace import DEFAULT_PACE, Pace
from zckpt.base.progress import Progress, reported
from zckpt.core.catalog import Catalog
from zckpt.core.dtypes import BF16, F16, DType
from zckpt.core.plan import Plan, literal_file
from zckpt.engine import replicas
from zckpt.jobs.convert import Report, protected, to_dtype
from zckpt.jobs.open import Opened, open_catalog
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.companions import companions, config_file
from zckpt.layouts.save.listing import ReadOptions
from zckpt.layouts.zero.torch_files import Laid
from zckpt.layouts.zero.write import DEFAULT_SUB_GROUP_SIZE, ZeroTarget, lay_out
from zckpt.output.checks import check_output
from zckpt.output.delivery import Order, deliver
from zckpt.storage.paths import local


class CheckpointTarget(Protocol):
    """What every form of checkpoint says of itself."""

    @property
    def tag(self) -> str:
        """Its tag directory."""

    @property
    def precision(self) -> DType:
        """The module's own weights."""

    def as_json(self) -> dict[str, object]:
        """What a manifest says of it."""


T = TypeVar("T", bound=CheckpointTarget)
T_co = TypeVar("T_co", bound=CheckpointTarget, covariant=True)


@dataclass(frozen=True, slots=True)
class PlannedReshard(Generic[T_co]):
    """A checkpoint in another form that is planned but not begun.

    Attributes:
        opened: the checkpoint.
        target: the form of the new one.
        plan: where every byte goes.
        out: the output directory.
        copies: (path, name) of small files copied beside the tag.
        overwrite: replace an existing output.
        notes: sentences a person should see.
    """

    opened: Opened
    target: T_co
    plan: Plan
    out: str
    copies: tuple[tuple[str, str], ...]
    overwrite: bool
    notes: tuple[str, ...]


class How(TypedDict, total=False):
    """What can be said of any such job.

    Attributes:
        tag: which save, where there are several.
        also: directories laid over the checkpoint.
        overwrite: replace an existing output.
        allow_unknown_layout: go on though an optimizer file holds keys that zckpt does not know.
        wishes: what a person says of a model-parallel checkpoint that does not say it itself.
    """

    tag: str | None
    also: Sequence[str | os.PathLike[str]]
    overwrite: bool
    allow_unknown_layout: bool
    wishes: ReadOptions | None


def opened_run(checkpoint: str, out: str, **how: Unpack[How]) -> tuple[Opened, Training]:
    """A checkpoint with all that a run needs to go on, once it is clear that `out` may be written.

    Raises:
        ZckptError: one of its kinds says what is wrong.
    """
    unknown = how.get("allow_unknown_layout", False)
    opened = open_catalog(
        checkpoint, how.get("tag"), how.get("also", ()), allow_unknown_layout=unknown, wishes=how.get("wishes")
    )
    training = layouts.read_training(opened.place.listing, allow_unknown=unknown)
    check_output(out, single=False, overwrite=how.get("overwrite", False), protected=protected(opened, checkpoint))
    return opened, training


def prepare(
    checkpoint: str,
    out: str,
    *,
    world_size: int,
    stage: int | None = None,
    precision: str | DType = "keep",
    **how: Unpack[How],
) -> PlannedReshard[ZeroTarget]:
    """Everything but the work. Writes nothing.

    Args:
        checkpoint: any form of a ZeRO checkpoint.
        out: the directory for the new one: a tag directory, `latest`, and what lies beside the old one.
        world_size: data-parallel ranks that will resume.
        stage: 1, 2 or 3; None for the one it has.
        precision: dtype of the module's own weights, "fp32", "fp16" or "bf16"; "keep" for the one it has.
        how: see `How`.

    Raises:
        ZckptError: one of its kinds says what is wrong.
    """
    if world_size < 1 or stage not in (None, 1, 2, 3):
        raise UsageError("an impossible target", found=f"world size {world_size}, stage {stage}")
    out = local(out)
    opened, training = opened_run(checkpoint, out, **how)
    dtype = training.precision if precision == "keep" else to_dtype(precision)
    target = target_of(opened.catalog, training, world_size, stage, dtype)
    training = replace(training, model=_with_config(training.model, target, training.precision))
    laid = lay_out(opened.catalog, training, target)
    return planned(opened, target, laid, out, "latest", overwrite=how.get("overwrite", False))


def planned(opened: Opened, target: T, laid: Laid, out: str, pointer: str, *, overwrite: bool) -> PlannedReshard[T]:
    """The files of a save, with the file that names its tag and the model's config made true."""
    home = opened.place.home
    config = config_file(home, target.precision)
    files = (*laid.files, literal_file(pointer, target.tag.encode()), *([config] if config else []))
    plan = Plan(files, laid.pairs)
    return PlannedReshard(opened, target, plan, out, tuple(companions(home)), overwrite, opened.catalog.source.notes)


def target_of(catalog: Catalog, training: Training, world_size: int, stage: int | None, precision: DType) -> ZeroTarget:
    """The save that DeepSpeed's engine would write from the same config at this world size and stage."""
    config = training.model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    zero = zero if isinstance(zero, Mapping) else {}
    stage = stage or catalog.source.zero_stage or 1
    size = zero.get("sub_group_size", DEFAULT_SUB_GROUP_SIZE)
    return ZeroTarget(
        tag=catalog.source.tag or "global_step0",
        stage=stage,
        world_size=world_size,
        precision=precision,
        form="bf16" if training.form == "bf16" and stage == 1 and precision == BF16 else "zero",
        round_robin=zero.get("round_robin_gradients") is True,
        align=zero.get("parameter_alignment") is True,
        sub_group_size=int(size) if isinstance(size, int | float) and size >= 1 else DEFAULT_SUB_GROUP_SIZE,
    )


def _with_config(model: Mapping[str, object], target: ZeroTarget, before: DType) -> dict[str, object]:
    """The config that the files carry, made true."""
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


def execute(
    prepared: PlannedReshard[T], progress: Callable[[int], None] | None = None, pace: Pace = DEFAULT_PACE
) -> Report:
    """Checks, moves and publishes; goes on where an interrupted run of the same job ended.

    Raises:
        ZckptError: one of its kinds says what is wrong; nothing stands under the output's name then.
    """
    began = time.perf_counter()
    replicas.check(prepared.opened.catalog)
    catalog = prepared.opened.catalog
    done = deliver(
        Order(
            plan=prepared.plan, out=prepared.out, catalog=catalog, options=prepared.target.as_json(), copies=prepared.copies,
            overwrite=prepared.overwrite, pace=pace,
        ),
        progress,
    )  # fmt: skip
    return Report(
        files=done.files,
        tensors=len(catalog),
        numel=catalog.numel,
        bytes_written=done.bytes_written,
        seconds=time.perf_counter() - began,
        engine=done.engine,
        kept=done.kept,
        overflows={},
        notes=(*prepared.notes, *done.notes),
        already_done=done.already_done,
    )


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
    wishes: ReadOptions | None = None,
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
        wishes: how tensor- and pipeline-parallel files are joined, where they do not say it themselves.
        progress: a function that is called with the bytes written so far, and with the total if it takes a second argument; None
            shows a bar in a terminal or notebook, False shows none.

    Returns:
        What was written: files, tensors, bytes, seconds, and notes for a person.

    Raises:
        UsageError: a world size or stage that does not exist.
        UnsupportedError: the checkpoint has no optimizer states that zckpt reads.
        OutputError: `out` exists, cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        zckpt.reshard("out/checkpoint-500", "resumable/", world_size=4, stage=3)
    """
    prepared = prepare(
        *(os.fspath(checkpoint), os.fspath(out)), world_size=world_size, stage=stage, precision=precision, tag=tag, also=also,
        overwrite=overwrite, allow_unknown_layout=allow_unknown_layout, wishes=wishes,
    )  # fmt: skip
    with reported(progress, prepared.plan.bytes_written, "reshard") as watch:
        return execute(prepared, watch)
