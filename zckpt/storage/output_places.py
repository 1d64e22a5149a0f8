"""Paths of an output and of its work directory."""

from __future__ import annotations

import os
import re
import shutil

from zckpt.base.patterns import compile_late
from zckpt.storage.identity import is_mount

WORK = ".zckpt"
"""The work directory's name if it is in the output."""

_USUAL = compile_late(rf"{re.escape(WORK)}(-.*)?|lost\+found")
"""Names in a mount point that are not a user's data."""


def resolve_output(out: str) -> str:
    """The output's absolute path; if OUT is a symbolic link, its target."""
    path = os.path.abspath(out)
    return os.path.realpath(path) if os.path.islink(path) else path


def keeps_its_name(out: str) -> bool:
    """Whether OUT is a directory that cannot be renamed: a mount point, or a directory within one that this user cannot
    write.
    """
    out = resolve_output(out)
    return os.path.isdir(out) and (is_mount(out) or not os.access(os.path.dirname(out), os.W_OK | os.X_OK))


def directory_for(out: str) -> str:
    """The work directory of an output, on the same file system, so that files can be renamed into the output."""
    return inside(out) if keeps_its_name(out) else beside(out)


def beside(out: str) -> str:
    """A work directory beside the output."""
    parent, name = os.path.split(resolve_output(out))
    return os.path.join(parent, f".{name}{WORK}")


def inside(out: str) -> str:
    """A work directory inside an output that cannot be renamed."""
    return os.path.join(resolve_output(out), WORK)


def entries(directory: str) -> list[str]:
    """The names in an output's directory, without zckpt's work directories and `lost+found`."""
    return sorted(name for name in os.listdir(directory) if not _USUAL.fullmatch(name))


def free_bytes(path: str) -> int:
    """Free bytes on the file system of a path, or of the nearest existing directory above it."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


def rendezvous_for(out: str, job: str) -> str:
    """The directory in which several processes that write one output exchange files."""
    return f"{directory_for(out)}-together-{job}"


def remove_rendezvous(out: str, job: str) -> None:
    """Removes the rendezvous directories of other jobs, which are dead; only the process with the output's lock may
    call it.
    """
    parent, name = os.path.split(rendezvous_for(out, ""))
    for entry in os.listdir(parent):
        path = os.path.join(parent, entry)
        if entry.startswith(name) and entry != name + job and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
