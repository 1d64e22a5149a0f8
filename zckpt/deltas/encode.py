"""The difference between two versions of a tensor, made piece by piece: compressed, with the checksum of the new bytes.

For `write` and `live.delta`. What is compressed is held in memory up to `_HELD_BYTES`, and beyond that in a file.

[Note: frames of zeros] The XOR of two versions is single bytes between zeros. The engine makes zstd blocks of it that say just
that (`csrc/difference.cpp`): 1.4 times the order-0 entropy of bf16 weights a step apart, where level 1 of zstd makes 2.0 and
level 12 makes 1.7. Without the engine it is level 1.
Source: RFC 8878, 3.1.1 (header of a frame).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.containers.zstd import Compressor
from zckpt.core.dtypes import DType
from zckpt.deltas.form import FRAME, MOST_POSITIONS, DeltaForm, Hasher, hasher_of

if TYPE_CHECKING:
    from zckpt.core.folds import Bytes

try:
    from zckpt import _core
except ImportError:  # pragma: no cover - depends on the build
    _core = None  # type: ignore[assignment]

_HELD_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor's difference.

    Attributes:
        name: of the tensor.
        digest: checksum of its new bytes.
        numel: its elements.
        changed: how many of them changed.
        data: the compressed difference; None if nothing changed.
        nbytes: of `data`.
    """

    name: str
    digest: str
    numel: int
    changed: int
    data: IO[bytes] | None
    nbytes: int

    def close(self) -> None:
        """Drops the data."""
        if self.data is not None:
            self.data.close()


class Encoder:
    """Takes a tensor's old and new bytes in order, and gives its difference. `directory`: for what does not fit into memory.
    Raises UnsupportedError if the form cannot say which bytes of so large a tensor changed, or a package is not installed.
    """

    def __init__(self, name: str, numel: int, dtype: DType, form: DeltaForm, directory: str) -> None:
        self._name, self._numel = name, numel
        nbytes = numel * dtype.itemsize
        self._hash: Hasher = hasher_of(form.checksum)()

        def hold() -> IO[bytes]:
            return tempfile.SpooledTemporaryFile(_HELD_BYTES, dir=directory)  # closed with the difference

        self._changed = 0
        self._stream: _Xor | _Overwrite
        if form.encoding == "xor":
            self._stream = _Xor(nbytes, dtype.itemsize, hold)
        else:
            if nbytes > MOST_POSITIONS:
                raise UnsupportedError(
                    f"tensor {name!r} is too large for an overwrite delta", found=f"{nbytes:,} bytes",
                    expected=f"at most {MOST_POSITIONS:,} bytes, as its positions have four bytes each",
                    remedy="Use --encoding xor.",
                )  # fmt: skip
            self._stream = _Overwrite(dtype.itemsize, hold)

    def feed(self, old: Bytes, new: Bytes) -> None:
        """Takes the next bytes of both versions, as many of each, whole elements."""
        self._hash.update(new.data)
        self._changed += self._stream.feed(old, new)

    def close(self) -> None:
        """Drops everything when no difference is wanted any more."""
        self._stream.close()

    def finish(self) -> TensorChange:
        """The difference, when all bytes were fed; the caller closes it."""
        data = self._stream.finish()
        nbytes = 0
        if data is not None:
            nbytes = data.tell()
            data.seek(0)
        return TensorChange(self._name, self._hash.hexdigest(), self._numel, self._changed, data, nbytes)


def _differences(old: Bytes, new: Bytes, width: int) -> tuple[Bytes, int]:
    """The XOR of both, and how many elements of `width` bytes differ."""
    import numpy as np

    kind = f"u{width}" if width in (1, 2, 4, 8) else "u1"
    difference = old.view(kind) ^ new.view(kind)
    if kind == "u1":
        return difference, int(np.count_nonzero(difference.reshape(-1, width).any(axis=1)))
    return difference.view(np.uint8), int(np.count_nonzero(difference))


class _Xor:
    """The difference of all bytes; see [Note: frames of zeros]."""

    def __init__(self, nbytes: int, width: int, hold: Callable[[], IO[bytes]]) -> None:
        self._width, self._left, self._data = width, nbytes, hold()
        self._any = False
        self._frame = Compressor(nbytes, self._data.write) if _core is None else None
        if self._frame is None:
            self._data.write(FRAME + nbytes.to_bytes(8, "little"))

    def feed(self, old: Bytes, new: Bytes) -> int:
        """Takes the next bytes of both versions; returns how many elements differ."""
        if self._frame is None:
            self._left -= len(new)
            ends = not self._left
            blocks, changed = _core.difference(old.ctypes.data, new.ctypes.data, len(new), self._width, ends)
            self._data.write(blocks)
        else:
            difference, changed = _differences(old, new, self._width)
            self._frame.feed(difference.data)
        self._any = self._any or bool(changed)
        return changed

    def finish(self) -> IO[bytes] | None:
        """The frame; None if nothing changed."""
        if not self._any:
            self.close()
            return None
        if self._frame is not None:
            self._frame.finish()
        return self._data

    def close(self) -> None:
        """Drops the frame."""
        self._data.close()


class _Overwrite:
    """The positions of the bytes that changed, and their new values."""

    def __init__(self, width: int, hold: Callable[[], IO[bytes]]) -> None:
        self._width, self._hold = width, hold
        self._positions, self._values = hold(), hold()
        self._at = self._count = 0

    def feed(self, old: Bytes, new: Bytes) -> int:
        """Takes the next bytes of both versions; returns how many elements differ."""
        import numpy as np

        difference, changed = _differences(old, new, self._width)
        if changed:
            found = np.flatnonzero(difference)
            self._positions.write((found + self._at).astype("<u4").view(np.uint8).data)
            self._values.write(new[found].data)
            self._count += len(found)
        self._at += len(new)
        return changed

    def close(self) -> None:
        """Drops positions and values."""
        self._positions.close()
        self._values.close()

    def finish(self) -> IO[bytes] | None:
        """The frame; None if nothing changed."""
        with self._positions, self._values:
            if not self._count:
                return None
            data = self._hold()
            frame = Compressor(4 + 5 * self._count, data.write)
            frame.feed(memoryview(self._count.to_bytes(4, "little")))
            for part in (self._positions, self._values):
                part.seek(0)
                while block := part.read(1 << 20):
                    frame.feed(memoryview(block))
            frame.finish()
            return data
