"""`zckpt apply`: a new version of weights out of an older one and the deltas between them, every tensor proved by its checksum.

What is written is what `to-bf16` writes of the new version: shards, index, config and tokenizer, as `from_pretrained` loads them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError, UsageError
from zckpt.base.progress import Progress, watch_progress
from zckpt.base.version import __version__
from zckpt.base.words import count, examples
from zckpt.core.catalog import TensorEntry, usual_dtype
from zckpt.core.dtypes import SHORT_NAMES, DType
from zckpt.core.plan import Plan, WrittenFile
from zckpt.deltas.decode import difference
from zckpt.deltas.form import Hasher, hasher_of
from zckpt.deltas.pieces import PieceReader, pieces
from zckpt.deltas.read import DeltaDirectory, read_delta
from zckpt.engine.checksums import Partial, crc32, seal
from zckpt.engine.output_files import create
from zckpt.jobs.casting import to_dtype
from zckpt.jobs.declarations import APPLY, Asked
from zckpt.jobs.opened import WorkingModel
from zckpt.jobs.options import ApplyOptions
from zckpt.jobs.planned import Report, protected_places, provenance
from zckpt.jobs.versions import dtype_in, open_version
from zckpt.layouts.plain.write import WeightsTarget, lay_out
from zckpt.layouts.save.companions import config_file
from zckpt.output import manifest as manifests
from zckpt.output.checks import check_space
from zckpt.output.files import FileOrder, Moved, finish_file
from zckpt.output.manifest import Manifest
from zckpt.output.order import facts_seen_by_all, fingerprint
from zckpt.output.publish import check_output, publish
from zckpt.storage.descriptors import OpenFiles, write_all, write_past_cache
from zckpt.storage.fsync_queue import make_durable
from zckpt.storage.location import Location, locate
from zckpt.team.sameness import share_of

if TYPE_CHECKING:
    from zckpt.core.folds import Bytes

Pair = tuple[TensorEntry, TensorEntry]
"""A tensor of the old version, and its place in the output."""

_RECORDED = "version"
"""The key under `options` of the manifest for the version of the weights."""


def apply_delta(
    old: str | os.PathLike[str],
    deltas: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    dtype: str | DType | None = None,
    options: ApplyOptions | None = None,
    progress: Progress = None,
) -> Report:
    """Writes the weights that a delta, or several in order, makes of an older version.

    Args:
        old: the version that the first delta was made from: plain weights, or a checkpoint of any layout.
        deltas: directories of `zckpt.delta`, or of a trainer that writes for SGLang.
        out: a directory of shards that `transformers` loads, or an address.
        dtype: as in `zckpt.delta`.
        options: everything else, such as `ApplyOptions(overwrite=True)`.
        progress: as in `convert`.

    Returns:
        What was written.

    Raises:
        InconsistentError: `old` is not the version that the delta was made from, or a tensor has another checksum than the
            delta says; it names the first such tensor.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> _ = zckpt.delta("model", "model", "delta_v000002", progress=False)
        >>> zckpt.apply_delta("model", "delta_v000002", "new/", progress=False).tensors
        29
    """
    began = time.perf_counter()
    several = [deltas] if isinstance(deltas, str | os.PathLike) else list(deltas)
    options = options or ApplyOptions()
    asked = options.split(APPLY, dtype=options.dtype if dtype is None else to_dtype(dtype))
    job = prepare(old, several, out, asked)
    with watch_progress(progress, job.nbytes, "apply") as watch:
        return replace(execute(job, watch), seconds=time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class PlannedApply:
    """Deltas that a job applies.

    Attributes:
        out: where the new weights go.
        old: the older version.
        deltas: in order.
        plan: of the output.
        pairs: the tensors of the plan.
        copies: small files that are copied: (where, name).
        names: for each delta, name in the old version -> name in the delta.
        asked: what was asked for.
        job: fingerprint of all that the output's bytes depend on.
    """

    out: Location
    old: WorkingModel
    deltas: tuple[DeltaDirectory, ...]
    plan: Plan
    pairs: tuple[Pair, ...]
    copies: tuple[tuple[Location, str], ...]
    names: tuple[Mapping[str, str], ...]
    asked: Asked[None]
    job: str = field(repr=False)
    shared: Callable[[], str] = field(default=str, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the output."""
        return self.plan.bytes_written

    @property
    def files(self) -> list[tuple[str, int]]:
        """Name and bytes of each file of the output, without the manifest."""
        written = [(file.path, file.size) for file, _ in self.plan.files]
        return written + [(name, file.size()) for file, name in self.copies]

    @property
    def bytes_read(self) -> int:
        """Bytes read of the old version and of the deltas."""
        return self.plan.bytes_read + sum(where.nbytes for one in self.deltas for where in one.changed.values())

    @property
    def version(self) -> int:
        """Number of the version that the new weights are."""
        return self.deltas[-1].form.version


