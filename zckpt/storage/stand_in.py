"""A file that is missing, seen as if it were built like another one: its headers are read from there, and no element ever is.

For `pictures.incomplete`, which draws what a missing file would hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from zckpt.base.dataclass import dataclass
from zckpt.core.stores import FileStore
from zckpt.storage.location import Location, OpenFile


@dataclass(frozen=True, repr=False)
class StandIn(Location):
    """A missing file with the headers of `fellow`. Its stores name `path`, so reading elements from them fails.
    `fellow`: a file that is there.
    """

    fellow: Location

    @property
    def fellow_path(self) -> str:  # noqa: D102
        return self.fellow.path

    @property
    def parent(self) -> Location:  # noqa: D102
        return self.fellow.parent

    def __truediv__(self, name: str) -> Location:
        return self.fellow / name

    def absolute(self) -> Location:  # noqa: D102
        return self

    def resolved(self) -> Location:  # noqa: D102
        return self

    def refreshed(self) -> Location:  # noqa: D102
        return self

    def is_file(self) -> bool:  # noqa: D102
        return True

    def is_dir(self) -> bool:  # noqa: D102
        return False

    def is_readable(self) -> bool:  # noqa: D102
        return False

    def names(self) -> list[str]:  # noqa: D102
        return []

    def kinds(self) -> dict[str, str]:  # noqa: D102
        return {}

    def file_names(self, below: Sequence[str] = ()) -> list[str]:  # noqa: D102
        return []

    def size(self) -> int:  # noqa: D102
        return self.fellow.size()

    def state(self) -> tuple[int, ...]:  # noqa: D102
        return self.fellow.state()

    def written_s(self) -> float | None:  # noqa: D102
        return None

    def open(self) -> OpenFile:  # noqa: D102
        return self.fellow.open()

    def read(self, nbytes: int | None = None, offset: int = 0) -> bytes:  # noqa: D102
        return self.fellow.read(nbytes, offset)

    def store(self, byteorder: Literal["little", "big"] = "little") -> FileStore:  # noqa: D102
        return FileStore(self.path, self.size(), byteorder=byteorder, fellow=self.fellow.path)

    def relative_to(self, directory: Location) -> str:  # noqa: D102
        return self.name

    def is_within(self, directory: Location) -> bool:  # noqa: D102
        return self.path == directory.path
