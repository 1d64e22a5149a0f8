"""Stages, seals, commits and cleans one output; resumes the work of an interrupted run.

For every job that writes files; see the note in `zckpt.output`. Files that an earlier run of the same job recorded are kept if
their bytes still have the recorded checksum. If a run fails, its work directory stays if it has a finished file that the same
command could keep; otherwise it is removed. An output that the same job has already made is not made again. Modes of files and
directories follow the umask, with two exceptions: only the owner can use the work directory, and a directory that replaces
another has that one's mode.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Callable, Collection
from dataclasses import replace
from hashlib import sha256
from stat import S_IMODE, S_ISREG
from types import TracebackType

from zckpt.base.errors import (
    CastError,
    InconsistentError,
    OutputError,
    UnsupportedError,
    UsageError,
    ZckptError,
    add_note,
)
from zckpt.base.words import examples
from zckpt.output import manifest
from zckpt.output.checks import refuse_existing
from zckpt.output.commit import Commit, recover, seal_of
from zckpt.output.contents import Replacement, replacement
from zckpt.output.durable import make_directories, sync_all, tree
from zckpt.output.journal import Finished, Journal, write_seal
from zckpt.output.manifest import Manifest
from zckpt.output.work_directory import WorkDirectory, left_by_others
from zckpt.storage.fsync_queue import make_durable
from zckpt.storage.location import LocalPath, Location
from zckpt.storage.output_places import entries, keeps_its_name, resolved

_HOPELESS = (CastError, InconsistentError, UsageError, UnsupportedError)
"""After these errors the same command would fail again, or must not trust the files made so far."""


class Staging:
    """One output; use as a context manager and call `commit` when all files are written.

    Args:
        out: the output's path.
        single: whether the output is the one file `basename(out)`, with its manifest beside it.
        names: of the output's files as far as they are known, to find early which files must not be written over.
        job: fingerprint of everything that the output's bytes depend on; files of an earlier run of the same job are kept.
        overwrite: whether the files of an existing output are replaced: those that its `zckpt.json` lists.
        merge: for a directory: write into an existing one, and replace files of the new names even if zckpt did not write them.

    Attributes:
        directory: where files are to be written.
        home: the directory that the output's files are in after the commit.
        left: files of an earlier run by path, as in its journal. The caller checks their bytes, then calls `keep`.
        published: whether an earlier run of the same job has made this output. Its files are in `left`, and their place is
            `home`. The caller checks their bytes and is done, or calls `make_again`.
        notes: sentences for a person.
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
            exists = os.path.lexists(self.out)  # one file may have been deleted, and its manifest not
            self.published = bool(self._job) and exists and os.path.isfile(facts) and self._is_mine(facts)
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
        """Finishes the sealed commits of earlier runs, in all places where they may have worked."""
        if recover(self._work, self.out).seal is not None:
            self._work.was_there = False
        for path in (*self._work.dead, *left_by_others(self.out, self._work.path)):
            other = WorkDirectory(self.out, path)
            if path not in self._work.dead:
                other.take()
            recover(other, self.out)
            other.release(remove=True)

    def _is_mine(self, facts: str) -> bool:
        """Whether the same job wrote the existing output."""
        return self._journal.done or manifest.job_of(facts) == self._job

    def _begin(self) -> None:
        """Checks that the output may be made, and finds the files that an earlier run left."""
        self._check(self._names)
        if self._job:
            there = self._journal.finished.items()
            self.left = {path: file for path, file in there if is_there(self.directory, file)}

    def _check(self, names: Collection[str]) -> Replacement | None:
        """What files of these names replace in an existing directory; None if there is no directory, or it is empty.

        Raises:
            OutputError: the output, or a file in it, must not be replaced.
        """
        if not (self._overwrite or self._merge):
            refuse_existing(self.out)
        if self._single or not os.path.isdir(self.out) or not entries(self.out):
            return None
        return replacement(LocalPath(self.out), names, merge=self._merge)

    def make_again(self, damaged: Collection[str]) -> None:
        """Starts the output again, because files that an earlier run of this job published are damaged.

        Raises:
            OutputError: the output must not be replaced.
        """
        if not (self._overwrite or self._merge):
            found: dict[str, list[str]] = {"missing": [], "changed": []}
            for path in damaged:
                found["changed" if os.path.lexists(os.path.join(self.home, path)) else "missing"].append(path)
            raise OutputError(
                "this command made this output, and it is damaged", file=self.out,
                found="; ".join(f"{what}: {examples(paths)}" for what, paths in found.items() if paths),
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
        """Begins the work: removes all files of an earlier run from the work directory, except `kept`."""
        try:
            for root, directories, names in os.walk(self.directory, topdown=False):
                for path in (os.path.join(root, name) for name in (*names, *directories)):
                    if not os.path.isdir(path) or os.path.islink(path):
                        if os.path.relpath(path, self.directory) not in kept:
                            os.unlink(path)
                    elif not os.listdir(path):
                        os.rmdir(path)
            shutil.rmtree(self._work.aside, ignore_errors=True)  # left by a power failure, of a commit that is done
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
        can_resume = error is not None and done and self._work.is_locked and not isinstance(error, _HOPELESS)
        self._work.release(remove=not can_resume or self._committed)
        if error is not None:
            self._forget_parents()
            if can_resume:
                files = "1 finished file is" if done == 1 else f"{done:,} finished files are"
                add_note(error, f"{files} kept in {self._work.path!r}. Run the same command again to resume.")

    def copy(self, file: Location, name: str) -> Finished:
        """Copies a small file into the output, and syncs it."""
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

    def commit(self, facts: Manifest, sign: Callable[[str], bytes] | None = None) -> None:
        """Gives the output its name.

        Args:
            facts: the manifest.
            sign: makes the signature's file, given the manifest's SHA-256; None for an output without a signature.

        Raises:
            OutputError: a step failed. The old output, if there was one, is unchanged; or, if it could not be restored, no file
                is lost, and the next run on this output finishes the commit.
        """
        changes = self._check(_files_in(self.directory))
        if changes is not None and changes.rivals:
            self.notes += (
                f"{examples(changes.rivals)} in {self.out!r} {'is' if len(changes.rivals) == 1 else 'are'} not of this output: "
                "a loader might take such weights instead of the new ones.",
            )
        try:
            name = os.path.basename(manifest.path_for(self.out, single=self._single))
            contents = (replace(facts, signature=manifest.signature_for(name)) if sign else facts).as_bytes()
            described = [os.path.join(self.directory, name)]
            manifest.write(described[0], contents, self._job)
            if sign is not None:
                described.append(os.path.join(self.directory, manifest.signature_for(name)))
                manifest.write(described[1], sign(sha256(contents).hexdigest()), "")
                if changes is not None and changes.stays:
                    self.notes += (
                        f"The signature does not cover {examples(changes.stays)}, which zckpt did not write.",
                    )
            swap = not self._single and self._can_swap(changes)
            seal = seal_of(
                self._work, self.out, single=self._single, swap=swap, files=facts.files,
                deleted=self._old_signature() if self._single else () if changes is None else changes.deleted,
            )  # fmt: skip
            sync_all((*described, *tree(self.directory), self._work.path, os.path.dirname(self._work.path)))
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
        with contextlib.suppress(OSError):  # the next run on this output cleans
            commit.clean()

    def _old_signature(self) -> tuple[str, ...]:
        """The name of the signature of the one file that is replaced, if it has one."""
        path = manifest.path_for(self.out, single=True)
        try:
            found = manifest.read(path).signature if os.path.isfile(path) else ""
        except ZckptError:
            return ()
        return (found,) if found else ()

    def _unnamed(self, error: OSError, *, undone: bool = True) -> OutputError:
        return OutputError(
            "the new output could not be given its name", file=self.out, found=error.strerror or str(error),
            remedy="Remove the cause, and run the same command again. "
            + ("The old output is as it was." if undone else "Nothing is lost, and the new output is complete."),
        )  # fmt: skip

    def _can_swap(self, changes: Replacement | None) -> bool:
        """Prepares the staged directory to replace the old one in one step. Returns False if that is not possible."""
        if keeps_its_name(self.out):
            return False
        if changes is None:
            return True
        if changes.untouched or LocalPath(os.getcwd()).is_within(LocalPath(self.out)):
            return False
        return _like(self.out, self.directory) and _linked(changes.stays, self.out, self.directory)


def is_there(directory: str, file: Finished) -> bool:
    """Whether the directory has a regular file of this name and size."""
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
    """Gives the new directory the mode and owner of the old one. Returns False if that fails, or the old one has attributes."""
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
    """Makes hard links in the new directory to files that stay. Returns False if the file system does not allow that."""
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
