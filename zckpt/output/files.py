"""The files of an output, from where they come: a plan says where every byte goes, or a job makes one file after the other.

For `publish`, which asks for their names and their manifest, and for destinations, which take the files as they can: a directory
takes all at once, written by threads and processes, and an address takes one after the other.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError, ZckptError
from zckpt.base.pace import Pace
from zckpt.base.words import count
from zckpt.core.plan import Plan, WrittenFile
from zckpt.engine.batches import progress_after
from zckpt.engine.checksums import crc_of_file
from zckpt.engine.move import Mode, run
from zckpt.engine.output_files import Consumer
from zckpt.output.manifest import Manifest
from zckpt.output.order import (
    Order,
    OutputReport,
    facts_seen_by_all,
    fingerprint,
    manifest_of,
    overflows_of,
)
from zckpt.storage.fsync_queue import make_durable
from zckpt.storage.location import Location
from zckpt.team.together import Team

if TYPE_CHECKING:
    from zckpt.output.signature import Signing

INDEX = ".index.json"
_BLOCK = 4 << 20

Write = Callable[[bytes | memoryview], None]
"""A function that sends the next bytes of a file."""

Moved = Callable[[int], None]
"""A function that is called with the number of bytes read or written since its last call."""


FileStream = tuple[str, int, Callable[[Write], WrittenFile]]
"""A file that is sent while it is made: its name in the output; its size; and a function that is given what sends bytes, and
returns what is known of the file then.
"""


class PlanFiles:
    """The files of a plan, and small ones that are copied.

    Args:
        order: the output and how it is made.
        team: the processes that make it; None for one alone.
        progress: called with the bytes written so far.

    Attributes:
        names: of all files as far as they are known.
        helpers: names of files that only `finish` and a later run need.
        makes_files: whether `stream` and `finish` need a directory.
        watch: is called with the bytes that are read of files that an earlier run left; None where nobody counts them.
        hashes: name -> what has SHA-256 of a file that was hashed while `write` wrote it.
    """

    def __init__(self, order: Order, team: Team | None, progress: Callable[[int], None] | None) -> None:
        self._order, self._team, self._progress = order, team, progress
        self._engine = "native"
        self._options = sorted(map(repr, order.options.items()))
        self.names: Collection[str] = order.names
        self.helpers: Collection[str] = ()
        self.makes_files = False
        self.watch = progress if team is None else team.watched(None)
        self.hashes: Mapping[str, Any] = {}

    @cached_property
    def job(self) -> str:
        """The fingerprint of everything that the output's bytes depend on."""
        order = self._order
        key = (order.signing.hint,) if order.signing else ()
        return fingerprint(order.plan, order.copies, order.overflow, order.single, self._options, *key)

    @cached_property
    def _parts(self) -> dict[str, Plan]:
        """The plan of each file."""
        return {part.files[0][0].path: part for part in self._order.plan.by_file()}

    @cached_property
    def _contents(self) -> dict[str, bytes]:
        """What an address gets at the commit: files with all their bytes in the plan, and copies."""
        known = {name: _literal_bytes(name, part) for name, part in self._parts.items()}
        small = {name: data for name, data in known.items() if data is not None}
        return small | {name: file.read() for file, name in self._order.copies}

    @cached_property
    def large(self) -> Collection[str]:
        """Names of files of tensors: an address has them before the commit."""
        return sorted(self._parts.keys() - self._contents.keys())

    @cached_property
    def small(self) -> Collection[str]:
        """Names of other files, as far as an address must know them."""
        return self._contents.keys()

    @cached_property
    def head(self) -> str:
        """The one of `large` that is the output's only file of tensors; "" if there are several."""
        return (
            "" if len(self.large) != 1 or any(name.endswith(INDEX) for name in self.small) else next(iter(self.large))
        )

    def shared(self) -> str:
        """The fingerprint of what all machines see alike, for several processes."""
        order = self._order
        asked = (order.overflow, order.single, order.overwrite, order.merge, order.dtype and order.dtype.name)
        return fingerprint(order.plan, order.copies, *asked, self._options, state=facts_seen_by_all)

    def choose(self, directory: str, left: Mapping[str, WrittenFile]) -> dict[str, WrittenFile]:
        """The earlier run's files that are whole and need not be made again."""
        return dict(left)

    def note(self, kept: Mapping[str, WrittenFile]) -> tuple[str, ...]:
        """The notes on files that are kept, at least one."""
        return _resume_note(len(kept), len(self.names), "conversion")

    def write(self, directory: str, kept: Mapping[str, WrittenFile], record: Callable[[WrittenFile], None]) -> None:
        """Writes all files that are not kept into a directory; `record` is called with each that is complete and durable."""
        order = self._order
        if self._team is not None:
            from zckpt.team.partition import lead

            self._engine = lead(
                self._team, order.plan, directory, order.how, done=kept, finished=record, progress=self._progress
            )
            return
        consumers: dict[str, Consumer] = {}
        if order.signing:  # a file with checksums in it is read again, as all are that several processes write
            hashed = [output.path for output, _ in order.plan.files if not output.checksums and output.path not in kept]
            self.hashes = {path: sha256() for path in hashed}
            consumers = {path: digest.update for path, digest in self.hashes.items()}
        self._engine = run(
            order.plan,
            directory,
            progress=self._progress,
            done=kept,
            finished=record,
            consumers=consumers,
            **order.how,
        ).engine

    def follow(self, team: Team) -> None:
        """The part of `write` that processes other than 0 do."""
        from zckpt.team.partition import follow

        follow(team, self._order.plan, self._order.how)

    def stream(self, directory: str, kept: Mapping[str, WrittenFile]) -> Iterator[FileStream]:
        """Files of `large` and `helpers` that are not kept; each is sent before the next is asked for."""
        done = 0
        for name in self.large:
            if name not in kept:
                yield self._stream(name, progress_after(self._progress, done))
            done += self._parts[name].bytes_written

    def _stream(self, name: str, progress: Callable[[int], None] | None) -> FileStream:
        """A `.bin` file has its checksums before its numbers, which are read twice: for the checksums, and to send them."""
        order, plan = self._order, _fill_checksums(self._parts[name], self._order.pace)

        def send(write: Write) -> WrittenFile:
            moved = run(plan, "", mode=Mode.STREAMED, progress=progress, consumers={name: write}, **order.how)
            overflows_of(moved.files, plan, order.overflow)
            self._engine = moved.engine
            return moved.files[0]

        return name, plan.bytes_written, send

    def finish(self, directory: str, files: Mapping[str, WrittenFile]) -> Manifest:
        """Makes what is missing in the directory, given all files so far; without one, small files are left to
        `read_small`. Raises CastError if numbers are too large for the dtype, and that is an error.
        """
        order = self._order
        overflows_of(files.values(), order.plan, order.overflow)
        made = dict(files)
        for file, name in order.copies if directory else ():
            made[name] = _copy_durably(file, directory, name)
        return manifest_of(order, made.values())

    def read_small(self, directory: str, manifest: Manifest) -> Mapping[str, bytes]:
        """The bytes of the other files, for an address."""
        return self._contents

    def report(
        self, files: Sequence[WrittenFile], kept: Mapping[str, WrittenFile], notes: tuple[str, ...], *, done: bool
    ) -> OutputReport:
        """The report on the output; `done`: whether an earlier run of the same job had made it."""
        order = self._order
        overflows = overflows_of(files, order.plan, order.overflow)
        rest = {file.path: file.nbytes for file in files}
        sizes = (*((name, rest.pop(name)) for name in self.names if name in rest), *rest.items())
        return OutputReport(sizes, self._engine, len(sizes) if done else len(kept), overflows, notes, done)


