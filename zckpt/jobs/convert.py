"""Consolidation, the main job of `to-*` and `zckpt.convert`: open, select and rename, lay out, route, check, move, publish."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zckpt.base.errors import UsageError
from zckpt.base.pace import Pace, thread_count, window_bytes
from zckpt.base.progress import Progress, reported
from zckpt.base.words import examples
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import BF16, BY_TORCH_NAME, CAST_TARGETS, F16, F32, SHORT_NAMES, DType
from zckpt.core.plan import Plan
from zckpt.engine import replicas
from zckpt.jobs.open import Opened, open_catalog, strip_wrappers
from zckpt.layouts.plain.read import Format, WeightsTarget, lay_out
from zckpt.layouts.save.companions import companions, config_file
from zckpt.layouts.save.listing import ReadOptions
from zckpt.naming.transform import Form, formed, matches
from zckpt.output import delivery_to_address
from zckpt.output.checks import check_output, keep_apart
from zckpt.output.delivery import Order, Overflow, deliver
from zckpt.storage import paths as files
from zckpt.storage.output_places import resolved

_DTYPES = {name: dtype for dtype in CAST_TARGETS for name in (SHORT_NAMES[dtype], dtype.name)}
_SUFFIXES: dict[str, Format] = {".safetensors": "safetensors", ".bin": "bin", ".pt": "bin"}


@dataclass(frozen=True, slots=True)
class Options:
    """What a conversion is to do.

    Attributes:
        dtype: of floating parameters in the output; None keeps each as it is.
        format: container; None for what OUT's suffix says, safetensors for a directory.
        max_shard_size: of a directory's shards.
        include: globs; only tensors that match one are kept.
        exclude: globs; tensors that match one are left out.
        exclude_frozen: leave out parameters that were not trained.
        strip_prefix: taken off every name that has it.
        rename: (regular expression, replacement) pairs, applied in order to every name.
        overflow: what to do with numbers too large for the dtype.
        threads: of the mover; None for its default.
        buffer: bytes that each thread gathers and writes at once; None for the default.
        keep_cache: whether the page cache keeps what is read; None: unless the job is larger than memory.
        limit_rate: at most so many bytes a second are read and written, together.
        overwrite: replace an existing output.
        merge: put the files into an existing directory instead of replacing it.
        beside: allow an output beside the input's tag directories.
        allow_unknown_layout: convert though the layout cannot be proved.
        wishes: how tensor- and pipeline-parallel files are joined, where they do not say it themselves.
        form: names and order of rows that the tensors get, as `--to`, `--config` and `--layer-names` do.
    """

    dtype: DType | None = F32
    format: Format | None = None
    max_shard_size: int | str = "5GB"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    exclude_frozen: bool = False
    strip_prefix: str = ""
    rename: Sequence[tuple[str, str]] = ()
    overflow: Overflow = "error"
    threads: int | None = None
    buffer: int | None = None
    keep_cache: bool | None = None
    limit_rate: int | None = None
    overwrite: bool = False
    merge: bool = False
    beside: bool = False
    allow_unknown_layout: bool = False
    wishes: ReadOptions | None = None
    form: Form = field(default_factory=Form)

    def __post_init__(self) -> None:
        thread_count(self.threads)
        window_bytes(self.buffer)

    @property
    def pace(self) -> Pace:
        """How hard to work, as engines are told."""
        return {"threads": self.threads, "keep_cache": self.keep_cache, "bytes_per_s": self.limit_rate}


@dataclass(frozen=True, slots=True)
class PlannedConversion:
    """A conversion that is planned but not begun.

    Attributes:
        opened: the checkpoint.
        catalog: the tensors to be written, under their new names.
        plan: where their bytes go.
        out: the output's path or address; empty when the caller takes the files of the plan one by one.
        single: whether it is one file.
        copies: (path, name) of small files copied beside the weights.
        options: what was asked for.
        notes: sentences a person should see.
        recorded: what the manifest says of it beyond the options.
    """

    opened: Opened
    catalog: Catalog
    plan: Plan
    out: str
    single: bool
    copies: tuple[tuple[str, str], ...]
    options: Options
    notes: tuple[str, ...]
    recorded: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def bytes_written(self) -> int:
        """Bytes of the whole output."""
        return self.plan.bytes_written + sum(files.size(path) for path, _ in self.copies)


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did.

    Attributes:
        files: (path relative to the output, bytes).
        tensors: tensors written; tied names count once.
        numel: elements written.
        bytes_written: bytes of all files.
        seconds: wall time, opening included.
        engine: "native" or "reference".
        kept: files that an earlier, interrupted run had finished.
        overflows: tensor name -> (elements that became infinite or were clamped, the largest of them).
        notes: sentences a person should see.
        already_done: whether this very conversion had made the output before, so that nothing was written.
    """

    files: tuple[tuple[str, int], ...]
    tensors: int
    numel: int
    bytes_written: int
    seconds: float
    engine: str
    kept: int
    overflows: dict[str, tuple[int, float]]
    notes: tuple[str, ...]
    already_done: bool


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
    chosen = replace(options or Options(), dtype=to_dtype(dtype))
    prepared = prepare(os.fspath(checkpoint), os.fspath(out), chosen, tag=tag, also=also)
    with reported(progress, prepared.plan.bytes_written, "convert") as watch:
        report = execute(prepared, watch)
    return replace(report, seconds=time.perf_counter() - began)


