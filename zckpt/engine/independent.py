"""Whether an output is exactly what its checkpoint says, derived a second time.

For `verify`. Every element of the output is derived from the shards once more and compared as bytes. Nothing here is what
wrote the output: no plan, no router, no mover and no cast. The C++ of `confirm` walks both sides' fragments as the catalogs have
them, reads files with a reader of its own, and rounds nothing: it looks whether another number would be nearer. What it does not
read (files behind addresses, elements that recipes compute, odd geometry), or where it was not built, `elements` reads with
`pread`, for the reference cast. A mistake in what writes is therefore found here, not repeated. Where the C++ was not built, the
reader of elements and the cast are those that wrote the output, and only plan and router are checked.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from zckpt.base.dataclass import dataclass
from zckpt.base.pace import gives_back, pace
from zckpt.core.catalog import Replica
from zckpt.core.fragments import Fragment
from zckpt.core.overlaps import clip
from zckpt.core.stores import FileStore
from zckpt.engine.batches import progress_after
from zckpt.engine.choice import threads_for
from zckpt.engine.confirm import Confirmed, Pair, Unequal, can_be_copy, can_confirm, confirm
from zckpt.engine.elements import ElementReader, elements
from zckpt.engine.prefetch import check_unchanged
from zckpt.engine.rounding import cast
from zckpt.engine.scan_requests import CrcRange

_PART = 1 << 20
"""Elements compared at once."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs in one tensor of the output.

    Attributes:
        number: of the pair.
        count: elements with bytes that differ.
        first: the first of them.
        file: name of the file of the output that holds it.
    """

    number: int
    count: int
    first: int
    file: str


@dataclass(frozen=True, slots=True)
class Derived:
    """What deriving an output a second time found.

    Attributes:
        differences: the tensors of the output that differ from their source.
        confirmed: what else was found on the way.
        copied: numbers of the pairs with a source that was compared with its copies.
        nbytes: that were read.
    """

    differences: list[Difference]
    confirmed: Confirmed
    copied: frozenset[int]
    nbytes: int


def differences(
    pairs: Sequence[Pair],
    *,
    clamp: bool = False,
    threads: int | None = None,
    bytes_per_s: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Difference]:
    """The tensors of an output that differ from their source, rounded to the output's dtype; see `derived_again`."""
    return derived_again(pairs, clamp=clamp, threads=threads, bytes_per_s=bytes_per_s, progress=progress).differences


def derived_again(
    pairs: Sequence[Pair],
    copies: Mapping[int, Sequence[Replica]] | None = None,
    sums: Sequence[CrcRange] = (),
    *,
    clamp: bool = False,
    threads: int | None = None,
    keep_cache: bool | None = None,
    bytes_per_s: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Derived:
    """Compares an output with its source, and learns on the way what the bytes show by themselves.

    Args:
        pairs: (source, output); of as many elements, in dtypes that can be cast.
        copies: number of a pair -> replicas of its source, to be compared with it where its bytes are read anyhow.
        sums: ranges with CRCs that are wanted, as far as their bytes are read anyhow.
        clamp: numbers too large became the largest finite one instead of infinity.
        threads: that read and compare.
        keep_cache: whether the page cache keeps what is read through it, and all is read through it; None: unless it is more
            than memory, and what the cache does not have is read past it.
        bytes_per_s: the most that is read.
        progress: called with the bytes read so far.

    Raises:
        CorruptError: a file ends too early, or cannot be read. InconsistentError: it changed meanwhile.
    """
    count = threads_for(threads, (entry for pair in pairs for entry in pair))
    native = {number for number, pair in enumerate(pairs) if pair[0].numel and can_confirm(*pair)}
    held = {
        number: replicas
        for number, replicas in (copies or {}).items()
        if number in native and all(can_be_copy(pairs[number][0], replica) for replica in replicas)
    }
    confirmed = confirm(
        [(number, pairs[number]) for number in sorted(native)],
        held,
        sums,
        clamp=clamp,
        threads=count,
        give_back=gives_back(keep_cache, sum(a.nbytes + b.nbytes for a, b in pairs)),
        past_cache=keep_cache is not True,
        bytes_per_s=bytes_per_s or 0,
        progress=progress,
    )
    rest = [(number, pair) for number, pair in enumerate(pairs) if number not in native]
    nbytes = sum(confirmed.bytes_read.values())
    after = progress_after(progress, nbytes)
    unequal = {**confirmed.unequal, **_slowly(rest, clamp, count, bytes_per_s, after)}
    found = [
        Difference(number, one.count, one.first, _file_of(pairs[number], one.first))
        for number, one in sorted(unequal.items())
    ]
    return Derived(found, confirmed, frozenset(held), nbytes + sum(a.nbytes + b.nbytes for _, (a, b) in rest))


def _slowly(
    pairs: Sequence[tuple[int, Pair]],
    clamp: bool,
    count: int,
    bytes_per_s: int | None,
    progress: Callable[[int], None] | None,
) -> dict[int, Unequal]:
    """As `derived_again`, with numpy, for any geometry and any place of the elements."""
    if not pairs:
        return {}
    found: dict[int, list[tuple[int, int]]] = {}
    lock, stop = threading.Lock(), threading.Event()
    parts = _parts([pair for _, pair in pairs])
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
                    index, first, last = part
                    number, (source, output) = pairs[index]
                    wide = reader.read(elements(source, first, last))
                    expected, _, _ = cast(wide, source.dtype, output.dtype, sys.byteorder, clamp)
                    actual = reader.read(elements(output, first, last))
                    with lock:
                        if expected != actual:
                            differ, place = _count_differences(expected, actual, output.dtype.itemsize)
                            found.setdefault(number, []).append((first + place, differ))
                        done += len(wide) + len(actual)
                        spend(len(wide) + len(actual))
                        if progress:
                            progress(done)
                reader.check_sources()
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(count) as pool:
        try:
            for worker in [pool.submit(work) for _ in range(count)]:
                worker.result()
        finally:
            stop.set()  # an interruption comes to this thread alone
    stores = (f.store for _, pair in pairs for entry in pair for f in entry.fragments)
    check_unchanged({s.path: s for s in stores if isinstance(s, FileStore) and s.is_remote}.values())
    return {number: Unequal(sum(n for _, n in places), min(places)[0]) for number, places in found.items()}


def _parts(pairs: Sequence[Pair]) -> Iterator[tuple[int, int, int]]:
    for number, (source, _) in enumerate(pairs):
        for start in range(0, source.numel, _PART):
            yield number, start, min(start + _PART, source.numel)


def _file_of(pair: Pair, element: int) -> str:
    """The file of the output that holds an element."""
    found: tuple[Fragment, ...] = clip(pair[1].fragments, element, element + 1, pair[1].dtype.itemsize)
    return os.path.basename(str(found[0].store))


def _count_differences(expected: bytes, actual: bytes, itemsize: int) -> tuple[int, int]:
    """How many elements differ, and the first."""
    import numpy as np

    differ = np.frombuffer(expected, f"V{itemsize}") != np.frombuffer(actual, f"V{itemsize}")
    return int(differ.sum()), int(differ.argmax())
