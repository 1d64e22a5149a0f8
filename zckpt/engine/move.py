"""Runs a plan: opens the files, hands batches of moves to an engine, fills in checksums, syncs.

For every job that moves weights. There are two engines. The native one (`zckpt._core`, C++) works on threads in constant
memory; the reference one (`reference`, Python) is slow, obviously right, and what the native one is tested against.
A plan is streamed, batch by batch (`batches`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal, TypeVar

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsafeError, UnsupportedError, read_error
from zckpt.base.pace import Pace, engine_error, gives_back, pace, window_bytes
from zckpt.core.dtypes import can_cast
from zckpt.core.plan import OutputFile, Plan, WrittenFile
from zckpt.core.stores import FileStore
from zckpt.engine.batches import Batch, batches, element_bytes, ranges_of
from zckpt.engine.bringing import Bringer, foresee
from zckpt.engine.checksums import Partial, seal
from zckpt.engine.choice import choose, threads_for
from zckpt.engine.output_files import Consumer, OrderedOutput, create, keeps_bytes, open_output_files
from zckpt.engine.prefetch import with_local_sources
from zckpt.storage.descriptors import OpenFiles
from zckpt.storage.fsync_queue import Syncing
from zckpt.storage.identity import stays_inside

if TYPE_CHECKING:
    from zckpt.engine.reference import Follow

try:
    from zckpt._core import run as native_run
except ImportError:  # pragma: no cover - depends on the build
    native_run = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What a run did.

    Attributes:
        bytes_read: bytes of elements read.
        bytes_written: bytes written, literals included.
        overflows: tensor name -> (elements with a cast that overflowed, the largest of them).
        engine: "native" or "reference".
        files: what was written, in the order in which it was complete; durable, unless it was streamed.
        bytes_cloned: of the bytes written, those that take no room: the file system lets output and source share them.
    """

    bytes_read: int
    bytes_written: int
    overflows: dict[str, tuple[int, float]]
    engine: str
    files: tuple[WrittenFile, ...] = ()
    bytes_cloned: int = 0


class MoveOptions(Pace):
    """What `run` takes of a job's options.

    Attributes:
        overflow: what becomes of numbers too large for the target's dtype.
        window: bytes written at once, per thread; None for the default.
    """

    overflow: Literal["error", "inf", "clamp"]
    window: int | None


class Mode(Enum):
    """What happens to the files of a plan."""

    DURABLE = auto()
    """Each file is created again, made durable and reported."""
    PASSING = auto()
    """Each is on its way elsewhere and need not outlive a crash: it stays in the page cache, a file that exists is
    overwritten in place, and none is reported."""
    STREAMED = auto()
    """Each exists for its consumer and its checksums only: nothing is written under the root. It is reported."""


def run(
    plan: Plan,
    root: str,
    *,
    mode: Mode = Mode.DURABLE,
    threads: int | None = None,
    overflow: Literal["error", "inf", "clamp"] = "error",
    engine: Literal["auto", "native", "reference"] = "auto",
    progress: Callable[[int], None] | None = None,
    window: int | None = None,
    keep_cache: bool | None = None,
    bytes_per_s: int | None = None,
    done: Collection[str] = (),
    finished: Callable[[WrittenFile], None] | None = None,
    consumers: Mapping[str, Consumer] | None = None,
) -> MoveReport:
    """Writes every file of a plan under `root`, and fills every memory destination.

    Args:
        plan: what goes where.
        root: an existing work directory.
        mode: what becomes of the files.
        threads: of the native engine; results do not depend on it.
        overflow: "clamp" makes numbers too large for the target its largest finite number, otherwise they become
            infinite; both are reported. The caller decides whether they are an error.
        engine: "auto" uses the native one where it was built.
        progress: called with the bytes written so far, about every 50 ms.
        window: bytes written at once, per thread.
        keep_cache: whether the page cache keeps what is read; None: unless the job is larger than memory.
        bytes_per_s: the most that are read and written, together.
        done: paths of files that exist already and are left alone.
        finished: called with each file that is reported, as soon as it is.
        consumers: path of an output file -> what gets its bytes in order, to hash them or to send them elsewhere. Only
            for files without checksums, with first bytes that are known before the last.

    Raises:
        CorruptError: a source ends too early. InconsistentError: it changed meanwhile.
        ResourceError: there is too little memory, or no thread starts.
        UsageError: the number of threads or the size of the buffer is impossible, or a consumer keeps the bytes it gets.
        OutputError: a file cannot be written. UnsupportedError: there is no such cast, or a streamed file's bytes do
            not come in order.
        UnsafeError: a file of the plan would be outside `root`.
    """
    mover = Mover(
        plan, overflow=overflow, engine=engine, threads=threads, window=window, keep_cache=keep_cache,
        bytes_per_s=bytes_per_s, root=root,
    )  # fmt: skip
    consumers = consumers or {}
    refuse(plan, consumers, mode)
    if consumers:
        mover.ordered = {
            id(store): OrderedOutput(consumers[output.path]) for output, store in plan.files if output.path in consumers
        }
    reported: list[WrittenFile] = []

    def report(file: WrittenFile) -> None:
        reported.append(file)
        if finished is not None:
            finished(file)

    with contextlib.ExitStack() as stack:
        nowhere = mode is Mode.STREAMED and mover.engine == "native"
        if mode is Mode.STREAMED and not nowhere:  # the reference engine does not write in order
            root = stack.enter_context(tempfile.TemporaryDirectory())
        paths = {id(store): os.devnull if nowhere else os.path.join(root, output.path) for output, store in plan.files}
        direct = mode is Mode.DURABLE
        files = stack.enter_context(open_output_files(plan, root, paths, give_back=mover.give_back, direct=direct))
        for output, store in plan.files:
            if output.path not in done and not nowhere:
                create(paths[id(store)], output.size, again=mode is not Mode.PASSING)

        def finish(output: OutputFile, store: FileStore) -> WrittenFile | None:
            if id(store) in mover.ordered:
                mover.ordered[id(store)].finish(files.of(store)[0], output)
            return None if mode is Mode.PASSING else mover.seal(output, store, files)

        written = mover.carry_out(
            batches(plan, done, None if mode is Mode.PASSING else mover.ranges), files, paths, finish, report,
            durable=mode is Mode.DURABLE, progress=progress,
            before=sum(output.size for output, _ in plan.files if output.path in done),
        )  # fmt: skip
    return MoveReport(mover.bytes_read, written, mover.overflows(), mover.engine, tuple(reported), mover.cloned)


