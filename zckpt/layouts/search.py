"""Which directories hold saves: tags, trainers' folders, weights, and what lies further below.

For `places`, and for the trainer. Every directory is listed once (`save.folder`), and families are asked about names alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zckpt import layouts
from zckpt.layouts.save import trainers
from zckpt.layouts.save.folder import Folder, list_folder
from zckpt.layouts.save.foreign import ForeignFormat, foreign_format, foreign_save
from zckpt.layouts.save.listing import UNIVERSAL_POINTER, natural
from zckpt.output.saves import PREFIX, find_displaced
from zckpt.storage.location import Location

POINTERS = ("latest", UNIVERSAL_POINTER)
_DEPTH = 4
_MOST_LOOKED_INTO = 100
_MOST_BEHIND_ADDRESSES = 30
"""The most directories that are listed to find saves further below an address; each takes a request."""


_OPTIMIZERS = ("optim", "optimizer")
"""Directories in which trainers keep an optimizer beside its model, such as NeMo Automodel's."""


class Below(NamedTuple):
    """What lies further below a directory.

    Attributes:
        saves: the directories that hold saves.
        foreign: the directories of formats that zckpt does not read.
    """

    saves: list[Folder]
    foreign: list[tuple[Folder, ForeignFormat]]


def is_begun(path: Location) -> bool:
    """Whether there is anything that `find` would look into: false for a directory that a run is yet to fill."""
    return has_saves(list_folder(path)) if path.is_dir() else path.is_file()


def has_saves(folder: Folder) -> bool:
    """Whether there is a save in a directory, or further below where its trainer keeps them; weights alone are none."""
    names = folder.names
    if pointer_in(names):  # the usual case needs no pattern of any family
        return True
    layouts.admit(names)
    if any(family.is_save(names) for family in layouts.FAMILIES) or trainers.saves_of(names) or tags_in(folder):
        return True
    inner = [trainers.folder_of(names), *(name for name in names if trainers.FOLDER.fullmatch(name))]
    return any(has_saves(at) for name in inner if name and (at := folder.inside(name)) is not None)


def holds_save(folder: Folder) -> bool:
    """Whether a directory holds a save, or weights under any name."""
    from zckpt.layouts.save.weight_files import models_in

    return has_saves(folder) or bool(models_in(folder))


def has_weights(names: Sequence[str]) -> bool:
    """Whether files of these names are read as weights where there is no save."""
    return any(family.fallback and family.is_save(names) for family in layouts.FAMILIES)


def is_taken(name: str) -> bool:
    """Whether an entry of this name means something to `find`, so that no tag may have it."""
    if name.casefold() in (*POINTERS, *(family.directory for family in layouts.FAMILIES)):
        return True
    taken = (family.owns(name) or family.holds_files(name, ()) for family in layouts.FAMILIES)
    return trainers.FSDP_MODEL.fullmatch(name) is not None or any(taken)


def pointer_in(names: Sequence[str]) -> str | None:
    """The file that names the newest tag: `latest`, or that of universal checkpoints where there is no other."""
    return next((name for name in POINTERS if name in names), None)


def tags_in(folder: Folder, also: Sequence[Folder] = ()) -> tuple[str, ...]:
    """Names of directories that hold a save's files, here or in the directories laid over this one."""
    is_displaced = not folder.path.is_remote and any(name.startswith(PREFIX) for name in folder.names)
    found = set(find_displaced(folder.path.path)) if is_displaced else set[str]()
    for root in (folder, *also):
        for name in root.names:
            if name[:1] == "." or name in _OPTIMIZERS or trainers.UNFINISHED in name:  # not finished, or of no model
                continue
            inner = root.inside(name)
            if inner is not None and layouts.is_save(inner.names):
                found.add(name)
    return tuple(sorted(found, key=natural))


def look_below(folder: Folder) -> Below:
    """What lies at most four directories below one that holds no save itself; not in those of optimizers, logs and the like."""
    below = Below([], [])
    rest = _MOST_BEHIND_ADDRESSES if folder.path.is_remote else _MOST_LOOKED_INTO
    level = [folder]
    for _ in range(_DEPTH):
        deeper: list[Folder] = []
        for inner in (inner for above in level for inner in _directories(above)):
            rest -= 1
            if rest < 0:
                return below
            if not foreign_save(inner.names) and holds_save(inner):
                below.saves.append(inner)
            elif foreign := foreign_format(inner.names):
                below.foreign.append((inner, foreign))
            else:
                deeper.append(inner)
        level = deeper
    return below


def _directories(folder: Folder) -> Iterator[Folder]:
    """The directories within one that may hold a model; for a link to one of them, such as `LATEST`, that directory
    itself.
    """
    found: dict[str, Folder] = {}
    for inner in (folder.inside(name) for name in folder.names if trainers.may_hold_model(name)):
        if inner is not None:
            target = inner.path.resolved().absolute().path
            if target not in found or inner.path.absolute().path == target:
                found.pop(target, None)
                found[target] = inner
    return iter(found.values())
