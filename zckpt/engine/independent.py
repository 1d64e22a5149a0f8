"""Whether an output is exactly what its checkpoint says, found out the slow way.

For `verify`. Every element of the output is derived from the shards once more and compared as bytes. Nothing here is what
wrote the output: no plan, no router, no C++, only the catalogs' geometry, `pread` and the reference cast. A mistake in the
fast path is therefore found here, not repeated.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from zckpt.base.pace import pace, thread_count
from zckpt.core.catalog import TensorEntry
from zckpt.core.fragments import FileStore, Run, runs_in_order
from zckpt.core.overlaps import clip
from zckpt.engine.prefetch import check_unchanged, in_memory
from zckpt.engine.reference import cast, read_elements
from zckpt.storage import fsspec_io
from zckpt.storage.descriptors import OpenFiles

_PART = 1 << 20
"""Elements compared at once."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What is not as it should be in one tensor of the output.

    Attributes:
        number: of the pair.
        count: elements whose bytes are others.
        first: the first of them.
        file: name of the file of the output that holds it.
    """

    number: int
    count: int
    first: int
    file: str


def differences(
    pairs: Sequence[tuple[TensorEntry, TensorEntry]],
    *,
    clamp: bool = False,
    threads: int | None = None,
    bytes_per_s: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Difference]:
    """The tensors of an output that are not their source, rounded to the output's dtype.

    Args:
        pairs: (source, output); of as many elements, in dtypes that can be cast.
        clamp: numbers too large became the largest finite one instead of infinity.
        threads: that read and compare.
        bytes_per_s: at most so many are read.
        progress: called with the bytes read so far.

    Raises:
        CorruptError: a file ends too early, or cannot be read. InconsistentError: it changed meanwhile.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    lock, stop = threading.Lock(), threading.Event()
    parts = _parts(pairs)
    done = 0
    spend = pace(bytes_per_s)

    def work() -> None:
        nonlocal done
        try:
            with OpenFiles(most=64) as files:
                while not stop.is_set():
                    with lock:
                        part = next(parts, None)
                    if part is None:
                        break
                    number, first, last = part
                    source, output = pairs[number]
                    wide = elements(source, first, last, files)
                    expected, _, _ = cast(wide, source.dtype, output.dtype, sys.byteorder, clamp)
                    actual = elements(output, first, last, files)
                    with lock:
                        if expected != actual:
                            count, place = _compared(expected, actual, output.dtype.itemsize)
                            found.setdefault(number, []).append((first + place, count))
                        done += len(wide) + len(actual)
                        spend(len(wide) + len(actual))
                        if progress:
                            progress(done)
                files.check_sources()
        except BaseException:
            stop.set()
            raise

    count = thread_count(threads)
    with ThreadPoolExecutor(count) as pool:
        try:
            for worker in [pool.submit(work) for _ in range(count)]:
                worker.result()
        finally:
            stop.set()  # an interruption comes to this thread alone
    stores = (f.store for pair in pairs for entry in pair for f in entry.fragments if f.store.is_remote)
    check_unchanged({store.path: store for store in stores if isinstance(store, FileStore)}.values())
    return [
        Difference(number, sum(count for _, count in places), first, _file_of(pairs[number][1], first))
        for number, places in sorted(found.items())
        for first in [min(places)[0]]
    ]


def _parts(pairs: Sequence[tuple[TensorEntry, TensorEntry]]) -> Iterator[tuple[int, int, int]]:
    for number, (source, _) in enumerate(pairs):
        for start in range(0, source.numel, _PART):
            yield number, start, min(start + _PART, source.numel)


def _file_of(entry: TensorEntry, element: int) -> str:
    (fragment,) = clip(entry.fragments, element, element + 1, entry.dtype.itemsize)
    return os.path.basename(str(fragment.store))


def elements(entry: TensorEntry, start: int, stop: int, files: OpenFiles) -> bytes:
    """Elements [start, stop) of a tensor, in the machine's byte order.

    Raises:
        CorruptError: a file ends too early, or cannot be read.
    """
    itemsize, dtype = entry.dtype.itemsize, entry.dtype
    runs: Iterable[Run] = runs_in_order(clip(entry.fragments, start, stop, itemsize), itemsize)
    if any(fragment.store.is_remote for fragment in entry.fragments):
        runs = _fetched(list(runs), itemsize)
    parts: list[bytes] = []
    for run in runs:
        data = read_elements(run.store, files.of(run.store)[0], run.byte_offset, run.count, run.store_step, itemsize)
        parts.append(cast(data, dtype, dtype, run.store.byteorder, False)[0])
    return b"".join(parts)


def _fetched(runs: Sequence[Run], itemsize: int) -> Iterator[Run]:
    """The same runs, of memory where they are of files on other machines: near ones come in one request."""
    far = [run for run in runs if run.store.is_remote]
    spans = (fsspec_io.Range(str(r.store), r.byte_offset, r.byte_offset + _span(r, itemsize)) for r in far)
    blocks = iter(fsspec_io.fetch(list(spans)))
    for run in runs:
        if run.store.is_remote:
            block, begin = next(blocks)
            run = run._replace(store=in_memory(block, run.store), byte_offset=run.byte_offset - begin)
        yield run


def _span(run: Run, itemsize: int) -> int:
    return ((run.count - 1) * run.store_step + 1) * itemsize


def _compared(expected: bytes, actual: bytes, itemsize: int) -> tuple[int, int]:
    """How many elements differ, and the first."""
    import numpy as np

    differ = np.frombuffer(expected, f"V{itemsize}") != np.frombuffer(actual, f"V{itemsize}")
    return int(differ.sum()), int(differ.argmax())