def to_dtype(dtype: str | DType) -> DType:
    """A dtype by any of its names: "bf16", "BF16", "bfloat16", "torch.bfloat16".

    Raises:
        UsageError: it is none that weights can be cast to.
    """
    if isinstance(dtype, DType):
        return dtype
    name = str(dtype).removeprefix("torch.")
    found = _DTYPES.get(name) or BY_TORCH_NAME.get(name)
    if found not in CAST_TARGETS:
        raise UsageError("an unknown dtype", found=repr(dtype), expected="fp32, fp16 and bf16 are known")
    return found


def prepare(
    checkpoint: str,
    out: str,
    options: Options,
    *,
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    opened: Opened | None = None,
) -> PlannedConversion:
    """Everything but the work: opens, selects, lays out, and refuses what cannot succeed. Writes nothing.

    Arguments as for `convert`. An empty `out` is a directory whose files the caller makes and takes one by one; `opened` is
    the checkpoint, where it is open already.
    """
    out = files.local(out)
    if opened is None:
        opened = open_catalog(
            checkpoint, tag, also, allow_unknown_layout=options.allow_unknown_layout, wishes=options.wishes
        )
    target, single = _target(out, options)
    _check_output(out, single, options, protected(opened, checkpoint, beside=options.beside))
    catalog, stripped = strip_wrappers(opened.catalog)
    form = formed(catalog, opened.place, options.form, to_directory=not single, exclude=options.exclude)
    catalog = select(form.catalog, options)
    wanted = [(entry, output_dtype(entry, options.dtype)) for entry in catalog.tensors.values()]
    destination = lay_out(wanted, catalog.aliases, target)
    if not single:
        usual = options.dtype or usual_dtype(destination.entries.values())
        config = config_file(opened.place.home, usual, form.config)
        destination = replace(destination, files=(*destination.files, *([config] if config else [])))
    return PlannedConversion(
        opened=opened,
        catalog=catalog,
        plan=Plan(destination.files, [(catalog.tensors[name], entry) for name, entry in destination.entries.items()]),
        out=out,
        single=single,
        copies=() if single else tuple(companions(opened.place.home)),
        options=options,
        notes=opened.catalog.source.notes + stripped + form.notes,
        recorded=form.recorded,
    )


def _check_output(out: str, single: bool, options: Options, inputs: set[str]) -> None:
    if files.is_remote(out):
        if out.lower().startswith("hf://"):
            raise UsageError("a hub's page as OUT", file=out, remedy="Use zckpt.push_to_hub(checkpoint, repo_id).")
        keep_apart(out, inputs)
        delivery_to_address.check_output(out, single=single, overwrite=options.overwrite, merge=options.merge)
    elif out:
        overwrite = options.overwrite or options.merge
        check_output(out, single=single, overwrite=overwrite, protected=inputs, merge=options.merge)


def execute(prepared: PlannedConversion, progress: Callable[[int], None] | None = None) -> Report:
    """Checks, moves and publishes; goes on where an interrupted run of the same job ended."""
    began = time.perf_counter()
    options, notes = prepared.options, [*prepared.notes, *check(prepared)]
    send = delivery_to_address.send if files.is_remote(prepared.out) else deliver
    done = send(
        Order(
            plan=prepared.plan,
            out=prepared.out,
            catalog=prepared.catalog,
            dtype=options.dtype,
            options={**_recorded(options), **prepared.recorded},
            single=prepared.single,
            copies=prepared.copies,
            overflow=options.overflow,
            overwrite=options.overwrite,
            merge=options.merge,
            buffer=options.buffer,
            pace=options.pace,
        ),
        progress,
    )
    return Report(
        files=done.files,
        tensors=len(prepared.catalog),
        numel=prepared.catalog.numel,
        bytes_written=done.bytes_written,
        seconds=time.perf_counter() - began,
        engine=done.engine,
        kept=done.kept,
        overflows=done.overflows,
        notes=(*notes, *done.notes),
        already_done=done.already_done,
    )


