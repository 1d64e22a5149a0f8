"""Orders what a scan reads of files: tensors for statistics, and everything for checksums."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.core.catalog import Catalog, Padding, TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.fragments import Fragment
from zckpt.core.plan import Move
from zckpt.core.stores import FileStore
from zckpt.engine.early import EarlyFile
from zckpt.engine.scan_requests import (
    AGAINST,
    CRC_OTHER,
    CRC_SOURCE,
    NUMBERS,
    ScanRequest,
    comparisons,
    request_of,
    request_of_bytes,
)


def _runs(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, stop) of parts of a file in order, with those joined that follow each other."""
    runs: list[tuple[int, int]] = []
    for start, nbytes in parts:
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + nbytes)
        else:
            runs.append((start, start + nbytes))
    return runs


class ScanOrder:
    """The scan requests for tensors and checksums, file by file, such that each byte is read once.

    A read for statistics also counts for the checksum if it is one dense run and no other request reads it (tied weights and
    views may share bytes). All other bytes are read only for the checksum. Places are kept in arrays of integers, because a
    large checkpoint has millions.

    Args:
        catalog: its tensors are looked at; None for none.
        wanted: (start, bytes) of the parts of files with checksums that are wanted.
        known: path -> (start, stop) of bytes with known checksums. If given, what is left of `wanted` is read apart
        from
            tensors.

    Attributes:
        entries: what is looked at; the number of a request is that of its entry here.
        spared_bytes: that were not asked for again, because they were read early.
    """

    def __init__(
        self,
        catalog: Catalog | None,
        wanted: Mapping[FileStore, Sequence[tuple[int, int]]],
        known: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        tensors = list(catalog.tensors.values()) if catalog is not None else []
        self.entries: list[TensorEntry | Padding] = [*tensors, *(catalog.zeros if catalog is not None else ())]
        self._wanted = {store.path: (store, _runs(parts)) for store, parts in wanted.items()}
        self._units: dict[str, array[int]] = {}  # path -> (byte offset, entry, fragment) of what begins there
        self._claims: dict[str, array[int]] = {}  # path -> (byte offset, end, unit) of dense runs
        self._count = 0
        self._early: dict[str, list[tuple[int, int]]] = {}  # path -> (start, stop) of bytes with known checksums
        self._finite: set[int] = set()  # units of which nothing else is to be found out
        self.spared_bytes = 0
        self._apart = known is not None
        for path, runs in (known or {}).items():
            for start, stop in runs:
                self._claims.setdefault(path, array("q")).extend((start, stop, -1))
        for number, entry in enumerate(self.entries):
            if isinstance(entry, TensorEntry) and entry.replicas:
                self._add_pair(number, entry)
            else:
                self._add_single(number, entry)
        self._shared = self._overlapping()

    def _add_single(self, number: int, entry: TensorEntry | Padding) -> None:
        for index, fragment in enumerate(entry.fragments):
            if fragment.numel:
                self._unit(fragment, number, index)
                if _is_dense(fragment):
                    self._claim(fragment.store, fragment.byte_offset, fragment.numel * entry.dtype.itemsize)
                self._count += 1

    def _add_pair(self, number: int, entry: TensorEntry) -> None:
        first = next((fragment for fragment in entry.fragments if fragment.numel), None)
        if first is None:
            return
        self._unit(first, number, _ALL)
        for request in self._pair_requests(number, entry):
            move, numel = request.move, request.move.count * request.move.rows
            in_source, in_other = _dense_sides(move)
            if in_source and move.tensor == number:
                self._claim(move.src, move.src_offset, numel * move.src_dtype.itemsize)
            if in_other:
                self._claim(move.dst, move.dst_offset, numel * move.dst_dtype.itemsize)
        self._count += 1

    def number_of(self, number: int, copy: int) -> int:
        """The number of the comparison of an entry with one of its copies. The first copy's counts for the entry
        itself.
        """
        return number + copy * len(self.entries)

    def _unit(self, fragment: Fragment, number: int, index: int) -> None:
        path = str(fragment.store)
        self._units.setdefault(path, array("q")).extend((fragment.byte_offset, number, index, self._count))

    def _claim(self, store: object, start: int, nbytes: int) -> None:
        if self._apart:
            return
        self._claims.setdefault(str(store), array("q")).extend((start, start + nbytes, self._count))

    def _overlapping(self) -> set[int]:
        """Units that share bytes with others."""
        shared: set[int] = set()
        for path in self._claims:
            end, last = 0, -1
            for start, stop, unit in _rows(self._claims[path], 3):
                if start < end:
                    shared.update((unit, last))
                if stop > end:
                    end, last = stop, unit
        return shared

    def _pair_requests(self, number: int, entry: TensorEntry) -> Iterator[ScanRequest]:
        """A tensor against its copy, and once more for each further copy."""
        for index, replica in enumerate(entry.replicas):
            yield from comparisons(replace(entry, replicas=()), entry.as_in(replica), self.number_of(number, index))

    def leave_out(self, early: Mapping[str, tuple[EarlyFile, list[tuple[int, int]]]]) -> None:
        """Leaves out what reading files early has found. `early`: path -> what was seen of it, and (start, stop) of the
        bytes with known checksums, in order.
        """
        for path, (file, runs) in early.items():
            self._early[path] = runs
            for _, number, index, unit in _rows(self._units.get(path, array("q")), 4):
                entry = self.entries[number]
                if index == _ALL or unit in self._shared or isinstance(entry, Padding) or entry.dtype != F32:
                    continue
                fragment = entry.fragments[index]
                start, stop = fragment.byte_offset, fragment.nbytes_end(F32.itemsize)
                if _is_dense(fragment) and not F32.swap(fragment.store.byteorder) and file.is_finite(start, stop):
                    self._finite.add(unit)

    def requests(self) -> Iterator[ScanRequest]:
        """All requests, file by file, in the order of each file."""
        for path in sorted(self._wanted.keys() | self._units.keys()):
            rest = self._unclaimed(path)
            gap = next(rest, None)
            for offset, number, index, unit in _rows(self._units.get(path, array("q")), 4):
                while gap is not None and gap.move.src_offset < offset:
                    yield gap
                    gap = next(rest, None)
                if unit not in self._finite:
                    yield from self._unit_requests(number, index, unit)
            while gap is not None:
                yield gap
                gap = next(rest, None)

    def _unit_requests(self, number: int, index: int, unit: int) -> Iterator[ScanRequest]:
        entry = self.entries[number]
        free = not self._apart and unit not in self._shared
        if index != _ALL:
            fragment = entry.fragments[index]
            how = NUMBERS | (CRC_SOURCE if free and _is_dense(fragment) else 0)
            yield request_of(fragment, entry.dtype, number, how)
            return
        assert isinstance(entry, TensorEntry)
        for request in self._pair_requests(number, entry):
            in_source, in_other = _dense_sides(request.move) if free else (False, False)
            in_source = in_source and request.move.tensor == number  # further copies read it again
            how = NUMBERS | AGAINST | (CRC_SOURCE if in_source else 0) | (CRC_OTHER if in_other else 0)
            yield request._replace(how=how)

    def _unclaimed(self, path: str) -> Iterator[ScanRequest]:
        """Requests for the wanted bytes of a file that no request for statistics covers."""
        if path not in self._wanted:
            return
        store, runs = self._wanted[path]
        first = 0
        for low, high in self._gaps(path, store.size):
            while first < len(runs) and runs[first][1] <= low:
                first += 1
            number = first
            while number < len(runs) and runs[number][0] < high:
                start, stop = runs[number]
                for first_byte, end in self._not_early(path, max(start, low), min(stop, high)):
                    yield request_of_bytes(store, first_byte, end - first_byte)
                number += 1

    def _not_early(self, path: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of a range of bytes that were not read early."""
        runs = self._early.get(path, [])
        for low, high in runs[bisect_right(runs, start, key=lambda run: run[1]) :]:
            if low >= stop:
                break
            if low > start:
                yield start, low
            self.spared_bytes += min(high, stop) - max(low, start)
            start = min(high, stop)
        if start < stop:
            yield start, stop

    def _gaps(self, path: str, size: int) -> Iterator[tuple[int, int]]:
        """The bytes of a file that no claim covers."""
        at = 0
        for start, stop, unit in _rows(self._claims.get(path, array("q")), 3):
            if unit in self._shared or unit in self._finite:
                continue
            if start > at:
                yield at, start
            at = max(at, stop)
        if at < size:
            yield at, size


_ALL = -1
"""The value in place of a fragment for a whole tensor, with its replicas."""


def _is_dense(fragment: Fragment) -> bool:
    return fragment.rows == 1 or (fragment.count == fragment.store_pitch and fragment.step == 1)


def _dense_sides(move: Move) -> tuple[bool, bool]:
    """Whether each side of a comparison is one run of bytes; the second must be in the machine's byte order too."""
    a, b = move.count * move.src_dtype.itemsize, move.count * move.dst_dtype.itemsize
    in_source = move.src_step == 1 and (move.rows == 1 or move.src_pitch == a)
    in_other = move.dst_step == 1 and (move.rows == 1 or move.dst_pitch == b)
    return in_source, in_other and not move.dst_dtype.swap(move.dst.byteorder)


def _rows(flat: array[int], width: int) -> Iterator[tuple[int, ...]]:
    """Rows of a flat array, sorted."""
    columns = [flat[i::width] for i in range(width)]
    order = sorted(range(len(columns[0])), key=columns[0].__getitem__)
    return zip(*(map(column.__getitem__, order) for column in columns), strict=True)
