"""Which records a zip file holds, and where each one's bytes begin.

For `torch_zip`. This is a parser of its own, for three reasons: torch's files are read by offset, not by stream; a file must
have one meaning, so anything that two parsers could read differently (overlaps, doubled names, two directories that disagree)
is an error here; and opening a file must cost one read of the directory, and one of a local header for each record that is used.

[Note: how a zip file is read]
1. The end record, 22 bytes, is the last thing in the file (a comment may follow). It says where the directory is.
2. If a zip64 locator precedes it, that points to the zip64 end record, with the same figures in 64 bits.
3. The directory has an entry per record: name, size, CRC, and where its local header is. A figure of 0xFFFFFFFF means
that the zip64 extra field has it.
4. A record's bytes begin after its local header, a name and an extra field. Only the local header has the length of
the latter: torch pads with it, so that storages begin on multiples of 64 bytes.

Source: PKWARE APPNOTE 6.3.10, 4.3 and 4.5.3; torch writes it with miniz (caffe2/serialize/inline_container.cc).
"""

from __future__ import annotations

import struct
from operator import itemgetter
from typing import NamedTuple

from zckpt.base import limits
from zckpt.base.errors import CorruptError, UnsupportedError
from zckpt.containers.container import Input

LOCAL_HEADER = struct.Struct("<4s5H3L2H")
ENTRY = struct.Struct("<4s6H3L5H2L")
_READ = struct.Struct("<4s4x2H4x3L3H8xL")
"""Of an entry: signature, flags, method, CRC, packed size, size, lengths of name, extra field and comment, place."""
END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")

MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF


class Record(NamedTuple):
    """One record, as the directory describes it.

    Attributes:
        name: in the archive.
        header_offset: where its local header begins.
        nbytes: of its contents.
        crc: CRC-32 of them, as the directory says; torch has a setting that leaves it 0.
        method: 0 if it is not compressed.
        encrypted: whether it is encrypted.
        limit: where the next record, or the directory, begins.
    """

    name: str
    header_offset: int
    nbytes: int
    crc: int
    method: int
    encrypted: bool
    limit: int


class Directory:
    """The records of one zip file, by name. `file`: open for reading. Raises CorruptError if the directory is missing
    or contradicts itself.
    """

    def __init__(self, file: Input) -> None:
        self.file = file
        self.records: dict[str, Record] = {}
        self._offsets: dict[str, int] = {}
        start, nbytes, count = _find(file)
        if nbytes > limits.DIRECTORY_BYTES or count * limits.RECORD_COST > limits.PICKLE_COST:
            found = f"{count:,} records, {nbytes:,} bytes"
            raise UnsupportedError("the zip directory is too large", file=file.path, found=found, remedy=limits.REMEDY)
        entries = self._parse(file.read(start, nbytes, "the zip directory"), start, count)
        entries.sort(key=itemgetter(1))
        ends = [*(entry[1] for entry in entries[1:]), start]
        for (name, offset, size, crc, method, encrypted), limit in zip(entries, ends):
            if name in self.records:
                raise self.corrupt(f"two records called {name!r}", offset)
            if offset + LOCAL_HEADER.size + len(name) + size > limit:
                raise self.corrupt(f"record {name!r}, which overlaps the next one", offset)
            self.records[name] = Record(name, offset, size, crc, method, encrypted, limit)

    def _parse(self, data: bytes, start: int, count: int) -> list[tuple[str, int, int, int, int, bool]]:
        entries: list[tuple[str, int, int, int, int, bool]] = []
        unpack, at, end = _READ.unpack_from, 0, len(data)
        while at < end:
            try:
                signature, flags, method, crc, packed, nbytes, name_len, extra_len, comment_len, offset = unpack(
                    data, at
                )
                extra_at = at + _READ.size + name_len
                next_at = extra_at + extra_len + comment_len
                if signature != b"PK\x01\x02" or next_at > end:
                    raise ValueError("no entry, or one that is cut short")
                name = data[extra_at - name_len : extra_at].decode()
                if packed == MAX32 or nbytes == MAX32 or offset == MAX32:
                    wide = _zip64_field(data[extra_at : extra_at + extra_len])
                    nbytes = wide.pop(0) if nbytes == MAX32 else nbytes
                    packed = wide.pop(0) if packed == MAX32 else packed
                    offset = wide.pop(0) if offset == MAX32 else offset
                if method == 0 and packed != nbytes:
                    raise ValueError(f"{name!r} with {nbytes:,} bytes in {packed:,}")
            except (struct.error, ValueError, IndexError) as error:
                raise self.corrupt(f"entry {len(entries):,}: {error}", start + at) from error
            entries.append((name, offset, nbytes if method == 0 else packed, crc, method, bool(flags & 1)))
            at = next_at
        if len(entries) != count:
            raise self.corrupt(f"{len(entries):,} entries", start, f"{count:,}, as its end says")
        return entries

    def data_offset(self, name: str) -> int:
        """Where the bytes of a record begin. Raises CorruptError if there is no such record, or its local header
        contradicts the directory; UnsupportedError if it is compressed or encrypted.
        """
        known = self._offsets.get(name)
        if known is not None:
            return known
        record = self.records.get(name)
        if record is None:
            raise self.file.damaged(f"record {name!r} is missing", f"{len(self.records):,} other records")
        if record.method or record.encrypted:
            raise UnsupportedError(
                "is compressed" if record.method else "is encrypted", file=self.file.path, found=f"record {name!r}",
                expected="records that are stored as they are, as torch does",
                remedy="Unpack it, and save it again with torch.",
            )  # fmt: skip
        encoded = name.encode()
        header = self.file.read(record.header_offset, LOCAL_HEADER.size + len(encoded), f"record {name!r}")
        signature, *_, name_len, extra_len = LOCAL_HEADER.unpack_from(header)
        start = record.header_offset + LOCAL_HEADER.size + int(name_len) + int(extra_len)
        if signature != b"PK\x03\x04" or name_len != len(encoded) or header[LOCAL_HEADER.size :] != encoded:
            raise self.corrupt(f"no record {name!r} at byte {record.header_offset:,}", record.header_offset)
        if start + record.nbytes > record.limit:
            raise self.corrupt(f"record {name!r}, which overlaps the next one", record.header_offset)
        self._offsets[name] = start
        return start

    def read(self, name: str, limit: int) -> bytes:
        """The contents of a small record. Raises UnsupportedError if it has more than `limit` bytes."""
        start, nbytes = self.data_offset(name), self.records[name].nbytes
        if nbytes > limit:
            raise UnsupportedError(
                f"record {name!r} is too large", file=self.file.path, found=f"{nbytes:,} bytes",
                expected=f"at most {limit:,} bytes", remedy=limits.REMEDY,
            )  # fmt: skip
        return self.file.read(start, nbytes, f"record {name!r}")

    def corrupt(self, found: str, byte_offset: int, expected: str = "") -> CorruptError:
        """The error for a directory that contradicts itself or the records."""
        return self.file.damaged("the zip directory is damaged", found, expected, byte_offset)


