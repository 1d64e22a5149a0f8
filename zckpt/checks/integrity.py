"""Checks that files still have the bytes that were written: checksums, padding, and counts of NaN and infinity.

For `verify`. One pass over the files, each byte read once, in the order of the files: the CRCs of zip records, those of
whole files that a manifest names, counts of NaN and infinity, and the comparison of masters with their half-precision
copies all come from the same reads.
"""

from __future__ import annotations

import os
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zckpt.base.pace import Pace
from zckpt.containers import TensorRef, torch_zip
from zckpt.containers.container import Container, open_input
from zckpt.core.catalog import Catalog, Padding, Replica, TensorEntry
from zckpt.core.fragments import FileStore, Fragment
from zckpt.core.plan import Move
from zckpt.engine.checksums import join
from zckpt.engine.scan import scan
from zckpt.engine.scan_requests import (
    AGAINST,
    CRC_OTHER,
    CRC_SOURCE,
    NUMBERS,
    CrcRange,
    ScanRequest,
    comparisons,
    request_of,
    request_of_bytes,
)
from zckpt.engine.tensor_statistics import Relation, Statistics

_SMALL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A file and its known checksums.

    Attributes:
        store: the file.
        records: (name, byte offset, bytes, CRC-32) of a zip file's records; empty where it has no checksums.
        crc32: of the whole file, as a manifest has it.
        index_bytes: bytes that are not elements, where it has no records.
        whole: whether all its bytes are read; otherwise those of its records.
    """

    store: FileStore
    records: tuple[tuple[str, int, int, int], ...] = ()
    crc32: int | None = None
    index_bytes: int = 0
    whole: bool = True

    @property
    def name(self) -> str:
        """Of the file."""
        return os.path.basename(self.store.path)

    @property
    def large_bytes(self) -> int:
        """Bytes that `small_records` does not read."""
        if not self.records:
            return self.store.size - self.index_bytes
        return sum(nbytes for name, _, nbytes, _ in self.records if not _is_small(name, nbytes))


def checked_file(container: Container, crc32: int | None = None) -> CheckedFile:
    """A file that was opened, with the checksums it holds."""
    if container.kind == "torch_zip":
        return checked_parts(container.store, torch_zip.records(container.store.path), crc32)
    refs = container.root.values() if container.kind == "safetensors" and isinstance(container.root, Mapping) else ()
    elements = sum(ref.nbytes for ref in refs if isinstance(ref, TensorRef))
    return CheckedFile(container.store, (), crc32, container.store.size - elements if refs else 0)


def checked_parts(
    store: FileStore, records: Sequence[tuple[str, int, int, int]], crc32: int | None = None
) -> CheckedFile:
    """A file with these records of zip files in it."""
    if not any(crc for *_, nbytes, crc in records if nbytes):
        records = ()  # torch.serialization.set_crc32_options(False)
    return CheckedFile(store, tuple(records), crc32)


def holding(files: Sequence[CheckedFile], entries: Iterable[TensorEntry]) -> tuple[list[CheckedFile], int]:
    """The files with only those of their records that hold elements of these tensors or of their copies.

    Returns:
        The files that have checksums of such elements, all of them whole where elements are computed from others; and the
        bytes of such elements without checksums.
    """
    starts = {file.store.path: sorted(offset for _, offset, _, _ in file.records) for file in files}
    found: dict[str, set[int]] = {file.store.path: set() for file in files}
    without = 0
    for entry in entries:
        for fragments, dtype in ((entry.fragments, entry.dtype), *((r.fragments, r.dtype) for r in entry.replicas)):
            for fragment in fragments:
                if not isinstance(fragment.store, FileStore):
                    return list(files), 0
                if own := starts.get(fragment.store.path):
                    first = max(0, bisect_right(own, fragment.byte_offset) - 1)
                    last = bisect_left(own, fragment.nbytes_end(dtype.itemsize))
                    found[fragment.store.path].update(own[first:last])
                else:
                    without += fragment.numel * dtype.itemsize
    held = [
        replace(file, records=tuple(record for record in file.records if record[1] in offsets), whole=False)
        for file in files
        if (offsets := found[file.store.path])
    ]
    return held, without


def small_records(file: CheckedFile) -> tuple[int, list[str]]:
    """Checks a zip file's pickle and whatever else of it is small: how many records, and names of those that are wrong."""
    wrong: list[str] = []
    count = 0
    with open_input(file.store.path) as data:
        for name, offset, nbytes, crc in file.records:
            if _is_small(name, nbytes):
                count += 1
                if zlib.crc32(data.read(offset, nbytes, f"record {name!r}")) != crc:
                    wrong.append(name)
    return count, wrong


