"""Tensors in pieces, several tensors at once: how both versions of weights are read.

For `jobs.delta` and `jobs.apply_delta`. Memory is threads x pieces, whatever the tensors' sizes.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from zckpt.base.pace import Pace, gives_back, pace, thread_count
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import DType
from zckpt.engine.bringing import Bringer
from zckpt.engine.choice import choose

if TYPE_CHECKING:
    from zckpt.core.folds import Bytes

try:
    from zckpt import _core
except ImportError:  # pragma: no cover - depends on the build
    _core = None  # type: ignore[assignment]

PIECE_BYTES = 4 << 20

T = TypeVar("T")
R = TypeVar("R")


class PieceReader:
    """Reads tensors piece by piece, on any number of threads; use as a context manager. `nbytes`: that will be read and written
    in all.
    """

    def __init__(self, how: Pace, nbytes: int) -> None:
        self.engine = choose("auto", built=_core is not None)
        self._threads = thread_count(how["threads"])
        give_back = gives_back(how["keep_cache"], nbytes)
        self.spend = pace(how["bytes_per_s"])
        self._bringer = Bringer(self.engine, 1, give_back=give_back, spend=self.spend)
        self._pool = ThreadPoolExecutor(self._threads)
        self._rooms = threading.local()

    def __enter__(self) -> PieceReader:
        self._bringer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._bringer.__exit__(kind, error, trace)

    def read(
        self, entry: TensorEntry, start: int, stop: int, dtype: DType, *, offset: int = 0, other: bool = False
    ) -> Bytes:
        """The bytes of elements [start, stop) of one of `pieces`, cast to `dtype`, in an array that the caller may change. What
        the same thread read before is there no more, unless it is the `other` one of two. Raises CastError if a number is too
        large for `dtype`, ZckptError if a file cannot be read.

        `offset`: where in a file they go; they lie in memory as in pages there, for `write_past_cache`.
        """
        import numpy as np

        rooms: dict[bool, Bytes] = self._rooms.__dict__.setdefault("own", {})
        if other not in rooms:
            rooms[other] = np.frombuffer(mmap.mmap(-1, PIECE_BYTES + mmap.PAGESIZE), np.uint8)
        first = offset % mmap.PAGESIZE
        room = rooms[other][first : first + (stop - start) * dtype.itemsize]
        self._bringer.tools().read(entry, start, stop, dtype, into=room)
        return room

    def check_sources(self) -> None:
        """Makes sure that no file changed while it was read; raises CorruptError or InconsistentError."""
        self._bringer.check_sources()

    def in_order(
        self,
        do: Callable[[T], R],
        items: Sequence[T],
        reads: Callable[[T], Iterable[TensorEntry]],
        drop: Callable[[R], object] = lambda result: None,
    ) -> Iterator[R]:
        """The results of `do` for each item, in their order; several run at once, and the disk begins to read the tensors of
        the next ones, which `reads` says. `drop` gets results that nobody takes.
        """

        def begin(number: int) -> R:
            for item in items[number + self._threads : number + self._threads + 1]:
                self._bringer.tools().expect(reads(item))
            return do(items[number])

        waiting: deque[Future[R]] = deque()
        try:
            for number in range(len(items)):
                waiting.append(self._pool.submit(begin, number))
                if len(waiting) > 2 * self._threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                if not future.cancel():
                    future.add_done_callback(lambda ended: None if ended.exception() else drop(ended.result()))


def pieces(numel: int, dtype: DType) -> Iterator[tuple[int, int]]:
    """Elements [start, stop) of each piece of a tensor."""
    step = max(1, PIECE_BYTES // dtype.itemsize)
    for start in range(0, numel, step):
        yield start, min(numel, start + step)
