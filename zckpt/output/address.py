"""Replaces an output at an address by a new one, in stores that cannot rename files.

For `address_destination`. A store has no rename, and no step that changes two files. So single steps are done in an
order in which a reader always finds the old output, the new one, or an output that no loader accepts; never parts of both.

[Note: the protocol]
 1. Stage. A record, `.zckpt-job.json` at the address, lists what is about to be written. The shards are sent under names that
    no file has yet: where a name is taken, a part is added to the names of all shards, as in
    `model-1a2b3c4d-00001-of-00002.safetensors`. An output that is one file keeps its name; the end of its upload waits for 3.
 2. Seal. The record now holds the small files that are still to be written (index, config, tokenizer, manifest) and lists
    the files that are deleted after that: of the old output, only those that its own `zckpt.json` lists.
 3. Commit. In this order: the old `zckpt.json` goes, and where small files change, the old `config.json` too (no loader takes
    weights without it); the index, or the one file, appears; old indexes and small files go; new small files appear,
    `config.json` late and `zckpt.json` last.
 4. Clean. The old shards are deleted. The record now says what was done, so that the same command recognizes its output.
 5. Recover. The next run that writes to the address first reads the record. It removes files of an unsealed run (the same
    command keeps them and continues). It finishes a sealed run: each step may be done twice. If the upload of an output of one
    file was not completed, it gives that output up, and puts back from the record what step 3 had deleted.

What loaders see while 3 runs; transformers takes `model.safetensors` before `model.safetensors.index.json`, vLLM and others the
index before the file, and each of these pairs is whole at any moment:

| from | to | what makes loaders take the new weights |
|---|---|---|
| nothing | shards | the index appears |
| nothing, or one file | one file | its upload is completed |
| shards | shards | the new index takes the old one's place; it names other files |
| shards | one file | its upload is completed (transformers); the old index goes (vLLM) |
| one file | shards | the index appears (vLLM); the old file goes (transformers) |
| `.bin` | `.safetensors` | as from nothing; then the old index or file goes |
| `.safetensors` | `.bin` | the old index or file goes; the new one is there before |

There is no lock at an address. A run that finds the record of another run stops.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, replace
from hashlib import sha256
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import NotACheckpointError, OutputError, UnsafeError, ZckptError
from zckpt.base.words import examples
from zckpt.core.plan import WrittenFile
from zckpt.output.manifest import NAME as MANIFEST
from zckpt.output.manifest import read as read_manifest
from zckpt.output.manifest import signature_for
from zckpt.storage import fsspec_io, uploads
from zckpt.storage.identity import stays_inside
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location

CONFIG = "config.json"
RECORD = ".zckpt-job.json"
"""Name of a run's record in an output directory; the record of one file is beside it, as `model.bin.zckpt-job.json`."""

MOST_SMALL_BYTES = 96 << 20
"""The most bytes of all small files of an output together: they are stored in the record, which is read whole."""

_MOST_RECORD_BYTES = 2 * MOST_SMALL_BYTES


@dataclass(frozen=True, slots=True)
class SentToAddress:
    """A file at an address.

    Attributes:
        file: what is known of its bytes.
        mark: text that changes when the file is written again (see `fsspec_io.mark`); "" if the store has no such fact.
    """

    file: WrittenFile
    mark: str


@dataclass(frozen=True, slots=True)
class AddressRecord:
    """The record that a run leaves at the address that it writes to.

    Attributes:
        job: fingerprint of everything that the output's bytes depend on.
        run: a random name of the run.
        state: "staging", "sealed" or "done".
        names: of the files that are about to be sent; no file had these names before.
        sent: files of `names` that were sent. In a sealed record, also small files that stay as they are, and the one file.
            In a record that is done, all files and the manifest.
        head: name of an output that is one file; "" for a directory.
        before: mark of the file `head` when the record was sealed; "" if there was none or its mark is not known.
        contents: small files that are written at the commit, in this order.
        deleted: small files that the commit deletes first, with their bytes: they are written back if the run is given up.
        heads: old indexes and small files, which are deleted when the new weights are there.
        old: old shards, which are deleted last.
        last: the record that was there before; None if there was no record.
    """

    job: str
    run: str
    state: str = "staging"
    names: tuple[str, ...] = ()
    sent: tuple[SentToAddress, ...] = ()
    head: str = ""
    before: str = ""
    contents: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    deleted: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    heads: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    last: AddressRecord | None = None

    def as_json(self) -> dict[str, object]:
        """The contents of the record's file, for `json.dumps`."""
        return {
            "zckpt": "what a run wrote here, or was about to write; the next run reads it",
            "job": self.job, "run": self.run, "state": self.state, "names": list(self.names),
            "sent": [
                [s.file.path, s.file.nbytes, s.file.crc32, s.mark, {n: list(o) for n, o in s.file.overflows.items()}]
                for s in self.sent
            ],
            "head": self.head, "before": self.before,
            "contents": {name: base64.b64encode(data).decode() for name, data in self.contents.items()},
            "deleted": {name: base64.b64encode(data).decode() for name, data in self.deleted.items()},
            "heads": list(self.heads), "old": list(self.old),
            "last": None if self.last is None else self.last.as_json(),
        }  # fmt: skip


