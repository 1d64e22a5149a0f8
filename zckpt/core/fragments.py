"""Fragments: pitched runs of a tensor's elements in a store.

For catalogs and the router. Pure arithmetic; no file is opened here.

[Note: the geometry of a fragment]
A tensor's elements are numbered row-major from 0. A fragment is `rows` runs of `count` elements each. Run r covers the
elements [start + r*pitch, start + r*pitch + count) of the tensor. Its element i is in the store at byte
`byte_offset + (r*store_pitch + i*step)*itemsize`. All figures but `byte_offset` are elements. Example: columns 2-3 of a (3, 8)
tensor held densely by one rank: start 2, count 2, rows 3, pitch 8, store_pitch 2, step 1.
A ZeRO partition is one run (rows 1). A box of a tensor-parallel or DCP checkpoint is a pitched fragment. A transposed matrix of r
rows and c columns, which the store has as c rows of r elements, is r runs of c elements: pitch c, store_pitch 1, step r. One run
with elements that are apart is written as runs of one element (count 1, pitch 1), so that a single run is always dense.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Literal, NamedTuple

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError
from zckpt.core.stores import MemoryStore, Store


class ComputedStore:
    """Memory with elements that are computed when they are first used, such as the mean of several ranks' copies.

    Args:
        size: in bytes.
        compute: returns that many bytes, in the machine's byte order.
        sources: (fragments, bytes of an element) of the tensors that they are computed from.
    """

    byteorder: Literal["little", "big"] = "little"
    at_hand = True

    def __init__(
        self, size: int, compute: Callable[[], bytearray], sources: Sequence[tuple[Sequence[Fragment], int]]
    ) -> None:
        self.size = size
        self.sources = sources
        self._compute = compute
        self._memory: MemoryStore | None = None
        self._lock = Lock()

    @property
    def address(self) -> int:
        """Address of the first byte; the first call computes the elements."""
        with self._lock:
            if self._memory is None:
                import ctypes

                data = self._compute()
                self._memory = MemoryStore(ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data), data)
            return self._memory.address

    def __str__(self) -> str:
        return "computed elements"


class Run(NamedTuple):
    """One contiguous run: elements [start, start + count) of a tensor at `byte_offset` of `store`."""

    start: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed
    byte_offset: int
    store: Store
    store_step: int = 1
    """Elements from one element to the next in the store: 1 is dense, 0 is one element repeated."""


class Box(NamedTuple):
    """A box of a tensor: its offsets and sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Block(NamedTuple):
    """The normal form of a fragment's geometry: as few rows as there can be, each of every `step`-th element of the store."""

    start: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed
    rows: int
    pitch: int
    store_pitch: int
    step: int

    @property
    def stop(self) -> int:
        """One past the last element of the tensor."""
        return self.start + (self.rows - 1) * self.pitch + self.count

    def every(self, of: int, number: int) -> Block:
        """Every row that is `of` rows after another one, from row `number` on."""
        rows = (self.rows - number - 1) // of + 1
        start = self.start + number * self.pitch
        return Block(start, self.count, rows, self.pitch * of, self.store_pitch * of, self.step)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A pitched run of a tensor's elements in a store; see [Note: the geometry of a fragment]."""

    store: Store
    byte_offset: int
    start: int
    count: int
    rows: int = 1
    pitch: int = 0
    store_pitch: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        if self.rows == 1 and self.step != 1:
            raise ValueError("a single run with elements that are apart")
        if (
            self.byte_offset < 0
            or self.start < 0
            or self.count < 0
            or self.rows < 1
            or self.store_pitch < 0
            or self.step < 0
        ):
            raise CorruptError(
                "the place of a tensor's elements is impossible", file=str(self.store), remedy=COPY_AGAIN,
                found=f"start {self.start}, count {self.count}, rows {self.rows}, byte offset {self.byte_offset}",
            )  # fmt: skip
        if self.rows > 1 and self.pitch < self.count:
            raise CorruptError(
                "rows of a tensor overlap", file=str(self.store), remedy=COPY_AGAIN,
                found=f"rows of {self.count:,} elements, {self.pitch:,} apart",
            )  # fmt: skip

    @property
    def numel(self) -> int:
        """Elements in all rows."""
        return self.count * self.rows

    @property
    def stop(self) -> int:
        """One past the tensor's last element in it."""
        return self.start + (self.rows - 1) * self.pitch + self.count

    def nbytes_end(self, itemsize: int) -> int:
        """One past the last byte of the store that it uses; 0 if it is empty."""
        if self.numel == 0:
            return 0
        return self.byte_offset + ((self.rows - 1) * self.store_pitch + (self.count - 1) * self.step + 1) * itemsize

    def block(self) -> Block:
        """The normal form: one row for rows that follow each other in tensor and store, and for a column of elements."""
        if self.rows == 1:
            return Block(self.start, self.count, 1, 0, 0, 1)
        if self.count == 1:
            if self.pitch == 1:
                return Block(self.start, self.rows, 1, 0, 0, self.store_pitch)
            return Block(self.start, 1, self.rows, self.pitch, self.store_pitch, 1)
        if self.pitch == self.count and self.store_pitch == self.count * self.step:
            return Block(self.start, self.count * self.rows, 1, 0, 0, self.step)
        return Block(self.start, self.count, self.rows, self.pitch, self.store_pitch, self.step)

    def runs(self, itemsize: int) -> Iterator[Run]:
        """The rows of the normal form, in tensor order."""
        block = self.block()
        for row in range(block.rows):
            byte_offset = self.byte_offset + row * block.store_pitch * itemsize
            yield Run(block.start + row * block.pitch, block.count, byte_offset, self.store, block.step)


def fragment_of(store: Store, byte_offset: int, block: Block) -> Fragment:
    """The fragment of this geometry."""
    start, count, rows, pitch, store_pitch, step = block
    if rows == 1 and step != 1 and count > 1:
        return Fragment(store, byte_offset, start, 1, count, 1, step)
    if rows == 1:
        return Fragment(store, byte_offset, start, count)
    return Fragment(store, byte_offset, start, count, rows, pitch, store_pitch, step if count > 1 else 1)


def runs_in_order(fragments: Sequence[Fragment], itemsize: int) -> Iterator[Run]:
    """The runs of all fragments, by first element. Memory: one run per fragment at a time."""
    ordered = sorted((f for f in fragments if f.numel), key=lambda f: f.start)
    if all(f.rows == 1 for f in ordered):  # the common case: nothing to merge
        return (Run(f.start, f.count, f.byte_offset, f.store) for f in ordered)
    return heapq.merge(*(f.runs(itemsize) for f in ordered), key=lambda run: run.start)
