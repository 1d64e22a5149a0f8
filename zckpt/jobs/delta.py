"""`zckpt delta`: the changes in a model's weights since an older version, as SGLang's weight pull reads them.

Both versions are read once, side by side, in constant memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from zckpt.base.dataclass import dataclass, public
from zckpt.base.errors import UsageError
from zckpt.base.progress import Progress, watch_progress
from zckpt.base.sizes import group_by_size, to_bytes
from zckpt.containers.zstd import Compressor
from zckpt.core.dtypes import SHORT_NAMES, DType
from zckpt.core.plan import Plan, WrittenFile
from zckpt.deltas.encode import Encoder, TensorChange
from zckpt.deltas.form import Checksum, DeltaForm, Encoding, hasher_of, version_in
from zckpt.deltas.pieces import PieceReader, pieces
from zckpt.deltas.write import DeltaCounts, data_name, end_delta, facts_name, needed_by, write_group
from zckpt.jobs.casting import to_dtype
from zckpt.jobs.declarations import DELTA, Asked
from zckpt.jobs.opened import WorkingModel
from zckpt.jobs.options import DeltaOptions
from zckpt.jobs.own_groups import Delta
from zckpt.jobs.planned import protected_places, provenance
from zckpt.jobs.versions import TensorPair, open_version, pair_tensors
from zckpt.output import manifest as manifests
from zckpt.output.files import FileOrder, Moved
from zckpt.output.manifest import Manifest
from zckpt.output.order import facts_seen_by_all, fingerprint
from zckpt.output.publish import check_output, publish
from zckpt.storage.location import Location, locate
from zckpt.team.sameness import share_of


@public
@dataclass(frozen=True, slots=True)
class DeltaReport:
    """What `delta` wrote.

    Attributes:
        form: what kind of delta it is.
        counts: what changed.
        files: (path relative to the output, bytes), without the manifest.
        kept: files that an earlier run had finished.
        already_done: whether the output was there already, so that nothing was written.
        engine: "native" or "reference".
        notes: sentences for a person.
        seconds: wall time.
    """

    form: DeltaForm
    counts: DeltaCounts
    files: tuple[tuple[str, int], ...]
    kept: int
    already_done: bool
    engine: str
    notes: tuple[str, ...]
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of the delta."""
        return sum(nbytes for _, nbytes in self.files)

    @property
    def ratio(self) -> float:
        """The delta's bytes divided by those of the weights."""
        return self.nbytes / max(1, self.counts.nbytes)

    @property
    def density(self) -> float:
        """The fraction of elements that changed."""
        return self.counts.changed / max(1, self.counts.numel)


