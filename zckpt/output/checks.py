"""Checks before any work is done that an output may be written, and that there is room for it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from zckpt.base.errors import OutputError, UnsupportedError
from zckpt.base.words import size
from zckpt.output import manifest
from zckpt.output.work_directory import is_unfinished, left_bytes
from zckpt.storage.identity import is_below, is_mount, other_name_of, parts_elsewhere
from zckpt.storage.location import LocalPath, Location
from zckpt.storage.output_places import directory_for, entries, free_bytes, resolve_output


def check_path(
    out: Location, *, single: bool, overwrite: bool, protected: Iterable[Location], merge: bool = False
) -> None:
    """Refuses an output on this machine that must not be written.

    Args:
        out: the output.
        single: whether it is one file rather than a directory.
        overwrite: whether an existing output may be replaced. An output that an interrupted run left unfinished, or that the
            same command may have made, is not refused: the run that resumes it checks again.
        protected: files and directories of the input: the output may not be, be in, or hold one of them.
        merge: whether files are put into a directory that exists.

    Raises:
        OutputError: the output must not be written.
        UnsupportedError: it is an address.
        UsageError: its name is that of a file of another kind.
    """
    if out.is_remote:
        raise UnsupportedError(
            "an address cannot be OUT of this command", file=out,
            remedy="Write to a directory on this machine, and copy that to the address.",
        )  # fmt: skip
    if not single:
        from zckpt.output.names import check_name

        check_name(out)
    keep_apart(out, protected)
    path = resolve_output(out.path)
    if not os.path.lexists(path):
        return
    if not os.path.isdir(path) and not os.path.isfile(path):
        raise OutputError(
            "is not a file", file=path, found="a pipe, a socket or a device", expected="a file or directory, or none",
            remedy="Choose another OUT: what is written appears in one step, when it is complete. Nothing was changed.",
        )  # fmt: skip
    check_kind(out, "directory" if os.path.isdir(path) else "file", single=single)
    if single and is_mount(path):
        raise OutputError(
            "cannot be replaced", file=path, found="a file that is a mount point",
            remedy="Mount the directory that holds the file instead, or choose another OUT. Nothing was changed.",
        )  # fmt: skip
    if not single and overwrite and not merge:
        for place in (os.getcwd(), os.path.expanduser("~")):
            if LocalPath(place).is_within(LocalPath(path)):
                raise OutputError(
                    "a directory in use cannot be replaced", file=path, found=f"{place!r} is in it",
                    remedy="Choose another OUT, or start the command in another directory. Nothing was changed.",
                )  # fmt: skip
    if is_unfinished(path):
        return
    if not (overwrite or merge) and not manifest.job_of(manifest.path_for(path, single=single)):
        refuse_existing(path)
    if not single and overwrite and not merge:
        from zckpt.output.contents import replacement

        replacement(LocalPath(path), (), merge=False)


def check_kind(out: Location, found: str | None, *, single: bool) -> None:
    """Refuses an output that would replace a file by a directory, or a directory by a file.

    Args:
        out: the output.
        found: "file" or "directory"; None if nothing exists there.
        single: whether the new output is a file.

    Raises:
        OutputError: it would replace one by the other.
    """
    wanted = "file" if single else "directory"
    if found not in (None, wanted):
        raise OutputError(
            "already exists", file=out, found=f"a {found}", expected=f"a {wanted}, by the name of OUT",
            remedy="Choose another OUT. A name that ends in .safetensors, .bin or .pt is written as one file, any other name "
            "as a directory. Nothing was changed.",
        )  # fmt: skip


def keep_apart(out: Location, protected: Iterable[Location]) -> None:
    """Refuses an output that would change the input.

    An input is recognised by what it is, not by its name: see `storage.identity`. Files that an input has through links
    or mounts lie elsewhere, and are its files all the same. Raises OutputError if the output is one of the input's
    files or directories, is in one, or contains one.
    """
    for home in sorted(set(protected), key=str):
        inside = out.is_within(home)
        if inside or home.is_within(out):
            raise _not_apart(out, home, inside=inside)
        if out.is_remote or home.is_remote or not os.path.lexists(out):
            continue
        if os.path.isfile(out) and (name := other_name_of(out.path, home.path)):
            raise _not_apart(out, LocalPath(name), inside=False)
        for part in map(LocalPath, parts_elsewhere(home.path)):
            if part.is_within(out):
                raise _not_apart(out, part, inside=False)


def _not_apart(out: Location, home: Location, *, inside: bool) -> OutputError:
    inner, outer = os.path.realpath(out), os.path.realpath(home)
    is_named_so = out.is_remote or is_below(inner, outer) or is_below(outer, inner)
    return OutputError(
        "the output would be inside the input" if inside else "the output would replace the input",
        file=out, found=f"the input in {home!r}" + ("" if is_named_so else ", which is linked or mounted there"),
        remedy="Choose an OUT elsewhere. Nothing was changed.",
    )  # fmt: skip


def refuse_existing(path: str) -> None:
    """Raises OutputError for a local output that exists; an empty directory or mount point is accepted."""
    if os.path.isdir(path):
        if entries(path):
            raise exists(LocalPath(path), is_directory=True)
    elif os.path.lexists(path):
        raise exists(LocalPath(path), is_directory=False)


def exists(out: Location, *, is_directory: bool) -> OutputError:
    """The error for an output that exists and must not be replaced."""
    return OutputError(
        "already exists", file=out, found="a directory that is not empty" if is_directory else "a file",
        remedy="Choose another OUT, or pass --overwrite to replace it once the new output is complete. Nothing was changed.",
    )  # fmt: skip


def check_space(out: Location, needed_bytes: int) -> None:
    """Checks before the first byte is written that the disk has room; bytes that an earlier run left count as free.
    Raises OutputError if the disk has too little room.
    """
    if not out.is_remote:
        check_free(os.path.dirname(directory_for(out.path)), needed_bytes - left_bytes(out.path), out.path)


def check_free(place: str, needed_bytes: int, out: str) -> None:
    """Checks that the file system of `place` has room for `out`. Raises OutputError if there is too little."""
    free = free_bytes(place)
    if free < needed_bytes:
        raise OutputError(
            "too little free disk space", file=out, found=f"{size(free)} free", expected=f"{size(needed_bytes)}",
            remedy="Free some space, choose an OUT on another disk, or a smaller dtype (to-bf16). Nothing was written.",
        )  # fmt: skip