@dataclass(frozen=True, slots=True)
class FileOrder:
    """An output with files that a job makes one after the other, with sizes that are not known before.

    Attributes:
        out: its path or address.
        job: fingerprint of everything that its bytes depend on.
        names: of the files that are made one by one, in order.
        make: is given the staged directory, one of these names, and what hears of progress; makes that file, and before
            it any that belong to it, each durable (`finish_file`).
        needs: is given the staged directory and a name of a file that an earlier run had made; names those that belong to it.
        end: is given the staged directory and what is known of all those files, by path; makes the others, may rename some, and
            returns the manifest. At an address, files of tensors are elsewhere and keep their names.
        overwrite: replace an existing output.
        pace: threads and I/O settings, for what an earlier run left.
        shared: the fingerprint of what all machines see alike, for several processes.
        helpers: those of `names` that only `end` and a later run need.
        large: names that files of tensors may have.
        signing: with which key the output is signed; None for none.
    """

    out: Location
    job: str
    names: Sequence[str]
    make: Callable[[str, str, Moved], Sequence[WrittenFile]]
    end: Callable[[str, Mapping[str, WrittenFile]], Manifest]
    overwrite: bool
    pace: Pace
    shared: Callable[[], str]
    needs: Callable[[str, str], Collection[str]] = lambda directory, name: ()
    helpers: Collection[str] = ()
    large: Collection[str] = ()
    signing: Signing | None = None
    single: bool = False
    merge: bool = False


