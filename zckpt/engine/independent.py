"""Whether an output is exactly what its checkpoint says, derived a second time.

For `verify`. Every element of the output is derived from the shards once more and compared as bytes. Nothing here is what
wrote the output: no plan, no router, no C++, only the catalogs' geometry, `pread` (`elements`) and the reference cast. A
mistake in the fast path is therefore found here, not repeated. Where the C++ engine was not built, the reader of elements and
the cast are those that wrote the output, and only plan and router are checked.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from zckpt.base.pace import pace, thread_count
from zckpt.core.catalog import TensorEntry
from zckpt.core.fragments import FileStore
from zckpt.core.overlaps import clip
from zckpt.engine.elements import ElementReader, elements
from zckpt.engine.prefetch import check_unchanged
from zckpt.engine.reference import cast

_PART = 1 << 20
"""Elements compared at once."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs in one tensor of the output.

    Attributes:
        number: of the pair.
        count: elements whose bytes differ.
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
    """The tensors of an output that differ from their source, rounded to the output's dtype.

    Args:
        pairs: (source, output); of as many elements, in dtypes that can be cast.
        clamp: numbers too large became the largest finite one instead of infinity.
        threads: that read and compare.
        bytes_per_s: the most that is read.
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
            with ElementReader() as reader:
                while not stop.is_set():
                    with lock:
                        part = next(parts, None)
                    if part is None:
                        break
                    number, first, last = part
                    source, output = pairs[number]
                    wide = reader.read(elements(source, first, last))
                    expected, _, _ = cast(wide, source.dtype, output.dtype, sys.byteorder, clamp)
                    actual = reader.read(elements(output, first, last))
                    with lock:
                        if expected != actual:
                            count, place = _compared(expected, actual, output.dtype.itemsize)
                            found.setdefault(number, []).append((first + place, count))
                        done += len(wide) + len(actual)
                        spend(len(wide) + len(actual))
                        if progress:
                            progress(done)
                reader.check_sources()
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
    stores = (f.store for pair in pairs for entry in pair for f in entry.fragments)
    check_unchanged({s.path: s for s in stores if isinstance(s, FileStore) and s.is_remote}.values())
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


def _compared(expected: bytes, actual: bytes, itemsize: int) -> tuple[int, int]:
    """How many elements differ, and the first."""
    import numpy as np

    differ = np.frombuffer(expected, f"V{itemsize}") != np.frombuffer(actual, f"V{itemsize}")
    return int(differ.sum()), int(differ.argmax())
