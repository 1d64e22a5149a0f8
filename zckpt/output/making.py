"""An output whose files the caller makes one after the other: how each is made, and what came of it.

For `made`, which publishes such outputs on this machine, and `made_to_address`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError, ZckptError
from zckpt.base.pace import Pace
from zckpt.base.words import count
from zckpt.engine.checksums import crc_of_file
from zckpt.output.journal import Finished
from zckpt.output.manifest import Manifest
from zckpt.output.signature import Signing
from zckpt.storage.fsync_queue import make_durable
from zckpt.storage.location import Location

Moved = Callable[[int], None]
"""Is told how many bytes more were read or written."""


@dataclass(frozen=True, slots=True)
class Made:
    """An output that was made.

    Attributes:
        files: (path relative to the output, bytes), without the manifest.
        kept: files that an earlier run had finished.
        notes: sentences for a person.
        already_done: whether an earlier run of the same job had made the output, so that nothing was written.
    """

    files: tuple[tuple[str, int], ...]
    kept: int
    notes: tuple[str, ...]
    already_done: bool = False


@dataclass(frozen=True, slots=True)
class Making:
    """How an output is made.

    Attributes:
        out: its path or address.
        job: fingerprint of everything that its bytes depend on.
        names: of the files that are made one by one, in order.
        make: is given the staged directory, one of these names, and what is to be told of progress; makes that file, and before
            it any that belong to it, each durable (`finished`).
        needs: is given the staged directory and a name of a file that an earlier run had made; names those that belong to it.
        end: is given the staged directory and what is known of all those files, by path; makes the others, may rename some, and
            returns the manifest. At an address, files of tensors are elsewhere and keep their names.
        overwrite: replace an existing output.
        pace: threads and I/O settings, for what an earlier run left.
        shared: the fingerprint of what all machines see alike, for several processes.
        helpers: those of `names` that only `end` and a later run need.
        large: names that files of tensors may have.
        signing: with which key the output is signed; None for none.
    """

    out: Location
    job: str
    names: Sequence[str]
    make: Callable[[str, str, Moved], Sequence[Finished]]
    end: Callable[[str, Mapping[str, Finished]], Manifest]
    overwrite: bool
    pace: Pace
    shared: Callable[[], str]
    needs: Callable[[str, str], Collection[str]] = lambda directory, name: ()
    helpers: Collection[str] = ()
    large: Collection[str] = ()
    signing: Signing | None = None

    def note(self, kept: int) -> tuple[str, ...]:
        """What is said of files that an earlier run had finished."""
        verb = "is" if kept == 1 else "are"
        of = count(len(self.names), "file")
        return (f"resuming an interrupted run: {kept:,} of {of} {verb} already complete",) if kept else ()

    def unwritten(self, error: OSError) -> OSError:
        """The error for a file that cannot be written."""
        if isinstance(error, ZckptError):
            return error
        return OutputError(
            "cannot be written", file=self.out, found=error.strerror or str(error),
            remedy="Make room or get the right to write there, and run the same command again. Nothing was published.",
        )  # fmt: skip


class RunningSum:
    """Adds up what is told of progress, and passes on the sum."""

    def __init__(self, progress: Callable[[int], None] | None) -> None:
        self._progress, self._nbytes = progress, 0

    def __call__(self, nbytes: int) -> None:
        """So many bytes more were read or written."""
        self._nbytes += nbytes
        if self._progress is not None:
            self._progress(self._nbytes)


def finished(directory: str, name: str) -> Finished:
    """Makes a file that was written durable, and reads its checksum; errors as OSError."""
    with open(os.path.join(directory, name), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        crc = crc_of_file(file.fileno(), 0, nbytes)
        make_durable(file.fileno())
    return Finished(name, nbytes, crc)


def write_small(directory: str, name: str, data: bytes) -> Finished:
    """Writes a small file, durably."""
    with open(os.path.join(directory, name), "wb") as file:
        file.write(data)
    return finished(directory, name)
