"""Writes outputs to addresses: sends each file while it is made, by multi-part upload, without a copy on this disk.

For conversions whose OUT is an address (`s3://bucket/weights`). `output.address` replaces the old output by the new one.
A `.bin` file has its checksums before its numbers, so its numbers are read twice: for the checksums, and to send them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from hashlib import sha256

from zckpt.base.errors import InconsistentError, UnsupportedError, ZckptError, add_note
from zckpt.base.pace import Pace
from zckpt.base.words import size
from zckpt.core.plan import OutputFile, Plan
from zckpt.engine.batches import progress_after
from zckpt.engine.move import Mode, run
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
from zckpt.output.contents import WEIGHTS, decided, listed_in
from zckpt.output.journal import Finished
from zckpt.output.order import Delivered, Order, as_finished, fingerprint, manifest_of, overflows_of, resumed
from zckpt.storage import fsspec_io
from zckpt.storage.location import Location
from zckpt.storage.uploads import Upload

_INDEX = ".index.json"
_SHARD = re.compile(r"(.+?)((?:-[0-9a-f]{8})?)(-\d{5}-of-\d{5}\.\w+)")


def check_address(out: Location, *, single: bool, overwrite: bool, merge: bool = False) -> None:
    """Refuses an output at an address that must not be written; arguments and errors as for `checks.check_path`."""
    place = OutputAddress(out.refreshed(), single=single)
    check_kind(out, fsspec_io.kind(place.out.path), single=single)
    there = place.names()
    if place.record not in there:  # after an interrupted run, `send` checks again
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


def send(
    order: Order, progress: Callable[[int], None] | None = None, on_note: Callable[[str], None] = lambda note: None
) -> Delivered:
    """As `delivery.deliver`, to an address.

    Args:
        order: the output and how it is made.
        progress: called with the bytes sent so far.
        on_note: called with sentences for a person while it runs.

    Raises:
        OutputError: the output exists, or files are in the way.
        RemoteError: the store failed.
    """
    place = OutputAddress(order.out.refreshed(), single=order.single)
    job = fingerprint(order.plan, order.copies, order.overflow, order.single, sorted(map(repr, order.options.items())))
    kept = recover(place, job)
    done = place.made_by(job)
    if done is not None:
        listed = [sent.file for sent in done.sent if sent.file.path != place.manifest]
        sizes = tuple((file.path, file.nbytes) for file in listed)
        overflows = overflows_of((file.overflows for file in listed), order.plan, order.overflow)
        return Delivered(sizes, "native", len(sizes), overflows, (), already_done=True)
    sending = _Sending(order, place, job, kept, progress)
    notes = resumed(len(kept), order)
    for note in notes:
        on_note(note)
    try:
        sending.stage()
        sending.seal()
    except BaseException:
        sending.withdraw()
        raise
    sending.commit()
    return replace(sending.delivered(), notes=notes)


class _Sending:
    """One run that sends an output.

    Args:
        order: the output and how it is made.
        place: the output's address.
        job: fingerprint of the order.
        kept: files that an interrupted run of the same job had sent.
        progress: called with the bytes sent so far.
    """

    def __init__(
        self,
        order: Order,
        place: OutputAddress,
        job: str,
        kept: tuple[SentToAddress, ...],
        progress: Callable[[int], None] | None,
    ) -> None:
        self._order, self._place, self._progress = order, place, progress
        self._left = {sent.file.path: sent for sent in kept}
        self._parts = {part.files[0][0].path: part for part in order.plan.by_file()}
        self._small = {name: text for name, part in self._parts.items() if (text := _literal(name, part)) is not None}
        self._copies = {name: file.read() for file, name in order.copies}
        large = [name for name in self._parts if name not in self._small]
        there = place.names() - self._left.keys()
        new = {*self._parts, *self._copies, place.manifest}
        self._old = _replaced(place, there, new, overwrite=order.overwrite, merge=order.merge)
        self._there = there
        is_indexed = any(name.endswith(_INDEX) for name in self._small)
        self._head = large[0] if len(large) == 1 and not is_indexed else ""
        self._names = {name: name for name in large} if self._head else _free_names(large, there, job)
        self._upload: Upload | None = None
        self._sent: dict[str, SentToAddress] = {}
        self._engine = "native"
        before = place.read_record()
        self._record = AddressRecord(
            job, os.urandom(8).hex(), names=() if self._head else tuple(self._names.values()), sent=kept,
            last=before.last if before is not None and before.state != "done" else before,
        )  # fmt: skip

    def stage(self) -> None:
        """Sends the shards, or the one file without completing its upload."""
        self._place.write_record(self._record)
        done = 0
        for name, actual in sorted(self._names.items()):
            if actual in self._left:
                file = self._left[actual].file
            else:
                self._check_mine()
                file = self._made(name, actual, progress_after(self._progress, done))
            done += file.nbytes
        overflows_of((sent.file.overflows for sent in self._sent.values()), self._order.plan, self._order.overflow)

    def _made(self, name: str, actual: str, progress: Callable[[int], None] | None) -> Finished:
        """Sends one large file. A shard appears unless a cast is an error; the only file of an output appears at the commit."""
        plan = _with_checksums(self._parts[name], self._order.pace)
        names = [entry.name for _, entry in plan.pairs]
        with contextlib.ExitStack() as stack:
            upload = Upload(self._place.at(actual).path, plan.bytes_written)
            if name == self._head:
                self._upload = upload
            else:
                stack.enter_context(upload)
            moved = run(
                plan, "", mode=Mode.STREAMED, progress=progress,
                consumers={plan.files[0][0].path: upload.write}, **self._order.how,
            )  # fmt: skip
            file = replace(as_finished(moved.files[0], names), path=actual)
            overflows_of([file.overflows], plan, self._order.overflow)
        self._engine = moved.engine
        if name == self._head:
            self._sent[actual] = SentToAddress(file, "")
        else:
            self._sent[actual] = self._place.sent(file)
            self._check_mine()
            self._record = replace(self._record, sent=(*self._record.sent, self._sent[actual]))
            self._place.write_record(self._record)
        return file

    def seal(self) -> None:
        """Writes the sealed record: what was sent, what is still to be written, and what is deleted after that."""
        place, old = self._place, self._old
        wanted = {
            **self._copies,
            **{n: _renamed(t, self._names) if n.endswith(_INDEX) else t for n, t in self._small.items()},
        }
        contents: dict[str, bytes] = {}
        same: list[Finished] = []
        for name, data in wanted.items():
            if name in self._there and not name.endswith(_INDEX) and place.read(name) == data:
                same.append(_file(name, data))
            else:
                contents[name] = data
        shards = {name for name in old if _SHARD.fullmatch(name)}
        going = old - {*wanted, *self._names.values(), place.manifest}
        changes = [n for n in contents if not n.endswith(_INDEX)] + [
            n for n in going - shards if not WEIGHTS.fullmatch(n)
        ]
        gate = {place.manifest} | ({CONFIG} if changes else set[str]())
        made = [sent.file for sent in (*self._left.values(), *self._sent.values())]
        facts = manifest_of(
            self._order, [*made, *same, *(_file(name, data) for name, data in contents.items())]
        ).as_bytes()
        sealed = replace(
            self._record,
            state="sealed",
            sent=(*self._left.values(), *self._sent.values(), *map(place.sent, same)),
            head=self._head,
            before=place.mark(self._head) if self._head in self._there else "",
            contents={**contents, place.manifest: facts},
            deleted={name: place.read(name) for name in gate & self._there if name in old or name in wanted},
            heads=tuple(sorted(going - shards - gate)),
            old=tuple(sorted(going & shards)),
        )
        nbytes = sum(map(len, (*sealed.contents.values(), *sealed.deleted.values())))
        if nbytes > MOST_SMALL_BYTES:
            raise UnsupportedError(
                "the small files beside the weights are too large for an address", file=place.out,
                found=f"{size(nbytes)} in all", expected=f"at most {size(MOST_SMALL_BYTES)}",
                remedy="Convert to a directory on this machine, and copy that.",
            )  # fmt: skip
        self._check_mine()
        if not all(place.has(sent) for sent in self._record.sent):
            raise _taken(place)
        self._record = sealed  # set first: the next request may succeed although its answer is lost
        place.write_record(sealed)

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
            self._check_mine()
            give_up(self._place, self._record)

    def _check_mine(self) -> None:
        found = self._place.read_record()
        if found is None or found.run != self._record.run:
            raise _taken(self._place)

    def delivered(self) -> Delivered:
        """The files and facts of the output."""
        files = [*(sent.file for sent in self._record.sent), *(_file(n, d) for n, d in self._record.contents.items())]
        listed = tuple((file.path, file.nbytes) for file in files if file.path != self._place.manifest)
        overflows = overflows_of((file.overflows for file in files), self._order.plan, self._order.overflow)
        return Delivered(listed, self._engine, len(self._left), overflows, ())


def _taken(place: OutputAddress) -> InconsistentError:
    return InconsistentError(
        "another run writes to the same address", file=place.out, found="a record of that run",
        remedy="Wait until the other run has ended. This one has stopped.",
    )  # fmt: skip


def _file(name: str, data: bytes) -> Finished:
    return Finished(name, len(data), zlib.crc32(data))


def _literal(name: str, part: Plan) -> bytes | None:
    """The bytes of a JSON file that are all in the plan; None for a file of tensors."""
    output = part.files[0][0]
    known = b"".join(data for _, data in sorted(output.literals))
    return known if name.endswith(".json") and len(known) == output.size else None


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


def _with_checksums(plan: Plan, pace: Pace) -> Plan:
    """The plan of one file with its checksums filled in; computes them by a first pass that writes nothing."""
    ((output, store),) = plan.files
    if not output.checksums:
        return plan
    literals = [(offset, bytearray(data)) for offset, data in output.literals]
    for slot, crc in run(plan, "", mode=Mode.STREAMED, **pace).files[0].slots.items():
        at, data = next((at, data) for at, data in literals if at <= slot < at + len(data))
        data[slot - at : slot - at + len(crc)] = crc
    known: OutputFile = replace(output, literals=tuple((at, bytes(data)) for at, data in literals), checksums=())
    return Plan(((known, store),), plan.pairs)
