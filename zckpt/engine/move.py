"""Runs a plan: opens the files, hands batches of moves to an engine, fills in checksums, syncs.

For every job that moves weights. There are two engines. The native one (`zckpt._core`, C++) works on threads in constant
memory; the reference one (`mover_reference`, Python) is slow, obviously right, and what the native one is tested against.
A plan is streamed, batch by batch (`batches`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from zckpt.base.errors import OutputError, UnsafeError, UnsupportedError, ZckptError, read_error
from zckpt.base.pace import engine_error, gives_back, pace, thread_count, window_bytes
from zckpt.core.dtypes import CAST_TARGETS
from zckpt.core.fragments import FileStore
from zckpt.core.plan import OutputFile, Plan
from zckpt.engine.batches import Batch, batches, element_bytes, ranges
from zckpt.engine.checksums import Partial, file_checksums, join
from zckpt.engine.ordered_output import Ordered, Sink, kept
from zckpt.engine.prefetch import localized, moved_near
from zckpt.engine.reference import run_batch as reference_batch
from zckpt.storage.descriptors import MOST_STORES, OpenFiles
from zckpt.storage.fsync_queue import Syncing

try:
    from zckpt._core import run as native_run
except ImportError:  # pragma: no cover - depends on the build
    native_run = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class CastLoss:
    """Finite numbers of one tensor that became infinite in the cast (or were clamped), and the largest of them."""

    count: int
    largest: float


@dataclass(frozen=True, slots=True)
class Written:
    """A file that is complete and, unless it was streamed or need not be, durable.

    Attributes:
        path: as in the plan.
        nbytes: its size.
        crc32: of the whole file, taken while it was written.
        overflows: number of the pair in the plan -> what its cast lost, for the tensors in this file.
        slots: byte offset -> what was filled in there, of the checksums that the plan wants in the file.
    """

    path: str
    nbytes: int
    crc32: int
    overflows: Mapping[int, CastLoss]
    slots: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What a run did.

    Attributes:
        bytes_read: bytes of elements read.
        bytes_written: bytes written, literals included.
        overflows: number of the pair in the plan -> what its cast lost.
        engine: "native" or "reference".
        files: what was written, in the order in which it was complete.
    """

    bytes_read: int
    bytes_written: int
    overflows: dict[int, CastLoss]
    engine: str
    files: tuple[Written, ...] = ()


def run(
    plan: Plan,
    root: str,
    *,
    threads: int | None = None,
    overflow: Literal["error", "inf", "clamp"] = "error",
    engine: Literal["auto", "native", "reference"] = "auto",
    progress: Callable[[int], None] | None = None,
    window: int | None = None,
    keep_cache: bool | None = None,
    bytes_per_s: int | None = None,
    done: Collection[str] = (),
    finished: Callable[[Written], None] | None = None,
    sinks: Mapping[str, Sink] | None = None,
    streamed: bool = False,
    passing: bool = False,
) -> MoveReport:
    """Writes every file of a plan under `root`, and fills every memory destination.

    Args:
        plan: what goes where.
        root: an existing private directory.
        threads: of the native engine; results do not depend on it.
        overflow: "clamp" makes numbers too large for the target its largest finite number, otherwise they become
            infinite; both are reported. Whether they are an error is the caller's to say.
        engine: "auto" takes the native one where it was built.
        progress: called with the bytes written so far, about every 50 ms.
        window: bytes written at once, per thread.
        keep_cache: whether the page cache keeps what is read; None: unless the job is larger than memory.
        bytes_per_s: at most so many are read and written, together.
        done: paths of files that are there already: they are left alone.
        finished: called with each file as soon as it is complete and durable.
        sinks: path of an output file -> what is handed its bytes in order, to hash them or to send them elsewhere. Only
            for files without checksums, whose first bytes are known before the last.
        streamed: write nothing under `root`: the files exist for their sinks and checksums only.
        passing: the files are on their way elsewhere, and need not outlive a crash: they are left to the page cache, a file
            that is there is written over where it lies, and none is reported.

    Raises:
        CorruptError: a source ends too early. InconsistentError: it changed meanwhile.
        ResourceError: there is too little memory, or no thread starts.
        UsageError: so many threads, or so large a buffer, cannot be; or a sink keeps what it is handed.
        OutputError: a file cannot be written. UnsupportedError: there is no such cast, or a streamed file's bytes do
            not come in order.
        UnsafeError: a file of the plan would lie outside `root`.
    """
    chosen = choose(engine)
    sinks = sinks or {}
    count, window = thread_count(threads), window_bytes(window)
    refuse(plan, sinks, passing=passing)
    raise_file_limit()
    give_back = gives_back(keep_cache, plan.bytes_read + plan.bytes_written)
    work = Work(plan, chosen, overflow == "clamp", count, window, give_back, bytes_per_s or 0)
    work.sinks = {id(store): Ordered(sinks[output.path]) for output, store in plan.files if output.path in sinks}
    complete: list[Written] = []
    written = sum(output.size for output, _ in plan.files if output.path in done)
    nowhere = streamed and chosen == "native"
    with contextlib.ExitStack() as stack:
        if streamed and not nowhere:  # the reference engine does not write in order
            root = stack.enter_context(tempfile.TemporaryDirectory())
        outputs = {
            id(store): os.devnull if nowhere else os.path.join(root, output.path) for output, store in plan.files
        }
        files = stack.enter_context(
            opened(plan, root, outputs, give_back=give_back, direct=not passing and not streamed)
        )

        def done_with(file: Written) -> None:
            complete.append(file)
            if finished is not None:
                finished(file)

        for output, store in plan.files:
            if output.path not in done and not nowhere:
                create(outputs[id(store)], output.size, anew=not passing)
        with Syncing(done_with, give_back=give_back) as syncing:

            def tick(now: int) -> None:
                syncing.settle(wait=False)
                if progress is not None:
                    progress(written + now)

            for batch in localized(batches(plan, done, summed=not passing), moved_near):
                work.do(batch, files, tick)
                written += batch.nbytes
                syncing.settle()
                for output, store in batch.finished:
                    if passing:
                        work.hand_over(output, store, files)
                    elif streamed:
                        done_with(work.finish(output, store, files))
                    else:
                        syncing.add(work.finish(output, store, files), files.of(store)[0])
                    files.close(outputs[id(store)])
    return MoveReport(plan.bytes_read, written, work.overflows, chosen, tuple(complete))


