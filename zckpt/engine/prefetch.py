"""Sources that are not at hand, for `move` and `scan`: what a batch needs of them is brought into memory.

A batch names a bounded number of such bytes (`batches.MOST_DISTANT_BYTES`). While the engine works on one, those that the next
ones need are asked for: so many that requests are always under way, and `AHEAD_BYTES` in all, whatever the size of the
checkpoint. When a batch is the next, `bringing` computes what nobody has yet; so one batch of such elements is in memory beside
the one that the engine works on. Sources at hand stay as they are, and so do those that an engine computes while it reads
(`core.folds`).
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from zckpt.base.errors import InconsistentError, redact
from zckpt.core.claims import ByteSpan
from zckpt.core.stores import FileStore, MemoryStore, Store
from zckpt.engine.batches import Batch, span_bytes
from zckpt.storage import fsspec_io

AnyBatch = TypeVar("AnyBatch", bound=Batch)


AHEAD_BYTES = 104 << 20
"""Of files on other machines, asked for before their turn: `fsspec_io.REQUESTS` pieces, and some that wait for others."""

_MOST_AHEAD = 256
"""Batches that wait, at most."""


Bring = Callable[[Sequence[ByteSpan]], Sequence[tuple[Any, int]]]
"""Returns, for each span, a block of bytes that contains it, and the byte of the store at which the block begins."""


class Fetched:
    """Blocks of files on other machines, that were fetched for a batch."""

    def __init__(self, ranges: Sequence[fsspec_io.Range] = (), blocks: Sequence[tuple[Any, int]] = ()) -> None:
        self._blocks: dict[str, dict[int, Any]] = {}
        for wanted, (block, begin) in zip(ranges, blocks, strict=True):
            self._blocks.setdefault(wanted.address, {})[begin] = block
        self._begins = {address: sorted(found) for address, found in self._blocks.items()}

    def find(self, wanted: fsspec_io.Range) -> tuple[Any, int] | None:
        """The block that contains a range, and the byte of the file at which it begins."""
        begins = self._begins.get(wanted.address, [])
        at = bisect_right(begins, wanted.start) - 1
        block = self._blocks[wanted.address][begins[at]] if at >= 0 else b""
        return (block, begins[at]) if at >= 0 and wanted.stop <= begins[at] + len(block) else None

    def fetch(self, ranges: Sequence[fsspec_io.Range]) -> list[tuple[Any, int]]:
        """As `fsspec_io.fetch`, but asks only for ranges that are not here."""
        found = [self.find(wanted) for wanted in ranges]
        missing = [wanted for wanted, block in zip(ranges, found, strict=True) if block is None]
        others = iter(fsspec_io.fetch(missing) if missing else ())
        return [next(others) if block is None else block for block in found]


def with_local_sources(
    batches: Iterable[AnyBatch],
    foresee: Callable[[AnyBatch], Sequence[fsspec_io.Range]],
    near: Callable[[AnyBatch, Fetched], AnyBatch],
) -> Iterator[AnyBatch]:
    """The same batches, in order, with sources that the engines can read.

    Args:
        batches: of moves or scan requests.
        foresee: says which ranges of files on other machines `near` will want.
        near: returns a batch with sources in memory.

    Raises:
        RemoteError: a source could not be fetched.
        InconsistentError: a source changed since the checkpoint was opened; raised after the last batch.
    """
    seen: dict[str, FileStore] = {}
    pool: ThreadPoolExecutor | None = None
    ahead: deque[tuple[AnyBatch, Sequence[fsspec_io.Range], fsspec_io.Fetch]] = deque()
    ready: Future[AnyBatch] | None = None

    def begin() -> Future[AnyBatch]:
        """Starts to bring the first waiting batch near, once its bytes are there."""
        nonlocal pool
        pool = pool or ThreadPoolExecutor(1)
        batch, ranges, fetch = ahead.popleft()
        return pool.submit(lambda: near(batch, Fetched(ranges, fetch.result())))

    try:
        for batch in batches:
            distant = [store for store in batch.stores if batch.is_distant(store)]
            if not distant and not ahead and ready is None:
                yield batch
                continue
            seen |= {store.path: store for store in distant if isinstance(store, FileStore)}
            ranges = foresee(batch)
            ahead.append((batch, ranges, fsspec_io.Fetch(ranges)))
            while ahead and (not (nbytes := sum(fetch.nbytes for _, _, fetch in ahead)) or nbytes > AHEAD_BYTES
                             or len(ahead) > _MOST_AHEAD):  # fmt: skip
                ready, done = begin(), ready
                if done is not None:
                    yield done.result()
        while ahead:
            ready, done = begin(), ready
            if done is not None:
                yield done.result()
        if ready is not None:
            yield ready.result()
    finally:
        for _, _, fetch in ahead:
            fetch.cancel()
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    if seen:
        check_unchanged(seen.values())


def check_unchanged(stores: Iterable[FileStore]) -> None:
    """Makes sure that files on other machines are what they were when the checkpoint was opened. Raises
    InconsistentError if one is not.
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
    """A batch of moves with sources at hand; errors as for `bring`."""
    distant = [move for _, _, move in batch.moves if batch.is_distant(move.src)]
    if not distant:
        return batch
    brought = iter(bring([ByteSpan(m.src, m.src_offset, m.src_offset + span_bytes(m)) for m in distant]))
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
