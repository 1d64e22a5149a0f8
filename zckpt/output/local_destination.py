"""A path of this machine as the destination of an output: stages, seals, commits, cleans, and resumes an interrupted run.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from stat import S_IMODE, S_ISREG
from types import TracebackType
from typing import TYPE_CHECKING

from zckpt.base.errors import (
    CastError,
    CorruptError,
    InconsistentError,
    OutputError,
    UnsupportedError,
    UsageError,
    ZckptError,
    add_note,
)
from zckpt.base.pace import DEFAULT_PACE, Pace
from zckpt.base.words import examples
from zckpt.core.plan import WrittenFile
from zckpt.engine.batches import progress_after
from zckpt.engine.checksums import join
from zckpt.output import manifest
from zckpt.output.checks import refuse_existing
from zckpt.output.commit import Commit, recover, seal_of
from zckpt.output.durable import make_directories, sync_all, tree
from zckpt.output.files import FileSource
from zckpt.output.journal import Journal, write_seal
from zckpt.output.manifest import Manifest
from zckpt.output.work_directory import WorkDirectory, left_by_others
from zckpt.storage.location import LocalPath
from zckpt.storage.output_places import entries, keeps_its_name, resolve_output

if TYPE_CHECKING:
    from zckpt.output.contents import Replacement
    from zckpt.output.signature import Signing

_HOPELESS = (CastError, InconsistentError, UsageError, UnsupportedError)
"""After these errors the same command would fail again, or must not trust the files made so far."""


class LocalDestination(contextlib.AbstractContextManager["LocalDestination"]):
    """One output, as `Destination` says; what is written by other means than `take` goes into `directory`.

    Args:
        out: the output's path.
        single: whether the output is the one file `basename(out)`, with its manifest beside it.
        names: of the output's files as far as they are known, to find early which files must not be written over.
        job: fingerprint of everything that the output's bytes depend on; files of an earlier run of the same job are kept.
        overwrite: whether the files of an existing output are replaced: those that its `zckpt.json` lists.
        merge: for a directory: write into an existing one, and replace files of the new names even if zckpt did not write them.
        signing: with which key the output is signed; None for none.
        pace: threads and I/O settings, for reading what an earlier run left.
        watch: called with the bytes read of that.

    Attributes:
        home: the directory that the output's files are in after the commit.
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
        signing: Signing | None = None,
        pace: Pace = DEFAULT_PACE,
        watch: Callable[[int], None] | None = None,
    ) -> None:
        self.out = resolve_output(out)
        self.parent, self.name = os.path.split(self.out)
        self.home = self.parent if single else self.out
        self.directory = ""
        self.published = False
        self.files: Sequence[WrittenFile] = ()
        self.notes: tuple[str, ...] = ()
        self._signed_name, self._signing, self._pace, self._watch = os.path.basename(out), signing, pace, watch
        self._single = single
        self._names = names
        self._overwrite = overwrite
        self._merge = merge and not single
        self._made: list[str] = []
        self._job = job
        self._work = WorkDirectory(out)
        self._has_begun = self._committed = False
        self._commit: Commit | None = None

    def begin(self) -> Mapping[str, WrittenFile]:
        """Takes the work directory; finds the files that an earlier run of this job left there, or published."""
        try:
            self._made = make_directories(self.parent)
            self._work.take()
            self.directory = self._work.files
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
            if not self.published:
                self._check(self._names)
        except BaseException:
            self._work.release(remove=not self._work.was_there)
            self._forget_parents()
            raise
        self._has_begun = True
        if self.published:
            known = self._journal.finished
            files = {file.path: known.get(file.path, file) for file in manifest.read(facts).files}
            sound = self._keep_sound_files(self.home, files)
            if damaged := sorted(files.keys() - sound.keys()):
                self._refuse_damaged(damaged)
                self.published = False
                self._check(self._names)
            self.files = tuple(sound.values())
        left = self._journal.finished if self._job and not self.published else {}
        return self._keep_sound_files(self.directory, left) if left else {}

    def _keep_sound_files(self, directory: str, left: Mapping[str, WrittenFile]) -> dict[str, WrittenFile]:
        """The files of `left` that still have their sizes and checksums, by path; reads every byte of them."""
        from zckpt.engine.scan import scan
        from zckpt.engine.scan_requests import CrcRange, request_of_bytes

        sound: dict[str, WrittenFile] = {}
        read = 0
        for path, file in left.items():
            if not _is_there(directory, file):
                continue
            store = (LocalPath(directory) / path).store()
            try:
                report = scan(
                    [request_of_bytes(store, 0, store.size)] if store.size else [],
                    [CrcRange(store, 0, store.size)],
                    progress=progress_after(self._watch, read),
                    **self._pace,
                )
            except CorruptError:
                continue
            if join(report.crcs.get(0, ()), 0, store.size) == file.crc32:
                sound[path] = file
                read += store.size
        return sound

    def _recover(self) -> None:
        """Finishes the sealed commits of earlier runs, in all places where they may have worked."""
        if self._work.was_there and recover(self._work, self.out).seal is not None:
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

    def _check(self, names: Collection[str]) -> Replacement | None:
        """What files of these names replace in an existing directory; None if there is no directory, or it is empty.
        Raises OutputError if the output, or a file in it, must not be replaced.
        """
        if not (self._overwrite or self._merge):
            refuse_existing(self.out)
        if self._single or not os.path.isdir(self.out) or not entries(self.out):
            return None
        from zckpt.output.contents import replacement

        return replacement(LocalPath(self.out), names, merge=self._merge)

    def _refuse_damaged(self, damaged: Collection[str]) -> None:
        """Refuses to make an output again when these files of it are damaged, if it must not be replaced."""
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

    def _forget_parents(self) -> None:
        for made in self._made:
            with contextlib.suppress(OSError):
                os.rmdir(made)

    def keep(self, kept: Mapping[str, WrittenFile]) -> None:
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
            self._journal.begin(kept.values())
        except OSError as error:
            raise OutputError(
                "cannot be written",
                file=self.directory,
                found=error.strerror or str(error),
                remedy="Check the disk and the permissions, and run the same command again.",
            ) from error

    def take(self, source: FileSource, kept: Mapping[str, WrittenFile]) -> dict[str, WrittenFile]:
        """Lets the source write all files that are not kept into `directory`."""
        source.write(self.directory, kept, self._journal.add)
        return self._journal.finished

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._has_begun:
            return
        self._journal.close()
        done = len(self._journal.finished)
        can_resume = error is not None and done and self._work.is_locked and not isinstance(error, _HOPELESS)
        self._work.release(remove=not can_resume or self._committed)
        if error is not None:
            self._forget_parents()
            if can_resume:
                files = "1 finished file is" if done == 1 else f"{done:,} finished files are"
                add_note(error, f"{files} kept in {self._work.path!r}. Run the same command again to resume.")

    def seal(self, facts: Manifest, source: FileSource | None = None) -> None:
        """Writes the manifest, signs the output if the job asks for it, and writes the seal, durably. Raises
        OutputError if the output must not be replaced, or cannot be written.
        """
        changes = self._check(_files_in(self.directory))
        if changes is not None and changes.rivals:
            self.notes += (
                f"{examples(changes.rivals)} in {self.out!r} {'is' if len(changes.rivals) == 1 else 'are'} not of this output: "
                "a loader might take such weights instead of the new ones.",
            )
        try:
            name = os.path.basename(manifest.path_for(self.out, single=self._single))
            signed = facts if self._signing is None else replace(facts, signature=manifest.signature_for(name))
            contents = signed.as_bytes()
            described = [os.path.join(self.directory, name)]
            manifest.write(described[0], contents, self._job)
            if self._signing is not None:
                hashes = {} if source is None else source.hashes
                signature = self._signing.of(
                    self._signed_name, self.directory, [file.path for file in facts.files],
                    {path: digest.hexdigest() for path, digest in hashes.items()}, sha256(contents).hexdigest(),
                    single=self._single,
                )  # fmt: skip
                described.append(os.path.join(self.directory, manifest.signature_for(name)))
                manifest.write(described[1], signature, "")
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
        self.files = facts.files
        self._commit = Commit(self._work, self.out, seal)

    def commit(self) -> None:
        """Gives the output its name; errors as in `Destination`."""
        assert self._commit is not None
        try:
            self._commit.carry_out()
        except OSError as error:
            undone = self._commit.undo()
            if isinstance(error, OutputError):
                raise
            raise self._unnamed(error, undone=undone) from error
        self._committed = True
        with contextlib.suppress(OSError):  # the next run on this output cleans
            self._commit.clean()

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
        return _like(self.out, self.directory) and _link_files(changes.stays, self.out, self.directory)


def _is_there(directory: str, file: WrittenFile) -> bool:
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


def _link_files(names: Collection[str], old: str, new: str) -> bool:
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