@contextlib.contextmanager
def opened(
    plan: Plan, root: str, outputs: Mapping[int, str], *, give_back: bool, direct: bool = True
) -> Iterator[OpenFiles]:
    """The files of a plan, of which `outputs` says by store where they are. Trouble with one is told of as what it is; at
    the end, sources must be what they were.
    """
    with OpenFiles(outputs, give_back=give_back, direct=direct) as files:
        try:
            yield files
        except OSError as error:
            if isinstance(error, ZckptError):
                raise
            output_failed(error, root, plan)
        files.check_sources()


def choose(engine: Literal["auto", "native", "reference"]) -> str:
    """Which engine works, "native" or "reference"; a person is told of the slow one.

    Raises:
        UnsupportedError: the one that is wanted was not built.
    """
    if engine == "native" and native_run is None:
        raise UnsupportedError("an engine that was not built", found="zckpt._core is missing")
    chosen = "reference" if engine == "reference" or native_run is None else "native"
    if engine == "auto" and chosen == "reference":
        warnings.warn("zckpt's C++ engine was not built: the slow Python one is used.", RuntimeWarning, stacklevel=3)
    return chosen


def refuse(plan: Plan, sinks: Mapping[str, Sink], *, passing: bool = False) -> None:
    """Raises for casts that there are not, for paths that lead elsewhere, for sinks of what is not known in order, and for
    files in passing of which not every byte is written.
    """
    if any(output.checksums and (passing or output.path in sinks) for output, _ in plan.files):
        raise ValueError("a file with checksums is not known in order")
    if passing:
        filled = element_bytes(plan)
        for output, store in plan.files:
            if filled[id(store)] + sum(len(data) for _, data in output.literals) != output.size:
                raise ValueError(f"{output.path} would keep bytes of what was there before")
    for source, destination in plan.pairs:
        a, b = source.dtype, destination.dtype
        if a != b and not (a.kind == "float" and b in CAST_TARGETS):
            raise UnsupportedError(f"a cast of tensor {source.name!r}", found=f"{a} to {b}")
    for output, _ in plan.files:
        parts = output.path.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in output.path:
            raise UnsafeError(
                "an output file that would lie elsewhere", found=f"{output.path!r:.200}",
                remedy="Nothing was written. The checkpoint's names were made to do harm, or need --rename.",
            )  # fmt: skip


def raise_file_limit() -> None:
    """Lets this process open as many files as a batch may name."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_STORES + 256
    if soft != resource.RLIM_INFINITY and soft < wanted and (hard == resource.RLIM_INFINITY or hard > soft):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def create(path: str, size: int, *, anew: bool = True) -> None:
    """A file of full size; one that is there is an error, or keeps its pages and what they hold."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_EXCL if anew else os.O_NOFOLLOW) | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