def _is_small(record: str, nbytes: int) -> bool:
    return nbytes <= _SMALL_BYTES or record.endswith("/data.pkl")


@dataclass(frozen=True, slots=True)
class Findings:
    """What one pass over files found.

    Attributes:
        bytes_read: in all.
        records: zip records whose checksum was compared.
        wrong_records: (file name, record name) of those whose bytes are not what was written.
        wrong_files: names of files whose bytes are not those that the manifest names.
        tensors: for each tensor of the catalog, what was counted; tied ones once.
        copies: (tensor, replica, comparison of the two); a master is rounded before.
        padding: the same as for tensors, for each padding that must be zero.
    """

    bytes_read: int
    records: int
    wrong_records: tuple[tuple[str, str], ...]
    wrong_files: tuple[str, ...]
    tensors: dict[str, Statistics] = field(default_factory=dict[str, Statistics])
    copies: tuple[tuple[str, Replica, Statistics], ...] = ()
    padding: tuple[Statistics, ...] = ()


def examine(
    catalog: Catalog | None,
    files: Sequence[CheckedFile],
    pace: Pace,
    progress: Callable[[int], None] | None = None,
) -> Findings:
    """Reads every byte that is wanted of the files, and of the tensors in the catalog.

    Args:
        catalog: whose numbers are counted and compared with their replicas; None for checksums alone.
        files: whose checksums are compared.
        pace: how hard to work.
        progress: called with the bytes read so far.

    Raises:
        CorruptError: a file ends too early, or cannot be read.
    """
    parts = [_parts(file) for file in files]
    sums = [CrcRange(file.store, *part) for file, own in zip(files, parts, strict=True) for part in own]
    order = _ScanOrder(catalog, {file.store: own for file, own in zip(files, parts, strict=True)})
    total = sum(nbytes for own in parts for _, nbytes in own)
    report = scan(order.requests(), sums, relation=Relation(rounded=True), total_bytes=total, progress=progress, **pace)
    number, records = 0, 0
    wrong_records: list[tuple[str, str]] = []
    wrong_files: list[str] = []
    for file, own in zip(files, parts, strict=True):
        crcs = {}
        for start, nbytes in own:
            crcs[start] = (start, nbytes, join(report.crcs.get(number, ()), start, nbytes))
            number += 1
        for name, offset, nbytes, crc in file.records:
            records += 1
            if nbytes and crcs[offset][2] != crc:
                wrong_records.append((file.name, name))
        if file.crc32 is not None and join(crcs.values(), 0, file.store.size) != file.crc32:
            wrong_files.append(file.name)
    entries = order.entries
    counted = {e.name: report.of(i) for i, e in enumerate(entries) if isinstance(e, TensorEntry)}
    padding = tuple(report.of(i) for i, e in enumerate(entries) if isinstance(e, Padding))
    copies = tuple(
        (e.name, replica, report.of(order.number_of(i, copy)))
        for i, e in enumerate(entries)
        if isinstance(e, TensorEntry)
        for copy, replica in enumerate(e.replicas)
    )
    return Findings(report.bytes_read, records, tuple(wrong_records), tuple(wrong_files), counted, copies, padding)


def _parts(file: CheckedFile) -> list[tuple[int, int]]:
    """(start, bytes) of the parts of a file that are read: its records and, of a whole file, what is between them."""
    parts: list[tuple[int, int]] = []
    at = 0
    for _, offset, nbytes, _ in sorted(file.records, key=lambda record: record[1]):
        if offset > at and file.whole:
            parts.append((at, offset - at))
        if nbytes:
            parts.append((offset, nbytes))
        at = offset + nbytes
    if at < file.store.size and file.whole:
        parts.append((at, file.store.size - at))
    return parts


