"""The difference between two versions of a tensor, made piece by piece: compressed, with the checksum of the new bytes.

For `write` and `live.delta`. Nothing is compressed before the first byte that changed, so that a tensor without changes costs two
reads and a checksum. What is compressed is held in memory up to `_HELD_BYTES`, and beyond that in a file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.containers.zstd import Compressor
from zckpt.core.dtypes import DType
from zckpt.deltas.form import MOST_POSITIONS, DeltaForm, Hasher, hasher_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_HELD_BYTES = 16 << 20
_ZEROS = bytes(1 << 20)


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
    """Takes a tensor's old and new bytes in order, and gives its difference.

    Args:
        name: of the tensor.
        numel: its elements.
        dtype: of both versions.
        form: of the delta.
        directory: for what does not fit into memory.

    Raises:
        UnsupportedError: the form cannot say which bytes of so large a tensor changed, or a package is not installed.
    """

    def __init__(self, name: str, numel: int, dtype: DType, form: DeltaForm, directory: str) -> None:
        self._name, self._numel, self._dtype = name, numel, dtype
        self._nbytes = numel * dtype.itemsize
        self._hash: Hasher = hasher_of(form.checksum)()
        self._hold: Callable[[], IO[bytes]] = lambda: tempfile.SpooledTemporaryFile(_HELD_BYTES, dir=directory)  # noqa: SIM115  # closed with the difference
        self._changed = 0
        self._stream: _Xor | _Overwrite
        if form.encoding == "xor":
            self._stream = _Xor(self._nbytes, self._hold)
        else:
            if self._nbytes > MOST_POSITIONS:
                raise UnsupportedError(
                    f"tensor {name!r} is too large for an overwrite delta", found=f"{self._nbytes:,} bytes",
                    expected=f"at most {MOST_POSITIONS:,} bytes, as its positions have four bytes each",
                    remedy="Use --encoding xor.",
                )  # fmt: skip
            self._stream = _Overwrite(self._hold)

    def feed(self, old: Bytes, new: Bytes) -> None:
        """Takes the next bytes of both versions, as many of each, whole elements."""
        import numpy as np

        self._hash.update(new.data)
        width = self._dtype.itemsize
        kind = f"u{width}" if width in (1, 2, 4, 8) else "u1"
        difference = old.view(kind) ^ new.view(kind)
        changed = int(np.count_nonzero(difference))
        if kind == "u1" and width > 1:
            changed = int(np.count_nonzero(difference.reshape(-1, width).any(axis=1)))
        self._changed += changed
        self._stream.feed(difference.view(np.uint8), new, changed=bool(changed))

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


class _Xor:
    """The difference of all bytes."""

    def __init__(self, nbytes: int, hold: Callable[[], IO[bytes]]) -> None:
        self._nbytes, self._hold = nbytes, hold
        self._zeros = 0
        self._frame: Compressor | None = None
        self._data: IO[bytes] | None = None

    def feed(self, difference: Bytes, new: Bytes, *, changed: bool) -> None:
        """Takes the next bytes of the difference."""
        if self._frame is None:
            if not changed:
                self._zeros += len(difference)
                return
            self._data = self._hold()
            self._frame = Compressor(self._nbytes, self._data.write)
            while self._zeros:
                some = min(self._zeros, len(_ZEROS))
                self._frame.feed(memoryview(_ZEROS)[:some])
                self._zeros -= some
        self._frame.feed(difference.data)

    def finish(self) -> IO[bytes] | None:
        """The frame; None if nothing changed."""
        if self._frame is not None:
            self._frame.finish()
        return self._data

    def close(self) -> None:
        """Drops the frame."""
        if self._data is not None:
            self._data.close()


class _Overwrite:
    """The positions of the bytes that changed, and their new values."""

    def __init__(self, hold: Callable[[], IO[bytes]]) -> None:
        self._hold = hold
        self._positions, self._values = hold(), hold()
        self._at = self._count = 0

    def feed(self, difference: Bytes, new: Bytes, *, changed: bool) -> None:
        """Takes the next bytes."""
        import numpy as np

        if changed:
            found = np.flatnonzero(difference)
            self._positions.write((found + self._at).astype("<u4").view(np.uint8).data)
            self._values.write(new[found].data)
            self._count += len(found)
        self._at += len(new)

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
