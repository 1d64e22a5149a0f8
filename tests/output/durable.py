"""What a power failure may leave of a run: trees of which only what was synced is certain.

`record` runs something once and looks at a place before each of its calls (`calls.at_each`). So it sees every name and every byte
that came or went, whoever wrote it: Python, the C++ engine, or somebody else. `trees` then gives, for every moment, what a power
failure may leave at it:

- only the data of files that were synced, and only the names in directories that were synced;
- that, and one more change of names (a rename is one change), or the data of one more file, whole or cut short;
- that, and two more changes of names, if `pairs`: a file system may write its directories in any order;
- all names, without the data that was not synced, as a journal of metadata alone leaves it;
- everything: what a process leaves that was killed.

A name that a rename gives is durable when its directory is synced. The name that the rename takes away may then still be there,
unless a directory is renamed, which has one name only. Where a directory was synced that lost a name, and not the one that got
it, neither has it. An exchange is whole or not there, in two directories too: only file systems with a journal or a log can
exchange names, and there it is one transaction, which a sync of either directory commits.
Source: Linux, fs/ext4/namei.c `ext4_cross_rename`; fs/xfs/xfs_inode.c `xfs_cross_rename`; fs/btrfs/inode.c
`btrfs_rename_exchange`, whose `btrfs_record_unlink_dir` lets a sync of either directory commit everything.
Syncs in threads happen as late as the code allows: when it waits for them.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from calls import at_each

from zckpt.output import commit, saves

Names = dict[str, int]
"""The entries of a directory: name -> inode number."""


class Content(NamedTuple):
    """What a file has."""

    data: bytes = b""
    attributes: tuple[tuple[str, bytes], ...] = ()


@dataclass
class Snapshot:
    """What is in a place: files and directories by inode number; the number of the place itself is `root`."""

    root: int
    files: dict[int, Content]
    directories: dict[int, Names]


class Moment(NamedTuple):
    """A call, just before it is made.

    Attributes:
        there: what the place holds.
        call: its name.
        synced: the inode number of what it syncs; 0 for other calls.
        sites: of the calls in zckpt that lead to a sync: `Site`s, as far as they are asked for.
    """

    there: Snapshot
    call: str
    synced: int = 0
    sites: frozenset[object] = frozenset()


Tree = tuple[Any, ...]
"""A directory: its number, and (name, `Tree` or (number, Content)) of what is in it."""


def look(place: Path, old: Mapping[int, int]) -> Snapshot:
    """What is in a place now; `old`: inode numbers that files had before, by those that they have."""
    root = place.stat().st_ino
    found = Snapshot(old.get(root, root), {}, {})
    for path in (place, *place.rglob("*")):
        number = path.lstat().st_ino
        number = old.get(number, number)
        if path.is_dir():
            inside = {entry.name: entry.inode() for entry in os.scandir(path)}
            found.directories[number] = {name: old.get(to, to) for name, to in inside.items()}
        else:
            names = sorted(os.listxattr(path))
            found.files[number] = Content(path.read_bytes(), tuple((name, os.getxattr(path, name)) for name in names))
    return found


class _Late(Future[Any]):
    """The result of a call that is made when somebody waits for it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work = work

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            try:
                self.set_result(self.work())
            except BaseException as error:
                self.set_exception(error)
        return super().result(timeout)


