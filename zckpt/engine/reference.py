"""The reference engine: one row after another with `pread`, numpy and `pwrite`. Slow and simple.

For `move`, where the C++ engine was not built, and for tests, which hold that engine to it byte by byte.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from zckpt.core.plan import Move
from zckpt.core.recipes import DerivedStore
from zckpt.core.stores import FileStore, MemoryStore, Store
from zckpt.engine.elements import read_elements
from zckpt.engine.prefetch import in_memory
from zckpt.engine.rounding import cast
from zckpt.storage.descriptors import write_all

_PART = 1 << 20
"""Elements handled at once: memory stays bounded."""

Follow = Callable[[DerivedStore, int, int], tuple[Any, int]]
"""Computes bytes of a store by its recipe, as `core.recipes.compute_bytes`."""


def run_batch(
    stores: Sequence[Store],
    descriptors: Sequence[tuple[int, int]],
    moves: Sequence[tuple[int, int, Move]],
    literals: Sequence[tuple[int, int, bytes]],
    clamp: bool,
    spend: Callable[[int], None],
    follow: Follow,
) -> list[tuple[int, int, float]]:
    """Runs a batch; returns (tensor, count, largest) for casts that overflowed. `spend` is called with the bytes moved,
    `follow` with elements that a recipe computes. Raises CorruptError if a source ends too early, OSError if a
    destination cannot be written.
    """
    overflows: list[tuple[int, int, float]] = []
    for number, offset, data in literals:
        _write(stores[number], descriptors[number][0], data, offset)
    for src, dst, move in moves:
        for row in range(move.rows):
            for first in range(0, move.count, _PART):
                count = min(_PART, move.count - first)
                source, target = move.src_dtype.itemsize, move.dst_dtype.itemsize
                at = move.src_offset + row * move.src_pitch + first * move.src_step * source
                store = stores[src]
                if isinstance(store, DerivedStore):
                    block, begin = follow(store, at, at + ((count - 1) * move.src_step + 1) * source)
                    store, at = in_memory(block, store), at - begin
                data = read_elements(store, descriptors[src][0], at, count, move.src_step, source)
                spend(count * (source + target))
                data, lost, largest = cast(data, move.src_dtype, move.dst_dtype, store.byteorder, clamp)
                if lost:
                    overflows.append((move.tensor, lost, largest))
                to = move.dst_offset + row * move.dst_pitch + first * move.dst_step * target
                if move.dst_step == 1:
                    _write(stores[dst], descriptors[dst][0], data, to)
                else:
                    for i in range(count):
                        element = data[i * target : (i + 1) * target]
                        _write(stores[dst], descriptors[dst][0], element, to + i * move.dst_step * target)
    return overflows


def _write(store: Store, fd: int, data: bytes, offset: int) -> None:
    if isinstance(store, FileStore):
        write_all(fd, data, offset)
    elif isinstance(store, MemoryStore):
        ctypes.memmove(store.address + offset, data, len(data))
    else:
        raise TypeError("nothing can be written there")
