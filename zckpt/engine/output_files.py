"""The files of a plan: made, opened with its sources, what is wrong where one cannot be written, who gets its bytes on the way.

For `move`, and for `team.partition`, where several processes write the same files. A hash or an upload gets a file's bytes in
order, while they are warm: the native engine hands over window by window. What it cannot hand over in order (a tensor of more
slices than a batch can hold), and all that the reference engine writes, is read back from the file at the end.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError, UnsupportedError, UsageError, ZckptError
from zckpt.base.words import size
from zckpt.core.plan import OutputFile, Plan
from zckpt.storage.descriptors import MOST_STORES, OpenFiles


@contextlib.contextmanager
def open_output_files(
    plan: Plan, root: str, paths: Mapping[int, str], *, give_back: bool, direct: bool = True
) -> Iterator[OpenFiles]:
    """The files of a plan.

    Args:
        plan: that is carried out.
        root: where its files are.
        paths: id of an output's store -> its path.
        give_back: whether the page cache forgets what is read.
        direct: whether outputs may go past the page cache.

    Raises:
        OutputError: an output could not be opened or written.
        CorruptError, InconsistentError: at the end, a source is not what it was.
    """
    raise_file_limit()
    with OpenFiles(paths, give_back=give_back, direct=direct) as files:
        try:
            yield files
        except OSError as error:
            if isinstance(error, ZckptError):
                raise
            output_failed(error, root, plan)
        files.check_sources()


def raise_file_limit() -> None:
    """Lets this process open as many files as a batch may name."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_STORES + 256
    if soft != resource.RLIM_INFINITY and soft < wanted and (hard == resource.RLIM_INFINITY or hard > soft):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def create(path: str, size: int, *, again: bool = True) -> None:
    """Makes a file of full size. One that exists is an error when `again`, and otherwise keeps its pages and their content."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_EXCL if again else os.O_NOFOLLOW) | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def output_failed(error: OSError, root: str, plan: Plan) -> NoReturn:
    """Raises OutputError for an output that could not be written."""
    import resource

    file, what, remedy = (
        os.path.dirname(root) or root,
        "the disk is full",
        "Free some room, or choose an OUT on another disk.",
    )
    found, expected = error.strerror or str(error), f"room for {size(plan.bytes_written)}"
    match error.errno:
        case errno.ENOSPC:
            state = os.statvfs(root) if os.path.isdir(root) else None
            full = state and state.f_files and not state.f_favail
            found = (
                "no room for another file" if full else f"{size(state.f_bavail * state.f_frsize if state else 0)} free"
            )
        case errno.EDQUOT:
            what, remedy = "the disk quota is used up", "Have it raised, or choose an OUT on another disk."
        case errno.EFBIG:
            largest = max((output.size for output, _ in plan.files), default=0)
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            mine = limit != resource.RLIM_INFINITY and limit < largest
            what = "a file would be larger than allowed"
            found = f"a limit of {size(limit)} for this process's files (ulimit -f)" if mine else found
            expected = f"room for {size(largest)} in the largest file"
            remedy = "Raise the limit (ulimit -f), or write smaller files (--max-shard-size)."
        case _:
            file, what, expected = error.filename or root, "cannot be written", ""
            remedy = "Check that the disk works and that you may write there, or choose another OUT."
    raise OutputError(
        what, file=file, found=found, expected=expected, remedy=f"{remedy} Nothing was published."
    ) from error


Consumer = Callable[[memoryview], object]
"""Called with the next bytes of a file. The view is valid during the call only, for its buffer is used again: a consumer that
keeps a slice or an array of it ends the job with an error, and what it kept has the bytes that it had."""


@dataclass(slots=True)
class OrderedOutput:
    """A consumer, and how much of its file it has got."""

    consumer: Consumer
    at: int = 0

    def __call__(self, view: memoryview, offset: int) -> None:
        """Hands over the bytes if they come next; leaves any others to `finish`."""
        if offset == self.at:
            self.consumer(view)
            self.at += len(view)

    def finish(self, fd: int, output: OutputFile) -> None:
        """Hands over the rest, from the file. Raises UnsupportedError if there is no file to read it from, UsageError
        if the sink keeps what it was handed.
        """
        while self.at < output.size:
            data = bytearray(os.pread(fd, min(output.size - self.at, 1 << 20), self.at))
            if not data:
                raise UnsupportedError(
                    "cannot be sent while it is made", file=output.path,
                    found="a tensor with slices in too many files",
                    remedy="Convert to a local directory, and copy that.",
                )  # fmt: skip
            view = memoryview(data)
            self(view, self.at)
            try:
                view.release()
                data.clear()  # refused while anything looks into it
            except BufferError as error:
                raise keeps_bytes(output.path) from error


def keeps_bytes(path: str) -> UsageError:
    """The error for a consumer that still holds a view of its bytes after its call."""
    return UsageError(
        "the consumer of this file keeps the bytes it gets", file=path, found="a slice or an array of the view",
        expected="a view that is used during the call only", remedy="Copy the bytes: bytes(view).",
    )  # fmt: skip
