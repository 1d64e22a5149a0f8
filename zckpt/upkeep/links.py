"""Which saves of a run are led into by what else is there: by symbolic links, at any depth, by mounts, and by adapters' configs.

For `prune`: a save that is verified through a link consists of the files that the link leads to, so these stay with it. Every
step of a link's way counts, for a link may lead through one save into another. Of links outside the run, nothing is known.
An adapter is of no use without the base that its config names. A relative path there counts from the directory that a script
was started in, which nothing records: so every directory above the config is tried, and this process's own.
Source: peft 0.18, config.py `base_model_name_or_path`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

from zckpt.base.errors import ZckptError
from zckpt.base.words import count
from zckpt.layouts.places import find
from zckpt.layouts.run_saves import RunSave, tags_in
from zckpt.storage.identity import (
    directories_above,
    is_below,
    is_within,
    mounts,
    place_in_file_system,
    places_passed,
)
from zckpt.storage.json_files import read_json
from zckpt.upkeep.removal import WORK

_ADAPTER, _MOST_BYTES = "adapter_config.json", 1 << 20


class RunLinks:
    """The links and mounts of a run.

    Attributes:
        leads: what leads into a save and lies elsewhere in the run: the first part of its own path, which is a save's name if it
            lies in one; a person's name of it, such as "the link 'best'"; the name of the save that it leads into.
        mounted: name of a save -> that something is mounted in it, or on it: deleting it would delete what lies elsewhere.
        notes: sentences on directories that cannot be looked through.
    """

    def __init__(self, run: str, saves: Sequence[RunSave], going: Collection[str] = ()) -> None:
        """Looks through the run's directory, without a path that begins with a name of `going`."""
        self._run = run
        self._saves = {save.name: save for save in saves}
        self._table = mounts()
        self.leads: list[tuple[str, str, str]] = []
        self.mounted: dict[str, str] = {}
        self.notes: list[str] = []
        leaving: set[str] = set()
        for path in self._links(run, going):
            origin = self._relative(path).partition("/")[0]
            if not os.path.islink(path):
                for base in _bases_of(path):
                    self._add(path, "adapter", origin, base)
                continue
            self._add(path, "link", origin)
            if origin in self._saves and os.path.isdir(path) and not is_below(os.path.realpath(path), run):
                leaving.add(origin)
        for path in (point for point in self._table if point != run and is_below(point, run)):
            origin, _, inner = self._relative(path).partition("/")
            if origin in self._saves:
                self.mounted.setdefault(origin, f"{inner!r} in it is mounted" if inner else "it is mounted")
            if origin not in going:
                self._add(path, "mount", origin)
        for name in sorted(leaving):
            for path in _files_of(self._saves[name]):
                self._add(path, "file", name)

    def reasons(self, staying: Collection[str]) -> dict[str, str]:
        """Name of a save -> why it stays, if the saves `staying` and everything outside saves do."""
        found: dict[str, list[str]] = {}
        for origin, what, save in self.leads:
            if origin in staying or origin not in self._saves:
                found.setdefault(save, []).append(what)
        return {
            name: f"{several[0]} leads into it"
            if len(several) == 1
            else f"{several[0]} and {count(len(several) - 1, 'other')} lead into it"
            for name, several in found.items()
        }

    def _relative(self, path: str) -> str:
        return os.path.relpath(path, self._run)

    def _add(self, path: str, kind: str, origin: str, leading: str = "") -> None:
        """Adds the saves that a path leads through; `leading`: another path that counts in its place."""
        passed = {name for place in places_passed(leading or path) if (name := self._save_at(place)) and name != origin}
        self.leads += [(origin, f"the {kind} {self._relative(path)!r}", name) for name in sorted(passed)]

    def _save_at(self, place: str) -> str:
        """The name of the save that a path without links is in; empty if it is in none."""
        (device, inner), (own, outer) = (place_in_file_system(path, self._table) for path in (place, self._run))
        if device != own or not is_below(inner, outer):
            return ""
        name = os.path.relpath(inner, outer).partition("/")[0]
        return name if name in self._saves and is_within(place, os.path.join(self._run, name)) else ""

    def _links(self, directory: str, going: Collection[str]) -> Iterator[str]:
        """All links below a directory, and all configs of adapters."""
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            if os.path.lexists(directory):  # else it is gone meanwhile
                reason = error.strerror or str(error)
                self.notes.append(f"{self._relative(directory)!r}: {reason}. Links in it are not known.")
            return
        for entry in entries:
            if directory == self._run and (entry.name in going or entry.name == WORK):
                continue
            if entry.is_symlink() or entry.name == _ADAPTER:
                yield entry.path
            elif entry.is_dir(follow_symlinks=False):
                yield from self._links(entry.path, ())


def _files_of(save: RunSave) -> Iterator[str]:
    """The files that a save is read from; empty for a save that cannot be read."""
    with suppress(ZckptError):
        for tag in tags_in(save):
            yield from (file.path for file in find(save.path, tag).listing.files.values())


def _bases_of(config: str) -> Iterator[str]:
    """The places where an adapter's base may be, by its config; empty if the config cannot be read."""
    with suppress(ZckptError):
        said = read_json(config, _MOST_BYTES, "an adapter's config")
        base = said.get("base_model_name_or_path") if isinstance(said, dict) else None
        if isinstance(base, str) and base and "\0" not in base:
            starts = dict.fromkeys((*directories_above(os.path.dirname(config)), os.getcwd()))
            yield from dict.fromkeys(os.path.join(start, base) for start in starts)
