"""Plans: which bytes go where, as a value that can be printed, compared and run.

`route` carries one catalog's tensor into another's: every overlap of their fragments (see `overlaps`) becomes one or a few
pitched moves; those of a transposed matrix follow the rows of the source. The time is O(fragments), not O(rows) or O(elements).
Moves are streamed, never held in a list.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import NamedTuple, overload

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError
from zckpt.core.catalog import TensorColumns, TensorEntry, TensorPart, alike
from zckpt.core.dtypes import DType
from zckpt.core.fragments import Block, Fragment, fragment_of
from zckpt.core.overlaps import overlaps, touching
from zckpt.core.recipes import DerivedStore
from zckpt.core.stores import FileStore, Store

SLAB_BYTES = 8 << 20
"""The most bytes in one move of a source behind an address: a batch of such moves is held in memory."""
COMPUTED_BYTES = 2 << 20
"""The most bytes in one move of computed elements: few enough to stay in a processor's cache on the way."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """A CRC-32 that is filled in after the move.

    Attributes:
        start: first byte of the range it covers.
        nbytes: bytes in that range.
        slots: byte offsets at which the CRC is stored, four bytes, little-endian.
    """

    start: int
    nbytes: int
    slots: tuple[int, ...]


class PackedLiteral(Sequence[tuple[int, bytes]]):
    """The literal at the beginning of a file that names very many tensors, a tenth as long until it is asked for.

    Args:
        pieces: its bytes, in order.

    Attributes:
        nbytes: of the pieces.
        head, tail: bytes before and behind them.
    """

    head = tail = b""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        packer = zlib.compressobj(1)
        self.nbytes = 0
        packed: list[bytes] = []
        for piece in pieces:
            self.nbytes += len(piece)
            packed.append(packer.compress(piece))
        self._packed = b"".join((*packed, packer.flush()))

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, index: int) -> tuple[int, bytes]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[int, bytes]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, bytes] | Sequence[tuple[int, bytes]]:
        range(1)[index]  # nothing is unpacked to find that there is no second one
        return ((0, self.head + zlib.decompress(self._packed) + self.tail),)[index]


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to be written, without its elements.

    Attributes:
        path: relative to the output directory, or the file's own name.
        size: in bytes, exact.
        literals: (byte offset, bytes) of headers, indexes and padding.
        checksums: CRC-32s that are filled in when the elements are known.
    """

    path: str
    size: int
    literals: Sequence[tuple[int, bytes]] = ()
    checksums: tuple[Checksum, ...] = ()


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A complete file of an output.

    Attributes:
        path: relative to the output.
        nbytes: its size.
        crc32: of the whole file.
        overflows: tensor name -> (elements with a cast that overflowed, the largest of them), of tensors in this file.
        slots: byte offset -> what was filled in there, of the checksums that a plan wants in the file.
    """

    path: str
    nbytes: int
    crc32: int
    overflows: Mapping[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    slots: Mapping[int, bytes] = field(default_factory=dict[int, bytes])


def literal_file(name: str, data: bytes) -> tuple[OutputFile, FileStore]:
    """A file without elements, and its store."""
    return OutputFile(name, len(data), ((0, data),) if data else ()), FileStore(name, len(data))


class Move(NamedTuple):
    """Elements from one place to another: `rows` runs of `count` elements. Offsets and pitches are bytes.

    Inside a run the source's elements are `src_step` elements apart (1: dense; 0: one element repeated), those of the
    destination `dst_step`. `tensor` numbers the pair of entries in the plan, for per-tensor statistics; `start` numbers the
    first element in its tensor, and `pitch` the elements from row to row there.
    """

    src: Store
    src_offset: int
    dst: Store
    dst_offset: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed
    src_dtype: DType
    dst_dtype: DType
    tensor: int
    rows: int = 1
    src_pitch: int = 0
    dst_pitch: int = 0
    src_step: int = 1
    dst_step: int = 1
    start: int = 0
    pitch: int = 0


def route(source: TensorEntry | TensorPart, destination: TensorEntry | TensorPart, tensor: int = 0) -> Iterator[Move]:
    """The moves that fill `destination` from `source`; of parts, the elements that both hold. Raises InconsistentError
    if the shapes differ in number of elements.
    """
    if source.numel != destination.numel:
        raise InconsistentError(
            f"tensor {source.name!r} has another size than its destination",
            found=f"shape {list(source.shape)}",
            expected=f"shape {list(destination.shape)}",
        )
    src_size, dst_size = source.dtype.itemsize, destination.dtype.itemsize
    for dst in destination.fragments:
        for src in touching(source.fragments, dst.start, dst.stop, flat=source.flat):
            if src.rows == 1 and dst.rows == 1:  # nearly all, and in a tenth of the time
                first, stop = max(src.start, dst.start), min(src.start + src.count, dst.start + dst.count)
                if first < stop:
                    at = src.byte_offset + (first - src.start) * src_size
                    to_byte = dst.byte_offset + (first - dst.start) * dst_size
                    dtypes = source.dtype, destination.dtype
                    yield Move(src.store, at, dst.store, to_byte, stop - first, *dtypes, tensor, start=first)
                continue
            of, to = src.block(), dst.block()
            for o in overlaps(of, to):
                several = o.rows > 1
                yield Move(
                    src.store,
                    src.byte_offset + o.a * src_size,
                    dst.store,
                    dst.byte_offset + o.b * dst_size,
                    o.count,
                    source.dtype,
                    destination.dtype,
                    tensor,
                    o.rows,
                    o.a_pitch * src_size if several else 0,
                    o.b_pitch * dst_size if several else 0,
                    of.step,
                    to.step,
                    o.start,
                    o.pitch,
                )


def _in_order_of_source(move: Move) -> Iterator[Move]:
    """The same move, row by row of the source: the rows of a transposed matrix are columns of the destination.

    A source that is not at hand is named row by row, since all between the first and the last element of a move is fetched.
    """
    size, to_size = move.src_dtype.itemsize, move.dst_dtype.itemsize
    if move.rows == 1 or move.count == 1 or not 0 < move.src_pitch < move.src_step * size:
        yield from (move,) if move.src.at_hand else _near(move)
        return
    turned = move._replace(
        count=move.rows, rows=move.count, src_pitch=move.src_step * size, dst_pitch=move.dst_step * to_size,
        src_step=move.src_pitch // size, dst_step=move.dst_pitch // to_size, pitch=1,
    )  # fmt: skip
    if turned.src.at_hand:
        yield turned
        return
    for row in range(turned.rows):
        at, to = move.src_offset + row * turned.src_pitch, move.dst_offset + row * turned.dst_pitch
        yield turned._replace(src_offset=at, dst_offset=to, rows=1, src_pitch=0, dst_pitch=0, start=move.start + row)


def _near(move: Move) -> Iterator[Move]:
    """A move of a single row from a source behind an address, cut to fit in memory; any other move as it is."""
    apart = move.src_step * move.src_dtype.itemsize
    most = max(1, SLAB_BYTES // max(apart, 1))
    if move.rows > 1 or move.src_step == 1 or move.count <= most:
        yield move
        return
    for first in range(0, move.count, most):
        at, to = move.src_offset + first * apart, move.dst_offset + first * move.dst_step * move.dst_dtype.itemsize
        count = min(most, move.count - first)
        yield move._replace(src_offset=at, dst_offset=to, count=count, start=move.start + first)


Pair = tuple[TensorEntry | TensorPart, TensorEntry | TensorPart]
"""A tensor's source and destination."""


