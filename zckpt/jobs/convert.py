"""Consolidation, the main job of `to-*` and `zckpt.convert`: open, select and rename, lay out, route, check, move, publish."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.base.progress import Progress
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import F32, DType
from zckpt.core.plan import Plan
from zckpt.engine import replicas
from zckpt.jobs.base_model import complete
from zckpt.jobs.left_out import find_left_out
from zckpt.jobs.merged import kept_dtype, merged_with, with_merge
from zckpt.jobs.open import Opened, open_catalog, strip_wrappers
from zckpt.jobs.options import Options, output_dtype, to_dtype
from zckpt.jobs.planned import Planned, Report, carried_out, protected
from zckpt.jobs.selection import settled
from zckpt.layouts.plain.read import WeightsTarget, lay_out
from zckpt.layouts.save.companions import config_file, read_own_config
from zckpt.naming.adapter_names import is_adapter_file, unmerged
from zckpt.naming.transform import Form, formed, matches
from zckpt.output.names import FILES
from zckpt.output.order import Order
from zckpt.output.publish import check_output
from zckpt.output.signature import signing_of
from zckpt.quantized.configs import without
from zckpt.storage.location import Location, locate


@dataclass(frozen=True, slots=True)
class PlannedConversion(Planned):
    """A conversion that is planned but not begun; further attributes as in `Planned`.

    Attributes:
        options: what was asked for.
        sources: what the written tensors are computed from, where they are no copies.
        beside: what the output is made from beside the checkpoint: a base model, adapters.
    """

    options: Options
    sources: tuple[Catalog, ...] = field(default=(), kw_only=True)
    beside: tuple[Opened, ...] = field(default=(), kw_only=True)

    @property
    def made_from(self) -> tuple[Opened, ...]:
        """As in `Planned`."""
        return (self.opened, *self.beside)

    def check(self) -> tuple[str, ...]:
        """As in `Planned`; with `allow_unknown_layout`, a contradiction is a sentence and not an error."""
        if not self.options.allow_unknown_layout:
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
    options: Options | None = None,
    progress: Progress = None,
) -> Report:
    """Writes a checkpoint's whole weights, in constant memory; returns what it wrote.

    Run it again after an interruption: it resumes. When `out` is this conversion's complete output already, it does nothing.

    Args:
        checkpoint: a checkpoint directory, tag directory, trainer's output directory, or weights; or an address that fsspec
            reaches (`s3://bucket/run`).
        out: a name ending in .bin, .pt or .safetensors for one file; anything else is a directory of shards that
            `transformers` loads. It may be an address too; for `hf://` there is `zckpt.push_to_hub`.
        dtype: "fp32", "fp16" or "bf16", for trained and frozen parameters; buffers and integers keep theirs.
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        options: everything else, such as `Options(overwrite=True)`; its dtype is overridden by `dtype`.
        progress: a function that is called with the bytes written so far, and with the total if it takes a second argument; None
            shows a bar in a terminal or notebook, False shows none.

    Raises:
        NotACheckpointError: there is no checkpoint at `checkpoint`.
        IncompleteError, CorruptError, InconsistentError: files are missing or damaged, or do not fit together.
        CastError: numbers are too large for `dtype`; `Options(overflow="clamp")` or "inf" writes them all the same.
        OutputError: `out` exists (`Options(overwrite=True)` replaces it), cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        zckpt.convert("out/checkpoint-500", "weights/", dtype="bf16")
    """
    began = time.perf_counter()
    options = options or Options()
    chosen = replace(options, dtype=to_dtype(dtype), tag=tag or options.tag, also=also or options.also)
    return carried_out(prepare(checkpoint, out, chosen), progress, "convert", began)


def prepare(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], options: Options, opened: Opened | None = None
) -> PlannedConversion:
    """Everything but the work: opens, selects, lays out, and refuses what cannot succeed. Writes nothing.

    Args:
        checkpoint: as for `convert`.
        out: as for `convert`; empty for a directory whose files the caller makes and takes one by one.
        options: what is to be done.
        opened: the checkpoint, where it is open already.
    """
    source, place = locate(checkpoint), locate(out)
    if place.path.lower().startswith("hf://"):
        raise UsageError(
            "OUT cannot be a page of the hub here", file=place, remedy="Use zckpt.push_to_hub(checkpoint, repo_id)."
        )
    if opened is None:
        opened = open_catalog(source, options)
    target, single = _target(place, options)
    catalog, stripped = strip_wrappers(opened.catalog)
    bare = catalog
    is_copy = options.dtype is None and opened.quantization is not None  # which is as good as what it is copied from
    if options.lora is None and not is_copy:
        check_wanted(opened, catalog, options)
    merge = None if options.lora is None else merged_with(opened, catalog, options.lora)
    if place.path:
        named = (options.form.config, options.form.layer_names)
        inputs = protected(opened, source, beside=options.beside, named=named)
        for other in () if merge is None else merge.made_from:
            inputs |= {other.place.home, *protected(other, other.place.home)}
        check_output(place, single=single, overwrite=options.overwrite, protected=inputs, merge=options.merge)
    if merge is None and not single and is_adapter_file(catalog) and options.form == Form():
        raise UsageError(
            "is an adapter of PEFT, and no model", file=source, found=f"tensors such as {examples(catalog)}",
            expected="a model, or an adapter and its base",
            remedy="Use to-peft, which writes the adapter with its config; or --merge-lora --base MODEL for merged weights; or "
            "give OUT the name of one file.",
        )  # fmt: skip
    if merge is not None:
        catalog, stripped = merge.catalog, (*stripped, *merge.notes)
    elif note := unmerged(catalog):
        stripped = (*stripped, note)
    if not single and opened.other_class:
        note = f"The config names a causal language model; the weights have the head of {opened.other_class}, which is written."
        stripped = (*stripped, note)
    completion = None
    if options.base is not None and merge is None:
        completion = complete(catalog, options.base)
        catalog, stripped = completion.catalog, (*stripped, *completion.notes)
        if place.path:
            inputs = protected(completion.base, completion.base.place.home, beside=True)
            check_output(place, single=single, overwrite=options.overwrite, protected=inputs, merge=options.merge)
    home = merge.place if merge else opened.place
    form = formed(catalog, home, options.form, to_directory=not single, exclude=options.exclude)
    options, said = settled(form.catalog, options, before=catalog)
    catalog = select(form.catalog, options)
    wanted = [(entry, output_dtype(entry, options.dtype or kept_dtype(entry))) for entry in catalog.tensors.values()]
    destination = lay_out(wanted, catalog.aliases, target)
    if not single:
        usual = options.dtype or usual_dtype(destination.entries.values())
        known = opened.config(form.config or (merge.config if merge else None))
        if merge is not None:
            known = read_own_config(home.home, home.named) if known is None else without(known)
        config = config_file(known, usual)
        destination = replace(destination, files=(*destination.files, *([config] if config else [])))
    if not is_copy:
        opened.check_read(catalog.tensors.values())
    plan = Plan(destination.files, [(catalog.tensors[name], entry) for name, entry in destination.entries.items()])
    copies: Sequence[tuple[Location, str]] = ()
    if not single:
        copies, left_out = (merge.copies, ()) if merge else opened.companions()
        stripped = (*stripped, *left_out)
    recorded = form.recorded if merge is None else with_merge(form.recorded, merge.recorded)
    recorded = recorded if completion is None else {**recorded, **completion.recorded}
    others = {} if merge is None else dict(merge.given_up)
    others |= {name: "original" for name in bare if merge is not None and ".original_module." in name}
    if merge is not None and opened.packed is not None:
        others |= dict.fromkeys(bare.tensors.keys() - opened.without_packed(bare).tensors.keys(), "packed")
    fates = find_left_out(
        bare, catalog.tensors, options, selectable=form.catalog.tensors, rules={**others, **form.dropped}
    )
    order = replace(order_for(options, plan, place, catalog, copies, recorded, single=single), left_out=fates)
    notes = opened.catalog.source.notes + stripped + form.notes + said
    if completion is not None:
        return PlannedConversion(opened, order, notes, options, beside=(completion.base,))
    if merge is None:
        return PlannedConversion(opened, order, notes, options)
    return PlannedConversion(opened, order, notes, options, sources=merge.sources, beside=merge.made_from)


_SELECTION = ("include", "exclude", "exclude_frozen", "strip_prefix", "rename", "overflow")


def _recorded(options: Options) -> dict[str, object]:
    """What the manifest says was asked for: all that changes tensors, and is not as it always is."""
    usual = Options()
    asked = {name: getattr(options, name) for name in _SELECTION}
    recorded = {name: value for name, value in asked.items() if value and value != getattr(usual, name)}
    return recorded | ({} if options.read_options is None else {"wishes": options.read_options.as_json()})


def order_for(
    options: Options,
    plan: Plan,
    out: Location,
    catalog: Catalog,
    copies: Iterable[tuple[Location, str]],
    recorded: Mapping[str, object] | None = None,
    *,
    single: bool = False,
) -> Order:
    """The order of a conversion with these options; `recorded` is what the manifest says beyond them."""
    return Order(
        plan=plan,
        out=out,
        catalog=catalog,
        dtype=options.dtype,
        options={**_recorded(options), **(recorded or {})},
        single=single,
        copies=tuple(copies),
        overflow=options.overflow,
        overwrite=options.overwrite,
        merge=options.merge,
        buffer=options.buffer,
        pace=options.pace,
        signing=signing_of(options.sign),
    )


def _target(out: Location, options: Options) -> tuple[WeightsTarget, bool]:
    suffix = os.path.splitext(out.name)[1]
    single = suffix in FILES and not out.path.endswith("/")
    wanted = options.format
    if single:
        if wanted is not None and wanted != FILES[suffix]:
            raise UsageError(
                f"--format {wanted} does not fit the name of OUT", file=out, found=f"the suffix {suffix}",
                remedy="Leave --format out, or change the name.",
            )  # fmt: skip
        return WeightsTarget(FILES[suffix], file=out.resolved().name), True
    return WeightsTarget(wanted or "safetensors", max_shard_size=options.max_shard_size), False


def select(catalog: Catalog, options: Options) -> Catalog:
    """The tensors that are wanted, under their new names.

    Raises:
        UsageError: none is left, or a wish makes no sense. InconsistentError: two would have one name.
    """
    try:
        patterns = [(re.compile(pattern), new) for pattern, new in options.rename]

        def renamed(name: str) -> str:
            name = name.removeprefix(options.strip_prefix)
            for pattern, new in patterns:
                name = pattern.sub(new, name)
            return name

        selected = catalog.select(lambda entry: _is_wanted(entry, options)).rename(renamed)
    except re.error as error:
        raise UsageError(
            "--rename is not a regular expression",
            found=str(error),
            remedy="Write --rename as PATTERN=REPLACEMENT, in the syntax of Python's re.",
        ) from error
    if not selected.tensors:
        raise UsageError(
            "there is nothing to convert", file=catalog.source.path, found=f"none of {len(catalog):,} tensors selected",
            remedy=f"Check --include and --exclude; names look like {examples(catalog)}.",
        )  # fmt: skip
    if not all(selected.tensors) or any("\0" in name for name in selected.tensors):
        raise UsageError(
            "--rename or --strip-prefix would leave a tensor without a name", remedy="Change these options."
        )
    return selected


def _is_wanted(entry: TensorEntry, options: Options) -> bool:
    if options.exclude_frozen and entry.role == "frozen":
        return False
    if options.include and not matches(entry.name, options.include):
        return False
    return not matches(entry.name, options.exclude)


def check_wanted(opened: Opened, catalog: Catalog, options: Options) -> None:
    """Makes sure that nothing that is wanted is packed, before a form of names meets tensors that it cannot understand.

    Args:
        opened: the checkpoint.
        catalog: its tensors, without what wrappers put into their names.
        options: which are wanted.

    Raises:
        UnsupportedError: one is packed; it names the quantisation.
    """
    opened.check_read(entry for entry in catalog.tensors.values() if _is_wanted(entry, options))


def usual_dtype(entries: Iterable[TensorEntry]) -> DType:
    """The dtype that most floating elements have."""
    numels: Counter[DType] = Counter()
    for entry in entries:
        if entry.dtype.kind == "float":
            numels[entry.dtype] += entry.numel
    return numels.most_common(1)[0][0] if numels else F32