@contextmanager
def _late_syncs(frames: list[FrameType]) -> Iterator[None]:
    """Inside, threads that sync do so when somebody waits; `frames` then has where the sync was asked for."""
    submit, shutdown = ThreadPoolExecutor.submit, ThreadPoolExecutor.shutdown
    waiting: list[_Late] = []

    def submitted(pool: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        if pool._thread_name_prefix != "sync":
            return submit(pool, function, *arguments, **named)
        asked = sys._getframe(1)

        def work() -> Any:
            frames.append(asked)
            try:
                return function(*arguments, **named)
            finally:
                frames.pop()

        waiting.append(_Late(work))
        return waiting[-1]

    def shut_down(pool: Any, *arguments: Any, **named: Any) -> None:
        while waiting:
            waiting.pop().exception() if waiting[-1].done() else waiting.pop().result()
        shutdown(pool, *arguments, **named)

    ThreadPoolExecutor.submit, ThreadPoolExecutor.shutdown = submitted, shut_down  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit, ThreadPoolExecutor.shutdown = submit, shutdown  # type: ignore[method-assign]


def record(
    place: Path,
    run: Callable[[], object],
    sites_of: Callable[[list[FrameType]], Collection[object]] = lambda frames: (),
    old: Mapping[int, int] | None = None,
) -> list[Moment]:
    """Runs something, and gives the moments before each of its calls and the one after the last.

    Args:
        place: what is looked at.
        run: what is done; it ends well.
        sites_of: says of a sync, given the frames that led to it, which sites these are.
        old: the inode numbers that files had when they were made first; see `Numbers`.
    """
    old = old or {}
    moments: list[Moment] = []
    asked: list[FrameType] = []

    def happens(_: int, name: str, *arguments: Any) -> None:
        if name not in ("fsync", "fdatasync"):
            moments.append(Moment(look(place, old), name))
            return
        frames: list[FrameType] = []
        for start in (sys._getframe(2), *asked):
            frame: FrameType | None = start
            while frame is not None:
                frames.append(frame)
                frame = frame.f_back
        sites = frozenset(sites_of(frames))
        number = os.stat(arguments[0]).st_ino
        moments.append(Moment(look(place, old), name, old.get(number, number), sites))

    with _late_syncs(asked), at_each(happens):
        run()
    return [*moments, Moment(look(place, old), "end")]


Change = dict[tuple[int, str], int]
"""Of one call: (directory, name) -> the inode number that it names now; 0 for none."""


def trees(moments: list[Moment], without: object = None, *, pairs: bool = False) -> Iterator[tuple[int, str, Tree]]:
    """What a power failure may leave: the number of a moment, which of the possibilities it is, and the tree.

    Args:
        moments: of one run; what is there before the first is durable.
        without: a site; the syncs of this site do not happen.
        pairs: two changes of names without those between them, too.
    """
    first = moments[0].there
    names = {number: dict(entries) for number, entries in first.directories.items()}
    data = dict(first.files)
    pending: list[Change] = []
    exchanges: list[Change] = []
    kinds = {
        n: is_dir
        for one in moments
        for some, is_dir in ((one.there.directories, True), (one.there.files, False))
        for n in some
    }
    before = moments[0]
    for number, (there, call, synced, sites) in enumerate(moments):
        change = _change(before.there, there)
        if change:
            (exchanges if before.call == "exchange" else pending).append(change)
        before = moments[number]
        resolved = _Resolver(there, kinds)
        yield number, f"only what was synced before {call}", resolved.tree(names, data)
        for one in (*pending, *exchanges):
            named = ", ".join(f"{'+' if to else '-'}{name}" for (_, name), to in one.items())
            yield number, f"and {named}, before {call}", resolved.tree(_changed(names, one), data)
        for one, two in itertools.combinations((*pending, *exchanges), 2) if pairs else ():
            yield number, f"and two changes, before {call}", resolved.tree(_changed(_changed(names, one), two), data)
        for file, content in there.files.items():
            known = data.get(file, Content())
            if content != known:
                at = len(known.data) if content.data.startswith(known.data) else 0
                cut = Content(content.data[: at + (len(content.data) - at) // 2], content.attributes)
                yield number, f"and data, before {call}", resolved.tree(names, {**data, file: content})
                yield number, f"and data cut short, before {call}", resolved.tree(names, {**data, file: cut})
        yield number, f"all names, before {call}", resolved.tree(there.directories, data)
        yield number, f"killed before {call}", resolved.tree(there.directories, there.files)
        if not synced or without in sites:
            continue
        if synced in there.files:
            data[synced] = there.files[synced]
        elif synced in there.directories:
            names[synced] = dict(there.directories[synced])
            for one in [one for one in exchanges if synced in {directory for directory, _ in one}]:
                names = _changed(names, one)
                exchanges.remove(one)
            pending = [{at: to for at, to in one.items() if at[0] != synced} for one in pending]
            pending = [one for one in pending if one]


def _change(before: Snapshot, after: Snapshot) -> Change:
    """The names that came, went, or name something else."""
    change: Change = {}
    for directory in (*after.directories, *(before.directories.keys() - after.directories.keys())):
        old, new = before.directories.get(directory, {}), after.directories.get(directory, {})
        if old != new:
            changed = {name for name in (*old, *new) if old.get(name) != new.get(name)}
            change.update({(directory, name): new.get(name, 0) for name in sorted(changed)})
    return change


def _changed(names: Mapping[int, Names], change: Change) -> dict[int, Names]:
    changed = dict(names)
    for (directory, name), to in change.items():
        entries = dict(changed.get(directory, {}))
        entries.pop(name, None)
        changed[directory] = {**entries, name: to} if to else entries
    return changed


class _Resolver:
    """Makes trees of what directories and files are said to have."""

    def __init__(self, there: Snapshot, known: Mapping[int, bool]) -> None:
        self.root, self.known = there.root, known
        self.places = {to: (at, name) for at, entries in there.directories.items() for name, to in entries.items()}

    def tree(self, names: Mapping[int, Names], data: Mapping[int, Content]) -> Tree:
        """The tree of what can be reached; a directory with two names keeps the one that it really has."""
        seen: dict[int, list[tuple[int, str]]] = {}
        ways = [self.root]
        while ways:
            at = ways.pop()
            for name, to in names.get(at, {}).items():
                if to not in seen and self.known[to]:
                    ways.append(to)
                seen.setdefault(to, []).append((at, name))
        gone = {
            (at, name)
            for to, found in seen.items()
            if self.known[to] and len(found) > 1
            for at, name in found
            if (at, name) != (self.places.get(to) if self.places.get(to) in found else found[0])
        }

        def one(number: int) -> Tree:
            if not self.known[number]:
                return (number, data.get(number, Content()))
            inside = sorted((name, to) for name, to in names.get(number, {}).items() if (number, name) not in gone)
            return (number, *((name, one(to)) for name, to in inside))

        return one(self.root)


class Numbers:
    """Makes trees on the disk, where files have other inode numbers than those that a seal names; `told` gives the old ones."""

    def __init__(self) -> None:
        self.old: dict[int, int] = {}
        self.inode = commit.inode

    def build(self, tree: Tree, place: Path) -> None:
        """Makes a tree in an empty directory."""
        self._remember(place, tree[0])
        made: dict[int, str] = {}
        self._fill(tree, str(place), made)

    def _fill(self, tree: Tree, place: str, made: dict[int, str]) -> None:
        for name, below in tree[1:]:
            path = os.path.join(place, name)
            if len(below) == 2 and isinstance(below[1], Content):
                number, (data, attributes) = below
                if number in made:
                    os.link(made[number], path)
                    continue
                with open(path, "wb") as file:
                    file.write(data)
                for attribute, value in attributes:
                    os.setxattr(path, attribute, value)
                made[number] = path
            else:
                os.mkdir(path)
                self._fill(below, path, made)
            self._remember(path, below[0])

    def _remember(self, path: str | Path, number: int) -> None:
        self.old[os.lstat(path).st_ino] = self.old.get(number, number)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside, zckpt is told the inode numbers that the files had when they were made."""

        def number(path: str) -> int:
            real = self.inode(path)
            return self.old.get(real, real)

        commit.inode = saves.inode = number
        try:
            yield
        finally:
            commit.inode = saves.inode = self.inode
