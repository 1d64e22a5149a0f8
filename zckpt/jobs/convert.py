"""Consolidation, the main job of `to-*` and `zckpt.convert`: open, select and rename, lay out, route, check, move, publish."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.base.progress import Progress
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, TensorColumns, usual_dtype
from zckpt.core.dtypes import DType
from zckpt.core.ledger import Fate
from zckpt.core.plan import Plan, pairs_of
from zckpt.engine import replicas
from zckpt.jobs.casting import dtype_of, output_dtype, to_dtype
from zckpt.jobs.declarations import CONVERT, Asked
from zckpt.jobs.open import Opened, read_model
from zckpt.jobs.opened import WorkingModel, working_model
from zckpt.jobs.planned import Planned, Report, carry_out, find_left_out, protected_places
from zckpt.jobs.steps import record_of, steps_of
from zckpt.layouts.plain.write import LaidOutFiles, WeightsTarget, is_for_columns, lay_out, lay_out_columns
from zckpt.layouts.save.companions import config_file
from zckpt.output.names import FILES
from zckpt.output.order import Order
from zckpt.output.publish import check_output
from zckpt.storage.fsspec_io import is_page
from zckpt.storage.location import Location, locate

if TYPE_CHECKING:
    from zckpt.jobs.options import Options


@dataclass(frozen=True, slots=True)
class PlannedConversion(Planned):
    """A conversion that is planned but not begun; further attributes as in `Planned`.

    Attributes:
        asked: what was asked for.
        sources: what the written tensors are computed from, where they are not copies.
        inputs: what the output is made from, where that is not the checkpoint alone: a base model, adapters, other checkpoints.
    """

    asked: Asked[object]
    sources: tuple[Catalog, ...] = field(default=(), kw_only=True)
    inputs: tuple[Opened, ...] = field(default=(), kw_only=True)

    @property
    def made_from(self) -> tuple[Opened, ...]:
        """As `Planned.made_from`."""
        return self.inputs or (self.opened,)

    def check(self) -> tuple[str, ...]:
        """As `Planned.check`; with `allow_unknown_layout`, a contradiction is a sentence and not an error."""
        if not self.asked.reading.allow_unknown_layout:
            for source in self.sources:
                replicas.check(source)
            return Planned.check(self)
        bad = [entry.name for catalog in (*self.sources, self.catalog) for entry, *_ in replicas.disagreements(catalog)]
        if not bad:
            return ()
        return (
            f"{count(len(bad), 'fp32 weight')} of the optimizer, rounded, would not give the model's own: {examples(bad)}.",
        )


def convert(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | DType = "fp32",
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    exclude_frozen: bool = False,
    strip_prefix: str = "",
    base: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    options: Options | None = None,
    progress: Progress = None,
    together: bool = False,
    **more: Any,
) -> Report:
    """Writes a checkpoint's consolidated weights, in constant memory; returns what it wrote.

    Run it again after an interruption: it resumes. When `out` is this conversion's complete output already, it does nothing.

    Args:
        checkpoint: a checkpoint directory, tag directory, trainer's output directory, or weights; or an address that fsspec
            reaches (`s3://bucket/run`).
        out: a name ending in .bin, .pt or .safetensors for one file; anything else is a directory of shards that
            `transformers` loads. It may be an address too; for `hf://` there is `zckpt.push_to_hub`.
        dtype: "fp32", "fp16" or "bf16", for trained and frozen parameters; buffers and integers keep theirs.
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        overwrite: replace an existing output.
        max_shard_size: of a directory's shards: bytes, or a text such as "2GB".
        include: globs; only tensors with a name that matches one are written.
        exclude: globs; tensors with a name that matches one are left out.
        exclude_frozen: leave out parameters that were not trained.
        strip_prefix: taken off every name that has it; "auto" for what wraps all names.
        base: the model that an adapter was trained on, or that a save without frozen parameters began with.
        threads: that move data; None for the default.
        options: these and all others together; its dtype is overridden by `dtype`, and its others by what is given beside it.
        progress: a function that is called with the bytes written so far, and with the total if it takes a second argument; None
            shows a bar in a terminal or notebook, False shows none.
        together: every rank that torchrun or srun started makes this call, and they share the work; by default each call is
            alone.
        more: further fields of `Options`, for those who make no `Options` of them: `keep_dtype=["*.router.*"]`, `best=True`.

    Raises:
        TypeError: `Options` has no field of such a name.
        NotACheckpointError: there is no checkpoint at `checkpoint`.
        IncompleteError, CorruptError, InconsistentError: files are missing or damaged, or do not fit together.
        CastError: numbers are too large for `dtype`; `Options(overflow="clamp")` or "inf" writes them all the same.
        OutputError: `out` exists (`Options(overwrite=True)` replaces it), cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> report = zckpt.convert("run", "weights/", dtype="bf16", progress=False)
        >>> report.tensors, [path for path, nbytes in report.files]
        (11, ['model.safetensors', 'config.json', 'generation_config.json'])
    """
    from zckpt.jobs.options import Options
    from zckpt.team.together import working_together

    given = Options(
        overwrite=overwrite, max_shard_size=max_shard_size, include=include, exclude=exclude,
        exclude_frozen=exclude_frozen, strip_prefix=strip_prefix, base=base, threads=threads,
    )  # fmt: skip
    options = (options or Options()).with_others(given, more)
    asked = options.split(CONVERT, dtype=to_dtype(dtype), tag=tag, also=also)
    with working_together(together):
        return carry_out(lambda: prepare(checkpoint, out, asked), progress, "convert")


def prepare(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], asked: Asked[object], opened: Opened | None = None
) -> PlannedConversion:
    """Opens, selects, lays out, and refuses what cannot succeed. Writes nothing.

    Args:
        checkpoint: as for `convert`.
        out: as for `convert`; empty for a directory with files that the caller makes and takes one by one.
        asked: its options.
        opened: the checkpoint, where it is open already.
    """
    source, place = locate(checkpoint), locate(out)
    if is_page(place.path):
        raise UsageError(
            "OUT cannot be a page of the hub here", file=place, remedy="Use zckpt.push_to_hub(checkpoint, repo_id)."
        )
    target, single = _target(place, asked)
    model = read_model(source, asked.reading) if opened is None else working_model(opened)
    for step in steps_of(asked, to_directory=not single, is_read=opened is not None):
        model = step(model)
    if place.path:  # else the caller takes the files
        inputs = _inputs_of(model, asked, source, single=single and not place.is_remote)
        how = asked.publishing
        check_output(place, single=single, overwrite=how.overwrite, protected=inputs, merge=how.merge)
    asked = replace(asked, naming=model.naming)
    destination, recorded, notes = _lay_out(model, asked, target)
    plan = Plan(destination.files, pairs_of(model.catalog.tensors, destination.entries))
    if not single:
        plan = plan.with_files(config_file(model.config, asked.casting.dtype or usual_dtype(destination.entries)))
    order = order_for(asked, plan, place, model.catalog, model.copies or (), recorded, find_left_out(
        model.source, model.catalog.tensors, asked.selecting, selectable=model.selectable, rules=model.given_up
    ), single=single)  # fmt: skip
    return PlannedConversion(
        model.opened, order, (*model.notes, *notes), asked,
        sources=model.sources, inputs=(model.opened, *model.made_from), trained=model.trained,
    )  # fmt: skip


def _inputs_of(model: WorkingModel, asked: Asked[object], source: Location, *, single: bool) -> set[Location]:
    """What the output must leave alone; `source`: the checkpoint as it was named, `single`: for one file on a disk."""
    named = (asked.naming.form.config, asked.naming.form.layer_names)
    inputs = protected_places(model.opened, source, beside=asked.publishing.beside or single, named=named)
    for other in model.made_from:
        inputs |= protected_places(other, other.place.home, beside=not model.is_merged)
        if other.place.listing.directory.is_dir():  # else it is one file, beside which an output may be
            inputs.add(other.place.home)
    return inputs


def _lay_out(
    model: WorkingModel, asked: Asked[object], target: WeightsTarget
) -> tuple[LaidOutFiles, dict[str, object], tuple[str, ...]]:
    """The files with a place for each tensor, what the manifest says of the model, and sentences for the user."""
    tensors = model.catalog.tensors
    recorded = {name: model.recorded[name] for name in ("form", "base") if name in model.recorded}
    notes: tuple[str, ...] = ()
    is_usual = asked.casting.like is None and not asked.casting.keep_dtype and not model.is_merged
    if is_usual and isinstance(tensors, TensorColumns) and not model.catalog.aliases:
        dtypes = [output_dtype(form, asked.casting.dtype) for form in tensors.forms]
        if is_for_columns(tensors, dtypes, target):
            return lay_out_columns(tensors, dtypes, target), recorded, notes
    wanted = {name: dtype_of(entry, asked.casting, is_merged=model.is_merged) for name, entry in tensors.items()}
    if asked.casting.like is not None:
        from zckpt.jobs.like_base import read_like

        like, usual = read_like(asked.casting.like), wanted
        wanted = {name: like.dtype_of(tensors[name], dtype) for name, dtype in usual.items()}
        target = like.target(target, tensors)
        recorded |= like.record(wanted, usual, target)
        notes = tuple(like.notes(model.catalog))
    pairs = list(zip(tensors.values(), wanted.values(), strict=True))
    del wanted  # of a million tensors, 80 MB
    return lay_out(pairs, model.catalog.aliases, target), recorded, notes


def order_for(
    asked: Asked[object],
    plan: Plan,
    out: Location,
    catalog: Catalog,
    copies: Iterable[tuple[Location, str]],
    recorded: Mapping[str, object] | None = None,
    left_out: tuple[Fate, ...] = (),
    *,
    single: bool = False,
) -> Order:
    """The order of a conversion with these options; `recorded` is what the manifest says beyond them, `left_out` as in
    `find_left_out`.
    """
    return Order(
        plan=plan,
        out=out,
        catalog=catalog,
        dtype=asked.casting.dtype,
        options={**record_of(asked), **(recorded or {})},
        single=single,
        copies=tuple(copies),
        overflow=asked.casting.overflow,
        overwrite=asked.publishing.overwrite,
        merge=asked.publishing.merge,
        buffer=asked.pacing.buffer,
        pace=asked.pacing.pace,
        signing=asked.signing_key.signing(),
        left_out=left_out,
    )


def _target(out: Location, asked: Asked[object]) -> tuple[WeightsTarget, bool]:
    suffix = os.path.splitext(out.name)[1]
    single = suffix in FILES and not out.path.endswith("/")
    wanted = asked.sharding.format
    if single:
        if wanted is not None and wanted != FILES[suffix]:
            raise UsageError(
                f"--format {wanted} does not fit the name of OUT", file=out, found=f"the suffix {suffix}",
                remedy="Leave --format out, or change the name.",
            )  # fmt: skip
        return WeightsTarget(FILES[suffix], file=out.resolved().name), True
    return WeightsTarget(wanted or "safetensors", max_shard_size=asked.sharding.max_shard_size), False
