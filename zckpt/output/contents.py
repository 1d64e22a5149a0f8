"""Decides which files of an existing output directory a new output replaces, and which files stay.

zckpt deletes only files that the directory's own `zckpt.json` lists. All other files stay. The output is refused if it would
write over one of them, or if a loader would read one of them instead of the new weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError, ZckptError
from zckpt.base.words import examples
from zckpt.output import manifest
from zckpt.storage.location import Location
from zckpt.storage.output_places import entries

WEIGHTS = re.compile(
    r"(model|pytorch_model|diffusion_pytorch_model|adapter_model|consolidated)[\w.-]*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack)"
    r"(\.index\.json)?|[\w.-]+\.(safetensors|bin)\.index\.json"
)
"""Names of files that loaders read as a model's weights."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """What happens to a directory's files when a new output replaces it. Paths are relative to it.

    Attributes:
        deleted: files that are replaced, or that belong only to the old output.
        stays: other files and links.
        untouched: directories without files that are replaced; they were not listed.
        rivals: files of `stays` that a loader might read instead of the new weights.
    """

    deleted: tuple[str, ...]
    stays: tuple[str, ...]
    untouched: tuple[str, ...]
    rivals: tuple[str, ...]


def replacement(out: Location, names: Collection[str], *, merge: bool) -> Replacement:
    """What a new output replaces in an existing directory of this machine.

    Args:
        out: the directory.
        names: files of the new output.
        merge: whether files with these names are replaced even if zckpt did not write them.

    Raises:
        OutputError: files that zckpt did not write are in the way.
    """
    listed = listed_in(out, entries(out.path), merge=merge)
    new = {*names, manifest.NAME}
    files, untouched = _survey(out.path, {*listed, *new})
    return decide_replacement(out, files, untouched, listed, new, merge=merge)


def listed_in(out: Location, there: Collection[str], *, merge: bool) -> set[str]:
    """The files that zckpt may delete: its manifest, and the files that the manifest lists.

    Args:
        out: the directory.
        there: names of what is in it.
        merge: whether a directory without a readable manifest is allowed.

    Raises:
        OutputError: it is not allowed, and there is no readable manifest.
    """
    if manifest.NAME in there:
        try:
            facts = manifest.read(out / manifest.NAME)
            signature = {facts.signature} if facts.signature else set[str]()
            return {manifest.NAME, *signature, *(file.path for file in facts.files)}
        except ZckptError as error:
            if not merge:
                raise OutputError(
                    f"{manifest.NAME} cannot be read, so zckpt does not know which files it may delete", file=out,
                    found=str(error), remedy="Move the directory away, or choose another OUT. Nothing was changed.",
                ) from error  # fmt: skip
    elif there and not merge:
        raise OutputError(
            "zckpt did not write this directory", file=out, found=f"no {manifest.NAME}, but {examples(sorted(there))}",
            expected=f"a {manifest.NAME}, which lists the files that --overwrite may replace",
            remedy="Move these files away, or choose another OUT. Nothing was changed.",
        )  # fmt: skip
    return {manifest.NAME} if merge else set()


def decide_replacement(
    out: Location,
    files: Collection[str],
    untouched: Collection[str],
    listed: Collection[str],
    new: Collection[str],
    *,
    merge: bool,
) -> Replacement:
    """What happens to the files of a directory, on this machine or at an address.

    Args:
        out: the directory, for messages.
        files: files in it, relative to it.
        untouched: directories in it without a file of `listed` or `new`.
        listed: files that zckpt may delete.
        new: files of the new output, with its manifest.
        merge: whether files with these names are replaced even if zckpt did not write them.

    Raises:
        OutputError: files that zckpt did not write are in the way.
    """
    if merge:
        gone = {name for name in files if name in new or (name in listed and WEIGHTS.fullmatch(name))}
    else:
        gone = set(listed) & set(files)
    stays = [name for name in files if name not in gone]
    rivals = [name for name in stays if WEIGHTS.fullmatch(name) and name not in new]
    if blocked := _in_the_way(stays, untouched, new):
        raise OutputError(
            "files that zckpt did not write are in the way", file=out, found=examples(blocked),
            expected="no file or directory with the name of a new one",
            remedy="Move them away, or choose another OUT. Nothing was changed.",
        )  # fmt: skip
    if rivals and not merge:
        raise OutputError(
            "holds weights that zckpt did not write", file=out, found=examples(rivals),
            expected="no weights that a loader might take instead of the new ones",
            remedy="Move them away, or choose another OUT. Nothing was changed.",
        )  # fmt: skip
    return Replacement(tuple(sorted(gone)), tuple(stays), tuple(untouched), tuple(rivals))


def _survey(out: str, names: Collection[str]) -> tuple[list[str], list[str]]:
    """Files and links in a directory, and the directories in it that contain none of these names."""
    entered = {path[:at] for path in names for at, letter in enumerate(path) if letter == "/"}
    files: list[str] = []
    untouched: list[str] = []

    def walk(below: str) -> None:
        inside = os.path.join(out, below)
        for entry in entries(inside) if not below else sorted(os.listdir(inside)):
            path = os.path.join(below, entry)
            if not os.path.isdir(place := os.path.join(out, path)) or os.path.islink(place):
                files.append(path)
            elif path in entered:
                walk(path)
            else:
                untouched.append(path)

    walk("")
    return files, untouched


def _in_the_way(stays: Collection[str], untouched: Collection[str], new: Collection[str]) -> list[str]:
    """Paths that stay and have the name of a new file or of a directory of new files."""
    above = {path[:at] for path in new for at, letter in enumerate(path) if letter == "/"}
    return sorted(path for path in (*stays, *untouched) if path in new or path in above)
