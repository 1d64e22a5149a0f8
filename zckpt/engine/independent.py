"""Whether an output is exactly what its checkpoint says, derived a second time.

For `verify`. Every element of the output is derived from the shards once more and compared as bytes. Nothing here is what
wrote the output: no plan, no router, no mover and no cast. The C++ (`csrc/confirm.cpp`) gets the fragments of both sides as the
catalogs have them, in parts of bounded size, and finds out by itself which elements of the one are which of the other; it reads
files with a reader of its own, and rounds nothing: it looks whether another number would be nearer. What it does not
read (files behind addresses, elements that recipes compute, odd geometry), or where it was not built, `elements` reads with
`pread`, for the reference cast. A mistake in what writes is therefore found here, not repeated. Where the C++ was not built, the
reader of elements and the cast are those that wrote the output, and only plan and router are checked.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import read_error
from zckpt.base.pace import engine_error, gives_back, pace
from zckpt.core.catalog import Replica, TensorEntry
from zckpt.core.dtypes import DType, can_cast
from zckpt.core.fragments import Fragment
from zckpt.core.overlaps import clip
from zckpt.core.stores import FileStore, Store
from zckpt.engine.batches import packed_ranges, packed_store, progress_after
from zckpt.engine.checksums import Partial
from zckpt.engine.choice import threads_for
from zckpt.engine.elements import ElementReader, elements
from zckpt.engine.prefetch import check_unchanged
from zckpt.engine.rounding import cast
from zckpt.engine.scan_requests import CrcRange
from zckpt.storage.descriptors import OpenFiles

try:
    from zckpt._core import confirm as native_confirm
except ImportError:  # pragma: no cover - depends on the build
    native_confirm = None  # type: ignore[assignment]

Pair = tuple[TensorEntry, TensorEntry]
"""A tensor of the source, and the same of the output."""

_PIECE = struct.Struct("=IIQQQQQQQ")
_SIDE = struct.Struct("=IIBB2x")
_GROUP = struct.Struct("=IIB3x")
_ZONE = struct.Struct("=IIQQ")
_EXACT, _CLAMPED = 0, 1
"""Which elements an output must have; the numbers of `csrc/nearest.h`."""

_MOST_PIECES = 1 << 15
_MOST_STORES = 256
"""The most stores open at once, each twice: half of the usual limit on a process's descriptors."""
_STORES_OF_SOURCE, _STORES_OF_OUTPUT, _STORES_OF_COPY = 128, 64, 8
"""Tensors in more files are confirmed in parts."""


Unequal = tuple[int, int]
"""How many elements are not what they should be, and the number of the first of them."""


@dataclass(slots=True)
class Confirmed:
    """What was found of pairs of tensors.

    Attributes:
        unequal: number of the pair -> the elements of the output that are not the source's.
        copies: (number of the pair, of the copy of its source) -> the elements of the copy that are not the source's.
        crcs: number of the `CrcRange` -> the parts of it that were read; no byte is in two of them.
        bytes_read: path -> bytes that were read of the file.
        copied: numbers of the pairs with a source that was compared with its copies.
        nbytes: that were read, of all files together.
    """

    unequal: dict[int, Unequal] = field(default_factory=dict[int, Unequal])
    copies: dict[tuple[int, int], Unequal] = field(default_factory=dict[tuple[int, int], Unequal])
    crcs: dict[int, list[Partial]] = field(default_factory=dict[int, list[Partial]])
    bytes_read: dict[str, int] = field(default_factory=dict[str, int])
    copied: frozenset[int] = frozenset()
    nbytes: int = 0


def can_confirm(source: TensorEntry, output: TensorEntry) -> bool:
    """Whether the C++ was built, and knows these dtypes and this geometry."""
    known = can_cast(source.dtype, output.dtype)
    return (
        native_confirm is not None
        and known
        and all(_is_dense_file(f) for f in output.fragments if f.numel)
        and _order(output) == 0
        and _order(source) is not None
        and all(_can_be_read(f) for f in source.fragments if f.numel)
    )


def can_be_copy(source: TensorEntry, copy: Replica) -> bool:
    """Whether the C++ can hold a replica against its tensor at the same time."""
    known = can_cast(source.dtype, copy.dtype)
    few = len({str(f.store) for f in copy.fragments}) <= _STORES_OF_COPY
    runs = few and all(f.store.at_hand and f.block().rows == f.block().step == 1 for f in copy.fragments if f.numel)
    return known and source.dtype.kind != "complex" and runs and _swap(copy.fragments, copy.dtype) is not None


def _is_dense_file(fragment: Fragment) -> bool:
    store, block = fragment.store, fragment.block()
    if not isinstance(store, FileStore) or store.is_remote:
        return False
    return block.step == 1 and (block.rows == 1 or block.store_pitch == block.count)


def _can_be_read(fragment: Fragment) -> bool:
    """Whether elements lie together at least in rows, or in columns."""
    block = fragment.block()
    return fragment.store.at_hand and (
        block.step == 1 or (block.rows > 1 and block.store_pitch == 1 and block.step >= block.rows)
    )


