"""Brings what engines cannot read themselves into memory: ranges of files on other machines, and elements that are computed.

For `move` and `scan`, by `prefetch`. What a recipe (`core.recipes`) computes comes in parts, one for each thread; a thread reads
the inputs with the same engine, and follows recipes with inputs that have recipes themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from zckpt.base.errors import CastError, read_error
from zckpt.base.pace import engine_error
from zckpt.core.catalog import TensorEntry, TensorPart
from zckpt.core.claims import ByteSpan
from zckpt.core.dtypes import F32, DType
from zckpt.core.fragments import Fragment
from zckpt.core.overlaps import touching
from zckpt.core.plan import Move, Plan
from zckpt.core.recipes import DerivedStore, compute_bytes
from zckpt.core.stores import FileStore, MemoryStore
from zckpt.engine.batches import Batch, batches, span_bytes
from zckpt.engine.prefetch import Fetched, check_unchanged, moved_near
from zckpt.storage import fsspec_io
from zckpt.storage.descriptors import OpenFiles, will_need

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Floats, Found, Kernels, Part, Tools

try:
    from zckpt._core import let_go
    from zckpt._core import run as native_run
except ImportError:  # pragma: no cover - depends on the build
    native_run = None  # type: ignore[assignment]

_MOST_FILES = 64
"""The most files that a thread keeps open."""
_WINDOW = 1 << 20
_LEAST_AHEAD = 2 << 20
"""What is read in smaller parts, the system reads ahead well enough."""
_MOST_EXPECTED = 32 << 20
"""The most bytes of expected tensors that the disk is asked for at once."""


class Bringer(AbstractContextManager["Bringer"]):
    """Brings spans of stores that are not at hand; use as a context manager.

    Args:
        engine: "native" or "reference": what inputs of recipes are read and computed with.
        threads: that compute.
        give_back: whether the page cache forgets what is read.
        spend: called with the bytes that are read for recipes; waits where that was faster than it may be.
    """

    def __init__(self, engine: str, threads: int, *, give_back: bool, spend: Callable[[int], None]) -> None:
        self._engine = engine
        self._threads = threads
        self._give_back = give_back
        self._spend = spend
        self._pool: ThreadPoolExecutor | None = None
        self._hands: ThreadPoolExecutor | None = None
        self._workers = threading.local()
        self._all: list[_Worker] = []
        self._lock = threading.Lock()

    def __exit__(self, *_: object) -> None:
        for pool in (self._pool, self._hands):
            if pool is not None:
                pool.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.files.__exit__()
        if native_run is not None:
            let_go()

    def follow(self, store: DerivedStore, start: int, stop: int) -> tuple[Any, int]:
        """Bytes of computed elements, as `core.recipes.compute_bytes`."""
        return compute_bytes(store, start, stop, self.tools())

    def near(self, batch: Batch, fetched: Fetched) -> Batch:
        """The same batch of moves, with its sources at hand."""
        return moved_near(batch, lambda spans: self.bring(spans, fetched))

    def bring(self, spans: Sequence[ByteSpan], fetched: Fetched) -> Sequence[tuple[Any, int]]:
        """Blocks that contain the spans, as `prefetch.Bring` says.

        Args:
            spans: of stores that are not at hand.
            fetched: what was fetched of them, and of the inputs of recipes (`foresee`).

        Raises:
            RemoteError: a range could not be fetched.
            ZckptError: an input of a recipe cannot be read, or changed.
        """
        return _brought(spans, lambda derived: self._computed(derived, fetched), fetched)

    def check_sources(self) -> None:
        """Makes sure that no input of a recipe changed while it was read; raises CorruptError or InconsistentError."""
        fetched: dict[str, FileStore] = {}
        for worker in self._all:
            worker.files.check_sources()
            fetched |= worker.fetched
        if fetched:
            check_unchanged(fetched.values())

    def _computed(self, spans: Sequence[ByteSpan], fetched: Fetched) -> Sequence[tuple[Any, int]]:
        if len(spans) < 2 or self._threads < 2:
            return [self.tools().follow(span, fetched) for span in spans]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads)
        found: dict[int, tuple[Any, int]] = {}
        for late in (False, True):
            numbers = [number for number, span in enumerate(spans) if _is_byproduct(span) == late]
            done = self._pool.map(lambda number: self.tools().follow(spans[number], fetched), numbers)
            found |= zip(numbers, done, strict=True)
        return [found[number] for number in range(len(spans))]

    def tools(self) -> _Worker:
        """The tools of the calling thread, also for work outside batches: they read elements of tensors in order."""
        worker: _Worker | None = getattr(self._workers, "own", None)
        if worker is None:
            hands = self._lend if self._threads > 1 else None
            worker = self._workers.own = _Worker(self._engine, hands, give_back=self._give_back, spend=self._spend)
            with self._lock:
                self._all.append(worker)
        return worker

    def _lend(self, work: Callable[[Tools], None]) -> list[Future[None]]:
        """Lets threads beside the calling one do some work, which each does with tools of its own."""
        with self._lock:
            self._hands = self._hands or ThreadPoolExecutor(self._threads - 1)

        def do() -> None:
            worker = self.tools()
            worker.hands = None  # who helps gets no help: all would wait for all
            work(worker)

        return [self._hands.submit(do) for _ in range(self._threads - 1)]


class _Worker:
    """The `Tools` of one thread.

    Attributes:
        files: that are open for it.
        fetched: path -> file on another machine from which it fetched something.
        hands: lets other threads do some work too; None where there are none.
    """

    def __init__(
        self,
        engine: str,
        hands: Callable[[Callable[[Tools], None]], list[Future[None]]] | None,
        *,
        give_back: bool,
        spend: Callable[[int], None],
    ) -> None:
        self.hands = hands
        self.files = OpenFiles(give_back=give_back, most=_MOST_FILES)
        self.fetched: dict[str, FileStore] = {}
        self._held = Fetched()
        self._engine = engine
        self._give_back = give_back
        self._spend = spend

    @property
    def kernels(self) -> Kernels:
        from zckpt.engine.kernels import kernels_of

        return kernels_of(self._engine)

    def read(
        self, entry: TensorEntry, start: int, stop: int, dtype: DType | None = None, *, into: Array | None = None
    ) -> Array:
        import numpy as np

        dtype = dtype or entry.dtype
        array: Array = np.empty(stop - start, dtype.numpy or f"u{dtype.itemsize}") if into is None else into
        if start == stop:
            return array
        memory = MemoryStore(int(array.ctypes.data), array.nbytes, array)
        if (batch := _direct(entry, start, stop, memory, dtype)) is not None:
            self._read_ahead(entry, start, stop)
            self._run(batch, entry, dtype)
            return array
        to = TensorPart(entry.name, entry.shape, dtype, (Fragment(memory, 0, start, stop - start),))
        for batch in batches(Plan((), [(entry, to)])):
            self._run(moved_near(batch, self._bring), entry, dtype)
        return array

    def read_floats(self, entry: TensorEntry, start: int, stop: int) -> Floats:
        return self.read(entry, start, stop, F32)  # type: ignore[return-value]

    def each(self, work: Callable[[Part, Tools], Found], parts: Iterable[Part]) -> list[Found]:
        parts = list(parts)
        todo, lock = iter(enumerate(parts)), threading.Lock()
        found: dict[int, Found] = {}

        def take() -> tuple[int, Part] | None:
            with lock:
                return next(todo, None)

        def help_with(tools: Tools) -> None:
            try:
                while (one := take()) is not None:
                    found[one[0]] = work(one[1], tools)
            except BaseException:
                while take() is not None:
                    pass
                raise

        others = [] if self.hands is None or len(parts) < 2 else self.hands(help_with)
        try:
            help_with(self)
        finally:
            wait(others)
        for other in others:
            other.result()
        return [found[number] for number in range(len(found))]

    def follow(self, span: ByteSpan, fetched: Fetched) -> tuple[Any, int]:
        """The elements of a span, widened to whole units, and the byte at which these begin."""
        store = span.store
        if not isinstance(store, DerivedStore):
            raise TypeError("elements without a recipe")
        before, self._held = self._held, fetched
        try:
            return self._follow(store, span.start, span.stop)
        finally:
            self._held = before

    def _follow(self, store: DerivedStore, start: int, stop: int) -> tuple[Any, int]:
        return compute_bytes(store, start, stop, self)

    def _bring(self, spans: Sequence[ByteSpan]) -> Sequence[tuple[Any, int]]:
        self.fetched |= {span.store.path: span.store for span in spans if isinstance(span.store, FileStore)}
        held = self._held
        return _brought(spans, lambda derived: [self.follow(span, held) for span in derived], held)

    def _read_ahead(self, entry: TensorEntry, start: int, stop: int) -> None:
        """Lets the disk read the next part of a tensor that is read part by part."""
        size, first = entry.dtype.itemsize, start + 2 * (stop - start) if start else start
        last = stop + 2 * (stop - start)
        if (stop - start) * size >= _LEAST_AHEAD:
            self._begin_to_read(entry, first, min(last, entry.numel))

    def expect(self, entries: Iterable[TensorEntry]) -> None:
        left = _MOST_EXPECTED
        for entry in entries:
            if entry.flat and left > 0:
                self._begin_to_read(entry, 0, min(entry.numel, left // entry.dtype.itemsize))
            left -= entry.nbytes

    def _begin_to_read(self, entry: TensorEntry, first: int, last: int) -> None:
        size = entry.dtype.itemsize
        if first >= last:
            return
        for f in touching(entry.fragments, first, last, flat=True):
            if isinstance(f.store, FileStore) and f.store.at_hand:
                low, high = max(first, f.start), min(last, f.start + f.count)
                will_need(self.files.of(f.store)[0], f.byte_offset + (low - f.start) * size, (high - low) * size)

    def _run(self, batch: Batch, entry: TensorEntry, dtype: DType) -> None:
        descriptors = [self.files.of(store) for store in batch.stores]
        if self._engine == "reference":
            from zckpt.engine.reference import run_batch as reference_batch

            lost = reference_batch(batch.stores, descriptors, batch.moves, (), False, self._spend, self._follow)
        else:
            self._spend(batch.nbytes)
            (kind, error, store, offset, text), _, lost, _ = native_run(
                *batch.packed(descriptors), 1, _WINDOW, False, self._give_back, 0, None, []
            )
            if kind == "read":
                raise read_error(str(batch.stores[store]), error, offset)
            if kind:
                raise engine_error(kind, text)
        for _, count, largest in lost:
            raise CastError(
                f"tensor {entry.name!r} has numbers too large for {dtype.torch_name}",
                found=f"{count:,} of them, the largest {largest:,.6g}", expected="numbers that can be computed with",
                remedy="Look at them with `zckpt verify CKPT --deep`, and leave the tensor out with --exclude if it is damaged.",
            )  # fmt: skip


def _is_byproduct(span: ByteSpan) -> bool:
    return isinstance(span.store, DerivedStore) and getattr(span.store.recipe, "is_byproduct", False)


def _direct(entry: TensorEntry, start: int, stop: int, to: MemoryStore, dtype: DType) -> Batch | None:
    """A batch that reads elements into memory, where they lie in a few runs in files; None where they do not.

    It is what `batches` makes of a plan, in a tenth of the time.
    """
    if not entry.flat:
        return None
    batch = Batch()
    for f in touching(entry.fragments, start, stop, flat=True):
        if not isinstance(f.store, FileStore) or not f.store.at_hand or len(batch.moves) >= _MOST_FILES - 1:
            return None
        low, high = max(start, f.start), min(stop, f.start + f.count)
        at, into = f.byte_offset + (low - f.start) * entry.dtype.itemsize, (low - start) * dtype.itemsize
        move = Move(f.store, at, to, into, high - low, entry.dtype, dtype, 0)
        batch.add(move, (high - low) * dtype.itemsize)
    return batch


def _brought(
    spans: Sequence[ByteSpan], compute: Callable[[Sequence[ByteSpan]], Sequence[tuple[Any, int]]], fetched: Fetched
) -> Sequence[tuple[Any, int]]:
    """What `Bringer.bring` returns; `compute` follows the recipes."""
    ranges = [fsspec_io.Range(s.store.path, s.start, s.stop) for s in spans if isinstance(s.store, FileStore)]
    found = iter(fetched.fetch(ranges))
    computed = iter(compute([span for span in spans if isinstance(span.store, DerivedStore)]))
    return [next(found) if isinstance(span.store, FileStore) else next(computed) for span in spans]


def foresee(batch: Batch) -> list[fsspec_io.Range]:
    """The ranges of files on other machines that a batch of moves needs, as far as recipes say what they read."""
    return ranges_of_spans(
        ByteSpan(move.src, move.src_offset, move.src_offset + span_bytes(move))
        for _, _, move in batch.moves
        if batch.is_distant(move.src)
    )


def ranges_of_spans(spans: Iterable[ByteSpan]) -> list[fsspec_io.Range]:
    """Collects the ranges of files that spans need, or that what is computed for them reads."""
    found: list[fsspec_io.Range] = []
    for span in spans:
        if isinstance(span.store, FileStore):
            found.append(fsspec_io.Range(span.store.path, span.start, span.stop))
        elif isinstance(span.store, DerivedStore):
            size = span.store.itemsize
            found += _inputs_of(span.store, span.start // size, -(-span.stop // size))
    return found


def _inputs_of(store: DerivedStore, start: int, stop: int) -> Iterator[fsspec_io.Range]:
    """The ranges of files on other machines that elements [start, stop) are computed from."""
    reads = getattr(store.recipe, "reads", None)
    if reads is None:
        return
    unit = store.recipe.unit
    whole = start // unit * unit, min(store.size // store.itemsize, -(-stop // unit) * unit)
    for entry, first, last in reads(*whole):
        size = entry.dtype.itemsize
        for f in touching(entry.fragments, first, last, flat=True) if entry.flat else ():
            low, high = max(first, f.start), min(last, f.start + f.count)
            at = f.byte_offset + (low - f.start) * size
            if isinstance(f.store, FileStore) and not f.store.at_hand:
                yield fsspec_io.Range(f.store.path, at, at + (high - low) * size)
            elif isinstance(f.store, DerivedStore):
                yield from _inputs_of(f.store, at // size, at // size + high - low)
