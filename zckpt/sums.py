"""CRC-32s of whole files, joined from those of their parts: what was taken while data passed by is not taken again.

For `mover`, which writes files, and `scan`, which reads them. The CRC of A followed by B follows from the CRCs of both and
the length of B, so parts may be done in any order, on any thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping

from zckpt.plan import OutputFile

try:
    from zckpt._core import crc32_combine
except ImportError:  # pragma: no cover - depends on the build

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
    """The CRC of bytes [start, start + nbytes) from those of its parts; where none is, the file has zeros."""
    crc, at = 0, start
    for offset, length, part in sorted(parts):
        crc = _after_zeros(crc, offset - at)
        crc = crc32_combine(crc, part, length)
        at = offset + length
    return _after_zeros(crc, start + nbytes - at)


def _after_zeros(crc: int, count: int) -> int:
    unit, length = zlib.crc32(b"\0"), 1
    while count:
        if count & 1:
            crc = crc32_combine(crc, unit, length)
        unit = crc32_combine(unit, unit, length)
        count, length = count >> 1, 2 * length
    return crc


def element_ranges(output: OutputFile) -> Iterator[tuple[int, int]]:
    """(start, bytes) of all that is no literal, cut wherever one of the file's checksums begins or ends."""
    cuts = sorted({edge for c in output.checksums for edge in (c.start, c.start + c.nbytes)})
    at = cut = 0
    for offset, data in (*sorted(output.literals), (output.size, b"")):
        while at < offset:
            while cut < len(cuts) and cuts[cut] <= at:
                cut += 1
            stop = min(offset, cuts[cut]) if cut < len(cuts) else offset
            yield at, stop - at
            at = stop
        at = offset + len(data)


def file_checksum(output: OutputFile, ranges: Mapping[int, Partial], slots: Mapping[int, bytes]) -> int:
    """The CRC of a whole output file.

    Args:
        output: the file.
        ranges: start -> part, for each of `element_ranges`.
        slots: byte offset -> bytes that were filled in later, over a literal.
    """
    parts = list(ranges.values())
    pending = sorted(slots.items(), reverse=True)
    for offset, data in sorted(output.literals):
        patched = bytearray(data)
        while pending and pending[-1][0] < offset + len(data):
            at, filled = pending.pop()
            patched[at - offset : at - offset + len(filled)] = filled
        parts.append((offset, len(data), zlib.crc32(patched)))
    return join(parts, 0, output.size)
