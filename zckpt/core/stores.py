"""Stores: the files and the memory that hold elements.

For fragments. Stores with computed elements know fragments, and so are elsewhere: `fragments.ComputedStore`, and
`recipes.DerivedStore`. No file is opened here.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from zckpt.base.dataclass import dataclass


class Store(Protocol):
    """A file or memory that holds elements."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    @property
    def byteorder(self) -> Literal["little", "big"]:
        """The byte order of the numbers."""

    @property
    def at_hand(self) -> bool:
        """Whether an engine reads the store itself; if not, it works on a copy in memory of what a batch needs."""


@dataclass(frozen=True, slots=True, eq=False)
class FileStore:
    """A file that holds elements.

    Attributes:
        path: where the file is.
        size: its size in bytes when it was opened.
        identity: (st_dev, st_ino, st_mtime_ns) when it was opened; the engine refuses a file that changed since.
        byteorder: byte order of the numbers in it.
        is_remote: whether `path` is an address.
        fellow: of a file that is missing, the path of the one that it is taken to be built as (`pictures.incomplete`); a single
            number may be read there. Empty for all others.
        at_hand: whether an engine reads it itself; if not, it works on a copy in memory of what a batch needs.
    """

    path: str
    size: int
    identity: tuple[int, int, int] = (0, 0, 0)
    byteorder: Literal["little", "big"] = "little"
    is_remote: bool = False
    fellow: str = ""

    @property
    def at_hand(self) -> bool:
        """As `Store.at_hand`."""
        return not self.is_remote

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True, eq=False)
class MemoryStore:
    """Memory that holds elements, in the machine's byte order.

    Attributes:
        address: of the first byte.
        size: in bytes.
        owner: whatever keeps the memory alive.
        place: the part of a file that it is; empty where it is none.
    """

    address: int
    size: int
    owner: object = None
    byteorder: Literal["little", "big"] = "little"
    place: str = ""
    at_hand: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.place or f"memory at {self.address:#x}"
