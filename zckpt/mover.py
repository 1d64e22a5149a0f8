"""Runs a plan: opens the files, hands batches of moves to an engine, fills in checksums, syncs.

For every job that moves weights. There are two engines. The native one (`zckpt._core`, C++) works on threads in constant
memory; the reference one (`mover_reference`, Python) is slow, obviously right, and what the native one is tested against.
A plan is streamed, batch by batch (`batches`).
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NoReturn

from zckpt.batches import MOST_STORES, batches, element_bytes, progress_after
from zckpt.dtypes import CAST_TARGETS
from zckpt.engines import Overflow, Work, choose, crc_of_file, sealed, write
from zckpt.errors import OutputError, UnsafeError, UnsupportedError, ZckptError
from zckpt.open_files import OpenFiles
from zckpt.plan import OutputFile, Plan
from zckpt.sums import Partial, element_ranges, join
from zckpt.tuning import gives_back

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Written:
    """A file that is complete and durable.

    Attributes:
        path: as in the plan.
        nbytes: its size.
        crc32: of the whole file, taken while it was written.
        overflows: number of the pair in the plan -> what its cast lost, for the tensors in this file.
    """

    path: str
    nbytes: int
    crc32: int
    overflows: Mapping[int, Overflow]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one of several processes put into a file; it is durable.

    Attributes:
        path: of the file, as in the plan.
        nbytes: bytes of elements.
        crcs: of its parts; None where the engine takes none while it writes.
        overflows: number of the pair in the plan -> what this process's casts have lost of it so far.
    """

    path: str
    nbytes: int
    crcs: tuple[Partial, ...] | None
    overflows: Mapping[int, Overflow]


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
    overflows: dict[int, Overflow]
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

    Raises:
        CorruptError: a source ends too early. InconsistentError: it changed meanwhile.
        OutputError: a file cannot be written. UnsupportedError: there is no such cast.
        UnsafeError: a file of the plan would lie outside `root`.
    """
    chosen = choose(engine)
    _refuse(plan)
    give_back = gives_back(keep_cache, plan.bytes_read + plan.bytes_written)
    work = Work(plan, chosen, overflow == "clamp", threads, window, give_back, bytes_per_s)
    complete: list[Written] = []
    written = sum(output.size for output, _ in plan.files if output.path in done)
    with _opened(plan, root, give_back) as (files, outputs):
        for output, store in plan.files:
            if output.path not in done:
                _create(outputs[id(store)], output.size)
        for batch in batches(plan, done):
            work.do(batch, files, progress_after(progress, written))
            written += batch.nbytes
            for output, store in batch.finished:
                crc = work.finish(output, store, files)
                complete.append(Written(output.path, output.size, crc, work.lost(store)))
                files.close(outputs[id(store)])
                if finished is not None:
                    finished(complete[-1])
    return MoveReport(plan.bytes_read, written, work.overflows, chosen, tuple(complete))


def begin(plan: Plan, root: str, done: Collection[str] = ()) -> None:
    """For several processes: makes the files, at full size and with their literals; arguments and errors as in `run`."""
    _refuse(plan)
    with _opened(plan, root, False) as (files, outputs):
        for output, store in plan.files:
            if output.path not in done:
                _create(outputs[id(store)], output.size)
                fd, _ = files.of(store)
                for offset, data in output.literals:
                    write(fd, data, offset)
                files.close(outputs[id(store)])


def move(
    part: Plan,
    root: str,
    *,
    moved: Callable[[Piece], None],
    overflow: Literal["error", "inf", "clamp"] = "error",
    engine: Literal["auto", "native", "reference"] = "auto",
    progress: Callable[[int], None] | None = None,
    window: int | None = None,
    threads: int | None = None,
    keep_cache: bool | None = None,
    bytes_per_s: int | None = None,
) -> str:
    """For several processes: moves one's part of a plan into files that `begin` made. Literals and CRC slots are left alone.

    Args:
        part: only files that it moves something into are in it.
        root: where they are.
        moved: called with each file's piece as soon as it is durable.
        overflow: as in `run`, like all that follow.
        engine: which.
        progress: told of bytes.
        window: bytes written at once.
        threads: of the engine.
        keep_cache: whether it keeps what is read.
        bytes_per_s: at most.

    Returns:
        The engine, "native" or "reference".

    Raises:
        ZckptError: as in `run`.
    """
    chosen = choose(engine)
    give_back = gives_back(keep_cache, part.bytes_read + part.bytes_written)
    work = Work(part, chosen, overflow == "clamp", threads, window, give_back, bytes_per_s)
    nbytes, written = element_bytes(part), 0
    with _opened(part, root, give_back) as (files, outputs):
        for batch in batches(part, literals=False):
            work.do(batch, files, progress_after(progress, written))
            written += batch.nbytes
            for output, store in batch.finished:
                os.fsync(files.of(store)[0])
                moved(Piece(output.path, nbytes[id(store)], work.taken(store), work.lost(store)))
                files.close(outputs[id(store)])
    return chosen


def seal(plan: Plan, output: OutputFile, root: str, crcs: Iterable[Partial] | None) -> int:
    """For several processes: fills in the CRCs of a file that all have moved their parts into, and makes it durable.

    Args:
        plan: the whole.
        output: the file.
        root: where it is.
        crcs: of all its pieces; None to read it again.

    Returns:
        The CRC of the whole file.
    """
    parts = None if crcs is None else sorted(crcs)
    path = os.path.join(root, output.path)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found: dict[int, int] = {}
            for start, nbytes in element_ranges(output):
                if parts is None:
                    found[start] = crc_of_file(fd, start, nbytes)
                else:
                    here = parts[bisect_left(parts, (start,)) : bisect_left(parts, (start + nbytes,))]
                    found[start] = join(here, start, nbytes)
            return sealed(fd, output, found)
        finally:
            os.close(fd)
    except OSError as error:
        _output_failed(error, root, plan)


@contextmanager
def _opened(plan: Plan, root: str, give_back: bool) -> Iterator[tuple[OpenFiles, dict[int, str]]]:
    """The files of a run, and the outputs' paths by store. Trouble with an output is told of; at the end, sources are checked."""
    _raise_file_limit()
    outputs = {id(store): os.path.join(root, output.path) for output, store in plan.files}
    with OpenFiles(outputs, give_back=give_back) as files:
        try:
            yield files, outputs
        except OSError as error:
            if isinstance(error, ZckptError):
                raise
            _output_failed(error, root, plan)
        files.check_sources()


def _refuse(plan: Plan) -> None:
    """Raises for casts that there are not, and for paths that lead elsewhere."""
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


def _raise_file_limit() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_STORES + 256
    if soft != resource.RLIM_INFINITY and soft < wanted and (hard == resource.RLIM_INFINITY or hard > soft):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def _create(path: str, size: int) -> None:
    """A new file of full size."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def _output_failed(error: OSError, root: str, plan: Plan) -> NoReturn:
    if error.errno in _FULL:
        free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize if os.path.isdir(root) else 0
        raise OutputError(
            "a disk that is full (or a quota or size limit reached)", file=os.path.dirname(root) or root,
            found=f"{os.strerror(error.errno or 0)}; {free:,} bytes are free",
            expected=f"{plan.bytes_written:,} bytes are needed",
            remedy="Nothing was published. Free some room, or choose an OUT on another disk.",
        ) from error  # fmt: skip
    raise OutputError(
        "an output that cannot be written", file=error.filename or root, found=error.strerror or str(error),
        remedy="Nothing was published.",
    ) from error  # fmt: skip