class OutputAddress:
    """An output's address: a directory, or one file with what goes with it beside.

    Args:
        out: the address.
        single: whether it is one file.
    """

    def __init__(self, out: Location, *, single: bool) -> None:
        self.out = out.absolute()
        self.single = single
        self.own = self.out.name if single else ""
        self._home = self.out.parent if single else self.out
        self.manifest = f"{self.own}.{MANIFEST}" if single else MANIFEST
        self.signature = signature_for(self.manifest)
        self.record = self.own + RECORD

    def at(self, name: str) -> Location:
        """The place of one of the output's files."""
        return self._home / name

    def names(self) -> set[str]:
        """Names of the files that exist: all in a directory; for an output of one file, the file, its manifest and its
        record.
        """
        if self.single:
            names = (self.own, self.manifest, self.record, *([self.signature] if self._is_signed() else []))
            return {name for name in names if fsspec_io.kind(self.at(name).path) is not None}
        try:
            return set(self.out.names()) if self.out.is_dir() else set()
        except NotACheckpointError:
            return set()

    def _is_signed(self) -> bool:
        """Whether the manifest of one file names its signature."""
        try:
            return bool(read_manifest(self.at(self.manifest)).signature)
        except ZckptError:
            return False

    def read(self, name: str) -> bytes:
        """Reads a small file."""
        return self.at(name).read()

    def put(self, name: str, data: bytes) -> None:
        """Sends a small file."""
        uploads.upload_small(self.at(name).path, data)

    def mark(self, name: str) -> str:
        """As `fsspec_io.mark`."""
        return fsspec_io.mark(self.at(name).path)

    def read_record(self) -> AddressRecord | None:
        """The record at the address, or None. Raises OutputError if zckpt did not write it."""
        try:
            found = read_json(self.at(self.record), _MOST_RECORD_BYTES, "a record of a run")
        except NotACheckpointError:
            return None
        try:
            return _parse_record(found)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise OutputError(
                "is a record that zckpt did not write", file=self.at(self.record), found=f"{error!r:.100}",
                remedy="Remove it if nobody else uses it, or choose another OUT. Nothing was changed.",
            ) from error  # fmt: skip

    def write_record(self, record: AddressRecord) -> None:
        """Leaves a record."""
        self.put(self.record, json.dumps(record.as_json()).encode())

    def remove(self, names: Collection[str]) -> None:
        """Removes files."""
        for name in sorted(names):
            uploads.remove(self.at(name).path)

    def sent(self, file: WrittenFile) -> SentToAddress:
        """A file that has just been sent."""
        return SentToAddress(file, self.mark(file.path))

    def has(self, sent: SentToAddress) -> bool:
        """Whether a file is still what was sent: by its mark, or where the store has no mark, by every byte."""
        try:
            if sent.mark and self.mark(sent.file.path) == sent.mark:
                return True
            size = self.at(sent.file.path).size()
            return size == sent.file.nbytes and self.checksum(sent.file.path) == sent.file.crc32
        except NotACheckpointError:
            return False

    def checksum(self, name: str) -> int:
        """The CRC-32 of an existing file, read in pieces."""
        crc = 0
        for block in self.at(name).blocks():
            crc = zlib.crc32(block, crc)
        return crc

    def sha256(self, name: str) -> str:
        """The SHA-256 of an existing file, read in pieces."""
        digest = sha256()
        for block in self.at(name).blocks():
            digest.update(block)
        return digest.hexdigest()

    def made_by(self, job: str) -> AddressRecord | None:
        """The record of a finished run of this very job, with all files as it left them."""
        record = self.read_record()
        if record is None or record.state != "done" or record.job != job or not job:
            return None
        return record if all(self.has(sent) for sent in record.sent) else None


def recover(place: OutputAddress, job: str) -> tuple[SentToAddress, ...]:
    """Puts right what an interrupted run left at an address; see [Note: the protocol].

    Args:
        place: the address.
        job: fingerprint of the job that is about to write there.

    Returns:
        Files that an interrupted run of the same job had sent and that are unchanged: they need not be sent again.

    Raises:
        OutputError: the new output cannot be completed, and the old one is gone.
    """
    record = place.read_record()
    if record is None or record.state == "done":
        return ()
    if record.state == "sealed":
        settle(place, record)
        return ()
    kept = tuple(sent for sent in record.sent if place.has(sent)) if record.job == job else ()
    give_up(place, record, but=[sent.file.path for sent in kept])
    return kept


