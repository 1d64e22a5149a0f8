"""Whether two paths of this machine mean one place, whatever they are called: by links, by mounts, by device and inode.

For `location`, which decides by it what is in what, for `output.checks` and for `upkeep`. A directory that is mounted twice
(`mount --bind`, `docker -v d:/in -v d:/out`) has two paths, and neither is a link. What is the same is its device and its inode.
[Note: a part that is mounted alone] Of `d/ckpt` at `/in` and `d` at `/out`, no directory above one is the other. The table of
mounts says where each lies in its file system, so where `/in` should be below `/out`; the inode there shows whether it is.
The table alone proves nothing: of NFS, it says "/" for every mount.
Source: Linux, Documentation/filesystems/proc.rst, 3.5 /proc/<pid>/mountinfo; fs/nfs/super.c `nfs_show_path`.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

_TABLE = "/proc/self/mountinfo"
_MOST_LINKS = 40  # one after another; Linux follows no more: include/linux/namei.h MAXSYMLINKS


class Mount(NamedTuple):
    """A line of the system's table of mounts.

    Attributes:
        device: of the file system, as the table writes it.
        top: which of its directories or files is mounted.
        kind: of the file system.
    """

    device: str
    top: str
    kind: str = ""


def mounts() -> Mapping[str, Mount]:
    """Mount point -> what this process sees there: of several mounts the newest. None where the system has no such table."""
    try:
        with open(_TABLE, "rb") as file:
            return _mounts_in(file.read())
    except OSError:
        return {}


@functools.lru_cache(maxsize=2)  # it is read anew each time, and seldom differs
def _mounts_in(table: bytes) -> Mapping[str, Mount]:
    found: dict[str, Mount] = {}
    for line in table.split(b"\n"):
        row = line.split()
        if len(row) > 4 and b"-" in row[5:-1]:
            kind = row[row.index(b"-") + 1].decode()
            found[_unescape(row[4])] = Mount(row[2].decode(), _unescape(row[3]), kind)
    return found


def _unescape(path: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), path))


_DISTANT = re.compile(r"nfs4?|cifs|smb[23]|smbfs|lustre|ceph|9p|virtiofs|beegfs|gpfs|afs|pvfs2|wekafs|fuse(\..*)?")
"""Kinds of file systems that hold their bytes on other machines, or reach them through a program."""


def is_distant(path: str) -> bool:
    """Whether a path is on a mount that probably has its bytes from another machine."""
    table = mounts()
    point = _mount_point_of(os.path.realpath(path), table)
    return point in table and _DISTANT.fullmatch(table[point].kind) is not None


def _mount_point_of(path: str, table: Collection[str]) -> str:
    """The nearest mount point at or above a path without links; the topmost directory if none is known."""
    for above in directories_above(path):
        if above in table:
            break
    return above


def is_mount(path: str) -> bool:
    """Whether the path is a mount point, or a bind mount of the same file system."""
    real = os.path.realpath(path)
    return os.path.ismount(path) or real in mounts()


def inode_of(path: str) -> tuple[int, int] | None:
    """The device and inode of what a path leads to; None if that is nothing, or is on a file system without inodes."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino) if found.st_ino else None


def is_below(path: str, directory: str) -> bool:
    """Whether a path is `directory` or below it, by their texts alone."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def stays_inside(name: str) -> bool:
    """Whether a path that a file gives, relative to a directory, names a file in it, by its text alone."""
    return "\0" not in name and {"", ".", ".."}.isdisjoint(name.split("/"))


def directories_above(path: str) -> Iterator[str]:
    """A path itself, then every directory above it."""
    yield path
    while (above := os.path.dirname(path)) != path:
        path = above
        yield path


def is_within(path: str, directory: str) -> bool:
    """Whether a path, which need not exist, leads to `directory` (which may be a file) or into it, by any of its names."""
    inner, outer = os.path.realpath(path), os.path.realpath(directory)
    if is_below(inner, outer):
        return True
    wanted = inode_of(outer)
    if wanted is None:
        return False
    if wanted in map(inode_of, directories_above(inner)):
        return True
    table = mounts()
    return any(_is_mounted_from(inner, top, table) for top in {outer, *table} if is_below(top, outer))


def _is_mounted_from(inner: str, outer: str, table: Mapping[str, Mount]) -> bool:
    """Whether `inner` lies in `outer` in the file system; see [Note: a part that is mounted alone]."""
    (device, place), (other, top) = place_in_file_system(inner, table), place_in_file_system(outer, table)
    if device != other or not is_below(place, top):
        return False
    there = os.path.normpath(os.path.join(outer, os.path.relpath(place, top)))
    for real in directories_above(inner):  # the last parts need not exist yet
        if (found := inode_of(real)) is not None or not is_below(there, outer):
            return found is not None and found == inode_of(there) and is_below(there, outer)
        there = os.path.dirname(there)
    return False


def place_in_file_system(path: str, table: Mapping[str, Mount]) -> tuple[str, str]:
    """The device of a path without links, and where it lies there."""
    point = _mount_point_of(path, table)
    if point not in table:
        return "", path
    return table[point].device, os.path.normpath(os.path.join(table[point].top, os.path.relpath(path, point)))


def places_passed(path: str) -> list[str]:
    """Every path without links that the system looks up on its way to what a path leads to, links on the way included.

    A link that leads to nothing gives the places up to there.
    """
    passed: list[str] = []
    ahead = os.path.abspath(path).split("/")[::-1]
    at, links = "/", 0
    while ahead:
        name = ahead.pop()
        if name in ("", "."):
            continue
        if name == "..":
            at = os.path.dirname(at)
            continue
        place = os.path.join(at, name)
        passed.append(place)
        try:
            target = os.readlink(place)
        except OSError:  # it is not a link
            at = place
            continue
        links += 1
        if links > _MOST_LINKS:
            break
        ahead += target.split("/")[::-1]
        at = "/" if target.startswith("/") else at
    return passed


def leads_out_of(path: str, *trees: str) -> bool:
    """Whether a file that is seen in one of these directories lies outside all of them, by a link.

    The hub's cache keeps a model's files in `blobs/`, and links to them in `snapshots/REVISION/`: these are the model's own.
    Source: huggingface_hub 1.0, file_download.py `_create_symlink`.
    """
    real = os.path.realpath(path)
    for top in map(os.path.realpath, trees):
        stores = (above for above in directories_above(os.path.dirname(top)) if os.path.basename(above) == "snapshots")
        blobs = (os.path.join(os.path.dirname(store), "blobs") for store in stores)
        if any(is_below(real, own) for own in (top, *blobs)):
            return False
    return True


def parts_elsewhere(directory: str) -> list[str]:
    """The paths in a directory that lie elsewhere: links to files, and whatever is mounted below it."""
    real = os.path.realpath(directory)
    found = [point for point in mounts() if point != real and is_below(point, real)]
    try:
        with os.scandir(directory) as entries:
            found += [entry.path for entry in entries if entry.is_symlink() and entry.is_file()]
    except OSError:
        pass
    return found


def other_name_of(file: str, directory: str) -> str:
    """The path of a file in a directory that is `file` under another name, such as a hard link; empty if there is none."""
    wanted = inode_of(file)
    try:
        with os.scandir(directory) as entries:
            return next(
                (e.path for e in entries if e.inode() == (wanted or (0, 0))[1] and inode_of(e.path) == wanted), ""
            )
    except OSError:
        return ""