def checksums_of(file: Input) -> list[int]:
    """Where the CRC-32 of each record is in the directory of a file that was read."""
    at, nbytes, _ = _find(file)
    found: list[int] = []
    end = at + nbytes
    while at < end:
        fields = ENTRY.unpack(file.read(at, ENTRY.size, "the zip directory"))
        found.append(at + 16)
        at += ENTRY.size + sum(fields[10:13])
    return found


def _find(file: Input) -> tuple[int, int, int]:
    """Where the directory begins, its number of bytes, and of entries; see [Note: how a zip file is read]."""
    for comment in (0, MAX16):  # torch writes no comment: the 64 KiB of one are read only if needed
        tail_at = max(0, file.size - END.size - comment - LOCATOR.size)
        tail = file.read(tail_at, file.size - tail_at, "the zip directory's end")
        at = tail.rfind(b"PK\x05\x06")
        while at >= 0 and (at + END.size > len(tail) or at + END.size + END.unpack_from(tail, at)[7] != len(tail)):
            at = tail.rfind(b"PK\x05\x06", 0, at)
        if at >= LOCATOR.size or (at >= 0 and not tail_at):
            break
    else:
        found = f"{file.size:,} bytes without a directory at the end"
        raise file.damaged("the zip file is cut short", found, byte_offset=file.size)
    _, disk, start_disk, here, count, nbytes, start, _ = END.unpack_from(tail, at)
    end = tail_at + at
    if at >= LOCATOR.size and tail.startswith(b"PK\x06\x07", at - LOCATOR.size):
        _, _, end, _ = LOCATOR.unpack_from(tail, at - LOCATOR.size)
        signature, _, _, _, disk64, start_disk64, here64, count64, nbytes64, start64 = END64.unpack(
            file.read(end, END64.size, "the zip64 directory's end")
        )
        figures = ((here, here64, MAX16), (count, count64, MAX16), (nbytes, nbytes64, MAX32), (start, start64, MAX32))
        if signature != b"PK\x06\x06" or not all(short in (wide, limit) for short, wide, limit in figures):
            raise file.damaged("the zip directory is damaged", "two ends that contradict each other", byte_offset=end)
        disk, start_disk, here, count, nbytes, start = disk64, start_disk64, here64, count64, nbytes64, start64
    if disk or start_disk or here != count or start + nbytes > end:
        found, expected = f"{count:,} entries in {nbytes:,} bytes at {start:,}", f"entries that end before byte {end:,}"
        raise file.damaged("the zip directory is damaged", found, expected, end)
    return start, nbytes, count


def _zip64_field(extra: bytes) -> list[int]:
    """The 64-bit figures of an entry's zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            return list(struct.unpack_from(f"<{min(nbytes, 24) // 8}Q", extra, at + 4))
        at += 4 + nbytes
    raise ValueError("no 64-bit figures")