def refuse(plan: Plan, consumers: Collection[str] = (), mode: Mode = Mode.DURABLE) -> None:
    """Refuses what cannot be carried out.

    Args:
        plan: what goes where.
        consumers: paths of the files with bytes that are wanted in order.
        mode: what becomes of the files.

    Raises:
        UnsupportedError: there is no such cast.
        UnsafeError: a path leads elsewhere.
        ValueError: a file's bytes are not known in order, or not every byte of a passing file is written.
    """
    passing = mode is Mode.PASSING
    filled = element_bytes(plan) if passing else {}
    for output, store in plan.files:
        if not stays_inside(output.path):
            raise UnsafeError(
                "a file would be written outside of the output", found=f"{output.path!r:.200}",
                expected="a path below the output without '..'",
                remedy="If you know the checkpoint's author, rename its tensors (--rename). Nothing was written.",
            )  # fmt: skip
        if output.checksums and (passing or output.path in consumers):
            raise ValueError("a file with checksums is not known in order")
        if passing and filled[id(store)] + sum(len(data) for _, data in output.literals) != output.size:
            raise ValueError(f"{output.path} would keep bytes of what was there before")
    for source, destination in plan.pairs:
        a, b = source.dtype, destination.dtype
        if not can_cast(a, b):
            raise UnsupportedError(
                f"tensor {source.name!r} cannot be cast", found=f"{a} to {b}", expected="floats to fp32, fp16 or bf16",
                remedy="Leave the tensor out (--exclude), or write it in its own dtype.",
            )  # fmt: skip


T = TypeVar("T")