def delta(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    version: int | None = None,
    dtype: str | DType | None = None,
    encoding: Encoding = "xor",
    checksum: Checksum = "xxh3-128",
    options: DeltaOptions | None = None,
    progress: Progress = None,
) -> DeltaReport:
    """Writes what has changed between two versions of weights, in the form that SGLang's weight pull reads.

    Args:
        old: the version that whoever applies the delta has: plain weights, or a checkpoint of any layout.
        new: the version that they are to get, in any layout.
        out: a directory, or an address; named `weight_v000007`, it is what SGLang looks for as version 7.
        version: of the new weights; by default the one in `out`'s name, or 1.
        dtype: "bf16", "fp16" or "fp32"; by default each tensor's dtype in `old` if that is plain weights, and bf16 if not.
        encoding: "xor" (smaller, applied once) or "overwrite" (may be applied twice).
        checksum: "xxh3-128", "blake3" (against deliberate changes too) or "adler32".
        options: everything else, such as `DeltaOptions(overwrite=True)`; the arguments above override it.
        progress: as in `convert`, of the bytes that are compared.

    Returns:
        What changed, and the files.

    Raises:
        InconsistentError: the versions have different tensors.
        UnsupportedError: a package that deltas need is not installed (`pip install 'zckpt[delta]'`).
        OutputError: `out` exists or cannot be written.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> report = zckpt.delta("model", "model", "delta_v000002", progress=False)
        >>> report.counts.changed
        0
    """
    began = time.perf_counter()
    options = options or DeltaOptions()
    asked = options.split(
        DELTA, version=options.version if version is None else version, encoding=encoding, checksum=checksum,
        dtype=options.dtype if dtype is None else to_dtype(dtype),
    )  # fmt: skip
    job = prepare(old, new, out, asked)
    with watch_progress(progress, job.nbytes, "delta") as watch:
        return replace(execute(job, watch), seconds=time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class PlannedDelta:
    """A delta that is planned but not begun.

    Attributes:
        out: its directory.
        form: what kind of delta it is.
        old: the version that it changes.
        new: the version that it leads to.
        groups: tensors by file.
        asked: what was asked for.
        notes: sentences for a person.
    """

    out: Location
    form: DeltaForm
    old: WorkingModel
    new: WorkingModel
    groups: Sequence[Sequence[TensorPair]]
    asked: Asked[Delta]
    notes: tuple[str, ...]
    job: str = field(default="", repr=False)
    shared: Callable[[], str] = field(default=str, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of one version."""
        return sum(pair.nbytes for group in self.groups for pair in group)

    @property
    def bytes_read(self) -> int:
        """Bytes of both versions, as they are stored."""
        return sum(pair.old.nbytes + pair.new.nbytes for pair in self.pairs)

    @property
    def pairs(self) -> list[TensorPair]:
        """All tensors, each in both versions."""
        return [pair for group in self.groups for pair in group]


def prepare(
    old: str | os.PathLike[str], new: str | os.PathLike[str], out: str | os.PathLike[str], asked: Asked[Delta]
) -> PlannedDelta:
    """Opens both versions, and refuses what cannot succeed. Writes nothing; errors as in `delta`."""
    place = locate(out)
    form = form_for(place, asked.own.version, asked.own.encoding, asked.own.checksum)
    hasher_of(form.checksum)
    Compressor(0, lambda data: None)
    first = open_version(os.fspath(old), asked.having(tag=asked.own.old_tag, also=()))
    second = open_version(os.fspath(new), asked)
    inputs = protected_places(first.opened, locate(old)) | protected_places(second.opened, locate(new))
    check_output(place, single=False, overwrite=asked.publishing.overwrite, protected=inputs)
    changed = second.catalog
    pairs = pair_tensors(first, changed.tensors, changed.aliases, changed.source.path, asked.casting.dtype)
    groups = group_by_size(((pair, pair.nbytes) for pair in pairs), to_bytes(asked.sharding.max_shard_size))
    plan = Plan((), [(entry, entry) for pair in pairs for entry in (pair.old, pair.new)])
    facts = [form.metadata, [pair.dtype.name for pair in pairs], [len(group) for group in groups]]
    job = fingerprint(plan, (), "delta", *facts, asked.signing_key.known_as())
    notes = (*(f"OLD: {note}" for note in first.notes), *(f"NEW: {note}" for note in second.notes))

    def shared() -> str:
        return fingerprint(plan, (), "delta", *facts, asked.publishing.overwrite, state=facts_seen_by_all)

    return PlannedDelta(place, form, first, second, groups, asked, notes, job, shared)


def form_for(out: Location, version: int | None, encoding: Encoding, checksum: Checksum) -> DeltaForm:
    """The form of the delta in a directory. Raises UsageError if the directory's name says another version."""
    named = version_in(out.absolute().name)
    if version is not None and named not in (None, version):
        raise UsageError(
            "the name of OUT says another version", file=out, found=f"version {named}", expected=f"{version}, as --version says",
            remedy=f"Name OUT weight_v{version:06d}, or leave out --version.",
        )  # fmt: skip
    number = version if version is not None else named if named is not None else 1
    return DeltaForm(number, number - 1, encoding, checksum)


def execute(
    job: PlannedDelta, progress: Callable[[int], None] | None = None, on_note: Callable[[str], None] = lambda note: None
) -> DeltaReport:
    """Compares, writes and publishes; resumes an interrupted run of the same delta. `progress` is called with the bytes
    compared so far, `on_note` with sentences for a person.
    """
    began = time.perf_counter()
    of = len(job.groups)
    numbers = {facts_name(number): number for number in range(1, of + 1)}
    both = (job.new, job.old)
    ended: list[DeltaCounts] = []

    def make(directory: str, name: str, moved: Moved) -> list[WrittenFile]:
        group = job.groups[numbers[name] - 1]

        def encoded(pair: TensorPair) -> tuple[TensorChange, int]:
            return _encode_change(reader, pair, job.form, directory), pair.nbytes

        def watched() -> Any:
            for difference, nbytes in reader.in_order(
                encoded, group, lambda pair: (pair.old, pair.new), lambda made: made[0].close()
            ):
                yield difference, nbytes
                moved(nbytes)

        names = [pair.old.name for pair in group]
        made = list(write_group(directory, numbers[name], of, job.form, names, watched()))
        reader.check_sources()
        return made

    def end(directory: str, files: Mapping[str, WrittenFile]) -> Manifest:
        new = job.new.opened.catalog
        source = {**new.source_facts(), "base": job.old.catalog.source_facts()}
        manifest, counts = end_delta(directory, of, job.form, source, renames=not job.out.is_remote)
        ended.append(counts)
        dtype = SHORT_NAMES.get(job.asked.casting.dtype, "") if job.asked.casting.dtype else ""
        return replace(manifest, dtype=dtype)

    with PieceReader(share_of(job.asked.pacing.pace), 2 * job.nbytes) as reader:
        order = FileOrder(
            job.out, job.job, tuple(numbers), make, end, job.asked.publishing.overwrite, job.asked.pacing.pace, job.shared,
            lambda directory, name: needed_by(directory, name, of), helpers=numbers.keys(),
            large=[data_name(number, of) for number in numbers.values()],
            signing=job.asked.signing_key.signing(
                lambda: provenance([(v.opened.place.listing, v.opened.catalog) for v in both])
            ),
        )  # fmt: skip
        made = publish(order, progress, on_note)
    counts = ended[0] if ended else _counts(job.out)
    return DeltaReport(
        job.form, counts, made.files, made.kept, made.already_done, reader.engine, (*job.notes, *made.notes),
        time.perf_counter() - began,
    )  # fmt: skip


def _encode_change(reader: PieceReader, pair: TensorPair, form: DeltaForm, directory: str) -> TensorChange:
    encoder = Encoder(pair.old.name, pair.old.numel, pair.dtype, form, directory)
    try:
        for start, stop in pieces(pair.old.numel, pair.dtype):
            old = reader.read(pair.old, start, stop, pair.dtype)
            encoder.feed(old, reader.read(pair.new, start, stop, pair.dtype, other=True))
        return encoder.finish()
    except BaseException:
        encoder.close()
        raise


def _counts(out: Location) -> DeltaCounts:
    """The counts in the manifest of a delta that exists already."""
    said: Any = manifests.read(out.refreshed() / manifests.NAME).options["delta"]
    return DeltaCounts(*(int(said[key]) for key in ("tensors", "changed_tensors", "numel", "changed", "nbytes")))
