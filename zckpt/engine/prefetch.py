"""Sources that are not at hand, for `move` and `scan`: what a batch needs of them is brought into memory.

A batch names a bounded number of such bytes (`batches.MOST_DISTANT_BYTES`). While the engine works on one, the next ones are
brought: so many that requests are always under way, and `AHEAD_BYTES` in all, whatever the size of the checkpoint. `bringing`
does it: it fetches ranges of files on other machines, and computes elements that nobody has yet. Sources at hand stay as they
are, and so do those that an engine computes while it reads (`core.folds`).
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from zckpt.base.errors import InconsistentError, redact
from zckpt.core.stores import FileStore, MemoryStore, Store
from zckpt.engine.batches import Batch, span_bytes
from zckpt.storage import fsspec_io

AnyBatch = TypeVar("AnyBatch", bound=Batch)


AHEAD_BYTES = 96 << 20
"""Of files on other machines, in batches that are brought: `fsspec_io.REQUESTS` pieces, and some that wait for their turn."""

_BRINGERS = 12
"""Batches that are brought at a time, at most."""


class Span(NamedTuple):
    """Bytes [start, stop) of a store that is not at hand."""

    store: Store
    start: int
    stop: int


Bring = Callable[[Sequence[Span]], Sequence[tuple[Any, int]]]
"""Returns, for each span, a block of bytes that contains it, and the byte of the store at which the block begins."""


def with_local_sources(batches: Iterable[AnyBatch], near: Callable[[AnyBatch], AnyBatch]) -> Iterator[AnyBatch]:
    """The same batches, in order, with sources that the engines can read.

    Args:
        batches: of moves or scan requests.
        near: returns a batch whose sources are in memory.

    Raises:
        RemoteError: a source could not be fetched.
        InconsistentError: a source changed since the checkpoint was opened; raised after the last batch.
    """
    seen: dict[str, FileStore] = {}
    pool: ThreadPoolExecutor | None = None
    ahead: deque[tuple[int, Future[AnyBatch]]] = deque()
    try:
        for batch in batches:
            distant = [store for store in batch.stores if batch.is_distant(store)]
            if not distant and not ahead:
                yield batch
                continue
            seen |= {store.path: store for store in distant if isinstance(store, FileStore)}
            computed = any(not isinstance(store, FileStore) for store in distant)
            nbytes = AHEAD_BYTES // 2 + 1 if computed else batch.distant_bytes
            pool = pool or ThreadPoolExecutor(_BRINGERS)
            while ahead and (sum(size for size, _ in ahead) + nbytes > AHEAD_BYTES or len(ahead) >= _BRINGERS):
                yield ahead.popleft()[1].result()
            ahead.append((nbytes, pool.submit(near, batch)))
        while ahead:
            yield ahead.popleft()[1].result()
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    check_unchanged(seen.values())


def check_unchanged(stores: Iterable[FileStore]) -> None:
    """Makes sure that files on other machines are what they were when the checkpoint was opened.

    Raises:
        InconsistentError: one is not.
    """
    known = list(stores)
    found = fsspec_io.statuses([store.path for store in known])
    for store in known:
        if found[store.path].identity != store.identity:
            raise InconsistentError(
                "changed while it was read", file=redact(store.path),
                found="another size, version or time than when it was opened",
                remedy="Wait until nothing writes to the checkpoint any more, and start again.",
            )  # fmt: skip


def moved_near(batch: Batch, bring: Bring) -> Batch:
    """A batch of moves whose sources are at hand; errors as for `bring`."""
    distant = [move for _, _, move in batch.moves if batch.is_distant(move.src)]
    if not distant:
        return batch
    brought = iter(bring([Span(m.src, m.src_offset, m.src_offset + span_bytes(m)) for m in distant]))
    memory: dict[tuple[int, str], Store] = {}
    near = Batch(finished=batch.finished)
    for number, offset, data in batch.literals:
        near.literals.append((near.number(batch.stores[number]), offset, data))
        near.nbytes += len(data)
    near.ranges = [(near.number(batch.stores[number]), *rest) for number, *rest in batch.ranges]  # type: ignore[misc]
    for _, _, move in batch.moves:
        if batch.is_distant(move.src):
            block, begin = next(brought)
            store = memory.setdefault((id(block), move.src.byteorder), in_memory(block, move.src))
            move = move._replace(src=store, src_offset=move.src_offset - begin)
        near.add(move, move.count * move.rows * move.dst_dtype.itemsize)
    return near


def in_memory(block: Any, source: Store) -> MemoryStore:
    """Brought bytes, or a dense array of numpy, as a store of the byte order of the source."""
    if isinstance(block, mmap.mmap):
        return MemoryStore(ctypes.addressof(ctypes.c_char.from_buffer(block)), len(block), block, source.byteorder)
    if isinstance(block, bytes):
        address = ctypes.cast(ctypes.c_char_p(block), ctypes.c_void_p).value or 0
        return MemoryStore(address, len(block), block, source.byteorder)
    return MemoryStore(int(block.ctypes.data), int(block.nbytes), block, source.byteorder)