def check(prepared: PlannedConversion) -> tuple[str, ...]:
    """Raises InconsistentError where the checkpoint contradicts itself; with `allow_unknown_layout`, returns a note instead."""
    if not prepared.options.allow_unknown_layout:
        replicas.check(prepared.catalog)
        return ()
    bad = [entry.name for entry, *_ in replicas.disagreements(prepared.catalog)]
    return (f"{len(bad):,} master weights are not those of the model's own weights: {examples(bad)}.",) if bad else ()


_SELECTION = ("include", "exclude", "exclude_frozen", "strip_prefix", "rename", "overflow")


def _recorded(options: Options) -> dict[str, object]:
    """What the manifest says was asked for: all that changes tensors, and is not as it always is."""
    usual = Options()
    asked = {name: getattr(options, name) for name in _SELECTION}
    recorded = {name: value for name, value in asked.items() if value and value != getattr(usual, name)}
    return recorded | ({} if options.wishes is None else {"wishes": options.wishes.as_json()})


def output_dtype(entry: TensorEntry, dtype: DType | None) -> DType:
    """The dtype a tensor gets: floating parameters take the one asked for, if one is; buffers keep theirs.

    Half-precision buffers are lifted when fp32 is asked for. Integers, bools and complex numbers are never touched.
    """
    if entry.dtype.kind != "float" or dtype is None:
        return entry.dtype
    if entry.role == "buffer":
        return F32 if dtype == F32 and entry.dtype in (F16, BF16) else entry.dtype
    return dtype


def _target(out: str, options: Options) -> tuple[WeightsTarget, bool]:
    suffix = os.path.splitext(out.rstrip("/"))[1]
    single = suffix in _SUFFIXES and not out.endswith("/")
    wanted = options.format
    if single:
        if wanted is not None and wanted != _SUFFIXES[suffix]:
            raise UsageError(
                "a format that does not fit OUT's name", found=f"--format {wanted} and {out!r}",
                remedy="Leave --format out, or change the name.",
            )  # fmt: skip
        name = os.path.basename(out if files.is_remote(out) else resolved(out))
        return WeightsTarget(_SUFFIXES[suffix], file=name), True
    return WeightsTarget(wanted or "safetensors", max_shard_size=options.max_shard_size), False


def protected(opened: Opened, checkpoint: str, *, beside: bool = False) -> set[str]:
    """What the output must leave alone: the shards' directories, and the checkpoint's own unless `beside` is set."""
    listing = opened.place.listing
    if listing.directory in listing.files.values():  # one file
        return {listing.directory}
    shards = {files.parent(path) for path in listing.files.values()}
    home = files.local(checkpoint)
    return shards if beside or not listing.tag or not files.is_dir(home) else {*shards, home}


def select(catalog: Catalog, options: Options) -> Catalog:
    """The tensors that are wanted, under their new names.

    Raises:
        UsageError: none is left, or a wish makes no sense. InconsistentError: two would have one name.
    """

    def wanted(entry: TensorEntry) -> bool:
        if options.exclude_frozen and entry.role == "frozen":
            return False
        if options.include and not matches(entry.name, options.include):
            return False
        return not matches(entry.name, options.exclude)

    try:
        patterns = [(re.compile(pattern), new) for pattern, new in options.rename]

        def renamed(name: str) -> str:
            name = name.removeprefix(options.strip_prefix)
            for pattern, new in patterns:
                name = pattern.sub(new, name)
            return name

        selected = catalog.select(wanted).rename(renamed)
    except re.error as error:
        raise UsageError("a --rename that is no regular expression", found=str(error)) from error
    if not selected.tensors:
        raise UsageError(
            "nothing to convert", file=catalog.source.path, found=f"no tensor is left of {len(catalog):,}",
            remedy=f"Check --include and --exclude; names look like {examples(catalog)}.",
        )  # fmt: skip
    if not all(selected.tensors) or any("\0" in name for name in selected.tensors):
        raise UsageError("a tensor without a name", found="an empty name", remedy="Change --rename or --strip-prefix.")
    return selected


def usual_dtype(entries: Iterable[TensorEntry]) -> DType:
    """The dtype that most floating elements have."""
    numels: Counter[DType] = Counter()
    for entry in entries:
        if entry.dtype.kind == "float":
            numels[entry.dtype] += entry.numel
    return numels.most_common(1)[0][0] if numels else F32