def _order(entry: TensorEntry) -> int | None:
    return _swap(entry.fragments, entry.dtype)


def _swap(fragments: Sequence[Fragment], dtype: DType) -> int | None:
    """Bytes of a number in foreign order, or 0; None where the fragments' stores have several orders."""
    swaps = {dtype.swap(f.store.byteorder) for f in fragments if f.numel}
    return None if len(swaps) > 1 else swaps.pop() if swaps else 0


@dataclass(slots=True)
class _Batch:
    """A batch of pairs, as the structs of `csrc/confirm.h`; `written` are the paths of all of the output's files, and `how`
    is how it must be.
    """

    written: frozenset[str]
    how: int
    stores: list[Store] = field(default_factory=list[Store])
    numbers: dict[object, int] = field(default_factory=dict[object, int])
    pieces: list[bytes] = field(default_factory=list[bytes])
    sides: list[bytes] = field(default_factory=list[bytes])
    groups: list[bytes] = field(default_factory=list[bytes])
    meant: list[tuple[int, int | None]] = field(default_factory=list["tuple[int, int | None]"])
    ends: dict[str, int] = field(default_factory=dict[str, int])

    def add(
        self,
        number: int,
        pair: Pair,
        copies: Sequence[Replica],
        source: Sequence[Fragment],
        output: Sequence[Fragment],
    ) -> None:
        """Adds a pair, or the part of one that has these fragments on both sides, with the copies of its source."""
        self.groups.append(_GROUP.pack(len(self.sides), 2 + len(copies), self.how))
        self._side(source, pair[0].dtype, (number, None))
        self._side(output, pair[1].dtype, (number, None))
        for copy, replica in enumerate(copies):
            self._side(replica.fragments, replica.dtype, (number, copy))
        for fragment in output:
            path = str(fragment.store)
            self.ends[path] = max(self.ends.get(path, 0), fragment.nbytes_end(pair[1].dtype.itemsize))

    def _side(self, fragments: Sequence[Fragment], dtype: DType, meant: tuple[int, int | None]) -> None:
        first = len(self.pieces)
        for f in fragments:
            if f.numel:
                place = (f.byte_offset, f.start, f.count, f.rows, f.pitch, f.store_pitch, f.step)
                self.pieces.append(_PIECE.pack(self._number(f.store), str(f.store) in self.written, *place))
        self.sides.append(_SIDE.pack(first, len(self.pieces) - first, dtype.number, _swap(fragments, dtype) or 0))
        self.meant.append(meant)

    def _number(self, store: Store) -> int:
        number = self.numbers.setdefault(_key(store), len(self.stores))
        if number == len(self.stores):
            self.stores.append(store)
        return number


def confirm(
    pairs: Sequence[tuple[int, Pair]],
    copies: Mapping[int, Sequence[Replica]],
    sums: Sequence[CrcRange],
    *,
    clamp: bool,
    threads: int,
    give_back: bool,
    past_cache: bool,
    bytes_per_s: int,
    progress: Callable[[int], None] | None,
) -> Confirmed:
    """Reads both sides of pairs once, and compares them.

    Args:
        pairs: with their numbers; of those for which `can_confirm` is true.
        copies: number of a pair -> replicas of its source, for which `can_be_copy` is true.
        sums: ranges with CRCs that are wanted. An output's file that has some is read whole up to
            its last element.
        clamp: numbers too large became the largest finite one instead of infinity.
        threads: that compute; as many again and more wait for the disk.
        give_back: whether the page cache drops what was read through it.
        past_cache: whether what the page cache does not have is read past it, where the file system allows that.
        bytes_per_s: the most that is read; 0 for no limit.
        progress: called with the bytes read so far.

    Raises:
        CorruptError: a file ends too early, or cannot be read. InconsistentError: it changed meanwhile.
        ResourceError: there is too little memory, or no thread starts.
    """
    found = Confirmed(copied=frozenset(copies))
    by_path: dict[str, list[tuple[int, CrcRange]]] = {}
    for number, wanted in enumerate(sums):
        by_path.setdefault(wanted.store.path, []).append((number, wanted))
    whole: dict[str, int] = {}  # path of an output's file -> bytes from its beginning that were read whole
    done = 0
    with OpenFiles(give_back=give_back, most=_MOST_STORES, past_cache=past_cache) as files:
        for batch in _batches(pairs, copies, clamp=clamp):
            descriptors = [files.of(store) for store in batch.stores]
            ranges: list[tuple[int, int, int, int]] = []
            zones: list[bytes] = []
            for number, store in enumerate(batch.stores):
                own = by_path.get(str(store), ())
                ranges += [(number, of, wanted.start, wanted.nbytes) for of, wanted in own]
                begin, end = whole.get(str(store), 0), batch.ends.get(str(store), 0)
                if own and begin < end:
                    zones.append(_ZONE.pack(number, 0, begin, end))
                    whole[str(store)] = end
            failure, crcs, unequal, nbytes = native_confirm(
                b"".join(packed_store(store, fds) for store, fds in zip(batch.stores, descriptors, strict=True)),
                packed_ranges(ranges),
                b"".join(batch.pieces),
                b"".join(batch.sides),
                b"".join(batch.groups),
                b"".join(zones),
                threads=threads,
                give_back=give_back,
                bytes_per_s=bytes_per_s,
                progress=progress_after(progress, done),
            )
            if failure[0] == "read":
                raise read_error(str(batch.stores[failure[2]]), failure[1], failure[3])
            if failure[0]:
                raise engine_error(failure[0], failure[4])
            for of, crc, offset, length in crcs:
                found.crcs.setdefault(of, []).append((offset, length, crc))
            for store, read in zip(batch.stores, nbytes, strict=True):
                found.bytes_read[str(store)] = found.bytes_read.get(str(store), 0) + read
            done += sum(nbytes)
            _note(found, batch, unequal)
        files.check_sources()
    found.nbytes = sum(found.bytes_read.values())
    return found