class MadeFiles:
    """Files that a job makes one after the other. Several processes make them in turn.

    Args:
        order: how they are made.
        team: the processes; None for one alone.
        progress: called with the bytes that all processes have told of.
    """

    def __init__(self, order: FileOrder, team: Team | None, progress: Callable[[int], None] | None) -> None:
        self._order, self._team = order, team
        self._moved = _running_sum(progress if team is None else team.watched(None if team.rank else progress))
        self._unsent: dict[str, WrittenFile] = {}
        self.names: Collection[str] = ()
        self.makes_files, self.watch = True, None
        self.hashes: Mapping[str, Any] = {}
        self.job, self.large, self.helpers, self.shared = order.job, order.large, order.helpers, order.shared
        self.small: Collection[str] = {*order.names} - {*order.helpers, *order.large}
        self.head = "" if order.helpers or len(order.large) != 1 else next(iter(order.large))

    def choose(self, directory: str, left: Mapping[str, WrittenFile]) -> dict[str, WrittenFile]:
        """Returns those files that have all that belongs to them."""
        found: dict[str, WrittenFile] = {}
        for name in self._order.names:
            if name in left:
                needed = self._order.needs(directory, name)
                if all(other in left for other in needed):
                    found |= {path: left[path] for path in (name, *needed)}
        return found

    def note(self, kept: Mapping[str, WrittenFile]) -> tuple[str, ...]:
        """Says how many of the files are there."""
        return _resume_note(self._count(kept), len(self._order.names), "run")

    def _count(self, kept: Mapping[str, WrittenFile]) -> int:
        return len([name for name in self._order.names if name in kept])

    def write(self, directory: str, kept: Mapping[str, WrittenFile], record: Callable[[WrittenFile], None]) -> None:
        """Makes this process's files, and waits for those of the others."""
        team, names, there = self._team, [name for name in self._order.names if name not in kept], set[str]()

        def take(file: WrittenFile) -> None:
            there.add(file.path)
            record(file)

        def listen() -> None:
            for _, word in team.news() if team else ():
                take(WrittenFile(**word))

        if team is not None:
            team.meet({"directory": directory, "names": names})
        with self._explained():
            for name in names[:: team.size if team else 1]:
                for file in self._order.make(directory, name, self._moved):
                    take(file)
                listen()
            while not there.issuperset(names):
                listen()
                self._moved(0)
                time.sleep(0.02)

    def follow(self, team: Team) -> None:
        """Makes this process's files."""
        begun: Any = team.meet()[0]
        if begun is None:  # an earlier run has written all files
            return
        with self._explained():
            for name in begun["names"][team.rank :: team.size]:
                for file in self._order.make(begun["directory"], name, self._moved):
                    team.post(asdict(file))

    def stream(self, directory: str, kept: Mapping[str, WrittenFile]) -> Iterator[FileStream]:
        """Makes one after the other; each is removed when it is sent, but helpers, which `finish` reads."""
        with self._explained():
            for name in self._order.names:
                for file in self._order.make(directory, name, self._moved) if name not in kept else ():
                    if file.path not in self.large and file.path not in self.helpers:
                        self._unsent[file.path] = file
                        continue
                    yield self._stream(directory, file)
                    if file.path not in self.helpers:
                        os.unlink(os.path.join(directory, file.path))

    def _stream(self, directory: str, file: WrittenFile) -> FileStream:
        def send(write: Write) -> WrittenFile:
            with open(os.path.join(directory, file.path), "rb") as source:
                while block := source.read(_BLOCK):
                    write(block)
            return file

        return file.path, file.nbytes, send

    def finish(self, directory: str, files: Mapping[str, WrittenFile]) -> Manifest:
        """Lets the job make the other files."""
        with self._explained():
            return self._order.end(directory, {**files, **self._unsent})

    def read_small(self, directory: str, manifest: Manifest) -> Mapping[str, bytes]:
        """Reads all that was not sent."""
        sent = {*self.large, *self.helpers}
        with self._explained():
            return {f.path: Path(directory, f.path).read_bytes() for f in manifest.files if f.path not in sent}

    def report(
        self, files: Sequence[WrittenFile], kept: Mapping[str, WrittenFile], notes: tuple[str, ...], *, done: bool
    ) -> OutputReport:
        """Tells of the files in the manifest's order."""
        sizes = tuple((file.path, file.nbytes) for file in files)
        return OutputReport(sizes, "native", len(sizes) if done else self._count(kept), {}, notes, done)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns a system's error into an OutputError."""
        try:
            yield
        except OSError as error:
            if isinstance(error, ZckptError):
                raise
            raise OutputError(
                "cannot be written", file=self._order.out, found=error.strerror or str(error),
                remedy="Make room or get the right to write there, and run the same command again. Nothing was published.",
            ) from error  # fmt: skip


