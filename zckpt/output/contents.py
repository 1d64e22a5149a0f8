"""What an output's directory holds already: what a new output replaces, what stays, and what must not be there.

Only files that the directory's own `zckpt.json` lists are zckpt's to delete. Everything else is somebody's: it stays, or it
is a reason to refuse, where the new output would write over it or where a loader would take it instead of the new weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass

from zckpt.base.errors import OutputError, ZckptError
from zckpt.base.words import examples
from zckpt.output import manifest
from zckpt.storage.output_places import entries

WEIGHTS = re.compile(
    r"(model|pytorch_model|diffusion_pytorch_model|adapter_model|consolidated)[\w.-]*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack)"
    r"(\.index\.json)?|[\w.-]+\.(safetensors|bin)\.index\.json"
)
"""Files that loaders take for a model's weights, by their names."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """What becomes of a directory's files when a new output takes its place. Paths are relative to it.

    Attributes:
        deleted: files that are replaced, or that belong to the old output alone.
        stays: other files and links.
        untouched: directories that hold nothing that is replaced; nobody looked into them.
        rivals: of what stays, weights that a loader might take instead of the new ones.
    """

    deleted: tuple[str, ...]
    stays: tuple[str, ...]
    untouched: tuple[str, ...]
    rivals: tuple[str, ...]


def replacement(out: str, names: Collection[str], *, merge: bool) -> Replacement:
    """What a new output replaces in a directory that exists.

    Args:
        out: the directory.
        names: files of the new output.
        merge: whether files of these names are the caller's to replace, whoever wrote them.

    Raises:
        OutputError: files are in the way that zckpt did not write.
    """
    facts = manifest.path_for(out, single=False)
    listed = _listed(out, facts, merge=merge)
    new = {*names, manifest.NAME}
    files, untouched = _survey(out, {*listed, *new})
    if merge:
        gone = {name for name in files if name in new or (name in listed and WEIGHTS.fullmatch(name))}
    else:
        gone = set(listed) & set(files)
    stays = [name for name in files if name not in gone]
    rivals = [name for name in stays if WEIGHTS.fullmatch(name) and name not in new]
    blocked = _in_the_way(stays, untouched, new)
    if blocked:
        raise OutputError(
            "files in the output's place that zckpt did not write", file=out, found=examples(blocked),
            expected="a new file would have this name",
            remedy="Nothing was changed. Move them away, or choose another OUT.",
        )  # fmt: skip
    if rivals and not merge:
        raise OutputError(
            "other weights in the output's directory", file=out, found=examples(rivals),
            expected="a loader might take them instead of the new ones, and zckpt did not write them",
            remedy="Nothing was changed. Move them away, or choose another OUT.",
        )  # fmt: skip
    return Replacement(tuple(sorted(gone)), tuple(stays), tuple(untouched), tuple(rivals))


def _listed(out: str, facts: str, *, merge: bool) -> set[str]:
    """The files that are zckpt's to delete."""
    if os.path.isfile(facts):
        try:
            return {manifest.NAME, *(file.path for file in manifest.read(facts).files)}
        except ZckptError as error:
            if not merge:
                raise OutputError(
                    "an output whose zckpt.json cannot be read: nobody knows which files are zckpt's", file=out,
                    found=str(error), remedy="Nothing was changed. Move the directory away, or choose another OUT.",
                ) from error  # fmt: skip
    elif not merge and (names := entries(out)):
        raise OutputError(
            "a directory that zckpt did not write", file=out, found=f"no zckpt.json, but {examples(names)}",
            expected="--overwrite replaces only files that a zckpt.json lists",
            remedy="Nothing was changed. Move the directory away, or choose another OUT.",
        )  # fmt: skip
    return {manifest.NAME} if merge else set()


def _survey(out: str, names: Collection[str]) -> tuple[list[str], list[str]]:
    """Files and links in a directory, and directories in it which none of these names lies in."""
    entered = {path[:at] for path in names for at, letter in enumerate(path) if letter == "/"}
    files: list[str] = []
    untouched: list[str] = []

    def look(below: str) -> None:
        inside = os.path.join(out, below)
        for entry in entries(inside) if not below else sorted(os.listdir(inside)):
            path = os.path.join(below, entry)
            if not os.path.isdir(place := os.path.join(out, path)) or os.path.islink(place):
                files.append(path)
            elif path in entered:
                look(path)
            else:
                untouched.append(path)

    look("")
    return files, untouched


def _in_the_way(stays: Collection[str], untouched: Collection[str], new: Collection[str]) -> list[str]:
    """What stays though a new file, or a directory of new files, is to have its name."""
    above = {path[:at] for path in new for at, letter in enumerate(path) if letter == "/"}
    return sorted(path for path in (*stays, *untouched) if path in new or path in above)
