"""Computes a tensor's new bytes from its old ones and its difference, piece by piece.

For `read`. Nothing is held but a piece, whatever the tensor's size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from zckpt.base.errors import CorruptError
from zckpt.containers.zstd import Decompressor
from zckpt.deltas.form import FRAME, Encoding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zckpt.core.folds import Bytes

try:
    from zckpt import _core
except ImportError:  # pragma: no cover - depends on the build
    _core = None  # type: ignore[assignment]

_READ_BYTES = 1 << 19
_BLOCK = 3 + (128 << 10)
"""The most bytes of a block."""

_POSITIONS = 1 << 16
"""The number of positions that are read at once."""


def difference(read: Callable[[int, int], bytes], file: str, name: str) -> Decompressor:
    """The frame of a tensor's difference; arguments as for `Decompressor`, and the tensor's name."""
    return Decompressor(read, file, f"the difference of tensor {name!r}", "Copy the delta's directory again.")


class XorDecoder:
    """The difference of all bytes.

    The engine reads the blocks that it makes itself (`csrc/renew.cpp`). From the first other one on, and where something is
    damaged, it is zstd that reads.
    """

    def __init__(self, nbytes: int, read: Callable[[int, int], bytes], file: str, name: str) -> None:
        self._read, self._file, self._name = read, file, name
        self._frame: Decompressor | None = None
        self._at = self._done = 0
        self._ended = False
        self._held = b""
        begin = FRAME + nbytes.to_bytes(8, "little")
        if _core is None or not self._more() or not self._held.startswith(begin):
            self._frame = difference(read, file, name)
        self._held = self._held[len(begin) :]

    def renew(self, data: Bytes) -> None:
        """Turns the tensor's next bytes into the new ones, in place. Raises CorruptError if the difference is damaged."""
        import numpy as np

        done = 0
        if self._ended:
            self._frame = self._frame or self._other()
        while self._frame is None and done < len(data):
            used, made, self._ended = _core.renew(self._held, data.ctypes.data + done, len(data) - done)
            done, self._done, self._held = done + made, self._done + made, self._held[used:]
            if done < len(data) and (self._ended or len(self._held) > _BLOCK or not self._more()):
                self._frame = self._other()
        if self._frame is not None and done < len(data):
            data[done:] ^= np.frombuffer(self._frame.take(len(data) - done), np.uint8)

    def end(self) -> None:
        """Raises CorruptError if the difference goes on beyond the tensor."""
        if self._frame is None and not self._ended:
            self._frame = self._other()
        if self._frame is not None:
            self._frame.end()

    def _more(self) -> bool:
        """Whether there is more of the frame, which is held then."""
        data = self._read(_READ_BYTES, self._at)
        self._at, self._held = self._at + len(data), self._held + data
        return bool(data)

    def _other(self) -> Decompressor:
        """The reader of all of zstd, where the engine has come to."""
        frame = difference(self._read, self._file, self._name)
        frame.skip(self._done)
        return frame


class OverwriteDecoder:
    """A frame with two readers: of the positions, and of the values behind them."""

    def __init__(self, positions: Decompressor, values: Decompressor, nbytes: int, file: str, name: str) -> None:
        self._positions, self._values = positions, values
        self._nbytes, self._file, self._name = nbytes, file, name
        self._left = int.from_bytes(positions.take(4), "little")
        if self._left > nbytes:
            raise self._damaged(f"{self._left:,} changed bytes", f"at most {nbytes:,}")
        values.skip(4 + 4 * self._left)
        self._at = 0
        self._last = -1
        self._ready: NDArray[np.int64] = self._next()

    def renew(self, data: Bytes) -> None:
        """As `XorDecoder.renew`."""
        import numpy as np

        stop = self._at + len(data)
        while len(self._ready):
            here = int(np.searchsorted(self._ready, stop))
            if here:
                values = np.frombuffer(self._values.take(here), np.uint8)
                data[self._ready[:here] - self._at] = values
            self._ready = self._ready[here:]
            if len(self._ready):
                break
            self._ready = self._next()
        self._at = stop

    def _next(self) -> NDArray[np.int64]:
        """The next positions, in ascending order; empty at the end."""
        import numpy as np

        some = min(self._left, _POSITIONS)
        found = np.frombuffer(self._positions.take(4 * some), "<u4").astype(np.int64)
        if some:
            if found[0] <= self._last or not bool(np.all(found[1:] > found[:-1])) or found[-1] >= self._nbytes:
                raise self._damaged(
                    "positions that do not rise, or are beyond its end", "each changed byte once, in order"
                )
            self._last = int(found[-1])
            self._left -= some
        return found

    def end(self) -> None:
        """As `XorDecoder.end`."""
        self._values.end()

    def _damaged(self, found: str, expected: str) -> CorruptError:
        return CorruptError(
            f"the difference of tensor {self._name!r} cannot be read", file=self._file, found=found, expected=expected,
            remedy="Copy the delta's directory again.",
        )  # fmt: skip


Decoder = XorDecoder | OverwriteDecoder


def decoder_of(encoding: Encoding, nbytes: int, read: Callable[[int, int], bytes], file: str, name: str) -> Decoder:
    """Begins to turn a tensor's `nbytes` old bytes into new ones, in order. `read` gives bytes of the compressed difference,
    given how many at most and the offset in it; `file` has it, for errors. Raises UnsupportedError if a package is not installed,
    CorruptError if the difference is damaged.
    """
    if encoding == "xor":
        return XorDecoder(nbytes, read, file, name)
    frames = (difference(read, file, name), difference(read, file, name))
    return OverwriteDecoder(*frames, nbytes, file, name)
