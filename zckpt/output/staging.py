"""An output that is being made: staged, sealed, committed, cleaned; gone on with where an earlier run was interrupted.

For every job that writes files; see the note in `zckpt.output`. Files that an earlier run of the same job recorded are kept when
their bytes still have the recorded checksum. Where a run fails, the work directory stays if a finished file lies in it and the
same command could go on with it; otherwise it is removed. An output that this very job has made already is not made again.
Modes of files and directories follow the umask, but for the work directory, which is the owner's own, and for an output's
directory that is replaced: the new one has its mode.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Collection
from stat import S_IMODE, S_ISREG
from types import TracebackType

from zckpt.base.errors import CastError, InconsistentError, OutputError, UnsupportedError, UsageError, add_note
from zckpt.base.words import examples
from zckpt.output import manifest
from zckpt.output.checks import refuse_existing
from zckpt.output.commit import Commit, recover, seal_of
from zckpt.output.contents import Replacement, replacement
from zckpt.output.durable import make_directories, sync, sync_tree
from zckpt.output.journal import Finished, Journal, write_seal
from zckpt.output.manifest import Manifest
from zckpt.output.work_directory import WorkDirectory, left_by_others
from zckpt.storage.fsync_queue import make_durable
from zckpt.storage.location import LocalPath, Location
from zckpt.storage.output_places import entries, keeps_its_name, resolved

_HOPELESS = (CastError, InconsistentError, UsageError, UnsupportedError)
"""The same command would fail again, or must not trust what was made so far."""


class Staging:
    """An output that is being made; use as a context manager and call `commit` when all is written.

    Args:
        out: the output's path.
        single: whether the output is the one file `basename(out)`, with its manifest beside it.
        names: of the output's files, as far as they are known; those that must not be written over are found early then.
        job: fingerprint of all that decides the output's bytes; what an earlier run of the same job finished is kept.
        overwrite: whether an output that exists is replaced: the files that its `zckpt.json` lists.
        merge: for a directory: replace files of the new ones' names in one that exists, whoever wrote them.

    Attributes:
        directory: where files are to be written.
        home: the directory that the output's files lie in when all is done.
        left: by path, files of an earlier run, as its journal has them. Whoever has read them again calls `keep`.
        published: an earlier run of the same job has made this very output, by all that is known of it. Its files are in
            `left` and lie in `home`: whoever has read them again is done, or calls `make_again`.
        notes: sentences a person should see.
    """

    def __init__(
        self,
        out: str,
        *,
        single: bool,
        names: Collection[str] = (),
        job: str = "",
        overwrite: bool = False,
        merge: bool = False,
    ) -> None:
        self.out = resolved(out)
        self.parent, self.name = os.path.split(self.out)
        self.home = self.parent if single else self.out
        self.left: dict[str, Finished] = {}
        self.published = False
        self.notes: tuple[str, ...] = ()
        self._single = single
        self._names = names
        self._overwrite = overwrite
        self._merge = merge and not single
        self._made: list[str] = []
        self._job = job
        self._work = WorkDirectory(out)
        self._committed = False

    @property
    def directory(self) -> str:
        """Where files are to be written."""
        return self._work.files

    def __enter__(self) -> Staging:
        try:
            self._made = make_directories(self.parent)
            self._work.take()
        except OSError as error:
            self._forget_parents()
            if isinstance(error, OutputError):
                raise
            raise OutputError(
                "cannot be written", file=self.out, found=error.strerror or str(error),
                remedy="Check the path and its permissions. Nothing was changed.",
            ) from error  # fmt: skip
        try:
            if not self._work.is_locked:
                self.notes = (
                    "This file system has no locks, so an interrupted conversion would start from the beginning.",
                )
            self._recover()
            self._journal = Journal(self._work.journal, self._job)
            facts = manifest.path_for(self.out, single=self._single)
            self.published = bool(self._job) and os.path.isfile(facts) and self._is_mine(facts)
            if self.published:
                known = self._journal.finished
                self.left = {file.path: known.get(file.path, file) for file in manifest.read(facts).files}
            else:
                self._begin()
        except BaseException:
            self._work.release(remove=not self._work.was_there)
            self._forget_parents()
            raise
        return self

    def _recover(self) -> None:
        """Brings to an end what runs before this one had sealed, wherever they worked."""
        if recover(self._work, self.out).seal is not None:
            self._work.was_there = False
        for path in (*self._work.dead, *left_by_others(self.out, self._work.path)):
            other = WorkDirectory(self.out, path)
            if path not in self._work.dead:
                other.take()
            recover(other, self.out)
            other.release(remove=True)

    def _is_mine(self, facts: str) -> bool:
        """Whether this very job wrote the output that is there."""
        return self._journal.done or manifest.job_of(facts) == self._job

    def _begin(self) -> None:
        """Looks whether the output may be made, and what there is of it."""
        self._check(self._names)
        if self._job:
            there = self._journal.finished.items()
            self.left = {path: file for path, file in there if is_there(self.directory, file)}

    def _check(self, names: Collection[str]) -> Replacement | None:
        """What files of these names replace in a directory that exists; None where there is nothing.

        Raises:
            OutputError: the output must not be replaced, or not all that lies there.
        """
        if not (self._overwrite or self._merge):
            refuse_existing(self.out)
        if self._single or not os.path.isdir(self.out) or not entries(self.out):
            return None
        return replacement(LocalPath(self.out), names, merge=self._merge)

    def make_again(self, damaged: Collection[str]) -> None:
        """The output that this job has made is not what it was: it is made again, if it may be replaced.

        Raises:
            OutputError: it may not.
        """
        if not (self._overwrite or self._merge):
            raise OutputError(
                "this command made this output, and it is damaged", file=self.out, found=f"changed: {examples(damaged)}",
                expected="files with the checksums of their manifest",
                remedy="Pass --overwrite to make the output again. Nothing was changed.",
            )  # fmt: skip
        self.published, self.left = False, {}
        self._begin()

    def _forget_parents(self) -> None:
        for made in self._made:
            with contextlib.suppress(OSError):
                os.rmdir(made)

    def keep(self, kept: Collection[str]) -> None:
        """Begins the work: of what an earlier run left, only `kept` stays."""
        try:
            for root, directories, names in os.walk(self.directory, topdown=False):
                for path in (os.path.join(root, name) for name in (*names, *directories)):
                    if not os.path.isdir(path) or os.path.islink(path):
                        if os.path.relpath(path, self.directory) not in kept:
                            os.unlink(path)
                    elif not os.listdir(path):
                        os.rmdir(path)
            os.makedirs(self.directory, exist_ok=True)
            self._journal.begin({path: self.left[path] for path in kept})
        except OSError as error:
            raise OutputError(
                "cannot be written",
                file=self.directory,
                found=error.strerror or str(error),
                remedy="Check the disk and the permissions, and run the same command again.",
            ) from error

    def finished(self, file: Finished) -> None:
        """Records a file that is complete and durable."""
        self._journal.add(file)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()
        done = len(self._journal.finished)
        goes_on = error is not None and done and self._work.is_locked and not isinstance(error, _HOPELESS)
        self._work.release(remove=not goes_on or self._committed)
        if error is not None:
            self._forget_parents()
            if goes_on:
                files = "1 finished file is" if done == 1 else f"{done:,} finished files are"
                add_note(error, f"{files} kept in {self._work.path!r}: the same command goes on from there.")

    def copy(self, file: Location, name: str) -> Finished:
        """Copies a small file that belongs to the output, and syncs it."""
        crc, nbytes = 0, 0
        target = os.path.join(self.directory, name)
        try:
            with open(target, "wb") as copy:
                for block in file.blocks():
                    crc, nbytes = zlib.crc32(block, crc), nbytes + len(block)
                    copy.write(block)
                copy.flush()
                make_durable(copy.fileno())
        except OSError as error:
            raise OutputError(
                "cannot be copied", file=file, found=error.strerror or str(error),
                remedy="Check this file and the disk of OUT, and run the same command again.",
            ) from error  # fmt: skip
        return Finished(name, nbytes, crc)

    def commit(self, facts: Manifest) -> None:
        """Gives the output its name.

        Args:
            facts: the manifest.

        Raises:
            OutputError: it could not be done. The old output, if there was one, is as it was; where even that could not be
                done, nothing is lost, and the next run on this output brings it to an end.
        """
        changes = self._check(_files_in(self.directory))
        if changes is not None and changes.rivals:
            self.notes += (
                f"{examples(changes.rivals)} in {self.out!r} {'is' if len(changes.rivals) == 1 else 'are'} not of this output: "
                "a loader might take such weights instead of the new ones.",
            )
        try:
            name = os.path.basename(manifest.path_for(self.out, single=self._single))
            manifest.write(os.path.join(self.directory, name), facts.as_bytes(), self._job)
            swap = not self._single and self._can_swap(changes)
            seal = seal_of(
                self._work, self.out, single=self._single, swap=swap, files=facts.files,
                deleted=() if changes is None else changes.deleted,
            )  # fmt: skip
            sync_tree(self.directory)
            sync(self._work.path)
            sync(os.path.dirname(self._work.path))
            write_seal(self._work.journal, seal)
        except OSError as error:
            raise self._unnamed(error) from error
        commit = Commit(self._work, self.out, seal)
        try:
            commit.carry_out()
        except OSError as error:
            undone = commit.undo()
            if isinstance(error, OutputError):
                raise
            raise self._unnamed(error, undone=undone) from error
        self._committed = True
        with contextlib.suppress(OSError):  # the next run on this output does it
            commit.clean()

    def _unnamed(self, error: OSError, *, undone: bool = True) -> OutputError:
        return OutputError(
            "the new output could not be given its name", file=self.out, found=error.strerror or str(error),
            remedy="Remove the cause, and run the same command again. "
            + ("The old output is as it was." if undone else "Nothing is lost, and the new output is complete."),
        )  # fmt: skip

    def _can_swap(self, changes: Replacement | None) -> bool:
        """Makes the staged directory ready to take the place of the one that is there; False where it cannot."""
        if keeps_its_name(self.out):
            return False
        if changes is None:
            return True
        if changes.untouched or LocalPath(os.getcwd()).is_within(LocalPath(self.out)):
            return False
        return _like(self.out, self.directory) and _linked(changes.stays, self.out, self.directory)


def is_there(directory: str, file: Finished) -> bool:
    """Whether there is a plain file of this name and size."""
    try:
        stat = os.lstat(os.path.join(directory, file.path))
    except (OSError, ValueError):
        return False
    return S_ISREG(stat.st_mode) and stat.st_size == file.nbytes


def _files_in(directory: str) -> set[str]:
    return {
        os.path.relpath(os.path.join(root, name), directory) for root, _, names in os.walk(directory) for name in names
    }


def _like(old: str, new: str) -> bool:
    """Gives the new directory the mode and owner of the old one; False where it has more that cannot be had."""
    stat = os.stat(old)
    try:
        attributes = os.listxattr(old)
    except (OSError, AttributeError):
        attributes = []
    if any(not name.startswith("security.") for name in attributes):
        return False
    try:
        if (stat.st_uid, stat.st_gid) != ((made := os.stat(new)).st_uid, made.st_gid):
            os.chown(new, stat.st_uid, stat.st_gid)
        os.chmod(new, S_IMODE(stat.st_mode))
    except OSError:
        return False
    return True


def _linked(names: Collection[str], old: str, new: str) -> bool:
    """Gives files that stay a second name in the new directory; False where the file system does not allow that."""
    made: list[str] = []
    try:
        for name in names:
            place = os.path.join(new, name)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.link(os.path.join(old, name), place, follow_symlinks=False)
            made.append(place)
    except OSError:
        for place in made:
            os.unlink(place)
        return False
    return True