def prepare(
    old: str | os.PathLike[str],
    deltas: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    asked: Asked[None],
) -> PlannedApply:
    """Opens everything, lays the output out, and refuses what cannot succeed. Writes nothing."""
    if not deltas:
        raise UsageError("there is no delta to apply", remedy="Give at least one, between OLD and OUT.")
    place, places = locate(out), [locate(path) for path in deltas]
    found = tuple(read_delta(one) for one in places)
    version = open_version(os.fspath(old), asked)
    _check_chain(version, found)
    inputs = {*protected_places(version.opened, locate(old)), *places}
    check_output(place, single=False, overwrite=asked.publishing.overwrite, protected=inputs)
    names = tuple(_names(version, one) for one in found)
    for one in found:
        hasher_of(one.form.checksum)
    difference(lambda nbytes, at: b"", place.path, "")
    wanted = asked.casting.dtype or _recorded_dtype(places[0])
    entries = [(entry, dtype_in(version, entry, wanted)) for entry in version.catalog.tensors.values()]
    target = WeightsTarget("safetensors", max_shard_size=asked.sharding.max_shard_size)
    destination = lay_out(entries, version.catalog.aliases, target)
    config = config_file(version.opened.config(), wanted or usual_dtype(destination.entries))
    files = (*destination.files, *([config] if config else []))
    pairs = tuple((version.catalog.tensors[name], entry) for name, entry in destination.entries.items())
    plan = Plan(files, pairs)
    copies, left_out = version.opened.companions()
    version = replace(version, notes=(*version.notes, *left_out))
    states = [(name, *(one.place / name).state()) for one in found for name in one.names]
    facts = ["apply", [one.form.metadata for one in found]]
    job = fingerprint(plan, copies, *facts, states, asked.signing_key.known_as())

    def shared() -> str:
        digests = [[(name, one.digest_of(name)) for name in (*one.changed, *one.unchanged)] for one in found]
        return fingerprint(
            plan,
            (),
            *facts,
            digests,
            sorted(name for _, name in copies),
            asked.publishing.overwrite,
            state=facts_seen_by_all,
        )

    return PlannedApply(place, version, found, plan, pairs, tuple(copies), names, asked, job, shared)


def _check_chain(old: WorkingModel, deltas: Sequence[DeltaDirectory]) -> None:
    """Refuses deltas that do not follow each other, and a first one that is known to be for another version."""
    at, where = _version_of(old), old.catalog.source.path
    for delta in deltas:
        if at is not None and delta.form.base_version != at:
            raise InconsistentError(
                "the delta is for another version", file=delta.place, found=f"a delta for version {delta.form.base_version}",
                expected=f"one for version {at}, which {where} is",
                remedy="Apply the deltas of all versions between them, in order.",
            )  # fmt: skip
        at, where = delta.form.version, delta.place.path