class Work:
    """Batches, done by one engine; and what is known of the files so far: CRCs of their parts, and overflows."""

    def __init__(
        self, plan: Plan, engine: str, clamp: bool, threads: int, window: int, give_back: bool, bytes_per_s: int
    ) -> None:
        self.engine = engine
        self.clamp = clamp
        self.threads = threads
        self.window = window
        self.give_back = give_back
        self.bytes_per_s = bytes_per_s
        self.spend = pace(bytes_per_s)
        self.overflows: dict[int, CastLoss] = {}
        self.ranges: dict[int, list[tuple[int, int, int]]] = {}
        for number, (store, start, nbytes) in enumerate(ranges(plan)):
            self.ranges.setdefault(id(store), []).append((number, start, nbytes))
        self.tensors: dict[int, set[int]] = {}
        for number, (_, entry) in enumerate(plan.pairs):
            for fragment in entry.fragments:
                self.tensors.setdefault(id(fragment.store), set()).add(number)
        self.parts: dict[int, list[Partial]] = {}
        self.sinks: dict[int, Ordered] = {}

    def do(self, batch: Batch, files: OpenFiles, progress: Callable[[int], None] | None) -> None:
        """Runs a batch."""
        if self.engine == "reference":
            lost = reference_batch(
                batch.stores,
                [files.of(store) for store in batch.stores],
                batch.moves,
                batch.literals,
                self.clamp,
                self.spend,
            )
            if progress:
                progress(batch.nbytes)
        else:
            lost = self._do_native(batch, files, progress)
        for tensor, count, largest in lost:
            old = self.overflows.get(tensor, CastLoss(0, 0.0))
            self.overflows[tensor] = CastLoss(old.count + count, max(old.largest, largest))

    def _do_native(
        self, batch: Batch, files: OpenFiles, progress: Callable[[int], None] | None
    ) -> list[tuple[int, int, float]]:
        (kind, number, store, offset, text), crcs, overflows = native_run(
            *batch.packed([files.of(store) for store in batch.stores]),
            threads=self.threads,
            window=self.window,
            clamp=self.clamp,
            give_back=self.give_back,
            bytes_per_s=self.bytes_per_s,
            progress=progress,
            sinks=[self.sinks.get(id(store)) for store in batch.stores] if self.sinks else [],
        )
        if kind:
            where = str(batch.stores[store])
            if kind == "write":
                raise OSError(number, os.strerror(number), where)
            if kind == "kept":
                raise kept(where)
            raise read_error(where, number, offset) if kind == "read" else engine_error(kind, text)
        for number, crc, offset, length in crcs:
            self.parts.setdefault(number, []).append((offset, length, crc))
        return overflows

    def finish(self, output: OutputFile, store: FileStore, files: OpenFiles) -> Written:
        """Fills in the CRCs of a complete file, and hands its sink what did not come in order."""
        self.hand_over(output, store, files)
        fd, _ = files.of(store)
        crcs: dict[int, int] = {}
        for number, start, nbytes in self.ranges.get(id(store), ()):
            parts = self.parts.pop(number, ())
            crcs[start] = crc_of_file(fd, start, nbytes) if self.engine == "reference" else join(parts, start, nbytes)
        crc, slots = file_checksums(output, crcs)
        for slot, data in slots.items():
            write(fd, data, slot)
        return Written(output.path, output.size, crc, self.lost(store), slots)

    def hand_over(self, output: OutputFile, store: FileStore, files: OpenFiles) -> None:
        """Hands the sink of a complete file what did not come in order."""
        if id(store) in self.sinks:
            self.sinks[id(store)].finish(files.of(store)[0], output)

    def lost(self, store: FileStore) -> dict[int, CastLoss]:
        """What casts have lost so far of the tensors in a file."""
        here = self.overflows.keys() & self.tensors.get(id(store), set())
        return {number: self.overflows[number] for number in sorted(here)}


def crc_of_file(fd: int, start: int, nbytes: int) -> int:
    """The CRC of bytes of a file, read again."""
    import zlib

    crc, stop = 0, start + nbytes
    while start < stop and (data := os.pread(fd, min(stop - start, 1 << 20), start)):
        crc = zlib.crc32(data, crc)
        start += len(data)
    return crc


def write(fd: int, data: bytes, offset: int) -> None:
    """Writes all of it."""
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def output_failed(error: OSError, root: str, plan: Plan) -> NoReturn:
    """Says what is wrong with an output."""
    import resource

    what, remedy = "a disk that is full", "Free some room, or choose an OUT on another disk."
    found, expected = os.strerror(error.errno or 0), f"{plan.bytes_written:,} bytes are needed"
    match error.errno:
        case errno.ENOSPC:
            state = os.statvfs(root) if os.path.isdir(root) else None
            free = "no more files fit on it" if state and state.f_files and not state.f_favail else ""
            found += f"; {free or f'{state.f_bavail * state.f_frsize if state else 0:,} bytes are free'}"
        case errno.EDQUOT:
            what, remedy = "a disk quota that is used up", "Have it raised, or choose an OUT on another disk."
        case errno.EFBIG:
            largest = max((output.size for output, _ in plan.files), default=0)
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            mine = limit != resource.RLIM_INFINITY and limit < largest
            what = "a limit on the size of a file"
            found += f"; this process may write {limit:,} bytes to a file (ulimit -f)" if mine else ""
            expected = f"the largest file has {largest:,} bytes"
            remedy = "Raise the limit (ulimit -f), or write smaller files (--max-shard-size)."
        case _:
            raise OutputError(
                "an output that cannot be written", file=error.filename or root, found=error.strerror or str(error),
                remedy="Nothing was published.",
            ) from error  # fmt: skip
    raise OutputError(
        what, file=os.path.dirname(root) or root, found=found, expected=expected,
        remedy=f"Nothing was published. {remedy}",
    ) from error  # fmt: skip
