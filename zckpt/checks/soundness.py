"""Is a checkpoint complete and intact?

For `verify`. Everything that is wrong is reported: a damaged file does not hide another one. Problems are findings, not
errors; an error means that the question itself could not be answered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from zckpt import layouts
from zckpt.base.errors import NotACheckpointError, UnsupportedError, UsageError, ZckptError
from zckpt.base.pace import DEFAULT_PACE, Pace
from zckpt.base.words import count, examples, joined, size
from zckpt.checks.digests import compared
from zckpt.checks.integrity import (
    CheckedFile,
    Findings,
    checked_file,
    checked_parts,
    examine,
    holding,
    non_finite,
    numel_of,
    small_records,
)
from zckpt.checks.reread import misplaced
from zckpt.checks.verdict import Check, summarized
from zckpt.containers import open_container
from zckpt.core.catalog import Catalog, Replica, TensorEntry
from zckpt.engine import replicas
from zckpt.engine.tensor_statistics import Statistics
from zckpt.jobs.open import open_catalog, strip_wrappers
from zckpt.jobs.options import OpenOptions
from zckpt.layouts.places import Place, find
from zckpt.layouts.run import agreement
from zckpt.layouts.save.origins import FileOrigin, contradictions, of_other_ages, origin
from zckpt.output import manifest as manifests
from zckpt.output.address import RECORD
from zckpt.output.manifest import Manifest
from zckpt.storage.descriptors import forget
from zckpt.storage.location import Location, locate


@dataclass(slots=True)
class Examined:
    """What has been found out about a checkpoint or output, check by check.

    Attributes:
        place: where it is.
        catalog: its tensors, under the model's own names; None when they cannot be read.
        files: those of the save that can be opened.
        origins: what they record of their save.
        checks: the questions and answers so far.
        notes: sentences a person should see.
        numbers: tensor -> (NaNs, infinities), where there are any; None where they were not counted.
        names: of tensors, as the files have them -> the model's own.
        whole: whether every byte was read.
        unread_bytes: of elements that no check has read.
    """

    place: Place
    catalog: Catalog | None = None
    files: list[CheckedFile] = field(default_factory=list[CheckedFile])
    origins: list[FileOrigin] = field(default_factory=list[FileOrigin])
    checks: list[Check] = field(default_factory=list[Check])
    notes: list[str] = field(default_factory=list[str])
    numbers: dict[str, tuple[int, int]] | None = None
    names: dict[str, str] = field(default_factory=dict[str, str])
    whole: bool = False
    unread_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong so far."""
        return all(check.ok for check in self.checks)

    def add(self, name: str, answer: str, problems: Sequence[str] = ()) -> None:
        """One more check."""
        self.checks.append(Check(name, answer, tuple(problems)))


def examined(
    path: Location,
    options: OpenOptions,
    *,
    deep: bool = False,
    whole: bool = False,
    pace: Pace = DEFAULT_PACE,
    progress: Callable[[int], None] | None = None,
    expect: Callable[[int], None] = lambda nbytes: None,
) -> Examined:
    """Everything that one checkpoint or output shows by itself.

    Args:
        path: of the checkpoint.
        options: which save, and how it is read.
        deep: read every byte, count NaN and infinity.
        whole: read every byte, from the disk and not from the page cache. An output with a manifest is always read whole.
        pace: how hard to work.
        progress: called with the bytes read so far.
        expect: called with the bytes that will be read, when that is known.

    Raises:
        NotACheckpointError: there is nothing to look at. UnsupportedError: zckpt cannot read it.
    """
    state = Examined(find(path, options.tag, [locate(root) for root in options.also]))
    facts = _manifest_of(state, path)
    unknown = _open(state, path, options)
    _open_files(state, facts)
    for file in state.files if whole and not path.is_remote else ():
        with open(file.store.path, "rb") as data:
            forget(data.fileno())
    _check_save(state)
    try:
        if deep or whole or facts is not None:
            expect(sum(file.store.size for file in state.files))
            _check_bytes(state, facts, deep, pace, progress)
        else:
            _check_ends(state)
    except ZckptError as error:  # a disk that does not give back what it was given
        state.add("bytes", "", [str(error)])
    if (digests := compared(state.place.listing, read=deep or whole)) is not None:
        state.add("digests", *digests)
    if unknown is not None and all(check.ok for check in state.checks if check.name != "tensors"):
        raise unknown  # nothing is damaged: zckpt cannot read it
    state.notes.extend(of_other_ages(state.origins))
    return state


