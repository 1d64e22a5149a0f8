"""What must not be written: refused before any work is done."""

from __future__ import annotations

import os
from collections.abc import Iterable

from zckpt.base.errors import OutputError, UnsupportedError, redact
from zckpt.output import manifest
from zckpt.output.contents import replacement
from zckpt.output.work_directory import is_unfinished, left_bytes
from zckpt.storage import paths
from zckpt.storage.output_places import directory_for, entries, free_bytes, is_mount, resolved


def check_output(out: str, *, single: bool, overwrite: bool, protected: Iterable[str], merge: bool = False) -> None:
    """Refuses an output that must not be written.

    Args:
        out: the output's path.
        single: whether it is one file rather than a directory.
        overwrite: whether an existing output may be replaced. One that an interrupted run left unfinished is no reason to
            refuse, nor is one that this very command may have made: who goes on with it looks again.
        protected: files and directories of the input: the output may not be, lie in, or hold one of them.
        merge: whether files are put into a directory that exists.

    Raises:
        OutputError: one of these.
    """
    if paths.is_remote(out):
        raise UnsupportedError("an output behind an address", file=out, remedy="Choose an OUT on this machine.")
    keep_apart(out, protected)
    out = resolved(out)
    if not os.path.lexists(out):
        return
    if os.path.isdir(out) == single:
        kind, wanted = ("a directory", "a file") if single else ("a file", "a directory")
        raise OutputError(
            f"an output that is already {kind}",
            file=out,
            expected=f"this OUT would be {wanted}",
            remedy="Nothing was changed. A name ending in .safetensors, .bin or .pt is written as one file, "
            "anything else as a directory.",
        )
    if single and is_mount(out):
        raise OutputError(
            "a file as output that something is mounted on", file=out, found="a mount point keeps its file",
            remedy="Nothing was changed. Mount the directory that the file is to lie in, or choose another OUT.",
        )  # fmt: skip
    if not single and overwrite and not merge:
        for place in (os.getcwd(), os.path.expanduser("~")):
            if paths.is_within(place, out):
                raise OutputError(
                    "an output that would replace a directory in use", file=out, found=f"{place!r} lies in it"
                )
    if is_unfinished(out):
        return
    if not overwrite and not manifest.job_of(manifest.path_for(out, single=single)):
        refuse_existing(out)
    if not single and overwrite and not merge:
        replacement(out, (), merge=False)


def keep_apart(out: str, protected: Iterable[str]) -> None:
    """Refuses an output that would touch the input: one that is, lies in, or holds one of its files or directories.

    Raises:
        OutputError: it is such an output.
    """
    for home in sorted(set(protected)):
        inside = paths.is_within(out, home)
        if inside or paths.is_within(home, out):
            raise OutputError(
                "an output inside the input" if inside else "an output that would replace the input",
                file=redact(out), found=f"the input lies in {redact(home)!r}",
                remedy="Nothing was changed. Choose an OUT elsewhere.",
            )  # fmt: skip


def refuse_existing(out: str) -> None:
    """Refuses an output that is there already; an empty directory is not, nor is an empty mount point.

    Raises:
        OutputError: it is.
    """
    if not os.path.lexists(out) or (os.path.isdir(out) and not entries(out)):
        return
    raise OutputError(
        "an output that exists",
        file=out,
        found="is there already and is not empty" if os.path.isdir(out) else "is there already",
        remedy="Nothing was changed. Choose another OUT, or pass --overwrite to replace it when the new one is complete.",
    )


def check_space(out: str, needed_bytes: int) -> None:
    """Finds out before the first byte whether the disk has room. What an earlier run left will be used or removed.

    Raises:
        OutputError: it has not.
    """
    check_free(os.path.dirname(directory_for(out)), needed_bytes - left_bytes(out), out)


def check_free(place: str, needed_bytes: int, out: str) -> None:
    """Makes sure of room for `out` on the file system of a place.

    Raises:
        OutputError: there is too little.
    """
    free = free_bytes(place)
    if free < needed_bytes:
        raise OutputError(
            "too little free disk",
            file=out,
            found=f"{free:,} bytes free",
            expected=f"{needed_bytes:,} bytes are needed",
            remedy="Nothing was written. Free some room, choose an OUT on another disk, or a smaller dtype (to-bf16).",
        )