class Mover:
    """One plan carried out by one engine, and what is known of its files so far: CRCs of their parts, and overflows.

    Arguments are those of `run`.

    Attributes:
        engine: "native" or "reference".
        bytes_read: of elements, by the whole plan.
        give_back: whether the page cache forgets what is read and written.
        ranges: runs of elements with CRCs that are taken, by output.
        cloned: bytes of outputs so far that share their sources' blocks.
        ordered: id of an output's store -> what gets its bytes in order.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        overflow: Literal["error", "inf", "clamp"] = "error",
        engine: Literal["auto", "native", "reference"] = "auto",
        threads: int | None = None,
        window: int | None = None,
        keep_cache: bool | None = None,
        bytes_per_s: int | None = None,
        root: str = "",
    ) -> None:
        self.engine = choose(engine, built=native_run is not None)
        self.bytes_read = plan.bytes_read
        self.give_back = gives_back(keep_cache, self.bytes_read + plan.bytes_written)
        self.cloned = 0
        self.ordered: dict[int, OrderedOutput] = {}
        self._clamp = overflow == "clamp"
        self._threads = threads_for(threads, (source for source, _ in plan.pairs), *([root] if root else []))
        self._window = window_bytes(window)
        self._bytes_per_s = bytes_per_s or 0
        self._spend = pace(bytes_per_s)
        self.ranges = ranges_of(plan)
        self._pairs = plan.pairs
        self._lost: dict[int, tuple[int, float]] = {}
        self._tensors: dict[int, set[int]] = {}
        for number, (_, entry) in enumerate(plan.pairs if plan.files else ()):
            for fragment in entry.fragments:
                self._tensors.setdefault(id(fragment.store), set()).add(number)
        self._crcs: dict[int, list[Partial]] = {}

    def carry_out(
        self,
        parts: Iterable[Batch],
        files: OpenFiles,
        paths: Mapping[int, str],
        finish: Callable[[OutputFile, FileStore], T | None],
        report: Callable[[T], None],
        *,
        durable: bool = True,
        progress: Callable[[int], None] | None = None,
        before: int = 0,
    ) -> int:
        """Runs the plan's batches, one after the other, while the files of earlier ones are synced.

        Args:
            parts: the plan, as `batches` cuts it.
            files: that are open; the outputs exist.
            paths: id of an output's store -> its path.
            finish: called when all of a file's elements are in it; returns what `report` is called with, if anything.
            report: called when the file is durable.
            durable: sync the files; otherwise `report` is called at once.
            progress: called with the bytes written so far.
            before: bytes that were written earlier.

        Returns:
            Bytes written, `before` included.
        """
        bringer = Bringer(self.engine, self._threads, give_back=self.give_back, spend=self._spend)
        with bringer, Syncing(report, give_back=self.give_back) as syncing:

            def tick(now: int) -> None:
                syncing.settle(wait=False)
                if progress is not None:
                    progress(before + now)

            for batch in with_local_sources(parts, foresee, bringer.near):
                self._do(batch, files, tick, bringer.follow)
                before += batch.nbytes
                syncing.settle()
                for output, store in batch.finished:
                    file = finish(output, store)
                    if file is not None and durable:
                        syncing.add(file, files.of(store)[0])
                    elif file is not None:
                        report(file)
                    files.close(paths[id(store)])
            bringer.check_sources()
        return before

    def _do(self, batch: Batch, files: OpenFiles, progress: Callable[[int], None], follow: Follow) -> None:
        descriptors = [files.of(store) for store in batch.stores]
        if self.engine == "reference":
            how = self._clamp, self._spend, follow
            from zckpt.engine.reference import run_batch as reference_batch

            lost = reference_batch(batch.stores, descriptors, batch.moves, batch.literals, *how)
            progress(batch.nbytes)
        else:
            lost = self._do_native(batch, descriptors, progress)
        for number, count, largest in lost:
            before = self._lost.get(number, (0, 0.0))
            self._lost[number] = before[0] + count, max(before[1], largest)

    def _do_native(
        self, batch: Batch, descriptors: Sequence[tuple[int, int]], progress: Callable[[int], None]
    ) -> list[tuple[int, int, float]]:
        (kind, number, store, offset, text), crcs, overflows, cloned = native_run(
            *batch.packed(descriptors),
            self._threads,
            self._window,
            self._clamp,
            self.give_back,
            self._bytes_per_s,
            progress,
            [self.ordered.get(id(store)) for store in batch.stores] if self.ordered else [],
        )
        if kind:
            where = str(batch.stores[store])
            if kind == "write":
                raise OSError(number, os.strerror(number), where)
            if kind == "kept":
                raise keeps_bytes(where)
            raise read_error(where, number, offset) if kind == "read" else engine_error(kind, text)
        self.cloned += cloned
        for number, crc, offset, length in crcs:
            self._crcs.setdefault(number, []).append((offset, length, crc))
        return overflows

    def seal(self, output: OutputFile, store: FileStore, files: OpenFiles) -> WrittenFile:
        """Fills in the checksums of a file that has all its elements."""
        crc, slots = seal(files.of(store)[0], output, self.crcs(store))
        return WrittenFile(output.path, output.size, crc, self.overflows(store), slots)

    def crcs(self, store: FileStore) -> list[Partial] | None:
        """CRCs of parts of a file, each within one range of elements, once; None where the engine takes none."""
        found: list[Partial] = []
        for number, _, _ in self.ranges[id(store)]:
            found += self._crcs.pop(number, ())
        return None if self.engine == "reference" else found

    def overflows(self, store: FileStore | None = None) -> dict[str, tuple[int, float]]:
        """What casts have lost so far, of the tensors in a file or of all: name -> (elements, the largest of them)."""
        found: dict[str, tuple[int, float]] = {}
        for number in sorted(self._lost if store is None else self._lost.keys() & self._tensors.get(id(store), ())):
            name, (count, largest) = self._pairs[number][1].name, self._lost[number]
            before = found.get(name, (0, 0.0))
            found[name] = before[0] + count, max(before[1], largest)
        return found
