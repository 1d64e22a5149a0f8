"""Output appears whole or not at all; what an interrupted run finished is not done again.

For every job that writes. The protocol:
 1. Refuse what must not be touched: an existing output, the input itself, a disk without room.
 2. Make the private directory `.OUT.zckpt` beside the output (same file system, so that a rename is atomic), or take over
    what a dead run left there. Lock it: a second run on the same output is refused. The lock dies with its process.
 3. The mover writes files into `files/` there, syncs each when it is complete, and only then is it recorded in the journal.
    Files that an earlier run of the same job recorded are kept when their bytes still have the recorded checksum;
    everything else that lies there is removed.
 4. Sync the directories, record that all is complete, rename `files/` (or its one file) to the output's name, sync the
    parent directory.
    An existing directory changes places with the new one in one step, where the file system can do that.
 5. Remove the private directory. A run that was killed after 4 is recognised by the next one, which only does this.
Where a run fails, the private directory stays if a finished file lies in it and the same command could go on with it;
otherwise it is removed. Modes of files and directories follow the umask, but for the private one, which is the owner's own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import zlib
from collections.abc import Collection, Iterable
from stat import S_ISREG
from types import TracebackType

from zckpt import files, manifest
from zckpt.errors import CastError, InconsistentError, OutputError, UnsupportedError, UsageError, add_note, redact
from zckpt.journal import Finished, Journal
from zckpt.private import PrivateDirectory, is_unfinished, left_bytes


def check_output(out: str, *, single: bool, overwrite: bool, protected: Iterable[str]) -> None:
    """Refuses an output that must not be written.

    Args:
        out: the output's path.
        single: whether it is one file rather than a directory.
        overwrite: whether an existing output may be replaced. One that an interrupted run left unfinished is no reason to
            refuse: who goes on with it looks again.
        protected: files and directories of the input: the output may not be, lie in, or hold one of them.

    Raises:
        OutputError: one of these.
    """
    if files.is_remote(out):
        raise UnsupportedError("an output behind an address", file=out, remedy="Choose an OUT on this machine.")
    keep_apart(out, protected)
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
    if not overwrite and not is_unfinished(out):
        refuse_existing(out)
    if not single and overwrite:
        for place in (os.getcwd(), os.path.expanduser("~")):
            if files.is_within(place, out):
                raise OutputError(
                    "an output that would replace a directory in use", file=out, found=f"{place!r} lies in it"
                )


def keep_apart(out: str, protected: Iterable[str]) -> None:
    """Refuses an output that would touch the input: one that is, lies in, or holds one of its files or directories.

    Raises:
        OutputError: it is such an output.
    """
    for home in sorted(set(protected)):
        inside = files.is_within(out, home)
        if inside or files.is_within(home, out):
            raise OutputError(
                "an output inside the input" if inside else "an output that would replace the input",
                file=redact(out), found=f"the input lies in {redact(home)!r}",
                remedy="Nothing was changed. Choose an OUT elsewhere.",
            )  # fmt: skip


def refuse_existing(out: str) -> None:
    """Refuses an output that is there already; an empty directory is not.

    Raises:
        OutputError: it is.
    """
    if not os.path.lexists(out) or (os.path.isdir(out) and not os.listdir(out)):
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
    needed_bytes -= left_bytes(out)
    place = os.path.abspath(out)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise OutputError(
            "too little free disk",
            file=out,
            found=f"{free:,} bytes free",
            expected=f"{needed_bytes:,} bytes are needed",
            remedy="Nothing was written. Free some room, choose an OUT on another disk, or a smaller dtype (to-bf16).",
        )


class Staging:
    """The private directory beside an output; use as a context manager and call `commit` when all is written.

    Args:
        out: the output's path.
        single: whether the output is the one file `basename(out)`, with its manifest beside it.
        job: fingerprint of all that decides the output's bytes; what an earlier run of the same job finished is kept.
        overwrite: whether an output that exists is replaced.
        merge: for a directory: move the files into an existing one instead of replacing it.

    Attributes:
        directory: where files are to be written.
        left: by path, files of an earlier run, as its journal has them. Whoever has read them again calls `keep`.
        published: an earlier run of the same job was killed after its output had got its name: nothing is left to do.
        notes: sentences a person should see.
    """

    def __init__(self, out: str, *, single: bool, job: str = "", overwrite: bool = False, merge: bool = False) -> None:
        self.out = os.path.abspath(out)
        self.parent, self.name = os.path.split(self.out)
        self.left: dict[str, Finished] = {}
        self.published = False
        self.notes: tuple[str, ...] = ()
        self._single = single
        self._overwrite = overwrite or merge
        self._merge = merge and not single and os.path.isdir(self.out)
        self._made: list[str] = []
        self._job = job
        self._private = PrivateDirectory(out)

    @property
    def directory(self) -> str:
        """Where files are to be written."""
        return os.path.join(self._private.path, "files")

    def __enter__(self) -> Staging:
        try:
            missing = self.parent
            while not os.path.isdir(missing):
                self._made.append(missing)
                missing = os.path.dirname(missing)
            os.makedirs(self.parent, exist_ok=True)
            self._private.take()
        except OSError as error:
            self._forget_parents()
            if isinstance(error, OutputError):
                raise
            raise OutputError(
                "an output that cannot be written", file=self.out, found=error.strerror or str(error),
                remedy="Nothing was changed. Check the path and its permissions.",
            ) from error  # fmt: skip
        try:
            if not self._private.is_locked:
                self.notes = ("This file system has no locks: an interrupted conversion would begin anew.",)
            self._journal = Journal(os.path.join(self._private.path, "journal"), self._job)
            self.published = self._is_published()
            if not self.published and not self._overwrite:
                refuse_existing(self.out)
            if self._job:
                self.left = {path: file for path, file in self._journal.finished.items() if self._has(file)}
        except BaseException:
            self._private.release(remove=not self._private.was_there)
            self._forget_parents()
            raise
        return self

    def _forget_parents(self) -> None:
        for made in self._made:
            with contextlib.suppress(OSError):
                os.rmdir(made)

    def _has(self, file: Finished) -> bool:
        try:
            stat = os.lstat(os.path.join(self.directory, file.path))
        except (OSError, ValueError):
            return False
        return S_ISREG(stat.st_mode) and stat.st_size == file.nbytes

    def _is_published(self) -> bool:
        """Whether the output under the final name is the one that this job's earlier run completed."""
        mark = self._journal.complete
        path = manifest.path_for(self.out, single=self._single)
        if mark is None or not self._job or not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            if zlib.crc32(file.read()) != mark:
                return False
        home = self.parent if self._single else self.out
        return all(
            os.path.isfile(place := os.path.join(home, file.path)) and os.path.getsize(place) == file.nbytes
            for file in manifest.read(path).files
        )

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
                "an output that cannot be written", file=self.directory, found=error.strerror or str(error)
            ) from error

    def finished(self, file: Finished) -> None:
        """Records a file that is complete and durable."""
        self._journal.add(file)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()
        done = len(self._journal.finished)
        goes_on = error is not None and done and self._private.is_locked and not isinstance(error, _HOPELESS)
        self._private.release(remove=not goes_on)
        if error is not None:
            self._forget_parents()
            if goes_on:
                files = "1 finished file is" if done == 1 else f"{done:,} finished files are"
                add_note(error, f"{files} kept in {self._private.path!r}: the same command goes on from there.")

    def copy(self, path: str, name: str) -> Finished:
        """Copies a small file that belongs to the output, and syncs it."""
        crc, nbytes = 0, 0
        target = os.path.join(self.directory, name)
        try:
            with open(target, "wb") as copy:
                for block in files.blocks(path):
                    crc, nbytes = zlib.crc32(block, crc), nbytes + len(block)
                    copy.write(block)
                copy.flush()
                os.fsync(copy.fileno())
        except OSError as error:
            raise OutputError("a file that cannot be copied", file=path, found=error.strerror or str(error)) from error
        return Finished(name, nbytes, crc)

    def commit(self, facts: bytes) -> None:
        """Gives the output its final name.

        Args:
            facts: the manifest.

        Raises:
            OutputError: the rename failed; the old output, if there was one, is back under its name.
        """
        name = os.path.basename(manifest.path_for(self.out, single=self._single))
        try:
            with open(os.path.join(self.directory, name), "wb") as file:
                file.write(facts)
                file.flush()
                os.fsync(file.fileno())
            for root, _, _ in os.walk(self.directory, topdown=False):
                sync(root)
            self._journal.completed(zlib.crc32(facts))
            if self._single:
                os.replace(os.path.join(self.directory, name), os.path.join(self.parent, name))
                os.replace(os.path.join(self.directory, self.name), self.out)
            elif self._merge:
                for name in index_last(os.listdir(self.directory)):
                    os.replace(os.path.join(self.directory, name), os.path.join(self.out, name))
                sync(self.out)
            else:
                self._replace_directory()
            sync(self.parent)
        except OSError as error:
            raise OutputError(
                "an output that could not be given its name", file=self.out, found=error.strerror or str(error)
            ) from error

    def _replace_directory(self) -> None:
        try:
            os.rename(self.directory, self.out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if _exchange(self.directory, self.out):
                return
            old = os.path.join(self._private.path, "old")
            os.rename(self.out, old)
            try:
                os.rename(self.directory, self.out)
            except OSError:
                os.rename(old, self.out)
                raise
            shutil.rmtree(old, ignore_errors=True)


_HOPELESS = (CastError, InconsistentError, UsageError, UnsupportedError)
"""The same command would fail again, or must not trust what was made so far."""


def _exchange(a: str, b: str) -> bool:
    """Two directories change places, for all to see at once; False where that cannot be done."""
    try:
        from zckpt._core import exchange
    except ImportError:  # pragma: no cover - depends on the build
        return False
    return not exchange(a, b)


def index_last(names: Iterable[str]) -> list[str]:
    """Shards first, the index that names them last: a reader never follows an index to a missing shard."""
    return sorted(names, key=lambda name: (name.endswith(".index.json"), name))


def sync(path: str) -> None:
    """Makes a file, or the names in a directory, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