def _manifest_of(state: Examined, path: Location) -> Manifest | None:
    """The manifest, after making sure that the files it names are there, of the right size."""
    tag = state.place.listing.tag
    place = manifests.find(state.place.home if tag else path)
    if place is None:
        return None
    try:
        facts = manifests.read(place)
    except ZckptError as error:
        state.add("manifest", "", [str(error)])
        return None
    if tag and not any(file.path.startswith(f"{tag}/") for file in facts.files):
        return None  # the manifest is of something else beside the tags
    home = place.parent
    problems: list[str] = []
    for file in facts.files:
        where = home / file.path
        if not where.is_file():
            problems.append(f"{file.path!r} is missing")
        elif (nbytes := where.size()) != file.nbytes:
            problems.append(f"{file.path!r} has {nbytes:,} bytes, not {file.nbytes:,}")
    named = {file.path.partition("/")[0] for file in facts.files} | {place.name, RECORD}
    if path.is_dir() and (strangers := sorted(set(home.names()) - named)):
        verb = "is" if len(strangers) == 1 else "are"
        state.notes.append(f"{examples(strangers)} {verb} not in the manifest.")
    made = f"made by zckpt {facts.version} from {facts.source.get('layout')} {facts.source.get('tag') or ''}".rstrip()
    files = "its file exists and has" if len(facts.files) == 1 else f"all {len(facts.files):,} files exist and have"
    state.add("manifest", f"{files} the right size; {made}", problems)
    return facts


def _open(state: Examined, path: Location, options: OpenOptions) -> ZckptError | None:
    """Reads the catalog. Returns an error that is no finding, unless damage explains it."""
    try:
        opened = open_catalog(path, options, as_stored=True)
    except ZckptError as error:
        state.add("tensors", "", [str(error)])
        strange = isinstance(error, NotACheckpointError) and not state.place.listing.tag
        return error if strange or isinstance(error, UnsupportedError | UsageError) else None
    state.place = opened.place
    state.catalog, stripped = strip_wrappers(opened.catalog)
    state.names = dict(zip(opened.catalog.tensors, state.catalog.tensors, strict=True))
    state.notes.extend((*opened.catalog.source.notes, *stripped))
    tensors, elements = count(len(state.catalog), "tensor"), count(state.catalog.numel, "element")
    state.add("tensors", f"{tensors}, {elements}, each stored exactly once")
    found, elsewhere = misplaced(opened.place.listing, opened.catalog)
    if found:
        tensors = count(found, "tensor")
        answer = f"a second reader, which shares no code with the first, finds {tensors} in the same places"
        state.add("places", answer, summarized(elsewhere, "tensors are not read where the files have them"))
    return None


