"""zstd streams: frames of level 1 with a size that is known before, written and read in pieces.

For `deltas` and for Orbax's arrays. By the package `zstandard`, or by Python's own `compression.zstd` (3.14), whichever is there.

[Note: one frame] SGLang reads one frame, and has to know its size before: it cannot decompress one that does not say it.
Source: python-zstandard 0.25 (`compressobj(size)`), Python 3.14 (`compression.zstd`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from zckpt.base.errors import COPY_AGAIN, CorruptError, UnsupportedError

LEVEL = 1
"""Higher levels make differences little smaller, and take much longer."""

_READ_BYTES = 1 << 18


class Compressor:
    """Makes one frame of `nbytes` bytes.

    Args:
        nbytes: of what is compressed, in all.
        write: takes the frame's next bytes.

    Raises:
        UnsupportedError: no package is there.
    """

    def __init__(self, nbytes: int, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._stream: Any = _native_compressor(nbytes) or _packaged_compressor(nbytes)

    def feed(self, data: memoryview) -> None:
        """Compresses the next bytes."""
        if made := self._stream.compress(data):
            self._write(made)

    def finish(self) -> None:
        """Ends the frame, which has `nbytes` bytes now."""
        self._write(self._stream.flush())


class Decompressor:
    """Reads one frame in pieces of any size, and holds no more of it than is asked for.

    Args:
        read: gives bytes of the frame, given how many at most and the offset in it; none at its end.
        file: that it is in, for errors.
        what: the frame is, for errors.
        remedy: for one that is damaged.

    Raises:
        UnsupportedError: no package is there.
    """

    def __init__(self, read: Callable[[int, int], bytes], file: str, what: str, remedy: str = COPY_AGAIN) -> None:
        self._file, self._what, self._remedy = file, what, remedy
        read_next = _in_order(read)
        self._read_some: Callable[[int], bytes] = _native_reader(read_next) or _packaged_reader(read_next)

    def take(self, nbytes: int) -> bytes:
        """Exactly the next `nbytes` bytes. Raises CorruptError if the frame is damaged or ends before."""
        parts: list[bytes] = []
        while nbytes:
            part = self.some(nbytes)
            if not part:
                raise self._damaged("a frame that ends before its tensor does")
            parts.append(part)
            nbytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def skip(self, nbytes: int) -> None:
        """Skips the next bytes; errors as in `take`."""
        while nbytes:
            nbytes -= len(self.take(min(nbytes, 1 << 20)))

    def drain(self) -> int:
        """The number of bytes that follow; errors as in `take`."""
        nbytes = 0
        while part := self.some(1 << 20):
            nbytes += len(part)
        return nbytes

    def end(self) -> None:
        """Raises CorruptError if anything follows the bytes that were taken."""
        if self.some(1):
            raise self._damaged("a frame that is longer than its tensor")

    def some(self, nbytes: int) -> bytes:
        """At most the next `nbytes` bytes, and none only at the end; errors as in `take`."""
        try:
            data = self._read_some(nbytes)
        except (OSError, CorruptError):
            raise
        except Exception as error:  # each package has an error of its own
            raise self._damaged(f"no zstd frame: {error}") from error
        return data

    def _damaged(self, found: str) -> CorruptError:
        return CorruptError(f"{self._what} cannot be read", file=self._file, found=found, remedy=self._remedy)


def frame_bytes(header: bytes) -> int | None:
    """The number of bytes in a frame, by its first 18 bytes; None if it does not record it. Source: RFC 8878, 3.1.1.1."""
    if len(header) < 5 or header[:4] != b"\x28\xb5\x2f\xfd":
        return None
    flag, single = header[4] >> 6, header[4] >> 5 & 1
    at = 5 + (0 if single else 1) + (0, 1, 2, 4)[header[4] & 3]
    width = (1 if single else 0, 2, 4, 8)[flag]
    value = int.from_bytes(header[at : at + width], "little")
    return value + (256 if width == 2 else 0) if width else None


def _in_order(read: Callable[[int, int], bytes]) -> Callable[[int], bytes]:
    """What gives the next bytes of a frame, by what gives those at an offset."""
    at = 0

    def read_next(nbytes: int) -> bytes:
        nonlocal at
        data = read(nbytes, at)
        at += len(data)
        return data

    return read_next


def _missing() -> UnsupportedError:
    return UnsupportedError(
        "what is compressed with zstd needs the package zstandard, which is not installed",
        remedy="Run: pip install zstandard.",
    )


def _native_compressor(nbytes: int) -> Any:
    try:
        from compression import zstd
    except ImportError:
        return None
    stream = zstd.ZstdCompressor(level=LEVEL)
    stream.set_pledged_input_size(nbytes)
    return stream


def _packaged_compressor(nbytes: int) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise _missing() from error
    return zstandard.ZstdCompressor(level=LEVEL).compressobj(size=nbytes)


def _native_reader(read_next: Callable[[int], bytes]) -> Callable[[int], bytes] | None:
    """What reads a frame by Python's own package: gives at most so many bytes, none at its end; None without the package."""
    try:
        from compression import zstd
    except ImportError:
        return None
    stream: Any = zstd.ZstdDecompressor()

    def read(nbytes: int) -> bytes:
        while not stream.eof:
            data = read_next(_READ_BYTES) if stream.needs_input else b""
            if stream.needs_input and not data:
                break
            made: bytes = stream.decompress(data, nbytes)
            if made:
                return made
        return b""

    return read


def _packaged_reader(read_next: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """As `_native_reader`, by the package `zstandard`. Raises UnsupportedError without it."""
    try:
        import zstandard
    except ImportError as error:
        raise _missing() from error
    source = cast(Any, SimpleNamespace(read=read_next))
    return zstandard.ZstdDecompressor().stream_reader(source, read_size=_READ_BYTES).read
