"""One opened file: what every reader of this package takes and returns.

For the readers. Every read has a length and a place, so a file that is too short is found here, for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Literal

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError
from zckpt.core.stores import FileStore
from zckpt.storage.location import Location, OpenFile, locate

_HEAD_BYTES, _TAIL_BYTES = 2048, 1024
"""In a small torch file, these bytes hold all but the tensor: its headers, its pickle and its directory."""

Kind = Literal["torch_zip", "torch_legacy", "torch_tar", "nemo", "safetensors", "gguf"]


@dataclass(frozen=True, slots=True)
class Container:
    """What one file holds.

    Attributes:
        kind: how its bytes are laid out.
        store: the file.
        root: the inert object in it, with a `TensorRef` for each tensor; for safetensors and GGUF a dict name -> TensorRef.
        metadata: texts that the container holds beside it.
        values: values of other kinds that it holds beside it.
    """

    kind: Kind
    store: FileStore
    root: object
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    values: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Input:
    """A file open for reading, or a part of one that is read as if it were a file.

    Attributes:
        location: of the file.
        file: the open file; its size and identity stay those of now, whatever its path names later.
        size: bytes of the part.
        base: where the part begins in the file; all offsets that readers ask for are relative to it.
        stores: the stores made so far, by byte order.
        ahead: (offset, bytes) of what was read beforehand.
    """

    location: Location
    file: OpenFile
    size: int
    base: int = 0
    stores: dict[str, FileStore] = field(default_factory=dict[str, FileStore], repr=False)
    ahead: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)

    @property
    def path(self) -> str:
        """Of the file, for messages."""
        return self.location.path

    def part(self, offset: int, nbytes: int, what: str) -> Input:
        """`nbytes` bytes at `offset`, as if they were a file; the bytes at its two ends are read at once. Raises
        CorruptError if the file ends before.
        """
        self._check_range(offset, nbytes, what)
        head = self.peek(offset, min(nbytes, _HEAD_BYTES))
        tail_at = max(len(head), nbytes - _TAIL_BYTES)
        ahead = ((0, head), (tail_at, self.peek(offset + tail_at, nbytes - tail_at)))
        return Input(self.location, self.file, nbytes, self.base + offset, self.stores, ahead)

    def read(self, offset: int, nbytes: int, what: str) -> bytes:
        """Exactly `nbytes` bytes at `offset`; `what` names them in the error. Raises CorruptError if the file ends
        before.
        """
        self._check_range(offset, nbytes, what)
        data = self.peek(offset, nbytes)
        if len(data) < nbytes:  # it shrank since it was opened
            raise self.cut_short(what, offset + nbytes)
        return data

    def _check_range(self, offset: int, nbytes: int, what: str) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise self.cut_short(what, offset + nbytes)

    def peek(self, offset: int, nbytes: int) -> bytes:
        """At most `nbytes` bytes at `offset`; fewer only at the end of the file."""
        nbytes = min(nbytes, max(0, self.size - offset))
        for start, known in self.ahead:
            if start <= offset and offset + nbytes <= start + len(known):
                return known[offset - start : offset - start + nbytes]
        return self.file.read(self.base + offset, nbytes)

    def cut_short(self, what: str, needed: int) -> CorruptError:
        """The error for a file that ends before its first `needed` bytes, and the last of them are `what`."""
        needed += self.base
        return self.damaged(
            f"ends before the end of {what}", f"{self.file.size:,} bytes", f"{needed:,} bytes or more", self.size
        )

    def damaged(self, what: str, found: str, expected: str = "", byte_offset: int = 0) -> CorruptError:
        """The error for bytes that contradict themselves; `byte_offset` is relative to `base`."""
        return CorruptError(
            what, file=self.path, found=found, expected=expected, remedy=COPY_AGAIN, byte_offset=self.base + byte_offset
        )

    def store(self, byteorder: Literal["little", "big"] = "little") -> FileStore:
        """The store of this file's bytes, the same one for all its parts."""
        if byteorder not in self.stores:
            identity, far = self.file.identity, self.location.is_remote
            self.stores[byteorder] = FileStore(
                self.path, self.file.size, identity, byteorder, far, self.location.fellow_path
            )
        return self.stores[byteorder]


@contextmanager
def open_input(path: str | os.PathLike[str]) -> Iterator[Input]:
    """Opens a regular file for reading. Raises NotACheckpointError if it does not exist, cannot be opened, or is not a
    regular file.
    """
    location = locate(path)
    with location.open() as file:
        yield Input(location, file, file.size)
