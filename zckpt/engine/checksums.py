"""CRC-32s of whole files, joined from those of their parts, which the engine computes while it moves or reads the data.

For `move`, which writes files, and `scan`, which reads them. The CRC of A followed by B follows from the CRCs of both and
the length of B, so parts may be done in any order, on any thread.
"""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from zckpt.core.plan import OutputFile
from zckpt.storage.descriptors import write_all

try:
    from zckpt._core import crc32 as _crc32
    from zckpt._core import crc32_combine
except ImportError:  # pragma: no cover - depends on the build
    from zlib import crc32 as _crc32  # type: ignore[assignment]

    def crc32_combine(a: int, b: int, nbytes_b: int) -> int:
        """The CRC of A followed by B."""
        power = 1 << 30  # x; squared three times: x^8, one byte
        for _ in range(3):
            power = _multiply(power, power)
        shift = 1 << 31
        while nbytes_b:
            if nbytes_b & 1:
                shift = _multiply(shift, power)
            power = _multiply(power, power)
            nbytes_b >>= 1
        return _multiply(shift, a) ^ b


def crc32(data: bytes | memoryview, crc: int = 0) -> int:
    """The CRC-32 of bytes that follow those of `crc`; faster than zlib's."""
    return _crc32(data, crc)


def _multiply(a: int, b: int) -> int:
    """Product modulo CRC-32's polynomial, both reflected."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ (0xEDB88320 if b & 1 else 0)
    return product


Partial = tuple[int, int, int]
"""(byte offset, bytes, CRC-32) of a part."""


def join(parts: Iterable[Partial], start: int, nbytes: int) -> int:
    """The CRC of bytes [start, start + nbytes) from those of the parts; bytes that no part covers are zeros."""
    crc, at = 0, start
    for offset, length, part in sorted(parts):
        crc = _after_zeros(crc, offset - at)
        crc = crc32_combine(crc, part, length)
        at = offset + length
    return _after_zeros(crc, start + nbytes - at)


def share(part: Partial, stop: int) -> int:
    """What a part adds to the CRC of a range that ends at `stop`.

    The CRC of a range is the exclusive or of that of as many zeros and of its parts' shares, in any order: so whoever knows some
    of the parts has one number to say, however many they are.
    """
    offset, length, crc = part
    return crc32_combine(crc ^ of_zeros(length), 0, stop - offset - length)


@lru_cache(1024)
def of_zeros(count: int) -> int:
    """The CRC of `count` zeros."""
    return _after_zeros(0, count)


def _after_zeros(crc: int, count: int) -> int:
    unit, length = zlib.crc32(b"\0"), 1
    while count:
        if count & 1:
            crc = crc32_combine(crc, unit, length)
        unit = crc32_combine(unit, unit, length)
        count, length = count >> 1, 2 * length
    return crc


def spans(output: OutputFile) -> Iterator[tuple[int, int, bytes | None]]:
    """A file's literals and what lies between them, in order, cut wherever one of its checksums begins or ends: (start, bytes,
    data), with None for data that is elements.
    """
    literals = sorted(output.literals)
    edges = {0, output.size}
    for checksum in output.checksums:
        edges |= {checksum.start, checksum.start + checksum.nbytes}
    for offset, data in literals:
        edges |= {offset, offset + len(data)}
    ahead = iter(literals)
    offset, data = next(ahead, (output.size, b""))
    for start, stop in pairwise(sorted(edges)):
        while offset + len(data) <= start:
            offset, data = next(ahead, (output.size, b""))
        yield start, stop - start, data[start - offset : stop - offset] if offset <= start else None


def element_ranges(output: OutputFile) -> Iterator[tuple[int, int]]:
    """(start, bytes) of all spans of elements: those with CRCs that are taken while they are written."""
    for start, nbytes, data in spans(output):
        if data is None:
            yield start, nbytes


def seal(fd: int, output: OutputFile, parts: Iterable[Partial] | None) -> tuple[int, dict[int, bytes]]:
    """Fills in the checksums of a file that has all its elements and literals.

    Args:
        fd: of the file, open for reading and writing.
        output: the file.
        parts: CRCs of its elements, each part within one of `element_ranges`; bytes that no part covers are zeros.
            None to read the file again.

    Returns:
        The CRC of the whole file, and what was filled in: byte offset -> bytes.

    Raises:
        OSError: the file cannot be read or written.
    """
    ordered = None if parts is None else sorted(parts)
    whole: list[Partial] = []
    for start, nbytes, data in spans(output):
        if data is not None:
            crc = zlib.crc32(data)
        elif ordered is None:
            crc = crc_of_file(fd, start, nbytes)
        else:
            crc = join(_between(ordered, start, start + nbytes), start, nbytes)
        whole.append((start, nbytes, crc))
    slots: dict[int, bytes] = {}
    for checksum in output.checksums:
        crc = join(_between(whole, checksum.start, checksum.start + checksum.nbytes), checksum.start, checksum.nbytes)
        slots.update(dict.fromkeys(checksum.slots, struct.pack("<I", crc)))
    if slots:
        for slot, data in slots.items():
            write_all(fd, data, slot)
        whole = _with_slots(whole, output, slots)
    return join(whole, 0, output.size), slots


def _between(parts: Sequence[Partial], start: int, stop: int) -> Sequence[Partial]:
    """Those of sorted parts that begin in [start, stop)."""
    return parts[bisect_left(parts, (start,)) : bisect_left(parts, (stop,))]


def crc_of_file(fd: int, start: int, nbytes: int) -> int:
    """The CRC of bytes of a file, which it reads."""
    crc, stop = 0, start + nbytes
    while start < stop and (data := os.pread(fd, min(stop - start, 1 << 20), start)):
        crc = crc32(data, crc)
        start += len(data)
    return crc


def _with_slots(whole: Sequence[Partial], output: OutputFile, slots: Mapping[int, bytes]) -> list[Partial]:
    """The CRCs of a file's spans when its slots, which lie in literals, have been filled in."""
    pending = sorted(slots.items(), reverse=True)
    found: list[Partial] = []
    for (start, nbytes, literal), part in zip(spans(output), whole, strict=True):
        if literal is None or not pending or pending[-1][0] >= start + nbytes:
            found.append(part)
            continue
        patched = bytearray(literal)
        while pending and pending[-1][0] < start + nbytes:
            at, data = pending.pop()
            patched[at - start : at - start + len(data)] = data
        found.append((start, nbytes, zlib.crc32(patched)))
    return found