def _version_of(old: WorkingModel) -> int | None:
    """The version of weights that `apply_delta` wrote; None for other weights."""
    place = manifests.find(old.opened.place.home)
    said = manifests.read(place).options.get(_RECORDED) if place is not None else None
    return said if isinstance(said, int) else None


def _recorded_dtype(place: Location) -> DType | None:
    """The dtype that was asked for when a delta was made; None if it is not recorded."""
    found = manifests.find(place)
    said = manifests.read(found).dtype if found is not None else ""
    return to_dtype(said) if said in SHORT_NAMES.values() else None


def _names(old: WorkingModel, delta: DeltaDirectory) -> dict[str, str]:
    """Name in the old version -> name in the delta, of all tensors that the delta knows. Raises InconsistentError if
    the old version lacks some, or has others.
    """
    known = {**delta.unchanged, **delta.changed}
    lacking = [name for name in known if name not in old.catalog.tensors and name not in old.catalog.aliases]
    names = {old.catalog.aliases.get(name, name): name for name in known if name not in lacking}
    others = [name for name in old.catalog if name not in names] if delta.unchanged else []
    if lacking or others:
        who, some = ("lacks", lacking) if lacking else ("has", others)
        raise InconsistentError(
            f"the delta is for another model: OLD {who} {count(len(some), 'tensor')}", file=delta.place, found=examples(some),
            expected=f"the tensors of {old.catalog.source.path}",
            remedy="Apply it to the weights that it was made from. Nothing was written.",
        )  # fmt: skip
    return names


def execute(
    job: PlannedApply, progress: Callable[[int], None] | None = None, on_note: Callable[[str], None] = lambda note: None
) -> Report:
    """Applies, proves, writes and publishes; resumes an interrupted run of the same job."""
    began = time.perf_counter()
    files = {output.path: (output, store) for output, store in job.plan.files}
    inside: dict[int, list[Pair]] = {}
    for old, new in job.pairs:
        for fragment in new.fragments:
            inside.setdefault(id(fragment.store), []).append((old, new))

    def make(directory: str, name: str, moved: Moved) -> list[WrittenFile]:
        if name not in files:
            return [_copy_file(next(file for file, copy in job.copies if copy == name), directory, name)]
        output, store = files[name]
        path = os.path.join(directory, name)
        create(path, output.size)
        with OpenFiles({id(store): path}) as opened:
            fds = opened.of(store)
            for offset, data in output.literals:
                write_all(fds[0], data, offset)
            moved(sum(len(data) for _, data in output.literals))
            parts: list[Partial] = []
            renew = partial(_renew, job, reader, fds)
            for some in reader.in_order(renew, inside.get(id(store), ()), lambda pair: pair[:1]):
                parts += some
                moved(sum(nbytes for _, nbytes, _ in some))
            reader.check_sources()
            crc, _ = seal(fds[0], output, parts)
            make_durable(fds[0])
        return [WrittenFile(name, output.size, crc)]

    def end(directory: str, made: Mapping[str, WrittenFile]) -> Manifest:
        catalog = job.old.opened.catalog
        chain = [one.form.metadata for one in job.deltas]
        return Manifest(
            version=__version__, source={**catalog.source_facts(), "deltas": chain},
            dtype=SHORT_NAMES[job.asked.casting.dtype] if job.asked.casting.dtype else "", options={_RECORDED: job.version},
            tensors=len(job.old.catalog), numel=job.old.catalog.numel, files=tuple(made[name] for name in names),
        )  # fmt: skip

    check_space(job.out, job.plan.bytes_written)
    names = (*files, *(name for _, name in job.copies))
    large = [path for path, (_, store) in files.items() if id(store) in inside]
    with PieceReader(share_of(job.asked.pacing.pace), job.plan.bytes_read + job.plan.bytes_written) as reader:
        source = (job.old.opened.place.listing, job.old.opened.catalog)
        signing = job.asked.signing_key.signing(lambda: provenance([source], _files_of(job)))
        order = FileOrder(
            job.out, job.job, names, make, end, job.asked.publishing.overwrite, job.asked.pacing.pace, job.shared,
            large=large, signing=signing,
        )  # fmt: skip
        done = publish(order, progress, on_note)
    return Report(
        files=done.files, engine=reader.engine, kept=done.kept, overflows={}, notes=(*job.old.notes, *_proof(job), *done.notes),
        already_done=done.already_done, tensors=len(job.old.catalog), numel=job.old.catalog.numel,
        seconds=time.perf_counter() - began, out=str(job.out),
    )  # fmt: skip