def _runs(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, stop) of parts of a file in order, with those joined that follow each other."""
    runs: list[tuple[int, int]] = []
    for start, nbytes in parts:
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + nbytes)
        else:
            runs.append((start, start + nbytes))
    return runs


class _ScanOrder:
    """The scan requests for tensors and checksums, file by file, such that each byte is read once.

    A read for statistics also counts for the checksum if it is one dense run and no other request reads it (tied weights and
    views may share bytes). All other bytes are read only for the checksum. Places are kept in arrays of integers, because a
    large checkpoint has millions.
    """

    def __init__(self, catalog: Catalog | None, wanted: Mapping[FileStore, Sequence[tuple[int, int]]]) -> None:
        tensors = list(catalog.tensors.values()) if catalog is not None else []
        self.entries: list[TensorEntry | Padding] = [*tensors, *(catalog.zeros if catalog is not None else ())]
        self._wanted = {store.path: (store, _runs(parts)) for store, parts in wanted.items()}
        self._units: dict[str, array[int]] = {}  # path -> (byte offset, entry, fragment) of what begins there
        self._claims: dict[str, array[int]] = {}  # path -> (byte offset, end, unit) of dense runs
        self._count = 0
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
        """Of the comparison of an entry with one of its copies. That with the first one counts for the entry itself."""
        return number + copy * len(self.entries)

    def _unit(self, fragment: Fragment, number: int, index: int) -> None:
        path = str(fragment.store)
        self._units.setdefault(path, array("q")).extend((fragment.byte_offset, number, index, self._count))

    def _claim(self, store: object, start: int, nbytes: int) -> None:
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
            copy = replace(entry, dtype=replica.dtype, fragments=replica.fragments, replicas=())
            yield from comparisons(replace(entry, replicas=()), copy, self.number_of(number, index))

    def requests(self) -> Iterator[ScanRequest]:
        """All requests, file by file, in the order of each file."""
        for path in sorted(self._wanted.keys() | self._units.keys()):
            rest = self._unclaimed(path)
            gap = next(rest, None)
            for offset, number, index, unit in _rows(self._units.get(path, array("q")), 4):
                while gap is not None and gap.move.src_offset < offset:
                    yield gap
                    gap = next(rest, None)
                yield from self._unit_requests(number, index, unit)
            while gap is not None:
                yield gap
                gap = next(rest, None)

    def _unit_requests(self, number: int, index: int, unit: int) -> Iterator[ScanRequest]:
        entry = self.entries[number]
        free = unit not in self._shared
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
                yield request_of_bytes(store, max(start, low), min(stop, high) - max(start, low))
                number += 1

    def _gaps(self, path: str, size: int) -> Iterator[tuple[int, int]]:
        """The bytes of a file that no claim covers."""
        at = 0
        for start, stop, unit in _rows(self._claims.get(path, array("q")), 3):
            if unit in self._shared:
                continue
            if start > at:
                yield at, start
            at = max(at, stop)
        if at < size:
            yield at, size


_ALL = -1
"""In place of a fragment: the whole tensor, with its replicas."""


def _is_dense(fragment: Fragment) -> bool:
    return fragment.rows == 1 or (fragment.count == fragment.store_pitch and fragment.step == 1)


def _dense_sides(move: Move) -> tuple[bool, bool]:
    """Whether each side of a comparison is one run of bytes; those of the second are seen after they were swapped."""
    a, b = move.count * move.src_dtype.itemsize, move.count * move.dst_dtype.itemsize
    in_source = move.src_step == 1 and (move.rows == 1 or move.src_pitch == a)
    in_other = move.dst_step == 1 and (move.rows == 1 or move.dst_pitch == b)
    return in_source, in_other and not move.dst_dtype.swap(move.dst.byteorder)


def _rows(flat: array[int], width: int) -> Iterator[tuple[int, ...]]:
    """Rows of a flat array, sorted."""
    columns = [flat[i::width] for i in range(width)]
    for row in sorted(range(len(columns[0])), key=columns[0].__getitem__):
        yield tuple(column[row] for column in columns)


def non_finite(counted: dict[str, Statistics]) -> dict[str, tuple[int, int]]:
    """Name -> (NaNs, infinities), where there are any."""
    return {name: (one.nan, one.inf) for name, one in counted.items() if one.nan or one.inf}


def numel_of(padding: Sequence[Padding]) -> int:
    """Elements of padding."""
    return sum(fragment.numel for pad in padding for fragment in pad.fragments)
