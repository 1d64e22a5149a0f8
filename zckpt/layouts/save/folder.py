"""A directory that is looked into, listed once: what is in it, and what is in the directories in it.

For `places` and what it asks. Families are asked about names alone, and these are here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import ZckptError
from zckpt.layouts.save.listing import as_listed, natural
from zckpt.storage.location import Location


@dataclass(frozen=True, slots=True)
class Folder:
    """A directory, and its entries.

    Attributes:
        path: of the directory.
        kinds: name -> "file", "directory" or another word, of all entries, in natural order.
    """

    path: Location
    kinds: Mapping[str, str]
    _inside: dict[str, Folder | None] = field(default_factory=dict[str, "Folder | None"], repr=False)
    _above: Folder | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The last part of its absolute path."""
        return self.path.name

    @property
    def names(self) -> Sequence[str]:
        """The names of all entries, in natural order."""
        return tuple(self.kinds)

    def has_file(self, name: str) -> bool:
        """Whether an entry is a file."""
        return self.kinds.get(name) == "file"

    def inside(self, name: str) -> Folder | None:
        """A directory in it, listed when first asked for; None for anything else, or if it cannot be listed."""
        if name not in self._inside:
            self._inside[name] = None
            if self.kinds.get(name) == "directory":
                with suppress(ZckptError):
                    self._inside[name] = replace(list_folder(self.path / name), _above=self)
        return self._inside[name]

    def above(self) -> Folder:
        """The directory that it is in. Raises NotACheckpointError if that cannot be listed."""
        if self._above is not None:
            return self._above
        above = list_folder(self.path.absolute().parent)
        above._inside[self.name] = self
        return above

    def directories(self, pattern: re.Pattern[str]) -> list[str]:
        """Names of the directories in it that match, in natural order."""
        return [name for name, kind in self.kinds.items() if kind == "directory" and pattern.fullmatch(name)]

    def files(self, below: Sequence[str] = ()) -> list[str]:
        """Names of the files in it, and `NAME/...` of all under each directory `NAME` of `below`."""
        names = [name for name, kind in self.kinds.items() if kind == "file"]
        inner = [name for name in below if self.kinds.get(name) == "directory"]
        return names + [name for name in self.path.file_names(inner) if "/" in name] if inner else names


def list_folder(path: Location) -> Folder:
    """A directory, listed. Raises NotACheckpointError if it cannot be listed."""
    with as_listed(path):
        kinds = path.kinds()
    return Folder(path, {name: kinds[name] for name in sorted(kinds, key=natural)})
