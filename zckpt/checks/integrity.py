"""Checks that files still have the bytes that were written: checksums, padding, and counts of NaN and infinity.

For `verify`. One pass over the files, each byte read once, in the order of the files: the CRCs of zip records, those of
whole files that a manifest names, counts of NaN and infinity, and the comparison of masters with their half-precision
copies all come from the same reads.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace

from zckpt.base.dataclass import dataclass
from zckpt.base.pace import Pace
from zckpt.checks.scan_order import ScanOrder
from zckpt.containers import TensorRef, torch_legacy, torch_zip
from zckpt.containers.container import Container, open_input
from zckpt.core.catalog import Catalog, Padding, Replica, TensorEntry
from zckpt.core.stores import FileStore
from zckpt.engine.checksums import Partial, join
from zckpt.engine.early import EarlyFile, EarlyReads
from zckpt.engine.scan import scan
from zckpt.engine.scan_requests import CrcRange
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
        """The file's name."""
        return os.path.basename(self.store.path)

    @property
    def large_bytes(self) -> int:
        """The bytes that `small_records` does not read."""
        if not self.records:
            return self.store.size - self.index_bytes
        return sum(nbytes for name, _, nbytes, _ in self.records if not _is_small(name, nbytes))


def checked_file(container: Container, crc32: int | None = None) -> CheckedFile:
    """A file that was opened, with the checksums it holds."""
    if container.kind == "torch_zip":
        return checked_parts(container.store, torch_zip.records(container.store.path), crc32)
    if container.kind == "nemo":
        return checked_parts(container.store, torch_legacy.records_of_nemo(container.store.path), crc32)
    refs = container.root.values() if container.kind == "safetensors" and isinstance(container.root, Mapping) else ()
    elements = sum(ref.nbytes for ref in refs if isinstance(ref, TensorRef))
    return CheckedFile(container.store, (), crc32, container.store.size - elements if refs else 0)


def checked_parts(
    store: FileStore, records: Sequence[tuple[str, int, int, int]], crc32: int | None = None
) -> CheckedFile:
    """A file with the records of zip files that it contains."""
    if not any(crc for *_, nbytes, crc in records if nbytes):
        records = ()  # torch.serialization.set_crc32_options(False)
    return CheckedFile(store, tuple(records), crc32)


def holding(files: Sequence[CheckedFile], entries: Iterable[TensorEntry]) -> tuple[list[CheckedFile], int]:
    """The files with only those of their records that hold elements of these tensors or of their copies, all of them whole
    where elements are computed from others; and the bytes of such elements without checksums.
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
    """Checks a zip file's pickle and its other small records: returns how many there are, and the names of damaged
    ones.
    """
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
        records: zip records with a checksum that was compared.
        wrong_records: (file name, record name) of those with other bytes than were written.
        wrong_files: names of files with other bytes than the manifest names.
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


@dataclass(frozen=True, slots=True)
class Done:
    """The parts of files that were read before: for each number among `sums_of` these files, and bytes in all."""

    crcs: Mapping[int, Sequence[Partial]]
    nbytes: int

    def runs(self, sums: Sequence[CrcRange]) -> dict[str, list[tuple[int, int]]]:
        """Path -> (start, stop) of the bytes that were read for checksums."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, parts in self.crcs.items():
            found.setdefault(sums[number].store.path, []).extend((at, at + nbytes) for at, nbytes, _ in parts)
        return found


def sums_of(files: Sequence[CheckedFile]) -> list[CrcRange]:
    """The ranges with CRCs that show whether these files are intact."""
    return [CrcRange(file.store, *part) for file in files for part in _parts(file)]


def examine(
    catalog: Catalog | None,
    files: Sequence[CheckedFile],
    pace: Pace,
    progress: Callable[[int], None] | None = None,
    read: Done | None = None,
    early: EarlyReads | None = None,
) -> Findings:
    """Reads every byte that is wanted of the files, for their checksums, and of the tensors in the catalog, which are
    counted and compared with their replicas. `read`: what was read of the files before; their other bytes alone are read
    for checksums. `early`: what reads some of them meanwhile; it is stopped. Raises CorruptError if a file ends too early,
    or cannot be read.
    """
    parts = [_parts(file) for file in files]
    sums = sums_of(files)
    known = None if read is None else read.runs(sums)
    order = ScanOrder(catalog, {file.store: own for file, own in zip(files, parts, strict=True)}, known)
    total = sum(nbytes for own in parts for _, nbytes in own) if read is None else 0
    seen = _Seen(sums, {} if early is None else early.stop())
    order.leave_out(seen.files)
    watch = None if progress is None else lambda nbytes: progress(nbytes + order.spared_bytes)
    report = scan(
        order.requests(), seen.left, relation=Relation(rounded=True), total_bytes=total, progress=watch, **pace
    )
    found_of = seen.joined(report.crcs)
    number, records = 0, 0
    wrong_records: list[tuple[str, str]] = []
    wrong_files: list[str] = []
    for file, own in zip(files, parts, strict=True):
        crcs = {}
        for start, nbytes in own:
            found = [*found_of.get(number, ()), *(read.crcs.get(number, ()) if read is not None else ())]
            crcs[start] = (start, nbytes, join(found, start, nbytes))
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
    bytes_read = report.bytes_read + order.spared_bytes + (0 if read is None else read.nbytes)
    return Findings(bytes_read, records, tuple(wrong_records), tuple(wrong_files), counted, copies, padding)


class _Seen:
    """The part of the wanted checksums that was read early.

    Args:
        sums: the ranges.
        early: what was seen of files.

    Attributes:
        files: path -> what was seen of it, and (start, stop) of the bytes with known checksums.
        left: what is left of the ranges.
    """

    def __init__(self, sums: Sequence[CrcRange], early: Mapping[tuple[tuple[int, int, int], int], EarlyFile]) -> None:
        self.files: dict[str, tuple[EarlyFile, list[tuple[int, int]]]] = {}
        self.left: list[CrcRange] = []
        self._numbers: list[int] = []  # of the ranges that `left` is of
        self._crcs: dict[int, list[Partial]] = {}
        for number, (store, start, nbytes) in enumerate(sums):
            low = high = stop = start + nbytes
            if (file := early.get((store.identity, store.size))) is not None:
                _, runs = self.files.setdefault(store.path, (file, []))
                low, high = file.run(start, stop)
                if low < high:
                    runs.append((low, high))
                    self._crcs[number] = file.parts(low, high)
                else:
                    low = high = stop
            for first, end in ((start, low), (high, stop)):
                if first < end:
                    self.left.append(CrcRange(store, first, end - first))
                    self._numbers.append(number)

    def joined(self, crcs: Mapping[int, Sequence[Partial]]) -> dict[int, list[Partial]]:
        """Number of each range -> all parts of it that were read; `crcs` are those of `left`."""
        for number, parts in crcs.items():
            self._crcs.setdefault(self._numbers[number], []).extend(parts)
        return self._crcs


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


def non_finite(counted: dict[str, Statistics]) -> dict[str, tuple[int, int]]:
    """Name -> (NaNs, infinities), where there are any."""
    return {name: (one.nan, one.inf) for name, one in counted.items() if one.nan or one.inf}


def numel_of(padding: Sequence[Padding]) -> int:
    """Elements of padding."""
    return sum(fragment.numel for pad in padding for fragment in pad.fragments)
