"""Elements of tensors, read from where their fragments are: slow, and without plan, router or C++.

For what checks the engine (`reference`, `scan_reference`, `independent`) and for what reads a few numbers (`replicas`, totals of
slices). It shares nothing with the engine that it checks but the geometry of the catalogs (`runs_in_order`, `clip`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from zckpt.base.errors import read_error
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32, DType
from zckpt.core.fragments import ComputedStore, Fragment, Run, runs_in_order
from zckpt.core.overlaps import clip
from zckpt.core.recipes import DerivedStore, compute_bytes
from zckpt.core.stores import FileStore, MemoryStore, Store
from zckpt.storage import fsspec_io
from zckpt.storage.descriptors import OpenFiles

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Floats, Found, Kernels, Part, Tools

_SPAN_BYTES = 1 << 20
"""Elements that are apart are read together with what is between them, so many bytes at once."""


class Wanted(NamedTuple):
    """Elements [start, stop) of the tensor of these fragments."""

    fragments: Sequence[Fragment]
    dtype: DType
    start: int
    stop: int


class ElementReader(AbstractContextManager["ElementReader"]):
    """Reads elements from many files; the last ones stay open; use as a context manager."""

    def __init__(self) -> None:
        self._files = OpenFiles(most=64)
        self._fetched: dict[fsspec_io.Range, bytes] = {}

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def read(self, wanted: Wanted) -> bytes:
        """Elements in the machine's byte order. Raises CorruptError if a file ends too early, or cannot be read;
        InconsistentError if it is not what it was when the checkpoint was opened; RemoteError if it could not be
        fetched.
        """
        size, runs = wanted.dtype.itemsize, list(_runs(wanted))
        fetched = self._fetched
        if any(_range(run, size) not in fetched for run in runs if _is_remote(run)):
            fetched = _fetch([wanted])
        parts: list[bytes] = []
        from zckpt.engine.rounding import native

        for run in runs:
            store, offset = run.store, run.byte_offset
            if not store.at_hand:
                from zckpt.engine.prefetch import in_memory  # which is slow to import, and seldom wanted

                if isinstance(store, DerivedStore):
                    block, begin = compute_bytes(store, offset, offset + _span(run, size), _Tools(self))
                    store, offset = in_memory(block, store), offset - begin
                else:
                    store, offset = in_memory(fetched[_range(run, size)], store), 0
            data = read_elements(store, self._files.of(store)[0], offset, run.count, run.store_step, size)
            parts.append(native(data, wanted.dtype, store.byteorder))
        return b"".join(parts)

    def fetch_ahead(self, wanted: Iterable[Wanted]) -> None:
        """Fetches what the next calls of `read` will want from other machines, in few requests."""
        self._fetched = _fetch(wanted)

    def check_sources(self) -> None:
        """Makes sure that no file changed while it was read; raises CorruptError or InconsistentError."""
        self._files.check_sources()


class _Tools:
    """The tools of recipes here (`core.recipes.Tools`): the reference's loops and casts."""

    def __init__(self, reader: ElementReader) -> None:
        self._reader = reader
        from zckpt.engine.kernels import ReferenceKernels

        self.kernels: Kernels = ReferenceKernels()

    def read(self, entry: TensorEntry, start: int, stop: int, dtype: DType | None = None) -> Array:
        import numpy as np

        data = self._reader.read(elements(entry, start, stop))
        if dtype is not None and dtype != entry.dtype:
            from zckpt.engine.rounding import cast

            data, _, _ = cast(data, entry.dtype, dtype, sys.byteorder, clamp=False)
        kind = dtype or entry.dtype
        return np.frombuffer(bytearray(data), kind.numpy or f"u{kind.itemsize}")

    def read_floats(self, entry: TensorEntry, start: int, stop: int) -> Floats:
        return self.read(entry, start, stop, F32)  # type: ignore[return-value]

    def each(self, work: Callable[[Part, Tools], Found], parts: Iterable[Part]) -> list[Found]:
        return [work(part, self) for part in parts]

    def expect(self, entries: Iterable[TensorEntry]) -> None:
        """Reads nothing before it is asked for."""


def elements(entry: TensorEntry, start: int, stop: int) -> Wanted:
    """Elements [start, stop) of a tensor."""
    return Wanted(entry.fragments, entry.dtype, start, stop)


def _runs(wanted: Wanted) -> Iterator[Run]:
    size = wanted.dtype.itemsize
    return runs_in_order(clip(wanted.fragments, wanted.start, wanted.stop, size), size)


def _range(run: Run, itemsize: int) -> fsspec_io.Range:
    """The bytes of a file from a run's first element to its last."""
    return fsspec_io.Range(str(run.store), run.byte_offset, run.byte_offset + _span(run, itemsize))


def _span(run: Run, itemsize: int) -> int:
    return ((run.count - 1) * run.store_step + 1) * itemsize


def _is_remote(run: Run) -> bool:
    return isinstance(run.store, FileStore) and run.store.is_remote


def _fetch(wanted: Iterable[Wanted]) -> dict[fsspec_io.Range, bytes]:
    ranges = [_range(run, w.dtype.itemsize) for w in wanted for run in _runs(w) if _is_remote(run)]
    blocks = fsspec_io.fetch(ranges) if ranges else ()
    return {r: block[r.start - at : r.stop - at] for r, (block, at) in zip(ranges, blocks, strict=True)}


_FAR_BYTES = 4096
"""The distance in bytes from which on elements are read one by one."""


def read_elements(store: Store, fd: int, offset: int, count: int, step: int, itemsize: int) -> bytes:
    """Elements `step` elements apart, as they are in the store; `fd` is for files of this machine. Raises CorruptError
    if the file ends too early, or cannot be read.
    """
    if step == 1 or count == 1:
        return _read(store, fd, offset, count * itemsize)
    if step == 0:
        return _read(store, fd, offset, itemsize) * count
    parts: list[bytes] = []
    most = max(1, _SPAN_BYTES // (step * itemsize)) if step * itemsize < _FAR_BYTES else 1
    for first in range(0, count, most):
        n = min(most, count - first)
        data = _read(store, fd, offset + first * step * itemsize, ((n - 1) * step + 1) * itemsize)
        parts.extend(data[at : at + itemsize] for at in range(0, len(data), step * itemsize))
    return b"".join(parts)


def _read(store: Store, fd: int, offset: int, nbytes: int) -> bytes:
    if isinstance(store, MemoryStore | ComputedStore):
        import ctypes  # which is slow to import, and seldom wanted

        return ctypes.string_at(store.address + offset, nbytes)
    if not isinstance(store, FileStore):
        raise TypeError("elements that are nowhere yet")
    parts: list[bytes] = []
    while nbytes:
        try:
            part = os.pread(fd, nbytes, offset)
        except OSError as error:
            raise read_error(store.path, error.errno or 0, offset) from error
        if not part:
            raise read_error(store.path, -1, offset)
        parts.append(part)
        offset, nbytes = offset + len(part), nbytes - len(part)
    return b"".join(parts)
