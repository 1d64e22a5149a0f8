"""An address as the destination of an output: its record, the files that appear early, the seal, the commit.

Each file is sent while it is made, by multi-part upload. `output.address` says in which order single steps replace an old output.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import TracebackType

from zckpt.base.errors import InconsistentError, OutputError, UnsupportedError, ZckptError, add_note
from zckpt.base.words import examples, size
from zckpt.core.plan import WrittenFile
from zckpt.output.address import (
    CONFIG,
    MOST_SMALL_BYTES,
    AddressRecord,
    OutputAddress,
    SentToAddress,
    give_up,
    recover,
    settle,
)
from zckpt.output.checks import check_kind, exists
from zckpt.output.contents import WEIGHTS, decide_replacement, listed_in
from zckpt.output.files import INDEX, FileOrder, FileSource, Write
from zckpt.output.manifest import Manifest
from zckpt.output.order import Order
from zckpt.output.signature import Signing
from zckpt.storage import fsspec_io
from zckpt.storage.location import Location
from zckpt.storage.uploads import Upload

_SHARD = re.compile(r"(.+?)((?:-[0-9a-f]{8})?)(-\d{5}-of-\d{5}\.\w+)")


def check_address(out: Location, *, single: bool, overwrite: bool, merge: bool = False) -> None:
    """Refuses an output at an address that must not be written; arguments and errors as for `checks.check_path`."""
    place = OutputAddress(out.refreshed(), single=single)
    check_kind(out, fsspec_io.kind(place.out.path), single=single)
    there = place.names()
    if place.record not in there:  # after an interrupted run, `begin` checks again
        _files_to_replace(place, there, (), overwrite=overwrite, merge=merge)


def _files_to_replace(
    place: OutputAddress, there: Collection[str], new: Collection[str], *, overwrite: bool, merge: bool
) -> frozenset[str]:
    """The files of the old output that are deleted or replaced: those that its `zckpt.json` lists. Raises OutputError
    if the output exists and must not be replaced, or files that zckpt did not write are in the way.
    """
    there = {name for name in there if name != place.record}
    if there and not (overwrite or merge):
        raise exists(place.out, is_directory=not place.single)
    if place.single or not there:
        return frozenset(there)
    listed = listed_in(place.out, there, merge=merge)
    inner = {name for name in listed if "/" in name}
    files = there - {name.partition("/")[0] for name in inner} | inner
    return frozenset(decide_replacement(place.out, files, (), listed, {*new, place.manifest}, merge=merge).deleted)


class AddressDestination(contextlib.AbstractContextManager["AddressDestination"]):
    """One run that sends an output, as `Destination` says.

    Args:
        order: the output.
        source: its files.
    """

    def __init__(self, order: Order | FileOrder, source: FileSource) -> None:
        self._place = OutputAddress(order.out.refreshed(), single=order.single)
        self._order, self._source, self._signing = order, source, order.signing
        self._head = ""
        self._helpers = {name: f".zckpt-{name}" for name in source.helpers}
        self._left: dict[str, SentToAddress] = {}
        self._sent: dict[str, SentToAddress] = {}
        self._digests: dict[str, str] = {}
        self._upload: Upload | None = None
        self._record: AddressRecord | None = None
        self._is_sealed = False
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.directory = ""
        self.published = False
        self.files: Sequence[WrittenFile] = ()
        self.notes: tuple[str, ...] = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and self._record is not None and not self._is_sealed:
                self._withdraw(self._record)
        finally:
            if self._scratch is not None:
                self._scratch.cleanup()

    def begin(self) -> Mapping[str, WrittenFile]:
        """Finishes or gives back what runs left, and finds the files that one of this job had sent."""
        place, source = self._place, self._source
        kept = recover(place, source.job)
        done = place.made_by(source.job)
        if done is not None:
            self.published = True
            self.files = [sent.file for sent in done.sent if sent.file.path != place.manifest]
            return {}
        if source.makes_files:
            self._scratch = tempfile.TemporaryDirectory(prefix="zckpt-")
            self.directory = self._scratch.name
        self._head, self._left = source.head, {sent.file.path: sent for sent in kept}
        self._there = there = place.names() - self._left.keys()
        own = {place.manifest, *([place.signature] if self._signing else [])}
        new = {*source.large, *source.small, *self._helpers.values(), *own}
        self._old = _files_to_replace(place, there, new, overwrite=self._order.overwrite, merge=self._order.merge)
        if blocked := there & set(self._helpers.values()):
            raise OutputError(
                "files that zckpt did not write are in the way", file=place.out, found=examples(sorted(blocked)),
                expected="no file of these names", remedy="Move them away, or choose another OUT. Nothing was changed.",
            )  # fmt: skip
        names = {name: name for name in source.large} if self._head else _free_names(source.large, there, source.job)
        self._names = names | self._helpers
        left = {name: replace(self._left[at].file, path=name) for name, at in self._names.items() if at in self._left}
        for name in self._helpers.keys() & left.keys():
            Path(self.directory, name).write_bytes(place.read(self._names[name]))
        return left

    def keep(self, kept: Mapping[str, WrittenFile]) -> None:
        """Leaves the record of this run; files that are left and not kept are sent again."""
        before = self._place.read_record()
        self._record = AddressRecord(
            self._source.job, os.urandom(8).hex(), names=() if self._head else tuple(self._names.values()),
            sent=tuple(self._left.values()), last=before.last if before is not None and before.state != "done" else before,
        )  # fmt: skip
        self._place.write_record(self._record)

    def take(self, source: FileSource, kept: Mapping[str, WrittenFile]) -> dict[str, WrittenFile]:
        """Sends all large files that are not kept, one after the other."""
        files = dict(kept)
        for name, nbytes, send in source.stream(self.directory, kept):
            files[name] = self._send(name, nbytes, send)
        return files

    def _send(self, name: str, nbytes: int, send: Callable[[Write], WrittenFile]) -> WrittenFile:
        """Sends one file. It appears when it is complete; the only file of an output appears at the commit."""
        actual, hashed = self._names[name], sha256()

        def write(data: bytes | memoryview) -> None:
            if self._signing is not None:
                hashed.update(data)
            upload.write(data)

        with contextlib.ExitStack() as stack:
            upload = Upload(self._place.at(actual).path, nbytes)
            if name == self._head:
                self._upload = upload
            else:
                stack.enter_context(upload)
            file = send(write)
            self._check_mine()  # before it appears: it may have the name of another run's file
        self._digests[actual] = hashed.hexdigest()
        self._left.pop(actual, None)
        if name == self._head:
            self._sent[actual] = SentToAddress(replace(file, path=actual), "")
            return file
        self._sent[actual] = self._place.sent(replace(file, path=actual))
        record = self._check_mine()
        others = (sent for sent in record.sent if sent.file.path != actual)
        self._record = replace(record, sent=(*others, self._sent[actual]))
        self._place.write_record(self._record)
        return file

    def seal(self, manifest: Manifest, source: FileSource) -> None:
        """Writes the sealed record: what was sent, what is still missing, and what is deleted after that."""
        place, old = self._place, self._old
        small = source.read_small(self.directory, manifest)
        wanted = {n: _rename_in_index(data, self._names) if n.endswith(INDEX) else data for n, data in small.items()}
        helpers = set(self._helpers.values())
        made = [sent for sent in (*self._left.values(), *self._sent.values()) if sent.file.path not in helpers]
        files = (*(sent.file for sent in made), *(_file_of(name, data) for name, data in wanted.items()))
        text = replace(manifest, files=files, signature=place.signature if self._signing else "").as_bytes()
        if self._signing is not None:
            wanted[place.signature] = self._signature(self._signing, made, wanted, text)
        same = {n for n in self._there & wanted.keys() if not n.endswith(INDEX) and place.read(n) == wanted[n]}
        shards = {name for name in old if _SHARD.fullmatch(name)}
        going = old - {*wanted, *self._names.values(), place.manifest}
        changes = [n for n in wanted if n not in same and not n.endswith(INDEX)] + [
            n for n in going - shards if not WEIGHTS.fullmatch(n)
        ]
        gate = {place.manifest} | ({CONFIG} if changes else set[str]())
        same -= gate  # these go first, and so are written again
        record = self._check_mine()
        sealed = replace(
            record,
            state="sealed",
            sent=(*made, *(place.sent(_file_of(name, data)) for name, data in wanted.items() if name in same)),
            head=self._head,
            before=place.mark(self._head) if self._head in self._there else "",
            contents={**{name: data for name, data in wanted.items() if name not in same}, place.manifest: text},
            deleted={name: place.read(name) for name in gate & self._there if name in old or name in wanted},
            heads=tuple(sorted(going - shards - gate)),
            old=tuple(sorted({*(going & shards), *helpers})),
        )
        nbytes = sum(map(len, (*sealed.contents.values(), *sealed.deleted.values())))
        if nbytes > MOST_SMALL_BYTES:
            raise UnsupportedError(
                "the small files beside the weights are too large for an address", file=place.out,
                found=f"{size(nbytes)} in all", expected=f"at most {size(MOST_SMALL_BYTES)}",
                remedy="Convert to a directory on this machine, and copy that.",
            )  # fmt: skip
        if not all(place.has(sent) for sent in record.sent):
            raise _taken_error(place)
        self._record = sealed  # set first: the next request may succeed although its answer is lost
        place.write_record(sealed)
        listed = [sent.file for sent in sealed.sent] + [_file_of(name, data) for name, data in sealed.contents.items()]
        self.files = [file for file in listed if file.path != place.manifest]
        self._is_sealed = True

    def _signature(
        self, signing: Signing, made: Iterable[SentToAddress], wanted: Mapping[str, bytes], manifest: bytes
    ) -> bytes:
        """The signature's file; what an interrupted run had sent is read again."""
        place = self._place
        digests = {s.file.path: self._digests.get(s.file.path) or place.sha256(s.file.path) for s in made}
        digests |= {name: sha256(data).hexdigest() for name, data in wanted.items()}
        return signing.bundle(place.out.name, digests, sha256(manifest).hexdigest(), single=place.single)

    def commit(self) -> None:
        """Puts the output in place; if the store fails, tries once more to finish it, or gives it up and raises."""
        assert self._record is not None
        try:
            with contextlib.ExitStack() as stack:
                if self._upload is not None:
                    stack.callback(self._upload.discard)  # otherwise its destructor would complete it
                settle(self._place, self._record, self._upload.complete if self._upload else lambda: None)
        except ZckptError as error:
            try:
                if settle(self._place, self._record):
                    return
                note = "The new output was given up; the old one, if there was one, is as it was."
            except ZckptError:
                note = f"The address has a record of this run ({self._place.record!r}). Run the same command again to resume it."
            add_note(error, note)
            raise

    def _withdraw(self, record: AddressRecord) -> None:
        """Removes the files that were sent, unless another run writes to the address."""
        if self._upload is not None:
            self._upload.discard()
        with contextlib.suppress(Exception):
            self._check_mine()
            give_up(self._place, record)

    def _check_mine(self) -> AddressRecord:
        """This run's record; raises InconsistentError if another run writes to the address."""
        found = self._place.read_record()
        if self._record is None or found is None or found.run != self._record.run:
            raise _taken_error(self._place)
        return self._record


def _taken_error(place: OutputAddress) -> InconsistentError:
    return InconsistentError(
        "another run writes to the same address", file=place.out, found="a record of that run",
        remedy="Wait until the other run has ended. This one has stopped.",
    )  # fmt: skip


def _file_of(name: str, data: bytes) -> WrittenFile:
    """The journal's facts of a small file."""
    return WrittenFile(name, len(data), zlib.crc32(data))


def _free_names(shards: Collection[str], there: Collection[str], job: str) -> dict[str, str]:
    """Shard -> the name it is sent under: its own if all names are free, otherwise with eight digits that follow from the job."""
    named = {name: name for name in shards}
    while any(name in there for name in named.values()):
        job = sha256(job.encode()).hexdigest()
        named = {name: _SHARD.sub(rf"\1-{job[:8]}\3", name) for name in shards}
    return named


def _rename_in_index(index: bytes, names: Mapping[str, str]) -> bytes:
    """An index with the names that the shards are sent under."""
    if all(name == actual for name, actual in names.items()):
        return index
    facts = json.loads(index)
    facts["weight_map"] = {tensor: names[shard] for tensor, shard in facts["weight_map"].items()}
    return (json.dumps(facts, indent=2) + "\n").encode()
