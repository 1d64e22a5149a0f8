"""One run that sends an output to an address: its record, the files that appear early, the seal, the commit.

For `delivery_to_address` and `made_to_address`. `output.address` says in which order single steps replace an old output.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import sha256

from zckpt.base.errors import InconsistentError, OutputError, UnsupportedError, ZckptError, add_note
from zckpt.base.words import examples, size
from zckpt.output.address import (
    CONFIG,
    MOST_SMALL_BYTES,
    AddressRecord,
    OutputAddress,
    SentToAddress,
    give_up,
    settle,
)
from zckpt.output.checks import check_kind, exists
from zckpt.output.contents import WEIGHTS, decided, listed_in
from zckpt.output.journal import Finished
from zckpt.output.manifest import Manifest
from zckpt.output.signature import Signing
from zckpt.storage import fsspec_io
from zckpt.storage.location import Location
from zckpt.storage.uploads import Upload

INDEX = ".index.json"
_SHARD = re.compile(r"(.+?)((?:-[0-9a-f]{8})?)(-\d{5}-of-\d{5}\.\w+)")

Write = Callable[[bytes | memoryview], None]
"""Sends the next bytes of a file."""


def check_address(out: Location, *, single: bool, overwrite: bool, merge: bool = False) -> None:
    """Refuses an output at an address that must not be written; arguments and errors as for `checks.check_path`."""
    place = OutputAddress(out.refreshed(), single=single)
    check_kind(out, fsspec_io.kind(place.out.path), single=single)
    there = place.names()
    if place.record not in there:  # after an interrupted run, `Sending` checks again
        _replaced(place, there, (), overwrite=overwrite, merge=merge)


def _replaced(
    place: OutputAddress, there: Collection[str], new: Collection[str], *, overwrite: bool, merge: bool
) -> frozenset[str]:
    """The files of the old output that are deleted or replaced: those that its `zckpt.json` lists.

    Raises:
        OutputError: the output exists and must not be replaced, or files that zckpt did not write are in the way.
    """
    there = {name for name in there if name != place.record}
    if there and not (overwrite or merge):
        raise exists(place.out, is_directory=not place.single)
    if place.single or not there:
        return frozenset(there)
    listed = listed_in(place.out, there, merge=merge)
    inner = {name for name in listed if "/" in name}
    files = there - {name.partition("/")[0] for name in inner} | inner
    return frozenset(decided(place.out, files, (), listed, {*new, place.manifest}, merge=merge).deleted)


class Sending:
    """One run that sends an output.

    Args:
        place: the output's address.
        job: fingerprint of everything that the output's bytes depend on.
        kept: files that an interrupted run of the same job had sent.
        large: names of the files that are sent before the commit.
        small: names of all other files, as far as they are known.
        head: the one of `large` that is the output's only one, and appears at the commit; "" if there are several.
        helpers: names of files that are sent for the next run, should this one be interrupted; the commit deletes them.
        overwrite: replace an existing output.
        merge: put the files among others.
        signing: with which key the output is signed; None for none.

    Attributes:
        names: of `large` and `helpers` -> the name that each is sent under.
    """

    def __init__(
        self,
        place: OutputAddress,
        job: str,
        kept: tuple[SentToAddress, ...],
        *,
        large: Collection[str],
        small: Collection[str],
        head: str = "",
        helpers: Collection[str] = (),
        overwrite: bool = False,
        merge: bool = False,
        signing: Signing | None = None,
    ) -> None:
        self._place, self._head, self._signing = place, head, signing
        self._helpers = {name: f".zckpt-{name}" for name in helpers}
        self._left = {sent.file.path: sent for sent in kept}
        self._sent: dict[str, SentToAddress] = {}
        self._digests: dict[str, str] = {}
        self._upload: Upload | None = None
        there = place.names() - self._left.keys()
        new = {*large, *small, *self._helpers.values(), place.manifest, *([place.signature] if signing else [])}
        self._old = _replaced(place, there, new, overwrite=overwrite, merge=merge)
        self._there = there
        if blocked := there & set(self._helpers.values()):
            raise OutputError(
                "files that zckpt did not write are in the way", file=place.out, found=examples(sorted(blocked)),
                expected="no file of these names", remedy="Move them away, or choose another OUT. Nothing was changed.",
            )  # fmt: skip
        self.names = {name: name for name in large} if head else _free_names(large, there, job)
        self.names |= self._helpers
        before = place.read_record()
        self._record = AddressRecord(
            job, os.urandom(8).hex(), names=() if head else tuple(self.names.values()), sent=kept,
            last=before.last if before is not None and before.state != "done" else before,
        )  # fmt: skip

    @property
    def kept(self) -> int:
        """How many files an interrupted run had sent."""
        return len(self._left)

    @property
    def sent(self) -> Iterator[Finished]:
        """The files that were sent so far, by an interrupted run too."""
        return (sent.file for sent in (*self._left.values(), *self._sent.values()))

    def begin(self) -> None:
        """Leaves the record of this run."""
        self._place.write_record(self._record)

    def left(self, name: str) -> Finished | None:
        """A file that an interrupted run had sent."""
        found = self._left.get(self.names[name])
        return None if found is None else found.file

    def send(self, name: str, nbytes: int, work: Callable[[Write], Finished]) -> Finished:
        """Sends one file. It appears when it is complete; the only file of an output appears at the commit.

        Args:
            name: one of `large` or `helpers`.
            nbytes: its size.
            work: is given what sends bytes, and returns what is known of the file then.
        """
        self.check_mine()
        actual, hashed = self.names[name], sha256()

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
            file = replace(work(write), path=actual)
        self._digests[actual] = hashed.hexdigest()
        self._left.pop(actual, None)
        if name == self._head:
            self._sent[actual] = SentToAddress(file, "")
        else:
            self._sent[actual] = self._place.sent(file)
            self.check_mine()
            others = (sent for sent in self._record.sent if sent.file.path != actual)
            self._record = replace(self._record, sent=(*others, self._sent[actual]))
            self._place.write_record(self._record)
        return file

    def seal(self, small: Mapping[str, bytes], manifest: Callable[[Iterable[Finished]], Manifest]) -> None:
        """Writes the sealed record: what was sent, what is still to be written, and what is deleted after that.

        Args:
            small: the other files of the output.
            manifest: makes it, given all files.
        """
        place, old = self._place, self._old
        wanted = {n: _renamed(data, self.names) if n.endswith(INDEX) else data for n, data in small.items()}
        helpers = set(self._helpers.values())
        made = [sent for sent in (*self._left.values(), *self._sent.values()) if sent.file.path not in helpers]
        facts = manifest([*(sent.file for sent in made), *(file_of(name, data) for name, data in wanted.items())])
        text = (replace(facts, signature=place.signature) if self._signing else facts).as_bytes()
        if self._signing is not None:
            wanted[place.signature] = self._signature(made, wanted, text)
        contents: dict[str, bytes] = {}
        same: list[Finished] = []
        for name, data in wanted.items():
            if name in self._there and not name.endswith(INDEX) and place.read(name) == data:
                same.append(file_of(name, data))
            else:
                contents[name] = data
        shards = {name for name in old if _SHARD.fullmatch(name)}
        going = old - {*wanted, *self.names.values(), place.manifest}
        changes = [n for n in contents if not n.endswith(INDEX)] + [
            n for n in going - shards if not WEIGHTS.fullmatch(n)
        ]
        gate = {place.manifest} | ({CONFIG} if changes else set[str]())
        sealed = replace(
            self._record,
            state="sealed",
            sent=(*made, *map(place.sent, same)),
            head=self._head,
            before=place.mark(self._head) if self._head in self._there else "",
            contents={**contents, place.manifest: text},
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
        self.check_mine()
        if not all(place.has(sent) for sent in self._record.sent):
            raise _taken(place)
        self._record = sealed  # set first: the next request may succeed although its answer is lost
        place.write_record(sealed)

    def _signature(self, made: Iterable[SentToAddress], wanted: Mapping[str, bytes], manifest: bytes) -> bytes:
        """The signature's file; what an interrupted run had sent is read again."""
        assert self._signing is not None
        place = self._place
        digests = {s.file.path: self._digests.get(s.file.path) or place.sha256(s.file.path) for s in made}
        digests |= {name: sha256(data).hexdigest() for name, data in wanted.items()}
        return self._signing.bundle(place.out.name, digests, sha256(manifest).hexdigest(), single=place.single)

    def commit(self) -> None:
        """Puts the output in place; if the store fails, tries once more to finish it, or gives it up and raises."""
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

    def withdraw(self) -> None:
        """Removes the files that were sent, unless another run writes to the address."""
        if self._upload is not None:
            self._upload.discard()
        with contextlib.suppress(Exception):
            self.check_mine()
            give_up(self._place, self._record)

    def check_mine(self) -> None:
        """Raises InconsistentError if another run writes to the address."""
        found = self._place.read_record()
        if found is None or found.run != self._record.run:
            raise _taken(self._place)

    def files(self) -> list[Finished]:
        """All files of the output but its manifest, when it is sealed."""
        there = [sent.file for sent in self._record.sent]
        there += [file_of(name, data) for name, data in self._record.contents.items()]
        return [file for file in there if file.path != self._place.manifest]


def _taken(place: OutputAddress) -> InconsistentError:
    return InconsistentError(
        "another run writes to the same address", file=place.out, found="a record of that run",
        remedy="Wait until the other run has ended. This one has stopped.",
    )  # fmt: skip


def file_of(name: str, data: bytes) -> Finished:
    """What is known of a small file."""
    return Finished(name, len(data), zlib.crc32(data))


def _free_names(shards: Collection[str], there: Collection[str], job: str) -> dict[str, str]:
    """Shard -> the name it is sent under: its own if all names are free, otherwise with eight digits that follow from the job."""
    named = {name: name for name in shards}
    while any(name in there for name in named.values()):
        job = sha256(job.encode()).hexdigest()
        named = {name: _SHARD.sub(rf"\1-{job[:8]}\3", name) for name in shards}
    return named


def _renamed(index: bytes, names: Mapping[str, str]) -> bytes:
    """An index with the names that the shards are sent under."""
    if all(name == actual for name, actual in names.items()):
        return index
    facts = json.loads(index)
    facts["weight_map"] = {tensor: names[shard] for tensor, shard in facts["weight_map"].items()}
    return (json.dumps(facts, indent=2) + "\n").encode()
