"""Gives a sealed output its name, and deletes what it replaces. The process may be killed after each step.

[Note: what is still to be done] If the staged directory still has its inode number in the work directory, it has not been
exchanged. If a staged file is still there, it has not been moved; if an old file still has its inode number under the output's
name, it has not been moved away. So `Commit` finds out which steps were done, and doing a step twice does no harm.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence

from zckpt.base.errors import OutputError
from zckpt.core.plan import WrittenFile
from zckpt.output import journal, manifest
from zckpt.output.durable import exchange, make_directories, sync, sync_all
from zckpt.output.journal import JournalRecord, Seal
from zckpt.output.work_directory import WorkDirectory


def inode(path: str) -> int:
    """The inode number of a path, links not followed; 0 if it does not exist."""
    try:
        return os.lstat(path).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return 0


def turn_of(path: str) -> int:
    """When a file gets its name: 0 for data; 1 for an index, at which readers begin, so that they never find a file missing
    that it names; 2 for the manifest. Files lose their names in the opposite order.
    """
    name = os.path.basename(path)
    if path == manifest.NAME or path.endswith(f".{manifest.NAME}"):
        return 2
    return int(name.endswith(".index.json") or name in (".metadata", "latest", "latest_universal"))


def in_order(paths: Iterable[str]) -> list[str]:
    """Sorts paths by their turns, and by name."""
    return sorted(paths, key=lambda path: (turn_of(path), path))


def seal_of(
    work: WorkDirectory,
    out: str,
    *,
    single: bool,
    swap: bool,
    deleted: Iterable[str],
    files: Iterable[WrittenFile] = (),
    by_file: bool = False,
) -> Seal:
    """Plans a commit before it begins, from the files in the work directory and under the output's name.

    Args:
        work: the work directory that the files are staged in.
        out: the output's path.
        single: whether it is one file, with its manifest.
        swap: whether the whole directory is exchanged; otherwise files are moved one by one.
        deleted: files of the old output to delete, relative to its directory.
        files: of the new output, without its manifest.
        by_file: whether old directories are left where they are, and only files are moved out of them.
    """
    deleted = tuple(sorted(deleted))
    facts = tuple((file.path, file.nbytes, file.crc32) for file in files)
    staged, old = inode(work.files), inode(out)
    if single:
        name = os.path.basename(manifest.path_for(out, single=True))
        signature = manifest.signature_for(name)
        new = (signature, name) if inode(os.path.join(work.files, signature)) else (name,)
        home = os.path.dirname(out)
        leave = tuple((path, at) for path in (name, *deleted) if (at := inode(os.path.join(home, path))))
        gone = tuple(dict.fromkeys((name, *deleted, *new)))
        return Seal("order", True, staged, old, leave, (os.path.basename(out), *new), gone, facts)
    if swap:
        return Seal("swap", False, staged, old, deleted=deleted, files=facts)
    leaving = list(deleted) if by_file else _units(out, set(deleted))
    moves = tuple((path, inode(os.path.join(out, path))) for path in reversed(in_order(leaving)))
    entering = in_order(_entering(work.files, out, set(leaving)))
    return Seal("order", False, staged, old, moves, tuple(entering), deleted, facts)


def _above(paths: Iterable[str]) -> set[str]:
    """All directories above these paths."""
    return {path[:at] for path in paths for at, letter in enumerate(path) if letter == "/"}


def _units(out: str, deleted: set[str], below: str = "") -> list[str]:
    """The fewest paths that cover these files: a directory without other files is one path."""
    units: list[str] = []
    above = _above(deleted)
    for entry in os.listdir(os.path.join(out, below)):
        path = os.path.join(below, entry)
        if path in deleted:
            units.append(path)
        elif path in above:
            inner = os.path.join(out, path)
            held = {
                os.path.relpath(os.path.join(r, n), out) for r, ds, ns in os.walk(inner) for n in (*ns, *_ends(r, ds))
            }
            units += [path] if held <= deleted else _units(out, deleted, path)
    return units


def _ends(root: str, directories: list[str]) -> list[str]:
    """Directories that count as files: links, and empty directories."""
    return [name for name in directories if os.path.islink(p := os.path.join(root, name)) or not os.listdir(p)]


def _entering(staged: str, out: str, leaving: set[str], below: str = "") -> list[str]:
    """Paths that are moved into the output: a directory whole if the output has none of its name, or moves it away."""
    found: list[str] = []
    for entry in os.listdir(os.path.join(staged, below)):
        path = os.path.join(below, entry)
        if os.path.isdir(os.path.join(staged, path)) and path not in leaving and os.path.isdir(os.path.join(out, path)):
            found += _entering(staged, out, leaving, path)
        else:
            found.append(path)
    return found


class Commit:
    """Carries out the steps of a seal.

    Args:
        work: the work directory; this process holds its lock.
        out: the output's path.
        seal: the steps.
    """

    def __init__(self, work: WorkDirectory, out: str, seal: Seal) -> None:
        self._work = work
        self._out = out
        self._seal = seal
        self._root = os.path.dirname(out) if seal.single else out

    def is_whole(self) -> bool:
        """Whether the files that wait for their names have the sizes that were sealed."""
        staged, seal = self._work.files, self._seal
        if not any(inode(os.path.join(staged, path)) for path in (seal.enter if seal.how == "order" else ("",))):
            return True
        if seal.how == "swap" and inode(staged) != seal.staged:
            return True
        homes = (staged, self._root) if seal.how == "order" else (staged,)
        return all(
            any(os.path.isfile(place := os.path.join(home, path)) and os.path.getsize(place) == size for home in homes)
            for path, size, _ in seal.files
        )

    def carry_out(self) -> None:
        """Does the steps that are left; after that the output has its name, durably. Raises OutputError if another
        program has put files there since the seal was written, OSError if a step failed.
        """
        if self._seal.how == "swap":
            try:
                self._swap()
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EBUSY) or inode(self._work.aside):
                    raise
                self._seal = self._without_swapping()
                self._move()
        else:
            self._move()
        sync(os.path.dirname(self._out))

    def _swap(self) -> None:
        staged, out, aside = self._work.files, self._out, self._work.aside
        there = inode(staged)
        if there != self._seal.staged:
            if there not in (0, self._seal.old):
                raise self._changed(staged)
            return
        if inode(out) not in (0, self._seal.old) and os.listdir(out):
            raise self._changed(out)
        try:
            os.rename(staged, out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not exchange(staged, out):
                os.rename(out, aside)
                sync(self._work.path)
                os.rename(staged, out)

    def _without_swapping(self) -> Seal:
        """The seal for moving file by file: for directories that are not mount points and cannot be renamed (overlayfs)."""
        work, seal = self._work, self._seal
        for root, _, names in os.walk(work.files):
            for name in names:
                path = os.path.join(root, name)
                if inode(path) == inode(os.path.join(self._out, os.path.relpath(path, work.files))):
                    os.unlink(path)
        plain = seal_of(work, self._out, single=False, swap=False, deleted=seal.deleted, by_file=True)
        plain = Seal("order", False, plain.staged, plain.old, plain.leave, plain.enter, plain.deleted, seal.files)
        journal.write_seal(work.journal, plain)
        return plain

    def _move(self) -> None:
        staged, aside, seal = self._work.files, self._work.aside, self._seal
        numbers = dict(seal.leave)
        for first in (True, False):  # each half is durable before the other begins: no index is there without its files
            leaving = [path for path in numbers if bool(turn_of(path)) == first]
            for path in leaving:
                here, there = os.path.join(self._root, path), os.path.join(aside, path)
                if inode(here) == numbers[path] and inode(there) in (0, numbers[path]):
                    make_directories(os.path.dirname(there))
                    _rename(here, there)
            self._sync_moves(aside, self._root, leaving)
        for last in (False, True):
            entering = [path for path in seal.enter if bool(turn_of(path)) == last]
            for path in entering:
                here, there = os.path.join(staged, path), os.path.join(self._root, path)
                if not inode(here):
                    continue
                if inode(there) not in (0, inode(here), seal.old if seal.single else 0):
                    raise self._changed(there)
                _rename(here, there)
            self._sync_moves(self._root, staged, entering)

    def _sync_moves(self, to: str, source: str, paths: Sequence[str]) -> None:
        """Makes moves durable: first the names that files have now, then that those are gone which they had."""
        for root in (to, source):
            homes = {os.path.dirname(os.path.join(root, path)) for path in paths}
            sync_all(filter(os.path.isdir, sorted(homes)))

    def _changed(self, path: str) -> OutputError:
        return OutputError(
            "somebody else has changed this output while it was being replaced", file=path,
            found="a file or directory that was not there before",
            remedy=f"Move it away, and run the same command again. The new output is complete in {self._work.path!r}.",
        )  # fmt: skip

    def undo(self) -> bool:
        """Moves everything back. Returns whether that succeeded and the seal was withdrawn; if not, the seal must stay."""
        staged, aside, seal = self._work.files, self._work.aside, self._seal
        try:
            if seal.how == "swap":
                if inode(staged) != seal.staged:
                    return False
                if inode(aside):
                    os.rename(aside, self._out)
                    sync(os.path.dirname(self._out))
            else:
                if seal.single and not inode(os.path.join(staged, seal.enter[0])):
                    return False
                self._move_back()
            journal.end_seal(self._work.journal, "withdrawn")
        except OSError:
            return False
        return True

    def _move_back(self) -> None:
        """Undoes what `_move` did, its last steps first."""
        staged, aside, seal = self._work.files, self._work.aside, self._seal
        for last in (True, False):
            entered = [path for path in reversed(seal.enter) if bool(turn_of(path)) == last]
            for path in entered:
                if not inode(os.path.join(staged, path)):
                    os.rename(os.path.join(self._root, path), os.path.join(staged, path))
            self._sync_moves(staged, self._root, entered)
        numbers = dict(seal.leave)
        for first in (False, True):
            left = [path for path in reversed(numbers) if bool(turn_of(path)) == first]
            for path in left:
                if inode(os.path.join(aside, path)) == numbers[path]:
                    os.rename(os.path.join(aside, path), os.path.join(self._root, path))
            self._sync_moves(self._root, aside, left)
        _remove_empty(aside)

    def clean(self, *, durable: bool = False) -> None:
        """Deletes the replaced files; call it when the new output has its name. `durable`: whether the end of the seal
        is made durable: needed unless the work directory is removed next.
        """
        for displaced in (self._work.aside, self._work.files):
            if inode(displaced):
                self._discard(displaced, "")
        for directory in sorted(_above(self._seal.deleted), reverse=True):
            with contextlib.suppress(OSError):  # it holds something else
                os.rmdir(os.path.join(self._root, directory))
        journal.end_seal(self._work.journal, "done", durable=durable)

    def _discard(self, displaced: str, below: str) -> None:
        """Deletes files that the seal lists, and second names of files that stay; moves all others into the new output."""
        deleted = set(self._seal.deleted)
        above = _above(deleted)
        inside = os.path.join(displaced, below)
        for entry in os.listdir(inside):
            path = os.path.join(below, entry)
            old, new = os.path.join(displaced, path), os.path.join(self._root, path)
            if os.path.isdir(old) and not os.path.islink(old):
                if path in above or inode(new):
                    self._discard(displaced, path)
                else:
                    self._keep(old, new)
            elif path in deleted or inode(old) == inode(new):
                os.unlink(old)
            else:
                self._keep(old, new)
        os.rmdir(inside)

    def _keep(self, old: str, new: str) -> None:
        """Moves a file that another program made after the new directory was filled: zckpt must not delete it."""
        home = os.path.dirname(new)
        make_directories(home)
        os.rename(old, new)
        sync(home)  # before the directory goes that it was in


def _rename(old: str, new: str) -> None:
    """Renames a file. One that has both names, as a power failure may leave it, loses the old one: `rename` would do nothing."""
    if inode(old) == inode(new):
        os.unlink(old)
    else:
        os.rename(old, new)


def _remove_empty(directory: str) -> None:
    for root, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(root)


def recover(work: WorkDirectory, out: str) -> JournalRecord:
    """Brings to an end what a run had sealed that was killed.

    Args:
        work: the work directory; this process holds its lock.
        out: the output's path.

    Returns:
        The journal's record, as it was before.

    Raises:
        OutputError: the commit cannot be finished; no file is lost.
    """
    record = journal.read(work.journal)
    if record.done:
        sync(
            work.journal
        )  # the work directory is used on: a seal that a power failure brings back would take its files
    if record.seal is not None:
        commit = Commit(work, out, record.seal)
        name = os.path.basename(manifest.path_for(out, single=True))
        own = {os.path.basename(out), name, manifest.signature_for(name)}
        strange = record.seal.single and not own.issuperset(record.seal.enter)
        if strange or os.path.islink(work.files) or os.path.islink(work.aside):
            raise OutputError(
                "zckpt did not make this work directory", file=work.path,
                found="a file of another name" if strange else "a link in it",
                remedy="Move it away. Nothing was changed.",
            )  # fmt: skip
        try:
            if not commit.is_whole() and commit.undo():  # the machine crashed, and files that were synced are not whole
                return journal.read(work.journal)
            commit.carry_out()
            commit.clean(durable=True)
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(
                "an earlier run completed this output, which could not be given its name",
                file=out, found=error.strerror or str(error),
                remedy="Remove the cause, and run the same command again. Nothing is lost: the new files, and those that they "
                f"replace, are in {work.path!r} and {out!r}.",
            ) from error  # fmt: skip
    return record