class PairColumns(Sequence[Pair]):
    """The pairs of a million small tensors that lie in columns, in the order of both; each is made when it is asked for.

    Args:
        source, destination: the same tensors, each one run of elements.
    """

    def __init__(self, source: TensorColumns, destination: TensorColumns) -> None:
        self.source, self.destination = source, destination

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Pair]:
        return zip(self.source.passing(), self.destination.passing(), strict=True)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | Sequence[Pair]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [(self.source.at(number), self.destination.at(number)) for number in numbers]
        return self.source.at(numbers), self.destination.at(numbers)


def pairs_of(source: Mapping[str, TensorEntry], destination: Mapping[str, TensorEntry]) -> Sequence[Pair]:
    """The pairs of the tensors of a destination, which a source has under the same names."""
    if isinstance(source, TensorColumns) and isinstance(destination, TensorColumns):
        return PairColumns(source, destination)
    return [(source[name], entry) for name, entry in destination.items()]


def _in_slabs(source: TensorEntry | TensorPart, to: TensorEntry | TensorPart) -> TensorEntry | TensorPart:
    """The destination of a tensor, cut into parts that fit in memory where the source is not at hand."""
    if all(fragment.store.at_hand for fragment in source.fragments):
        return to
    most = max(1, SLAB_BYTES // source.dtype.itemsize)
    for fragment in source.fragments:
        if fragment.step != 1:  # of a transposed matrix, whole rows
            most = max(fragment.pitch, most // fragment.pitch * fragment.pitch)
        if isinstance(fragment.store, DerivedStore):
            unit, most = fragment.store.recipe.unit, max(1, COMPUTED_BYTES // source.dtype.itemsize)
            most = max(unit, most // unit * unit)
    return replace(to, fragments=tuple(s for f in to.fragments for s in _slabs(f, most, to.dtype.itemsize)))


def _slabs(fragment: Fragment, most: int, itemsize: int) -> Iterator[Fragment]:
    """A fragment in parts of at most `most` elements, or of one row if a row has more."""
    if fragment.rows == 1:
        for first in range(0, fragment.count, most):
            at, count = fragment.byte_offset + first * itemsize, min(most, fragment.count - first)
            yield replace(fragment, byte_offset=at, start=fragment.start + first, count=count)
        return
    rows = max(1, most // fragment.count)
    for row in range(0, fragment.rows, rows):
        at, start = fragment.byte_offset + row * fragment.store_pitch * itemsize, fragment.start + row * fragment.pitch
        f, count = fragment, min(rows, fragment.rows - row)
        held = Block(start, f.count, count, f.pitch, f.store_pitch, f.step)
        yield fragment_of(fragment.store, at, held)


def _bytes_read(source: TensorEntry | TensorPart, to: TensorEntry | TensorPart) -> int:
    for fragment in source.fragments:
        if type(fragment.store) is DerivedStore:
            whole = sum(_bytes_read(entry, entry) for entry in fragment.store.recipe.inputs)
            return whole * (to.nbytes // to.dtype.itemsize) // source.numel
    return to.nbytes // to.dtype.itemsize * source.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a conversion writes, and from where.

    Attributes:
        files: the files to be written, each with its store in `pairs`.
        pairs: (source entry, destination entry), sorted by place in the destination.
    """

    files: tuple[tuple[OutputFile, FileStore], ...]
    pairs: Sequence[Pair]

    @classmethod
    def of(cls, plans: Iterable[Plan]) -> Plan:
        """One plan for the files of several, in their order."""
        every = list(plans)
        return cls(
            tuple(file for plan in every for file in plan.files), [pair for plan in every for pair in plan.pairs]
        )

    def with_files(self, *more: tuple[OutputFile, FileStore] | None) -> Plan:
        """The same with files behind it that nothing is moved into; a None is no file."""
        return Plan((*self.files, *(file for file in more if file is not None)), self.pairs)

    def moves(self) -> Iterator[Move | None]:
        """The moves, made again on each call. After a None, the moves before it must be done before the next is taken."""
        for number, (source, destination) in enumerate(self.pairs):
            for move in route(source, _in_slabs(source, destination), number):
                if move.rows == 1 and move.src.at_hand:  # nearly all
                    yield move
                else:
                    yield from _in_order_of_source(move)

    def by_file(self) -> Iterator[Plan]:
        """One plan for each file, in order. Each tensor must be in a single file."""
        pairs: dict[int, list[Pair]] = {id(store): [] for _, store in self.files}
        for source, destination in self.pairs:
            for number in {id(fragment.store) for fragment in destination.fragments}:
                pairs[number].append((source, destination))
        for output, store in self.files:
            yield Plan(((output, store),), pairs[id(store)])

    @property
    def move_count(self) -> int:
        """How many moves there are."""
        if isinstance(self.pairs, PairColumns):
            return sum(count for entry, count in alike(self.pairs.source) if entry.numel)
        return sum(1 for _ in self.moves())

    @property
    def bytes_read(self) -> int:
        """Bytes that will be read."""
        if isinstance(self.pairs, PairColumns):
            return sum(entry.nbytes * count for entry, count in alike(self.pairs.source))
        return sum(_bytes_read(of, to) for of, to in self.pairs)

    @property
    def bytes_written(self) -> int:
        """Bytes of all output files; for memory destinations, of the tensors."""
        return sum(file.size for file, _ in self.files) or sum(entry.nbytes for _, entry in self.pairs)


@dataclass(frozen=True, slots=True)
class Streamed(Plan):
    """A plan with moves that are made while it is carried out. `source`: of them; it can be read once."""

    source: Iterable[Move | None]

    def moves(self) -> Iterator[Move | None]:
        """The moves, this once."""
        return iter(self.source)
