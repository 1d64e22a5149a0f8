"""Whether a delta is complete and intact, and whether it leads to a given version of the weights.

For `verify`. Every difference is decompressed. A delta holds the checksums of the new version's tensors, so the version that it
was made from can be compared with it, without the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zckpt.base.errors import CastError, ZckptError
from zckpt.base.pace import Pace
from zckpt.base.words import count, examples, size
from zckpt.checks.verdict import Check, Verification, summarize
from zckpt.containers.zstd import frame_bytes
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import BF16, CAST_TARGETS, SHORT_NAMES, DType
from zckpt.deltas.decode import difference
from zckpt.deltas.form import hasher_of
from zckpt.deltas.pieces import PieceReader, pieces
from zckpt.deltas.read import DeltaDirectory, read_delta
from zckpt.engine.checksums import crc32
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog, strip_wrappers
from zckpt.output import manifest as manifests
from zckpt.storage.location import Location

_HEADER_BYTES = 18
"""The bytes of the longest header of a zstd frame."""


def verify_delta(
    place: Location,
    new: Location | None,
    options: Reading,
    pace: Pace,
    progress: Callable[[int], None] | None = None,
    expect: Callable[[int], None] = lambda nbytes: None,
) -> Verification:
    """Checks a delta in `place`, and whether it leads to the version `new` of the weights; None to check the delta alone.

    Raises:
        NotACheckpointError, UnsupportedError: `new` cannot be read, or a package that deltas need is not installed.
    """
    try:
        delta = read_delta(place)
    except ZckptError as error:
        return Verification(place.path, "a delta that cannot be read", True, (Check("index", "", (str(error),)),))
    form = delta.form
    opened = None if new is None else open_catalog(new, options)
    done = 0
    nbytes = sum((place / name).size() for name in delta.names)
    expect(2 * nbytes + (0 if opened is None else sum(e.nbytes for e in opened.catalog.tensors.values())))

    def read(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done)

    checks = [_files(delta, read), _differences(delta, read)]
    notes: list[str] = []
    deletable = None
    if opened is not None:
        checks.append(_weights(delta, strip_wrappers(opened.catalog)[0], pace, read))
        if not delta.unchanged:
            notes.append("The delta has no checksums of unchanged tensors, so only the changed ones were compared.")
        deletable = (False, "the output is a delta, which holds only what changed")
    return Verification(
        path=place.path, about=f"delta, version {form.version} from {form.base_version}, {form.encoding}", deep=True,
        checks=tuple(checks), deletable=deletable, notes=tuple(notes),
    )  # fmt: skip


def _files(delta: DeltaDirectory, read: Callable[[int], None]) -> Check:
    """Checks whether the files are those of the manifest."""
    found = manifests.find(delta.place)
    total = sum((delta.place / name).size() for name in delta.names)
    if found is None:
        read(total)
        return Check(
            "files", f"{count(len(delta.names), 'file')}, {size(total)}; there is no {manifests.NAME} with checksums"
        )
    problems: list[str] = []
    try:
        listed = manifests.read(found).files
        for file in listed:
            crc = nbytes = 0
            for block in (delta.place / file.path).blocks():
                crc, nbytes = crc32(block, crc), nbytes + len(block)
                read(len(block))
            if (crc, nbytes) != (file.crc32, file.nbytes):
                problems.append(f"{file.path}: has other bytes than {manifests.NAME} says")
        missing = {*delta.names} - {file.path for file in listed}
        problems += [f"{name}: is not listed in {manifests.NAME}" for name in sorted(missing)]
    except ZckptError as error:
        return Check("files", "", (*problems, str(error)))
    answer = f"{size(total)} read; the checksums of {count(len(listed), 'file')} of the manifest match"
    return Check("files", answer, tuple(summarize(problems, "files are damaged")), len(problems))


def _differences(delta: DeltaDirectory, read: Callable[[int], None]) -> Check:
    """Checks whether every difference can be decompressed, and has the length that it states."""
    problems: list[str] = []
    for name in delta.changed:
        try:
            problems += [f"the difference of {name!r} {what}" for what in _wrong(delta, name)]
        except ZckptError as error:
            problems.append(str(error))
        read(delta.changed[name].nbytes)
    known = count(len(delta.changed) + len(delta.unchanged), "tensor")
    what = f"{count(len(delta.changed), 'difference')} decompressed, of {known}"
    return Check("changes", what, tuple(summarize(problems, "differences are damaged")), len(problems))


def _wrong(delta: DeltaDirectory, name: str) -> Iterator[str]:
    with delta.open_difference(name) as read:
        said = frame_bytes(read(_HEADER_BYTES, 0))
        frame = difference(read, delta.changed[name].store.path, name)
        first = frame.take(4) if delta.form.encoding == "overwrite" else b""
        found = len(first) + frame.drain()
    if said is not None and found != said:
        yield f"ends after {found:,} of {said:,} bytes"
    if first and found != 4 + 5 * int.from_bytes(first, "little"):
        yield f"has {found:,} bytes, which are not those of {int.from_bytes(first, 'little'):,} changes"


def _weights(delta: DeltaDirectory, new: Catalog, pace: Pace, read: Callable[[int], None]) -> Check:
    """Checks whether the new version's tensors are those that the delta leads to."""
    known = {**delta.unchanged, **delta.digests}
    lacking = [name for name in known if name not in new.tensors and name not in new.aliases]
    problems = [f"{count(len(lacking), 'tensor')} of the delta is not in it: {examples(lacking)}"] if lacking else []
    if delta.unchanged:
        own = {new.aliases.get(name, name) for name in known}
        if others := [name for name in new.tensors if name not in own]:
            problems.append(f"the delta does not know {count(len(others), 'tensor')}: {examples(others)}")
    found = manifests.find(delta.place)
    wanted = manifests.read(found).dtype if found is not None else ""
    pairs = [(name, new.tensors[new.aliases.get(name, name)]) for name in known if name not in lacking]
    with PieceReader(pace, sum(entry.nbytes for _, entry in pairs)) as reader:

        def differs(pair: tuple[str, TensorEntry]) -> tuple[str, int]:
            name, entry = pair
            dtypes = _dtypes(entry, wanted)
            same = any(_digest(reader, entry, dtype, delta) == known[name] for dtype in dtypes)
            return "" if same else name, entry.nbytes

        wrong: list[str] = []
        for name, nbytes in reader.in_order(differs, pairs, lambda pair: pair[1:]):
            wrong += [name] if name else []
            read(nbytes)
        reader.check_sources()
    number = len(problems) + len(wrong)
    problems += summarize([f"{name!r} has another checksum than the delta says" for name in wrong], "tensors differ")
    answer = f"{count(len(pairs), 'tensor')} have the checksums that the delta says"
    return Check("weights", answer, tuple(problems), number)


def _dtypes(entry: TensorEntry, wanted: str) -> list[DType]:
    """The dtypes that a tensor may have in a delta, the most likely first; see `jobs.versions`."""
    if entry.dtype not in CAST_TARGETS:
        return [entry.dtype]
    likely = sorted(CAST_TARGETS, key=lambda dtype: (dtype != BF16, dtype != entry.dtype))
    return [dtype for dtype in likely if wanted in ("", SHORT_NAMES[dtype])] or likely


def _digest(reader: PieceReader, entry: TensorEntry, dtype: DType, delta: DeltaDirectory) -> str:
    hasher = hasher_of(delta.form.checksum)()
    try:
        for start, stop in pieces(entry.numel, dtype):
            hasher.update(reader.read(entry, start, stop, dtype).data)
    except CastError:
        return ""
    return hasher.hexdigest()