FileSource = PlanFiles | MadeFiles
"""The files of one output."""


def _running_sum(progress: Callable[[int], None] | None) -> Moved:
    """Adds up the progress of several sources, and passes on the sum."""
    total = 0

    def add(nbytes: int) -> None:
        nonlocal total
        total += nbytes
        if progress is not None:
            progress(total)

    return add


def finish_file(directory: str, name: str) -> WrittenFile:
    """Makes a file that was written durable, and reads its checksum; errors as OSError."""
    with open(os.path.join(directory, name), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        crc = crc_of_file(file.fileno(), 0, nbytes)
        make_durable(file.fileno())
    return WrittenFile(name, nbytes, crc)


def write_small(directory: str, name: str, data: bytes) -> WrittenFile:
    """Writes a small file, durably."""
    with open(os.path.join(directory, name), "wb") as file:
        file.write(data)
    return finish_file(directory, name)


def _copy_durably(file: Location, directory: str, name: str) -> WrittenFile:
    """Copies a small file into the output, and syncs it."""
    crc, nbytes = 0, 0
    try:
        with open(os.path.join(directory, name), "wb") as copy:
            for block in file.blocks():
                crc, nbytes = zlib.crc32(block, crc), nbytes + len(block)
                copy.write(block)
            copy.flush()
            make_durable(copy.fileno())
    except OSError as error:
        raise OutputError(
            "cannot be copied", file=file, found=error.strerror or str(error),
            remedy="Check this file and the disk of OUT, and run the same command again.",
        ) from error  # fmt: skip
    return WrittenFile(name, nbytes, crc)


def _resume_note(kept: int, of: int, what: str) -> tuple[str, ...]:
    """The note that an interrupted run is resumed."""
    verb = "is" if kept == 1 else "are"
    return (f"resuming an interrupted {what}: {kept:,} of {count(of, 'file')} {verb} already complete",)


def _literal_bytes(name: str, part: Plan) -> bytes | None:
    """The bytes of a JSON file that are all in the plan; None for a file of tensors."""
    output = part.files[0][0]
    known = b"".join(data for _, data in sorted(output.literals))
    return known if name.endswith(".json") and len(known) == output.size else None


def _fill_checksums(plan: Plan, pace: Pace) -> Plan:
    """The plan of one file with its checksums filled in; computes them by a first pass that writes nothing."""
    ((output, store),) = plan.files
    if not output.checksums:
        return plan
    literals = [(offset, bytearray(data)) for offset, data in output.literals]
    for slot, crc in run(plan, "", mode=Mode.STREAMED, **pace).files[0].slots.items():
        at, data = next((at, data) for at, data in literals if at <= slot < at + len(data))
        data[slot - at : slot - at + len(crc)] = crc
    known = replace(output, literals=tuple((at, bytes(data)) for at, data in literals), checksums=())
    return Plan(((known, store),), plan.pairs)
