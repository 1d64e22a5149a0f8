"""Plans: what goes where, as a value that can be printed, compared and run.

`route` carries one catalog's tensor into another's. Both sides are runs of elements in order (see `fragments`), so one
walk along both gives every overlap, whatever the kinds of sharding; consecutive overlaps of equal stride fold into one
pitched move. Time O(runs), memory O(fragments of one tensor): a plan is never a list of a million moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zckpt.catalog import TensorEntry
from zckpt.dtypes import DType
from zckpt.errors import InconsistentError
from zckpt.fragments import FileStore, Run, Store, runs_in_order


@dataclass(frozen=True, slots=True)
class Checksum:
    """A CRC-32 to be filled in after the move.

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
    """A file to be written: everything of it but the elements.

    Attributes:
        path: relative to the output directory, or the file's own name.
        size: in bytes, exact.
        literals: (byte offset, bytes) of headers, indexes and padding.
        checksums: CRC-32 slots to be filled after the elements are there.
    """

    path: str
    size: int
    literals: tuple[tuple[int, bytes], ...] = ()
    checksums: tuple[Checksum, ...] = ()


class Move(NamedTuple):
    """Elements from one place to another: `rows` runs of `count` elements. Offsets and pitches are bytes.

    Inside a run the source's elements are `src_step` elements apart (1: dense; 0: one element repeated), those of the
    destination `dst_step`. `tensor` numbers the pair of entries in the plan, for per-tensor statistics.
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


def route(source: TensorEntry, destination: TensorEntry, tensor: int = 0) -> Iterator[Move]:
    """The moves that make `destination` hold what `source` holds, in the destination's order.

    Raises:
        InconsistentError: the shapes differ in number of elements.
    """
    if source.numel != destination.numel:
        raise InconsistentError(
            f"tensor {source.name!r} of another size",
            found=f"shape {list(source.shape)}",
            expected=f"the destination has {list(destination.shape)}",
        )
    pending: Move | None = None
    for move in _overlaps(source, destination, tensor):
        folded = _fold(pending, move) if pending is not None else None
        if folded is None and pending is not None:
            yield pending
        pending = folded or move
    if pending is not None:
        yield pending


def _overlaps(source: TensorEntry, destination: TensorEntry, tensor: int) -> Iterator[Move]:
    src_size, dst_size = source.dtype.itemsize, destination.dtype.itemsize
    sources = runs_in_order(source.fragments, src_size)
    src: Run | None = next(sources, None)
    for dst in runs_in_order(destination.fragments, dst_size):
        start, stop = dst.start, dst.start + dst.count
        while src is not None and start < stop:
            high = min(src.start + src.count, stop)
            yield Move(
                src.store,
                src.byte_offset + (start - src.start) * src.store_step * src_size,
                dst.store,
                dst.byte_offset + (start - dst.start) * dst.store_step * dst_size,
                high - start,
                source.dtype,
                destination.dtype,
                tensor,
                src_step=src.store_step,
                dst_step=dst.store_step,
            )
            start = high
            if high == src.start + src.count:
                src = next(sources, None)


def _fold(a: Move, b: Move) -> Move | None:
    """`a` and the single-row move `b` that follows it as one move, if their strides allow."""
    if (
        a.src is not b.src
        or a.dst is not b.dst
        or (a.count, a.src_step, a.dst_step) != (b.count, b.src_step, b.dst_step)
    ):
        return None
    src_pitch, dst_pitch = (b.src_offset - a.src_offset) // a.rows, (b.dst_offset - a.dst_offset) // a.rows
    if a.rows == 1 and (src_pitch <= 0 or dst_pitch <= 0):
        return None
    if a.rows > 1 and (
        b.src_offset != a.src_offset + a.rows * a.src_pitch or b.dst_offset != a.dst_offset + a.rows * a.dst_pitch
    ):
        return None
    return Move(
        *(a.src, a.src_offset, a.dst, a.dst_offset, a.count, a.src_dtype, a.dst_dtype, a.tensor),
        rows=a.rows + 1,
        src_pitch=src_pitch if a.rows == 1 else a.src_pitch,
        dst_pitch=dst_pitch if a.rows == 1 else a.dst_pitch,
        src_step=a.src_step,
        dst_step=a.dst_step,
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a conversion does to bytes.

    Attributes:
        files: the files to be written, with the stores that stand for them in `pairs`.
        pairs: (source entry, destination entry), sorted by place in the destination.
    """

    files: tuple[tuple[OutputFile, FileStore], ...]
    pairs: Sequence[tuple[TensorEntry, TensorEntry]]

    def moves(self) -> Iterator[Move]:
        """The moves, made anew on each call."""
        for number, (source, destination) in enumerate(self.pairs):
            yield from route(source, destination, number)

    @property
    def bytes_read(self) -> int:
        """Bytes that will be read."""
        return sum(source.nbytes for source, _ in self.pairs)

    @property
    def bytes_written(self) -> int:
        """Bytes of all output files; for memory destinations, of the tensors."""
        return sum(file.size for file, _ in self.files) or sum(entry.nbytes for _, entry in self.pairs)
