"""Output appears whole or not at all.

For every job that writes. The protocol:
 1. Refuse what must not be touched: an existing output, the input itself, a disk without room.
 2. Make a private directory beside the output (same file system, so that a rename is atomic).
 3. The mover writes all files there and syncs each.
 4. Sync the private directory, rename it (or its one file) to the output's name, sync the parent directory.
 5. Whatever happens before 4, the private directory is removed; a crash leaves it under its own dotted name.
Modes of files and directories follow the umask.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from types import TracebackType

from zckpt import files
from zckpt.errors import OutputError, UnsupportedError


def check_output(out: str, *, single: bool, overwrite: bool, protected: Iterable[str]) -> None:
    """Refuses an output that must not be written.

    Args:
        out: the output's path.
        single: whether it is one file rather than a directory.
        overwrite: whether an existing output may be replaced.
        protected: files and directories of the input: the output may not be, lie in, or hold one of them.

    Raises:
        OutputError: one of these.
    """
    if files.is_remote(out):
        raise UnsupportedError("an output behind an address", file=out, remedy="Choose an OUT on this machine.")
    real = os.path.realpath(out)
    homes = {os.path.realpath(path) for path in protected}
    for home in sorted(homes):
        if _is_within(real, home) or _is_within(home, real):
            raise OutputError(
                "an output inside the input" if _is_within(real, home) else "an output that would replace the input",
                file=out,
                found=f"the input lies in {home!r}",
                remedy="Nothing was changed. Choose an OUT elsewhere.",
            )
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
    if (single and not overwrite) or (not single and not overwrite and os.listdir(out)):
        state = "is there already" if single else "is there already and is not empty"
        raise OutputError(
            "an output that exists",
            file=out,
            found=state,
            remedy="Nothing was changed. Choose another OUT, or pass --overwrite to replace it when the new one is complete.",
        )
    if not single and overwrite:
        for place in (os.getcwd(), os.path.expanduser("~")):
            if _is_within(os.path.realpath(place), real):
                raise OutputError(
                    "an output that would replace a directory in use", file=out, found=f"{place!r} lies in it"
                )


def _is_within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)


def check_space(out: str, needed_bytes: int) -> None:
    """Finds out before the first byte whether the disk has room.

    Raises:
        OutputError: it has not.
    """
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
        single: whether the output is the one file `basename(out)` in the private directory.
        merge: for a directory: move the files into an existing one instead of replacing it.
    """

    def __init__(self, out: str, *, single: bool, merge: bool = False) -> None:
        self.out = os.path.abspath(out)
        self.parent, self.name = os.path.split(self.out)
        self._single = single
        self._merge = merge and not single and os.path.isdir(self.out)
        self._made: list[str] = []
        self.directory = os.path.join(self.parent, f".{self.name}.zckpt-{os.getpid()}-{os.urandom(4).hex()}")

    def __enter__(self) -> Staging:
        try:
            missing = self.parent
            while not os.path.isdir(missing):
                self._made.append(missing)
                missing = os.path.dirname(missing)
            os.makedirs(self.parent, exist_ok=True)
            os.mkdir(self.directory)
        except OSError as error:
            raise OutputError(
                "an output that cannot be written", file=self.out, found=error.strerror or str(error),
                remedy="Nothing was changed. Check the path and its permissions.",
            ) from error  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        if error is not None:
            for made in self._made:
                with contextlib.suppress(OSError):
                    os.rmdir(made)

    def copy(self, path: str, name: str) -> None:
        """Copies a small file that belongs to the output, and syncs it."""
        target = os.path.join(self.directory, name)
        try:
            if files.is_remote(path):
                with open(target, "wb") as file:
                    file.write(files.read(path))
            else:
                shutil.copyfile(path, target)
            _sync(target)
        except OSError as error:
            raise OutputError("a file that cannot be copied", file=path, found=error.strerror or str(error)) from error

    def commit(self) -> None:
        """Gives the output its final name.

        Raises:
            OutputError: the rename failed; the old output, if there was one, is back under its name.
        """
        try:
            _sync(self.directory)
            if self._single:
                os.replace(os.path.join(self.directory, self.name), self.out)
            elif self._merge:
                for name in index_last(os.listdir(self.directory)):
                    os.replace(os.path.join(self.directory, name), os.path.join(self.out, name))
                _sync(self.out)
            else:
                self._replace_directory()
            _sync(self.parent)
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
            old = self.directory + ".old"
            os.rename(self.out, old)
            try:
                os.rename(self.directory, self.out)
            except OSError:
                os.rename(old, self.out)
                raise
            shutil.rmtree(old, ignore_errors=True)


def index_last(names: Iterable[str]) -> list[str]:
    """Shards first, the index that names them last: a reader never follows an index to a missing shard."""
    return sorted(names, key=lambda name: (name.endswith(".index.json"), name))


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
