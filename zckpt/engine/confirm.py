"""Hands pairs of tensors to the C++ that confirms them (`csrc/confirm.cpp`), in parts of bounded size.

For `independent`. The C++ gets the fragments of both sides as the catalogs have them, and finds out by itself which elements of
the one are which of the other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import read_error
from zckpt.base.pace import engine_error
from zckpt.core.catalog import Replica, TensorEntry
from zckpt.core.dtypes import DType, can_cast
from zckpt.core.fragments import Fragment
from zckpt.core.stores import FileStore, Store
from zckpt.engine.batches import packed_ranges, packed_store, progress_after
from zckpt.engine.checksums import Partial
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


class Unequal(NamedTuple):
    """Elements that are not what they should be.

    Attributes:
        count: how many.
        first: number of the first of them.
    """

    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed
    first: int


@dataclass(slots=True)
class Confirmed:
    """What was found of pairs of tensors.

    Attributes:
        unequal: number of the pair -> the elements of the output that are not the source's.
        copies: (number of the pair, of the copy of its source) -> the elements of the copy that are not the source's.
        crcs: number of the `CrcRange` -> the parts of it that were read; no byte is in two of them.
        bytes_read: path -> bytes that were read of the file.
    """

    unequal: dict[int, Unequal] = field(default_factory=dict[int, Unequal])
    copies: dict[tuple[int, int], Unequal] = field(default_factory=dict[tuple[int, int], Unequal])
    crcs: dict[int, list[Partial]] = field(default_factory=dict[int, list[Partial]])
    bytes_read: dict[str, int] = field(default_factory=dict[str, int])


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


class _Part(NamedTuple):
    """A pair, with those of its fragments that are in some files, and how its output must be."""

    number: int
    pair: Pair
    copies: Sequence[Replica]
    how: int
    source: Sequence[Fragment]
    output: Sequence[Fragment]

    def keys(self) -> set[object]:
        """Keys of the stores."""
        fragments = [*self.source, *self.output, *(f for replica in self.copies for f in replica.fragments)]
        return {_key(f.store) for f in fragments}


@dataclass(slots=True)
class _Batch:
    """A batch of pairs, as the structs of `csrc/confirm.h`; `written` are the paths of all of the output's files."""

    written: frozenset[str]
    stores: list[Store] = field(default_factory=list[Store])
    numbers: dict[object, int] = field(default_factory=dict[object, int])
    pieces: list[bytes] = field(default_factory=list[bytes])
    sides: list[bytes] = field(default_factory=list[bytes])
    groups: list[bytes] = field(default_factory=list[bytes])
    meant: list[tuple[int, int | None]] = field(default_factory=list["tuple[int, int | None]"])
    ends: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, part: _Part) -> None:
        """Adds a pair, or a part of one, with the copies of its source."""
        source, output = part.pair
        self.groups.append(_GROUP.pack(len(self.sides), 2 + len(part.copies), part.how))
        self._side(part.source, source.dtype, (part.number, None))
        self._side(part.output, output.dtype, (part.number, None))
        for copy, replica in enumerate(part.copies):
            self._side(replica.fragments, replica.dtype, (part.number, copy))
        for fragment in part.output:
            path = str(fragment.store)
            self.ends[path] = max(self.ends.get(path, 0), fragment.nbytes_end(output.dtype.itemsize))

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
    found = Confirmed()
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
    return found


def _note(found: Confirmed, batch: _Batch, unequal: Sequence[tuple[int, int, int]]) -> None:
    for side, count, first in unequal:
        number, copy = batch.meant[side]
        if copy is None:
            found.unequal[number] = _sum(found.unequal.get(number), count, first)
        else:
            found.copies[number, copy] = _sum(found.copies.get((number, copy)), count, first)


def _sum(before: Unequal | None, count: int, first: int) -> Unequal:
    return Unequal(count, first) if before is None else Unequal(before.count + count, min(before.first, first))


def _batches(
    pairs: Sequence[tuple[int, Pair]], copies: Mapping[int, Sequence[Replica]], *, clamp: bool
) -> Iterator[_Batch]:
    """The pairs in batches, in the order of the output's files."""
    ordered = sorted(pairs, key=lambda pair: min((str(f.store), f.byte_offset) for f in pair[1][1].fragments))
    written = frozenset(str(f.store) for _, (_, output) in pairs for f in output.fragments)
    batch = _Batch(written)
    for number, pair in ordered:
        for part in _parts(number, pair, copies.get(number, ()), _CLAMPED if clamp else _EXACT):
            stores = len(batch.numbers.keys() | part.keys())
            if batch.groups and (len(batch.pieces) >= _MOST_PIECES or stores > _MOST_STORES):
                yield batch
                batch = _Batch(written)
            batch.add(part)
    if batch.groups:
        yield batch


def _parts(number: int, pair: Pair, copies: Sequence[Replica], how: int) -> Iterator[_Part]:
    """A pair in parts with few files on each side; parts without a common element are left out."""
    outputs = list(_few(pair[1].fragments, _STORES_OF_OUTPUT))
    for source in _few(pair[0].fragments, _STORES_OF_SOURCE):
        first, last = source[0].start, max(f.stop for f in source)
        for output in outputs:
            if output[0].start < last and first < max(f.stop for f in output):
                yield _Part(number, pair, copies, how, source, output)


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
