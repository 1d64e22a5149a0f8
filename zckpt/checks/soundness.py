"""Checks whether a checkpoint is complete and intact.

For `verify`. Everything that is wrong is reported: a damaged file does not hide another one. Problems are findings, not
errors; an error means that the question itself could not be answered. Digests that the trainer recorded when it saved are no
checksums of a container: for these each file is read from begin to end.

[Note: twins] A catalog reads every element once, so two files from which it reads are never two copies of one part. If they hold
the same bytes, one is a copy under the other's name. Parts of trained weights are never alike; equal are only constant ones
(biases of zeros, norms of ones), tiny ones, and experts or layers that a run began with and has not trained yet.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from zckpt import layouts
from zckpt.base.errors import IncompleteError, NotACheckpointError, UnsupportedError, UsageError, ZckptError
from zckpt.base.pace import DEFAULT_PACE, Pace
from zckpt.base.words import count, examples
from zckpt.checks.contents import add_copies, add_padding, check_bytes
from zckpt.checks.examined import Examined
from zckpt.checks.integrity import CheckedFile, checked_file, checked_parts, examine, small_records
from zckpt.checks.second import as_unproved, compare_places
from zckpt.containers import open_container
from zckpt.containers.container import open_input
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.fragments import Fragment
from zckpt.core.stores import FileStore
from zckpt.engine import replicas
from zckpt.engine.early import EarlyReads
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog, strip_wrappers
from zckpt.layouts.places import find
from zckpt.layouts.run import agreement
from zckpt.layouts.run.training import Training
from zckpt.layouts.run.values import refuse_odd_values
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.origins import contradictions, of_other_ages, origin
from zckpt.output import manifest as manifests
from zckpt.output.address import RECORD
from zckpt.output.manifest import Manifest
from zckpt.storage.descriptors import forget
from zckpt.storage.location import Location, locate

_LEAST = 64
"""The least bytes that two files must have in common, constant tensors aside: fewer, such as step counts, may agree by
chance.
"""
_HEAD = 4 << 10
"""The bytes of one tensor's part that are read first in each file; more is read only if these are equal."""
_MOST = 64 << 10
"""The most bytes that are then compared of each part."""
_TRIES = 8
"""The most tensors that are compared for a set of files, if the parts of the first ones are constant."""

Spans = Sequence[tuple[int, int]]
"""First byte and bytes of a tensor's fragments in a file."""
Cut = Mapping[str, Spans]
"""Path of a file -> where a tensor's part is in it."""