def _files_of(job: PlannedApply) -> list[tuple[str, Location]]:
    """Name and place of every file of the deltas."""
    return [(f"{one.place.name}/{name}", one.place / name) for one in job.deltas for name in one.names]


def _proof(job: PlannedApply) -> list[str]:
    """The note for deltas without checksums of tensors that did not change."""
    silent = [one.place.path for one in job.deltas if not one.unchanged and len(one.changed) < len(job.old.catalog)]
    return [f"{path} has no checksums of unchanged tensors, so only the changed ones were proved." for path in silent]


def _copy_file(file: Location, directory: str, name: str) -> WrittenFile:
    with open(os.path.join(directory, name), "wb") as copy:
        for block in file.blocks():
            copy.write(block)
    return finish_file(directory, name)


def _renew(job: PlannedApply, reader: PieceReader, fds: tuple[int, int], pair: Pair) -> list[Partial]:
    """Writes one tensor of the new version to a file; returns the CRCs of its parts. Raises InconsistentError if a checksum is
    another one, CorruptError if a difference is damaged.
    """
    old, new = pair
    [fragment] = new.fragments
    parts: list[Partial] = []
    with ExitStack() as stack:
        steps = [
            _Step(one, names.get(old.name), stack, old, new.dtype)
            for one, names in zip(job.deltas, job.names, strict=True)
        ]
        for start, stop in pieces(old.numel, new.dtype):
            at = fragment.byte_offset + start * new.dtype.itemsize
            data = reader.read(old, start, stop, new.dtype, offset=at)
            for step in steps:
                step.take(data)
            write_past_cache(fds, data, at)
            parts.append((at, len(data), crc32(data.data)))
        for step in steps:
            step.prove()
    return parts


class _Step:
    """The work of one delta on one tensor."""

    def __init__(
        self, delta: DeltaDirectory, name: str | None, stack: ExitStack, entry: TensorEntry, dtype: DType
    ) -> None:
        self._delta, self._entry, self._name = delta, entry, name
        self._digest = delta.digest_of(name) if name is not None else None
        self._hash: Hasher | None = hasher_of(delta.form.checksum)() if self._digest is not None else None
        self._decoder = None
        if name is not None and name in delta.changed:
            self._decoder = stack.enter_context(delta.decoder(name, entry, dtype))

    def take(self, data: Bytes) -> None:
        """Changes the next bytes to the new version's."""
        if self._decoder is not None:
            self._decoder.renew(data)
        if self._hash is not None:
            self._hash.update(data.data)

    def prove(self) -> None:
        """Checks the tensor: raises InconsistentError for another checksum than the delta's, CorruptError if the delta
        has bytes left.
        """
        if self._decoder is not None:
            self._decoder.end()
        found = self._hash.hexdigest() if self._hash is not None else None
        if found != self._digest:
            kind = (
                "becomes another one than the delta says"
                if self._decoder
                else "is not the one that the delta was made on"
            )
            raise InconsistentError(
                f"tensor {self._entry.name!r} {kind}", file=self._delta.place, found=f"checksum {found}",
                expected=f"{self._digest} ({self._delta.form.checksum})",
                remedy="Apply the delta to the weights that it was made from, which are version "
                f"{self._delta.form.base_version}. If these are, copy the delta again. Nothing was written.",
            )  # fmt: skip