def _open_files(state: Examined, facts: Manifest | None) -> None:
    """Opens every file of the save: those of the layout, those that hold elements, and those that a manifest names."""
    listing = state.place.listing
    family = layouts.family_by_names(listing)
    paths = {listing.files[name].path: name for name in family.containers(listing)}
    for store in state.catalog.stores() if state.catalog is not None else ():
        paths.setdefault(store.path, "")
    known = {file.path: file for file in facts.files} if facts is not None else {}
    home = listing.directory if listing.directory.is_dir() else listing.directory.parent
    if listing.tag and facts is not None:
        home = state.place.home
    problems: list[str] = []
    data_files = dict(family.records(listing)) if family.records is not None else {}
    for path, found in data_files.items():
        paths[path] = ""
        known_as = known.pop(locate(path).relative_to(home), None)
        if isinstance(found, ZckptError):
            problems.append(str(found))
        else:
            state.files.append(checked_parts(locate(path).store(), found, known_as.crc32 if known_as else None))
    raw = {listing.files[name].path for name in listing.files if family.is_raw(name)}
    paths.update(dict.fromkeys(raw, ""))
    for path, name in paths.items():
        if path in data_files:
            continue
        known_as = known.pop(locate(path).relative_to(home), None)
        if path in raw:
            state.files.append(CheckedFile(locate(path).store(), (), known_as.crc32 if known_as else None))
            continue
        try:
            container = listing.open(name) if name else open_container(path)
            state.files.append(checked_file(container, known_as.crc32 if known_as else None))
        except ZckptError as error:
            problems.append(str(error))
            continue
        if name:
            state.origins.append(origin(listing, name, container))
    for path, file in known.items():  # config and tokenizer files: bytes without tensors
        where = home / path
        if where.is_file():
            state.files.append(CheckedFile(where.store(), (), file.crc32))
    answer = "1 file can be read" if len(paths) == 1 else f"all {len(paths):,} can be read"
    if not problems or state.catalog is not None:
        state.add("files", answer, problems)
    else:  # "tensors" reports the first of them
        reported = state.checks[-1].problems[0]
        others = [problem for problem in problems if problem != reported]
        if len(others) < len(problems):
            answer = f"{len(paths) - 1:,} of {count(len(paths), 'file')} can be read; the other one is under 'tensors'"
        state.add("files", answer, others)


def _check_save(state: Examined) -> None:
    if state.origins:
        steps = [f"step {o.step:,}" for o in state.origins if o.step is not None]
        versions = [f"DeepSpeed {o.version}" for o in state.origins if o.version is not None]
        answer = ", ".join([f"{count(len(state.origins), 'file')} of one save", *steps[:1], *versions[:1]])
        state.add("save", answer, list(contradictions(state.origins)))
    if state.catalog is not None:  # else "tensors" says why
        _check_optimizers(state)


def _check_optimizers(state: Examined) -> None:
    """Whether a run could resume from what all ranks' files say of their optimizers."""
    listing = state.place.listing
    try:
        files = len(agreement.files_of_optimizers(listing))
        bad = [str(bad) for bad in agreement.contradictions(listing)]
    except ZckptError as error:
        files, bad = 2, [str(error)]
    if files > 1:
        answer = f"{files:,} optimizer files agree on step counts, settings and loss scale"
        state.add("optimizer", answer, summarized(bad, "places at which optimizer files disagree"))


def _check_ends(state: Examined) -> None:
    """The quick check: both ends of every fragment, all padding, and the small records of every zip file."""
    state.unread_bytes = sum(file.large_bytes for file in state.files)
    records, problems = 0, []
    for file in state.files:
        try:
            right, wrong = small_records(file)
        except ZckptError as error:
            problems.append(str(error))
            continue
        records += right
        problems += [f"record {name!r} of {file.name!r} does not match its checksum" for name in wrong]
    if records or problems:
        answer = count(records, "small record matches its checksum", "indexes and small records match their checksums")
        state.add("checksums", answer, problems)
    catalog = state.catalog
    if catalog is None:
        return
    bad = [
        (replica, f"{entry.name!r}: element {element:,} is {value!r}, in its copy {copy!r}")
        for entry, replica, (element, value, copy) in replicas.disagreements(catalog)
    ]
    _add_copies(state, catalog, bad, "at both ends of every stored run")
    if catalog.zeros:
        findings = examine(replace(catalog, tensors={}, aliases={}), [], DEFAULT_PACE)
        _add_padding(state, catalog, findings.padding)


_COPIES = {
    "masters": ("fp32 weights of the optimizer", "the model's half-precision weights"),
    "copies": ("tensors", "the copies of other ranks"),
}


def _add_copies(state: Examined, catalog: Catalog, bad: Sequence[tuple[Replica, str]], where: str) -> None:
    """Whether masters equal the model's own weights, and whether ranks agree on what several of them hold."""
    for name, (what, copies) in _COPIES.items():
        of_ranks = name == "copies"
        held = sum(any(bool(r.rank) == of_ranks for r in entry.replicas) for entry in catalog.tensors.values())
        if held:
            problems = [answer for replica, answer in bad if bool(replica.rank) == of_ranks]
            answer = f"{held:,} {what} agree with {copies}, {where}"
            state.add(name, answer, summarized(problems, f"{what} disagree with {copies}"))