def _note(found: Confirmed, batch: _Batch, unequal: Sequence[tuple[int, int, int]]) -> None:
    for side, count, first in unequal:
        number, copy = batch.meant[side]
        if copy is None:
            found.unequal[number] = _sum(found.unequal.get(number), count, first)
        else:
            found.copies[number, copy] = _sum(found.copies.get((number, copy)), count, first)


def _sum(before: Unequal | None, count: int, first: int) -> Unequal:
    return (count, first) if before is None else (before[0] + count, min(before[1], first))


def _batches(
    pairs: Sequence[tuple[int, Pair]], copies: Mapping[int, Sequence[Replica]], *, clamp: bool
) -> Iterator[_Batch]:
    """The pairs in batches, in the order of the output's files."""
    ordered = sorted(pairs, key=lambda pair: min((str(f.store), f.byte_offset) for f in pair[1][1].fragments))
    written = frozenset(str(f.store) for _, (_, output) in pairs for f in output.fragments)
    how = _CLAMPED if clamp else _EXACT
    batch = _Batch(written, how)
    for number, pair in ordered:
        own = copies.get(number, ())
        of_copies = {_key(f.store) for replica in own for f in replica.fragments}
        for source, output in _parts(pair):
            stores = of_copies.union(batch.numbers, (_key(f.store) for f in (*source, *output)))
            if batch.groups and (len(batch.pieces) >= _MOST_PIECES or len(stores) > _MOST_STORES):
                yield batch
                batch = _Batch(written, how)
            batch.add(number, pair, own, source, output)
    if batch.groups:
        yield batch


def _parts(pair: Pair) -> Iterator[tuple[Sequence[Fragment], Sequence[Fragment]]]:
    """The fragments of a pair in parts with few files on each side; parts without a common element are left out."""
    outputs = list(_few(pair[1].fragments, _STORES_OF_OUTPUT))
    for source in _few(pair[0].fragments, _STORES_OF_SOURCE):
        first, last = source[0].start, max(f.stop for f in source)
        for output in outputs:
            if output[0].start < last and first < max(f.stop for f in output):
                yield source, output


def _few(fragments: Sequence[Fragment], most: int) -> Iterator[list[Fragment]]:
    """Fragments in parts that are in at most `most` stores."""
    held: list[Fragment] = []
    stores: set[object] = set()
    for fragment in sorted((f for f in fragments if f.numel), key=lambda f: f.start):
        if len(stores) == most and _key(fragment.store) not in stores:
            yield held
            held, stores = [], set()
        held.append(fragment)
        stores.add(_key(fragment.store))
    if held:
        yield held


def _key(store: Store) -> object:
    return store.path if isinstance(store, FileStore) else store


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


def differences(
    pairs: Sequence[Pair],
    *,
    clamp: bool = False,
    threads: int | None = None,
    bytes_per_s: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Difference]:
    """The tensors of an output that differ from their source, rounded to the output's dtype; see `derived_again`."""
    return derived_again(pairs, clamp=clamp, threads=threads, bytes_per_s=bytes_per_s, progress=progress)[0]


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
) -> tuple[list[Difference], Confirmed]:
    """Compares an output with its source: the tensors that differ, and what else the bytes show on the way.

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
    after = progress_after(progress, confirmed.nbytes)
    unequal = {**confirmed.unequal, **_slowly(rest, clamp, count, bytes_per_s, after)}
    found = [
        Difference(number, differ, first, _file_of(pairs[number], first))
        for number, (differ, first) in sorted(unequal.items())
    ]
    confirmed.nbytes += sum(a.nbytes + b.nbytes for _, (a, b) in rest)
    return found, confirmed


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
    parts = _ranges([pair for _, pair in pairs])
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
    return {number: (sum(n for _, n in places), min(places)[0]) for number, places in found.items()}


def _ranges(pairs: Sequence[Pair]) -> Iterator[tuple[int, int, int]]:
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
