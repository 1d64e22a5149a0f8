"""Runs a plan: opens the files, hands batches of moves to an engine, fills in checksums, syncs.

For every job that moves weights. There are two engines. The native one (`zckpt._core`, C++) works on threads in constant
memory; the reference one (`mover_reference`, Python) is slow, obviously right, and what the native one is tested against.
A plan is streamed, batch by batch (`batches`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from zckpt.batches import MOST_STORES, Batch, batches
from zckpt.dtypes import CAST_TARGETS
from zckpt.errors import CorruptError, InconsistentError, OutputError, UnsupportedError, ZckptError
from zckpt.fetching import localized
from zckpt.fragments import FileStore
from zckpt.mover_reference import run_batch as reference_batch
from zckpt.plan import OutputFile, Plan
from zckpt.sinks import Ordered, Sink

try:
    from zckpt._core import crc32_combine
    from zckpt._core import run as native_run
except ImportError:  # pragma: no cover - depends on the build
    native_run = None  # type: ignore[assignment]

WINDOW_BYTES = 4 << 20
"""Bytes of an output file gathered and written at once, per thread. Measured: 1 to 16 MiB differ little on ext4 with
direct I/O and on tmpfs; 4 MiB keeps memory low and writes large."""

THREADS = min(4, max(2, os.cpu_count() or 1))

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Overflow:
    """Finite numbers of one tensor that became infinite in the cast (or were clamped), and the largest of them."""

    count: int
    largest: float


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What a run did.

    Attributes:
        bytes_read: bytes of elements read.
        bytes_written: bytes written, literals included.
        overflows: number of the pair in the plan -> what its cast lost.
        engine: "native" or "reference".
        checksums: CRC-32 of each `Checksum` of the plan's files, in order.
    """

    bytes_read: int
    bytes_written: int
    overflows: dict[int, Overflow]
    engine: str
    checksums: tuple[int, ...] = ()