def _add_whole_copies(state: Examined, catalog: Catalog, findings: Findings) -> None:
    bad = [
        (
            replica,
            f"{name!r}: {statistics.differ:,} of {count(statistics.count, 'element')}, the first is number {statistics.first:,}",
        )
        for name, replica, statistics in findings.copies
        if statistics.differ
    ]
    _add_copies(state, catalog, bad, "in every element")


def check_compared(
    state: Examined, further: Sequence[TensorEntry], pace: Pace, progress: Callable[[int], None] | None = None
) -> int:
    """Checks the bytes that an output was compared with, if only ends of fragments were read so far.

    These are the elements of the catalog and of `further` tensors: each record that holds some of them must match its
    checksum, and every element must equal its copies.

    Returns:
        The bytes read.
    """
    if state.whole or state.catalog is None:
        return 0
    entries = [*state.catalog.tensors.values(), *further]
    held, without = holding(state.files, entries)
    copied = replace(state.catalog.select(lambda entry: bool(entry.replicas)), padding=())
    state.checks = [check for check in state.checks if check.name not in _COPIES]
    try:
        findings = examine(copied, held, pace, progress)
    except ZckptError as error:
        state.add("bytes", "", [str(error)])
        return 0
    _add_sums(state, findings, "that the output was compared with")
    _add_whole_copies(state, copied, findings)
    state.unread_bytes = max(0, state.unread_bytes - without - sum(file.large_bytes for file in held))
    return findings.bytes_read


def _add_padding(state: Examined, catalog: Catalog, found: Sequence[Statistics]) -> None:
    """Whether padding is zero where it should be."""
    problems = [
        f"{one.nonzero:,} of {count(one.count, 'element')} in {os.path.basename(str(pad.fragments[0].store))!r} are not zero"
        for pad, one in zip(catalog.zeros, found, strict=True)
        if one.nonzero
    ]
    state.add(
        "padding",
        f"{count(numel_of(catalog.zeros), 'element')}, all zero",
        summarized(problems, "vectors whose padding is not zero"),
    )


def _add_sums(state: Examined, findings: Findings, what: str, further: Sequence[str] = ()) -> None:
    """Whether bytes match their checksums, where there are some.

    Args:
        state: gets the check.
        findings: of reading them.
        what: the bytes that were read, in words.
        further: what else has checksums, in words.
    """
    problems = [f"record {r!r} of {f!r} does not match its checksum" for f, r in findings.wrong_records]
    problems = summarized(problems, "records do not match their checksums")
    problems += [f"{name!r} does not match its checksum in the manifest" for name in findings.wrong_files]
    sums = [*[count(findings.records, "record")] * bool(findings.records), *further]
    answer = f"the checksums of {joined(sums)} match" if sums else "there are no checksums"
    state.add("bytes", f"{size(findings.bytes_read)} {what}; {answer}", problems)
    if without := [f.name for f in state.files if not f.records and f.crc32 is None]:
        holds = "holds" if len(without) == 1 else "hold"
        state.notes.append(f"{examples(without)} {holds} no checksums, so changed bytes cannot be found there.")


def _check_bytes(
    state: Examined, facts: Manifest | None, deep: bool, pace: Pace, progress: Callable[[int], None] | None
) -> None:
    """Reads everything once."""
    catalog = state.catalog
    findings = examine(catalog, state.files, pace, progress)
    state.whole = True
    listed = 0 if facts is None else sum(file.crc32 is not None for file in state.files)
    _add_sums(state, findings, "read", [f"{count(listed, 'file')} of the manifest"] * bool(facts))
    if catalog is None:
        return
    _add_whole_copies(state, catalog, findings)
    if catalog.zeros:
        _add_padding(state, catalog, findings.padding)
    if deep:
        state.numbers = non_finite(findings.tensors)
        trained = [name for name in state.numbers if catalog.tensors[name].role != "buffer"]
        nan, inf = (sum(state.numbers[name][i] for name in trained) for i in (0, 1))
        answer = "no parameter holds NaN or infinity"
        problems = [f"{nan:,} NaN and {inf:,} infinite in {count(len(trained), 'parameter')}"] if trained else []
        state.add("numbers", answer, problems)
