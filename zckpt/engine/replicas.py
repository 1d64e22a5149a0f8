"""Whether two places hold the same numbers: `cast(master) == weight`, read at both ends of every fragment.

For layouts that must prove a guess, and for conversions before anything is published. A layout that is shifted by even
one element cannot pass: some fragment's end then holds a neighbour's number. A handful of elements per fragment is read,
so a checkpoint of any size is checked in a moment. Pure Python: it runs where numpy is not worth its import.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from zckpt.base.errors import CorruptError, InconsistentError
from zckpt.base.words import examples
from zckpt.core.catalog import Catalog, Replica, TensorEntry
from zckpt.core.dtypes import BF16, F16, F32, F64, DType
from zckpt.core.fragments import FileStore, Fragment, Run, Store, runs_in_order
from zckpt.core.overlaps import clip
from zckpt.storage import fsspec_io, paths

_CODES = {F64: "d", F32: "f", F16: "e", BF16: "H"}

_FORMS = {F32: (24, -149, 128), F16: (11, -24, 16), BF16: (8, -133, 128)}
"""Digits of a mantissa; the smallest number, and the first that is too large, as powers of two."""

WIDTH = 8
"""Elements compared at each end of a fragment. One would do; a few make a chance agreement of shifted data unlikely."""

_AHEAD = 64
"""Tensors whose numbers are fetched at once where they lie on another machine."""


class ElementReader:
    """Reads a few elements from many files; keeps the last files open, and what was fetched ahead from elsewhere."""

    _MOST = 64

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}
        self._ahead: dict[fsspec_io.Range, bytes] = {}

    def __enter__(self) -> ElementReader:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def numbers(self, fragments: Sequence[Fragment], dtype: DType, start: int, stop: int) -> list[float]:
        """Elements [start, stop) of the tensor that the fragments make up."""
        values: list[float] = []
        for run, span in _runs(fragments, dtype, start, stop):
            step = run.store_step * dtype.itemsize
            data = self._bytes(run.store, span, run.byte_offset)
            for index in range(run.count):
                values.append(_decode(data[index * step : index * step + dtype.itemsize], dtype, run.store.byteorder))
        return values

    def _bytes(self, store: Store, nbytes: int, offset: int) -> bytes:
        if not isinstance(store, FileStore):
            return ctypes.string_at(store.address + offset, nbytes)
        data = self._read(store.path, nbytes, offset)
        if len(data) < nbytes:
            raise CorruptError(
                "a file that ends too early",
                file=store.path,
                found=f"{len(data)} bytes at offset {offset:,}",
                expected=f"{nbytes} bytes",
                remedy="The copy was cut short. Copy that file again.",
                byte_offset=offset,
            )
        return data

    def fetch_ahead(self, entries: Sequence[TensorEntry]) -> None:
        """Fetches what comparing these entries will read from other machines, in few requests."""
        wanted = [
            fsspec_io.Range(str(run.store), run.byte_offset, run.byte_offset + span)
            for entry in entries
            if any(fragment.store.is_remote for fragment in entry.fragments)
            for replica in entry.replicas
            if not replica.whole or entry.numel <= _PART
            for start, stop in _seen(entry, replica)
            for fragments, dtype in ((entry.fragments, entry.dtype), (replica.fragments, replica.dtype))
            for run, span in _runs(fragments, dtype, start, stop)
            if isinstance(run.store, FileStore) and run.store.is_remote
        ]
        blocks = fsspec_io.fetch(wanted) if wanted else ()
        self._ahead = {r: block[r.start - at : r.stop - at] for r, (block, at) in zip(wanted, blocks, strict=True)}

    def _read(self, path: str, nbytes: int, offset: int) -> bytes:
        if not paths.is_remote(path):
            return os.pread(self._fd(path), nbytes, offset)
        known = self._ahead.get(fsspec_io.Range(path, offset, offset + nbytes))
        return paths.read(path, nbytes, offset) if known is None else known

    def _fd(self, path: str) -> int:
        if path not in self._fds:
            while len(self._fds) >= self._MOST:
                os.close(self._fds.pop(next(iter(self._fds))))
            self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[path]


def _runs(fragments: Sequence[Fragment], dtype: DType, start: int, stop: int) -> Iterator[tuple[Run, int]]:
    """The runs that hold elements [start, stop), and the bytes of each from its first to its last element."""
    for run in runs_in_order(clip(fragments, start, stop, dtype.itemsize), dtype.itemsize):
        yield run, ((run.count - 1) * run.store_step + 1) * dtype.itemsize


def _decode(data: bytes, dtype: DType, byteorder: Literal["little", "big"]) -> float:
    order = "<" if byteorder == "little" else ">"
    if dtype == BF16:
        bits: int = struct.unpack(order + "H", data)[0]
        return _from_bits(bits << 16)
    value: float = struct.unpack(order + _CODES[dtype], data)[0]
    return value


def _from_bits(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def rounded(value: float, dtype: DType) -> float:
    """`value` rounded to `dtype`, once and to nearest even; what is too large becomes infinite."""
    if not math.isfinite(value) or dtype == F64:
        return value
    digits, least, most = _FORMS[dtype]
    last = max(math.frexp(value)[1] - digits, least)
    whole = round(math.ldexp(value, -last))  # of the last digit that stays
    if abs(whole) >= math.ldexp(1.0, most - last):
        return math.copysign(math.inf, value)
    return math.copysign(math.ldexp(whole, last), value)


def ends(fragments: Sequence[Fragment], itemsize: int) -> Iterator[tuple[int, int]]:
    """The element ranges at both ends of every fragment; of one of many rows, those of its first and last row."""
    for fragment in fragments:
        if not fragment.numel:
            continue
        block = fragment.block()
        first, last = block.start, block.start + (block.rows - 1) * block.pitch
        if first == last and block.count <= 2 * WIDTH:
            yield first, first + block.count
        else:
            yield first, first + min(WIDTH, block.count)
            yield last + block.count - min(WIDTH, block.count), last + block.count


_PART = 1 << 16


def _parts(numel: int) -> Iterator[tuple[int, int]]:
    """Element ranges that make up a tensor."""
    for start in range(0, numel, _PART):
        yield start, min(start + _PART, numel)


def _seen(entry: TensorEntry, replica: Replica) -> Iterator[tuple[int, int]]:
    """Element ranges at which a replica is compared."""
    return _parts(entry.numel) if replica.whole else ends(entry.fragments, entry.dtype.itemsize)


def first_difference(
    reader: ElementReader,
    master: tuple[Sequence[Fragment], DType],
    copy: tuple[Sequence[Fragment], DType],
    ranges: Iterable[tuple[int, int]] | None = None,
) -> tuple[int, float, float] | None:
    """The first element seen whose rounded master is not its copy, as (element, master, copy); None when all agree.

    `ranges` are the elements to look at; by default both ends of every fragment.
    """
    (fragments, dtype), (others, narrow) = master, copy
    if dtype not in _CODES or narrow not in _CODES:
        return None
    for start, stop in ends(fragments, dtype.itemsize) if ranges is None else ranges:
        values = reader.numbers(fragments, dtype, start, stop)
        copies = reader.numbers(others, narrow, start, stop)
        for index, (value, found) in enumerate(zip(values, copies, strict=True)):
            if rounded(value, narrow) != found and not (math.isnan(value) and math.isnan(found)):
                return start + index, value, found
    return None


def disagreements(catalog: Catalog) -> Iterator[tuple[TensorEntry, Replica, tuple[int, float, float]]]:
    """Tensors whose replicas do not hold the same numbers, with the first such replica and difference seen."""
    entries = [entry for entry in catalog.tensors.values() if entry.replicas]
    with ElementReader() as reader:
        for number, entry in enumerate(entries):
            if number % _AHEAD == 0:
                reader.fetch_ahead(entries[number : number + _AHEAD])
            for replica in entry.replicas:
                difference = first_difference(
                    reader,
                    (entry.fragments, entry.dtype),
                    (replica.fragments, replica.dtype),
                    _seen(entry, replica),
                )
                if difference is not None:
                    yield entry, replica, difference
                    break


def check(catalog: Catalog) -> int:
    """Makes sure that every replica agrees; returns how many tensors had one.

    Raises:
        InconsistentError: some do not.
    """
    bad = list(disagreements(catalog))
    if bad:
        raise _disagreement(catalog.source.path, [e.name for e, *_ in bad], *bad[0])
    return sum(bool(entry.replicas) for entry in catalog.tensors.values())


def _disagreement(
    path: str, names: list[str], entry: TensorEntry, replica: Replica, difference: tuple[int, float, float]
) -> InconsistentError:
    element, value, found = difference
    told = f"{len(names):,} tensors differ ({examples(names)}): element {element:,} of {entry.name!r} is {value!r} "
    if replica.rank:
        return InconsistentError(
            f"tensors that {replica.rank} holds otherwise than the first",
            file=path,
            found=f"{told} in one copy and {found!r} in the other",
            expected="they are copies of each other",
            remedy="Files of different saves are mixed, or the copies drifted apart in training. Nothing was written. "
            "A rule can average them: --tp-rules.",
        )
    return InconsistentError(
        "master weights that are not those of the model's own weights",
        file=path,
        found=f"{told} as a master and {found!r} as a weight",
        expected="the master rounded to the weight's dtype should be the weight",
        remedy="Files of different saves are mixed, or the layout is not understood. Nothing was written. "
        "--allow-unknown-layout converts all the same.",
    )