def give_up(place: OutputAddress, record: AddressRecord, but: Collection[str] = ()) -> None:
    """Removes what a run wrote, and puts back what it had deleted. The record is removed last, and stays while files
    do.
    """
    if record.state == "sealed":
        record = replace(record, state="staging", contents={}, heads=(), old=())
        place.write_record(record)  # from here on no run finishes it
    for name, data in sorted(record.deleted.items(), key=lambda item: (_rank(place, item[0]), item[0])):
        place.put(name, data)
    place.remove(set(record.names) - set(but))
    if but:
        return
    if record.last is not None:
        place.write_record(record.last)
    else:
        place.remove([place.record])


def settle(place: OutputAddress, record: AddressRecord, complete: Callable[[], None] | None = None) -> bool:
    """Carries out what is sealed.

    Args:
        place: the address.
        record: the seal.
        complete: makes the one file of the output appear; None if an interrupted run was to do that.

    Returns:
        True if the new output is in place; False if it was given up, and the old one is unchanged.
    """
    if record.head and complete is None and not _has_appeared(place, record):
        give_up(place, record)
        return False
    lost = [sent.file.path for sent in record.sent if _is_missing(place, sent)] if complete is None else []
    if lost:
        raise OutputError(
            "the new output cannot be completed", file=place.out, found=f"{examples(lost)} missing",
            expected=f"all files that an interrupted run sent, by its record {place.record!r}",
            remedy=f"Put the file back and run the command again; or remove {place.record!r} and choose another OUT.",
        )  # fmt: skip
    place.remove(record.deleted)
    if complete is not None:
        complete()
    indexes = [name for name in record.contents if name.endswith(".index.json")]
    for name in indexes:
        place.put(name, record.contents[name])
    place.remove(record.heads)
    others = {name for name in record.contents if name not in indexes}
    for name in sorted(others, key=lambda name: (_rank(place, name), name)):
        place.put(name, record.contents[name])
    place.remove(record.old)
    made = [sent.file for sent in record.sent]
    made += [WrittenFile(name, len(data), zlib.crc32(data)) for name, data in record.contents.items()]
    sent = tuple(place.sent(file) for file in made)
    place.write_record(AddressRecord(record.job, record.run, "done", sent=sent))
    return True


def _is_missing(place: OutputAddress, sent: SentToAddress) -> bool:
    """Whether a file that was sent is missing, or has another size."""
    try:
        return place.at(sent.file.path).size() != sent.file.nbytes
    except NotACheckpointError:
        return True


def _has_appeared(place: OutputAddress, record: AddressRecord) -> bool:
    """Whether the one file of the output is the new one."""
    (wanted,) = (sent.file for sent in record.sent if sent.file.path == record.head)
    try:
        now = place.mark(record.head)
    except NotACheckpointError:
        return False
    return not (now and now == record.before) and place.has(SentToAddress(wanted, ""))


def _rank(place: OutputAddress, name: str) -> int:
    """The position of a small file in the order of a commit: `config.json` late, the manifest last."""
    return {CONFIG: 1, place.manifest: 2}.get(name, 0)


def _parse_record(found: Any) -> AddressRecord:
    match found:
        case {"job": str(job), "run": str(run), "state": "staging" | "sealed" | "done" as state, "last": last}:
            pass
        case _:
            raise ValueError("other entries than it has")
    text: dict[str, list[str]] = {}
    for key in ("names", "heads", "old"):
        text[key] = [_name(name) for name in found[key]]
    sent: list[SentToAddress] = []
    for path, nbytes, crc, mark, overflows in found["sent"]:
        lost = {str(name): (int(n), float(x)) for name, (n, x) in overflows.items()}
        sent.append(SentToAddress(WrittenFile(_name(path), int(nbytes), int(crc), lost), str(mark)))
    return AddressRecord(
        job=job, run=run, state=str(state), names=tuple(text["names"]), sent=tuple(sent),
        head=_name(found["head"]) if found["head"] else "", before=str(found["before"]),
        contents={_name(name): base64.b64decode(data) for name, data in found["contents"].items()},
        deleted={_name(name): base64.b64decode(data) for name, data in found["deleted"].items()},
        heads=tuple(text["heads"]), old=tuple(text["old"]), last=None if last is None else _parse_record(last),
    )  # fmt: skip


def _name(name: object) -> str:
    if not isinstance(name, str) or not stays_inside(name):
        raise UnsafeError(
            "the record of an interrupted run names a file outside its output", found=f"{name!r:.80}",
            remedy="Nothing was read from there. Delete the record, then run the command again.",
        )  # fmt: skip
    return name