def find_twins(
    catalog: Catalog, states: Sequence[TensorEntry], files: Sequence[CheckedFile], names: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """The files from which different parts of a model or its optimizer are read, with parts that are the same bytes:
    problems, where parts cannot be alike, and notes, where they may be. `names`: path -> what the file is called.
    """
    problems: list[str] = []
    notes: list[str] = []
    told: set[tuple[str, str]] = set()
    entries = [*catalog.tensors.values(), *states]
    with suppress(ZckptError):  # a file that cannot be read: other checks say so
        for a, b, number in _alike(entries):
            told.add((a, b))
            problems.append(
                f"{names.get(a, a)!r} and {names.get(b, b)!r} hold the same bytes of {count(number, 'tensor')}, and each "
                "should hold another part: one is a copy under the other's name"
            )
        for a, b, is_constant in _equal_files(entries, files) if catalog.source.layout != "plain" else ():
            both = f"{names.get(a, a)!r} and {names.get(b, b)!r} hold the same bytes"
            if (a, b) in told:
                continue
            if is_constant or catalog.source.global_steps == 0:
                notes.append(f"{both}: one may be a copy under the other's name.")
            else:
                problems.append(f"{both}, where each should hold other tensors: one is a copy under the other's name")
    return problems, notes


def _alike(entries: Sequence[TensorEntry]) -> Iterator[tuple[str, str, int]]:
    """Two files, and the number of tensors that they share: the parts of all of these are alike, and not all constant."""
    cuts = [cut for entry in entries if len(cut := _cut_of(entry)) > 1]
    cuts.sort(key=lambda cut: -min(_nbytes(spans) for spans in cut.values()))
    tries: dict[frozenset[str], int] = {}
    done: list[frozenset[str]] = []
    found: set[tuple[str, str]] = set()
    for cut in cuts:
        paths = frozenset(cut)
        if tries.get(paths, 0) >= _TRIES or any(paths <= one for one in done):
            continue
        tries[paths] = tries.get(paths, 0) + 1
        most = min(_HEAD, min(_nbytes(spans) for spans in cut.values()))
        heads: dict[bytes, list[str]] = {}
        for path in sorted(cut):
            heads.setdefault(_read(path, cut[path], most), []).append(path)
        if not any(map(_is_constant, heads)):
            done.append(paths)
        for head, (first, *others) in heads.items():
            for other in others if not _is_constant(head) else ():
                shared = [(one[first], one[other]) for one in cuts if first in one and other in one]
                if (first, other) not in found and sum(_alike_bytes(first, a, other, b) for a, b in shared) >= _LEAST:
                    found.add((first, other))
                    yield first, other, len(shared)


def _cut_of(entry: TensorEntry) -> Cut:
    """The parts of a tensor in each of the files that share it."""
    parts: dict[str, list[tuple[int, int]]] = {}
    for fragment in entry.fragments if len(entry.fragments) > 1 else ():
        if isinstance(fragment.store, FileStore) and fragment.numel:
            parts.setdefault(fragment.store.path, []).append(_span_of(fragment, entry.dtype.itemsize))
    return parts


def _span_of(fragment: Fragment, itemsize: int) -> tuple[int, int]:
    return fragment.byte_offset, fragment.nbytes_end(itemsize) - fragment.byte_offset


def _nbytes(spans: Spans) -> int:
    return sum(nbytes for _, nbytes in spans)


def _alike_bytes(path: str, spans: Spans, other: str, others: Spans) -> float:
    """The bytes that two parts have in common: 0 if they are constant, negative if they differ."""
    most = min(_nbytes(spans), _nbytes(others), _MOST)
    if (data := _read(path, spans, most)) != _read(other, others, most):
        return -math.inf
    return 0 if _is_constant(data) else most


def _read(path: str, spans: Spans, most: int) -> bytes:
    """The first bytes of a tensor's part."""
    data = b""
    with open_input(path) as file:
        for offset, nbytes in spans:
            data += file.read(offset, min(nbytes, most - len(data)), "a tensor")
            if len(data) >= most:
                break
    return data


def _is_constant(data: bytes) -> bool:
    """Whether all numbers of up to 8 bytes are equal."""
    return data[8:] == data[:-8]


def _equal_files(entries: Sequence[TensorEntry], files: Sequence[CheckedFile]) -> Iterator[tuple[str, str, bool]]:
    """Two files, and one of them has all records with trained numbers of the other, by their checksums; whether all
    are constant.
    """
    records = {file.store.path: sorted(file.records, key=lambda record: record[1]) for file in files}
    held: dict[str, set[int]] = {}
    for entry in entries:
        for fragment in entry.fragments if entry.role == "parameter" else ():
            if isinstance(fragment.store, FileStore) and (own := records.get(fragment.store.path)) is not None:
                if not own:  # a file without checksums is one record
                    size = fragment.store.size
                    own.append(("", 0, size, zlib.crc32(_read(fragment.store.path, [(0, size)], min(size, _MOST)))))
                at = bisect_right(own, fragment.byte_offset, key=lambda record: record[1]) - 1
                held.setdefault(fragment.store.path, set()).add(at)
    known: dict[tuple[int, int], list[str]] = {}
    sums: dict[str, set[tuple[int, int]]] = {}
    for path, numbers in held.items():
        large = [records[path][number] for number in sorted(numbers)]
        own_sums = sums[path] = {(nbytes, crc) for _, _, nbytes, crc in large}
        for other in dict.fromkeys(other for one in own_sums for other in known.get(one, ())):
            if own_sums <= sums[other] or sums[other] <= own_sums:
                same = [(at, size) for _, at, size, crc in large if (size, crc) in sums[other]]
                if sum(size for _, size in same) >= _LEAST:
                    told = sum(
                        size for at, size in same if not _is_constant(_read(path, [(at, size)], min(size, _MOST)))
                    )
                    yield other, path, told < _LEAST
                    break
        for one in own_sums:
            known.setdefault(one, []).append(path)


def examine_checkpoint(
    path: Location,
    options: Reading,
    *,
    deep: bool = False,
    whole: bool = False,
    later: bool = False,
    pace: Pace = DEFAULT_PACE,
    progress: Callable[[int], None] | None = None,
    expect: Callable[[int], None] = lambda nbytes: None,
    early: EarlyReads | None = None,
) -> Examined:
    """Examines one checkpoint or output by itself.

    Args:
        path: of the checkpoint.
        options: which save, and how it is read.
        deep: read every byte, count NaN and infinity.
        whole: read every byte, from the disk and not from the page cache. An output with a manifest is always read whole.
        later: leave the bytes to the caller, who calls `contents.check_bytes`, if the catalog can be read.
        pace: how hard to work.
        progress: called with the bytes read so far.
        expect: called with the bytes that will be read, when that is known.
        early: what reads some of its files meanwhile.

    Raises:
        NotACheckpointError: there is nothing to look at. UnsupportedError: zckpt cannot read it.
    """
    place = find(path, options.tag, [locate(root) for root in options.also], as_part=options.as_part)
    state = Examined(place, as_unproved("its tensors cannot be read"))
    state.facts = facts = _manifest_of(state, path)
    unknown = _open(state, path, options)
    _open_files(state, facts)
    _check_save(state)
    for file in state.files if whole and not path.is_remote else ():
        with open(file.store.path, "rb") as data:
            forget(data.fileno())
    if later and state.catalog is not None:
        pass
    elif deep or whole or facts is not None:
        expect(sum(file.store.size for file in state.files))
        check_bytes(state, pace, progress, deep=deep, early=early)
    else:
        try:
            _check_ends(state)
        except ZckptError as error:  # a disk that does not give back what it was given
            state.add("bytes", "", [str(error)])
    if (digests := check_digests(state.place.listing, read=deep or whole)) is not None:
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


def _open(state: Examined, path: Location, options: Reading) -> ZckptError | None:
    """Reads the catalog. Returns an error that is not a finding, unless damage explains it."""
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
    state.add("whole", str(state.catalog.evidence))
    state.places = compare_places(opened.place.listing, opened.catalog)
    state.add(
        "places", state.places.as_answer(), state.places.problems, "tensors are not read where the files have them"
    )
    return None


def _open_files(state: Examined, facts: Manifest | None) -> None:
    """Opens every file of the save: those of the layout, those that hold elements, and those that a manifest names."""
    listing = state.place.listing
    family = layouts.family_by_names(listing)
    paths = {listing.files[name].path: name for name in family.containers(listing)}
    for store in sorted(state.catalog.stores(), key=str) if state.catalog is not None else ():
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
    paths.update(dict.fromkeys(sorted(raw), ""))
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
    if not paths:
        return
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
        _check_twins(state, _check_states(state))


def _check_optimizers(state: Examined) -> None:
    """Checks whether a run can resume, by what all ranks' files say of their optimizers."""
    listing = state.place.listing
    try:
        with refuse_odd_values(listing):
            files = len(agreement.files_of_optimizers(listing))
            bad = [str(bad) for bad in agreement.contradictions(listing)]
    except ZckptError as error:
        files, bad = 2, [str(error)]
    source = state.catalog.source if state.catalog is not None else None
    if not files and source is not None and source.zero_stage and source.layout != "universal":
        state.add(
            "optimizer", "", ["every optimizer file is missing: the fp32 master weights and the states are not here"]
        )
    if files > 1:
        answer = f"{files:,} optimizer files agree on step counts, settings and loss scale"
        state.add("optimizer", answer, bad, "places at which optimizer files disagree")


def _check_states(state: Examined) -> Training | None:
    """Checks whether the optimizer's states fit the weights: what is not understood is a note, a contradiction a
    problem. Returns what was read of them; None where nothing was.
    """
    catalog, listing = state.catalog, state.place.listing
    if catalog is None or layouts.family_of(listing).read_training is None:
        return None
    has_states = bool(catalog.source.optimizer_states)
    try:
        return layouts.read_training(listing, any_shape=True)
    except UnsupportedError as error:
        if has_states:
            state.notes.append(f"The optimizer's states are not checked: {error}")
    except IncompleteError as error:
        if has_states:  # otherwise there are none
            state.add("states", "", [str(error)])
    except ZckptError as error:
        if state.ok:  # otherwise this may be what is said already
            state.add("states", "", [str(error)])
    return None


def _check_twins(state: Examined, training: Training | None) -> None:
    """Checks whether files that hold different parts of the model or its optimizer have the same bytes."""
    listing = state.place.listing
    names = {where.path: name for name, where in listing.files.items()}
    states = [entry for own in training.states.values() for entry in own.values()] if training is not None else []
    problems, notes = ([], []) if state.catalog is None else find_twins(state.catalog, states, state.files, names)
    state.notes.extend(notes)
    if problems:
        state.add("ranks", "", problems, "pairs of files hold the same bytes")


def _check_ends(state: Examined) -> None:
    """Checks both ends of every fragment, all padding, and the small records of every zip file."""
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
    add_copies(state, catalog, bad, "at both ends of every stored run")
    if catalog.zeros:
        findings = examine(replace(catalog, tensors={}, aliases={}), [], DEFAULT_PACE)
        add_padding(state, catalog, findings.padding)


def check_digests(listing: Listing, *, read: bool) -> tuple[str, list[str]] | None:
    """The result for the recorded digests: (answer, problems); None for a save without any. `read`: whether bytes are
    compared, and not only looked for.
    """
    try:
        family = layouts.family_of(listing)
    except ZckptError:  # whether there is a save at all, others say
        return None
    try:
        recorded = family.digests(listing)
    except ZckptError as error:
        return "", [str(error)]
    if not recorded:
        return None
    there = {name: digest for name, digest in recorded.items() if listing.where(name).is_file()}
    problems = [f"{name!r} is missing, which the save lists" for name in recorded.keys() - there.keys()]
    for name, digest in there.items() if read else ():
        sums = hashlib.sha256()
        for block in listing.where(name).blocks():
            sums.update(block)
        if sums.hexdigest() != digest.lower():
            problems.append(f"{name!r} does not have the SHA-256 that the save lists")
    files = count(len(recorded), "file")
    if read:
        return f"{files} with the SHA-256 that the save lists", sorted(problems)
    return f"{files} that the save lists with their SHA-256; --deep compares them", sorted(problems)
