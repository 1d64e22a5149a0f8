"""Plans: which bytes go where, as a value that can be printed, compared and run.

`route` carries one catalog's tensor into another's: every overlap of their fragments (see `overlaps`) becomes one or a few
pitched moves; the columns of a transposed matrix, each a fragment, become one move together. The time is O(fragments), not
O(rows) or O(elements). Moves are streamed, never held in a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zckpt.base.errors import InconsistentError
from zckpt.core.catalog import TensorEntry, TensorPart
from zckpt.core.dtypes import DType
from zckpt.core.fragments import DerivedStore, FileStore, Fragment, Store
from zckpt.core.overlaps import overlaps, touching

SLAB_BYTES = 8 << 20
"""The most bytes in one move of a source behind an address: a batch of such moves is held in memory."""
COMPUTED_BYTES = 2 << 20
"""The same of elements that are computed: few enough to stay in a processor's cache on the way."""


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
    literals: tuple[tuple[int, bytes], ...] = ()
    checksums: tuple[Checksum, ...] = ()


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
    """The moves that fill `destination` from `source`; of parts, the elements that both hold.

    Raises:
        InconsistentError: the shapes differ in number of elements.
    """
    if source.numel != destination.numel:
        raise InconsistentError(
            f"tensor {source.name!r} has another size than its destination",
            found=f"shape {list(source.shape)}",
            expected=f"shape {list(destination.shape)}",
        )
    src_size, dst_size = source.dtype.itemsize, destination.dtype.itemsize
    for dst in destination.fragments:
        to = dst.block()
        for src in touching(source.fragments, dst.start, dst.stop, flat=source.flat):
            of = src.block()
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


class _Column(NamedTuple):
    """Elements of one row of a source that are a column of the destination, from element `first` on, `step` apart."""

    store: Store
    byte_offset: int
    first: int
    numel: int
    step: int
    store_step: int


def _columns(fragments: Sequence[Fragment], start: int, stop: int, itemsize: int) -> Iterator[_Column]:
    """The parts of fragments, each a column, with elements [start, stop)."""
    for f in fragments:
        step, store_step = (f.pitch, f.store_pitch) if f.rows > 1 else (1, 1)
        low, high = max(0, -((f.start - start) // step)), min(f.rows, -((f.start - stop) // step))
        if low < high:
            byte_offset = f.byte_offset + low * store_step * itemsize
            yield _Column(f.store, byte_offset, f.start + low * step, high - low, step, store_step)


def _turned(source: TensorEntry | TensorPart, to: TensorEntry | TensorPart, tensor: int) -> Iterator[Move]:
    """As `route`, for a transposed matrix: rows of the source that become neighbouring columns make one move.

    The rows of such a move are those of the source; `dst_step` is the distance of their elements in the destination.
    """
    (into,), size = to.fragments, to.dtype.itemsize
    held: list[_Column] = []

    def move() -> Move:
        one, pitch = held[0], held[1].byte_offset - held[0].byte_offset if len(held) > 1 else 0
        at = into.byte_offset + (one.first - into.start) * size
        return Move(
            *(one.store, one.byte_offset, into.store, at, one.numel, source.dtype, to.dtype, tensor),
            *(len(held), pitch, size if pitch else 0, one.store_step, one.step, one.first),
        )

    for column in _columns(source.fragments, into.start, into.stop, source.dtype.itemsize):
        if held and not _follows(held, column):
            yield move()
            held = []
        held.append(column)
    if held:
        yield move()


def _follows(held: Sequence[_Column], column: _Column) -> bool:
    """Whether a column is the next one beside `held`, and comes from the next row, all rows being equally far apart."""
    last = held[-1]
    return (
        column.first == last.first + 1
        and column.store is last.store
        and (len(held) == 1 or column.byte_offset - last.byte_offset == held[1].byte_offset - held[0].byte_offset)
        and column[3:] == last[3:]
        and column.byte_offset != last.byte_offset
    )


def _is_turned(source: TensorEntry | TensorPart, to: TensorEntry | TensorPart) -> bool:
    """Whether all of a tensor's fragments are columns that go into a dense run."""
    return (
        source.numel == to.numel
        and len(source.fragments) > 1
        and len(to.fragments) == 1
        and to.fragments[0].rows == 1
        and all(f.count == 1 for f in source.fragments)
        and all(f.store.at_hand for f in source.fragments)
    )


Pair = tuple[TensorEntry | TensorPart, TensorEntry | TensorPart]
"""A tensor's source and destination."""


def _in_slabs(source: TensorEntry | TensorPart, to: TensorEntry | TensorPart) -> TensorEntry | TensorPart:
    """The destination of a tensor; for a source that is not at hand, cut into parts that fit in memory."""
    if all(fragment.store.at_hand for fragment in source.fragments):
        return to
    most = max(1, SLAB_BYTES // source.dtype.itemsize)
    for fragment in source.fragments:
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
        yield replace(fragment, byte_offset=at, start=start, rows=min(rows, fragment.rows - row))


def _bytes_read(source: TensorEntry | TensorPart, to: TensorEntry | TensorPart) -> int:
    for fragment in source.fragments:
        if isinstance(fragment.store, DerivedStore):
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

    def moves(self) -> Iterator[Move | None]:
        """The moves, made anew on each call. After a None, the moves before it must be done before the next is taken."""
        for number, (source, destination) in enumerate(self.pairs):
            if _is_turned(source, destination):
                yield from _turned(source, destination, number)
            else:
                yield from route(source, _in_slabs(source, destination), number)

    def by_file(self) -> Iterator[Plan]:
        """One plan for each file, in order. Each tensor must be in a single file."""
        pairs: dict[int, list[Pair]] = {id(store): [] for _, store in self.files}
        for source, destination in self.pairs:
            for number in {id(fragment.store) for fragment in destination.fragments}:
                pairs[number].append((source, destination))
        for output, store in self.files:
            yield Plan(((output, store),), pairs[id(store)])

    @property
    def bytes_read(self) -> int:
        """Bytes that will be read."""
        return sum(_bytes_read(of, to) for of, to in self.pairs)

    @property
    def bytes_written(self) -> int:
        """Bytes of all output files; for memory destinations, of the tensors."""
        return sum(file.size for file, _ in self.files) or sum(entry.nbytes for _, entry in self.pairs)