@dataclass(slots=True)
class _Files:
    """The files of a run: all outputs exist from its start; as many files as a batch may have are open.

    Attributes:
        outputs: id of a destination's store -> its path.
        open: path -> (a plain descriptor, a direct one or -1), the least recently used first.
        seen: the sources that were read.
        sinks: id of a destination's store -> what its bytes are handed to.
        durable: whether outputs are to outlive a crash.
    """

    outputs: dict[int, str] = field(default_factory=dict[int, str])
    open: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    seen: dict[str, FileStore] = field(default_factory=dict[str, FileStore])
    sinks: dict[int, Ordered] = field(default_factory=dict[int, Ordered])
    durable: bool = True

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        while self.open:
            self._close(next(iter(self.open)))

    def _close(self, path: str) -> None:
        for descriptor in self.open.pop(path):
            if descriptor >= 0:
                os.close(descriptor)

    def descriptors(self, batch: Batch) -> list[tuple[int, int]]:
        """A plain and a direct descriptor for each store of a batch; -1 for none."""
        return [self.of(store) if isinstance(store, FileStore) else (-1, -1) for store in batch.stores]

    def of(self, store: FileStore) -> tuple[int, int]:
        """A file's descriptors. The least recently used are closed where too many are open: never one of this batch."""
        path = self.outputs.get(id(store), store.path)
        found = self.open.pop(path, None)
        if found is None:
            while len(self.open) >= MOST_STORES:
                self._close(next(iter(self.open)))
            found = (
                _open_output(path, store.size if self.durable else 0)
                if id(store) in self.outputs
                else (self._open_source(store), -1)
            )
        self.open[path] = found
        return found

    def _open_source(self, store: FileStore) -> int:
        """A descriptor to read from; the file must be the one that was planned with."""
        try:
            descriptor = os.open(store.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptError(
                "a file that can no longer be read", file=store.path, found=error.strerror or str(error)
            ) from error
        try:
            _check_identity(store, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        self.seen[store.path] = store
        return descriptor

    def check_sources(self) -> None:
        """Nothing changed while it was read."""
        for path, store in self.seen.items():
            try:
                stat = os.stat(path)
            except OSError as error:
                raise CorruptError("a file that vanished while it was read", file=path, found=str(error)) from error
            _check_identity(store, stat)


def _check_identity(store: FileStore, stat: os.stat_result) -> None:
    if store.identity != (0, 0, 0) and (stat.st_dev, stat.st_ino, stat.st_mtime_ns) != store.identity:
        raise InconsistentError(
            "a file that changed while it was read",
            file=store.path,
            found="another file or modification time than when it was opened",
            remedy="Something still writes to the checkpoint. Wait until it is done, and start again.",
        )


def run(
    plan: Plan,
    root: str,
    *,
    threads: int | None = None,
    overflow: Literal["error", "inf", "clamp"] = "error",
    engine: Literal["auto", "native", "reference"] = "auto",
    progress: Callable[[int], None] | None = None,
    window: int = WINDOW_BYTES,
    sinks: Mapping[str, Sink] | None = None,
    streamed: bool = False,
    durable: bool = True,
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
        window: bytes written at once; a multiple of 4,096.
        sinks: path of an output file -> what is handed its bytes in order, to hash them or to send them elsewhere. Only
            for files without checksums, whose first bytes are known before the last.
        streamed: write nothing under `root`: the files exist for their sinks and checksums only.
        durable: False leaves the files to the page cache: they will be read at once, and need not outlive a crash.

    Raises:
        CorruptError: a source ends too early. InconsistentError: it changed meanwhile.
        OutputError: a file cannot be written. UnsupportedError: there is no such cast, or a streamed file's bytes do
            not come in order.
    """
    if engine == "native" and native_run is None:
        raise UnsupportedError("an engine that was not built", found="zckpt._core is missing")
    chosen = "reference" if engine == "reference" or native_run is None else "native"
    if engine == "auto" and chosen == "reference":
        warnings.warn("zckpt's C++ engine was not built: the slow Python one is used.", RuntimeWarning, stacklevel=2)
    for source, destination in plan.pairs:
        a, b = source.dtype, destination.dtype
        if a != b and not (a.kind == "float" and b in CAST_TARGETS):
            raise UnsupportedError(f"a cast of tensor {source.name!r}", found=f"{a} to {b}")
    sinks = sinks or {}
    if any(output.checksums and output.path in sinks for output, _ in plan.files):
        raise ValueError("a file with checksums is not known in order")
    _raise_file_limit()
    overflows: dict[int, Overflow] = {}
    sums: dict[int, list[tuple[int, int, int]]] = {}
    written = 0
    with contextlib.ExitStack() as stack:
        durable = durable and not streamed
        files = stack.enter_context(_Files(durable=durable))
        if streamed and chosen == "reference":  # it does not write in order
            root = stack.enter_context(tempfile.TemporaryDirectory())
        try:
            for output, store in plan.files:
                nowhere = streamed and chosen == "native"
                files.outputs[id(store)] = os.devnull if nowhere else _create(root, output)
                if output.path in sinks:
                    files.sinks[id(store)] = Ordered(sinks[output.path])
            for batch in localized(batches(plan)):
                told = _after(progress, written)
                if chosen == "reference":
                    done = _run_reference(batch, files, overflow == "clamp", told)
                else:
                    done = _run_native(batch, files, threads or THREADS, window, overflow == "clamp", told, sums)
                for tensor, count, largest in done:
                    old = overflows.get(tensor, Overflow(0, 0.0))
                    overflows[tensor] = Overflow(old.count + count, max(old.largest, largest))
                written += batch.nbytes
            checksums = _finish(plan, files, sums, chosen, durable=durable)
        except OSError as error:
            if isinstance(error, ZckptError):
                raise
            _output_failed(error, root, plan)
        files.check_sources()
    return MoveReport(plan.bytes_read, written, overflows, chosen, checksums)


def _after(progress: Callable[[int], None] | None, base: int) -> Callable[[int], None] | None:
    """`progress`, told of `base` bytes more than it is called with."""
    return None if progress is None else lambda now: progress(base + now)


def _raise_file_limit() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_STORES + 256
    if soft != resource.RLIM_INFINITY and soft < wanted and (hard == resource.RLIM_INFINITY or hard > soft):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def _create(root: str, output: OutputFile) -> str:
    """Makes a file of full size, and returns its path."""
    path = os.path.join(root, output.path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, output.size)
    finally:
        os.close(fd)
    return path


def _open_output(path: str, size: int) -> tuple[int, int]:
    """A descriptor for plain writes and, where the size makes it worth it, one for direct ones."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    direct = -1
    if size >= 1 << 20 and hasattr(os, "O_DIRECT") and not _is_tmpfs(path):
        try:
            direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            direct = -1
    return fd, direct


def _is_tmpfs(path: str) -> bool:
    """Memory file systems accept direct I/O, but have no disk to save a copy for: their device has no major number."""
    return os.major(os.stat(path).st_dev) == 0 and os.statvfs(path).f_frsize == os.sysconf("SC_PAGE_SIZE")


def _run_reference(
    batch: Batch, files: _Files, clamp: bool, progress: Callable[[int], None] | None
) -> list[tuple[int, int, float]]:
    """Returns overflows: (pair's number, count, largest)."""
    done = reference_batch(batch.stores, files.descriptors(batch), batch.moves, batch.literals, clamp)
    if progress:
        progress(batch.nbytes)
    return done


def _run_native(
    batch: Batch,
    files: _Files,
    threads: int,
    window: int,
    clamp: bool,
    progress: Callable[[int], None] | None,
    sums: dict[int, list[tuple[int, int, int]]],
) -> list[tuple[int, int, float]]:
    """Adds partial CRCs to `sums` (range -> (offset, length, crc)); returns overflows."""
    (kind, number, store, offset), crcs, overflows = native_run(
        *batch.packed(files.descriptors(batch)), threads=threads, window=window, clamp=clamp, progress=progress,
        sinks=[files.sinks.get(id(store)) for store in batch.stores] if files.sinks else [],
    )  # fmt: skip
    if kind:
        where = str(batch.stores[store])
        raise OSError(number, os.strerror(number), where) if kind == "write" else read_error(where, number, offset)
    for number, crc, offset, length in crcs:
        sums.setdefault(number, []).append((offset, length, crc))
    return list(overflows)


def read_error(path: str, number: int, offset: int) -> ZckptError:
    """The error for a source that cannot be read at `offset`; a negative `number` means that it ended."""
    if number < 0:
        return CorruptError(
            "a file that ends too early", file=path, found=f"nothing at byte {offset:,} or soon after",
            expected="its index says there is more", byte_offset=offset,
            remedy="It was cut short, or shrank while it was read. Copy that file again.",
        )  # fmt: skip
    return CorruptError(
        "a file that cannot be read", file=path, found=f"{os.strerror(number)} at byte {offset:,}", byte_offset=offset,
        remedy="Check the disk, and copy that file again.",
    )  # fmt: skip


def _finish(
    plan: Plan, files: _Files, sums: dict[int, list[tuple[int, int, int]]], engine: str, *, durable: bool
) -> tuple[int, ...]:
    """Fills in the CRCs and returns them; hands sinks what did not come in order; makes every file durable."""
    found: list[int] = []
    for output, store in plan.files:
        fd, _ = files.of(store)
        ordered = files.sinks.get(id(store))
        if ordered is not None:
            ordered.finish(fd, output)
        for checksum in output.checksums:
            if engine == "reference":
                crc = _crc_of_file(fd, checksum.start, checksum.nbytes)
            else:
                crc = 0
                for _, length, part in sorted(sums.get(len(found), ())):
                    crc = crc32_combine(crc, part, length)
            for slot in checksum.slots:
                _write(fd, struct.pack("<I", crc), slot)
            found.append(crc)
        if durable:
            os.fsync(fd)
    return tuple(found)


def _crc_of_file(fd: int, start: int, nbytes: int) -> int:
    import zlib

    crc, stop = 0, start + nbytes
    while start < stop and (data := os.pread(fd, min(stop - start, 1 << 20), start)):
        crc = zlib.crc32(data, crc)
        start += len(data)
    return crc


def _write(fd: int, data: bytes, offset: int) -> None:
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


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
