"""Writes the saves of a run, each a directory named by its tag beside `latest`, by the protocol of `zckpt.output`.

For the trainer, which writes saves, and for `layouts.places`, which finds them.
[Note: work on a save] A save is staged in a directory `.zckpt-` and sixteen digits that follow from its tag, so that the next
save of the tag finds the work of a killed run. The journal there names the tag. On file systems that cannot exchange two
directories, there is a moment in which the tag has no directory although `latest` may name it. If a run is killed then, a seal
says that the staged save is whole, readers use the staged directory (`find_displaced`), and the next save of any tag finishes the
commit (`finish_others`). Readers change nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator

from zckpt.base.errors import OutputError
from zckpt.core.plan import WrittenFile
from zckpt.output import journal
from zckpt.output.commit import Commit, inode, recover, seal_of
from zckpt.output.durable import replace_file, sync, sync_all, tree
from zckpt.output.journal import Journal, Seal
from zckpt.output.work_directory import WorkDirectory

PREFIX = ".zckpt-"
STAGED = "files"
"""The directory in a work directory that becomes the save."""


def find_displaced(directory: str) -> dict[str, str]:
    """Tag -> staged directory, of whole saves with a tag that has no directory; see [Note: work on a save]."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for path in _work_on_saves(directory):
            record = journal.read(os.path.join(path, "journal"))
            staged = os.path.join(path, STAGED)
            if record.seal is None or not record.job or os.path.lexists(os.path.join(directory, record.job)):
                continue
            if inode(staged) == record.seal.staged and not os.path.islink(staged):
                found[record.job] = staged
    return found


class SaveStaging:
    """Stages and commits one save.

    Args:
        directory: that holds the tags.
        tag: of the save.
        is_ours: whether a file of this name is one of a save; other files in an older save of the tag are kept.
    """

    def __init__(self, directory: str, tag: str, is_ours: Callable[[str], bool]) -> None:
        import hashlib  # which is slow to import, and seldom wanted

        self._directory, self._tag, self._is_ours = directory, tag, is_ours
        self._out = os.path.join(directory, tag)
        digits = hashlib.sha256(os.fsencode(tag)).hexdigest()[:16]
        self._work = WorkDirectory(self._out, os.path.join(directory, PREFIX + digits))
        self._seal: Seal | None = None

    @property
    def name(self) -> str:
        """The work directory's name."""
        return os.path.basename(self._work.path)

    def begin(self) -> None:
        """Makes the work directory, and finishes the commits of killed runs beside the tags. Raises OutputError if
        another run saves the same tag, OSError if the directory cannot be written.
        """
        self._work.take()
        try:
            for path in self._work.dead:
                finish(path, self._directory, self._is_ours)
            if self._work.was_there:
                _recover(self._work, self._directory, self._is_ours)
            self._empty()
            with contextlib.closing(Journal(self._work.journal, self._tag)) as begun:
                begun.begin()
            finish_others(self._directory, self._is_ours, but=self._work.path)
        except BaseException:
            self.end()
            raise

    def _empty(self) -> None:
        """Makes `files` an empty directory, and removes `aside`, which a power failure may leave of a commit that is done."""
        for directory in (self._work.files, self._work.aside):
            if inode(directory):
                shutil.rmtree(directory)
        os.mkdir(self._work.files)

    def seal(self) -> None:
        """Syncs the staged names and writes the seal, durably. Raises OSError if the seal cannot be written."""
        staged = self._work.files
        sync_all((*tree(staged), self._work.path, self._directory))
        files = [
            WrittenFile(name, os.path.getsize(os.path.join(staged, name)), 0) for name in sorted(os.listdir(staged))
        ]
        old = os.listdir(self._out) if os.path.isdir(self._out) else ()
        seal = seal_of(
            self._work, self._out, single=False, swap=True, deleted=[name for name in old if self._is_ours(name)],
            files=files,
        )  # fmt: skip
        journal.write_seal(self._work.journal, seal)
        self._seal = seal

    def commit(self) -> None:
        """Gives the save its name, and deletes what it replaces.

        Raises:
            OSError: a step failed. The old save is unchanged, or the next save finishes this commit.
        """
        assert self._seal is not None
        commit = Commit(self._work, self._out, self._seal)
        try:
            commit.carry_out()
        except OSError:
            commit.undo()
            raise
        with contextlib.suppress(OSError):  # the next save cleans
            commit.clean()

    def replace_file(self, name: str, data: bytes, mode: int | None = None) -> None:
        """Replaces a small file beside the tags in one step, durably; does nothing if it has these bytes already."""
        replace_file(os.path.join(self._directory, name), data, os.path.join(self._work.path, "new"), mode)

    def remove(self, tags: Collection[str]) -> None:
        """Deletes other saves: renames each away from its tag first, so that a tag never names half a save. Raises
        OSError if a save cannot be renamed; saves that still have their tags are whole.
        """
        if journal.read(self._work.journal).seal is not None:
            return  # this commit could not be cleaned: the next save does that first
        if not tags:
            return
        sync(self._work.journal)  # a seal that came back after a crash would take the deleted saves for its own
        self._empty()
        for tag in tags:
            os.rename(os.path.join(self._directory, tag), os.path.join(self._work.files, tag))
        sync(self._directory)

    def end(self) -> None:
        """Removes the work directory, unless a commit still needs it, and releases its lock."""
        _release(self._work)


def finish_others(directory: str, is_ours: Callable[[str], bool], but: str = "") -> None:
    """Finishes the commits of killed runs; skips work directories that are in use or that zckpt did not create."""
    for path in _work_on_saves(directory):
        if path != but:
            with contextlib.suppress(OSError):
                finish(path, directory, is_ours)


def finish(path: str, directory: str, is_ours: Callable[[str], bool]) -> None:
    """Finishes the commit in a work directory if its run has ended, and removes the directory. Raises OSError if
    another run uses it, or a step failed.
    """
    record = journal.read(os.path.join(path, "journal"))
    work = WorkDirectory(os.path.join(directory, record.job or "none"), path)
    text, _, _ = os.path.basename(path).removeprefix(PREFIX).partition("-")[2].rpartition("-")
    from zckpt.storage import processes

    process = processes.parse(text)
    if process is None:
        work.take()
        if not work.is_locked:  # without locks only the next save of the same tag may take it over
            _release(work)
            return
    elif not process.is_dead():
        return
    try:
        _recover(work, directory, is_ours)
    finally:
        _release(work)


def _recover(work: WorkDirectory, directory: str, is_ours: Callable[[str], bool]) -> None:
    """Finishes a sealed commit after checking that it is one of a save: a checkpoint may come from an attacker."""
    record = journal.read(work.journal)
    if record.seal is None:
        recover(work, directory)
        return
    seal, tag = record.seal, record.job or ""
    paths = (*seal.deleted, *seal.enter, *(path for path, _ in seal.leave))
    if (
        seal.single
        or not all(map(is_ours, paths))
        or os.path.basename(tag) != tag
        or tag.startswith(".")
        or os.path.islink(work.files)
        or os.path.islink(work.aside)
    ):
        raise OutputError(
            "zckpt did not make this work directory", file=work.path, found="a journal that names files of no save",
            remedy="Remove this directory. Nothing was changed.",
        )  # fmt: skip
    recover(work, os.path.join(directory, tag))


def _release(work: WorkDirectory) -> None:
    if journal.read(work.journal).seal is None:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(work.path, "new"))
    work.release(remove=True)


def _work_on_saves(directory: str) -> Iterator[str]:
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if name.startswith(PREFIX) and os.path.isdir(path) and not os.path.islink(path):
            yield path
