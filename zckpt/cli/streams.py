"""stdout and stderr of a command; either may be full, closed, or a pipe that nobody reads any more.

For `main`. A command cannot answer without stdout: what fails there is an `UnprintedError`, whoever prints. On stderr are notes
and progress: no work fails because these cannot be printed.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

from zckpt.base.errors import OutputError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class UnprintedError(OutputError):
    """What a command printed has not arrived. `error`: of the system. `is_pipe`: whether a reader has gone, as `head`
    does when it has enough.
    """

    def __init__(self, error: OSError) -> None:
        self.is_pipe = error.errno == errno.EPIPE
        super().__init__(
            "the result could not be printed", file="stdout", found=error.strerror or str(error),
            remedy="Run the same command again, with a stdout that can be written to.",
        )  # fmt: skip
        self.done = ""

    def after(self, done: str) -> UnprintedError:
        """The same error for a command that did its work, as the sentence `done` says."""
        self.done, self.remedy = done, f"{done} Only the result was not printed." if done else self.remedy
        return self


class _Watched(io.FileIO):
    """A descriptor that takes bytes until the first of them fails, and drops all after that.

    So what is left in a buffer does not fail once more when the interpreter ends.
    """

    def __init__(self, descriptor: int, *, tells: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._tells = tells
        self._failed = False

    def write(self, data: ReadableBuffer, /) -> int:
        """Writes bytes, and raises the first failure."""
        nbytes = memoryview(data).nbytes
        if nbytes and not self._failed:  # a buffer that is empty is written too, when a stream is made
            try:
                return super().write(data)
            except OSError as error:
                self._failed = True
                if self._tells:
                    raise UnprintedError(error) from error
        return nbytes


def guard() -> None:
    """Replaces `sys.stdout` and `sys.stderr` by watched streams."""
    sys.stdout = _stream(1, sys.stdout, tells=True)
    sys.stderr = _stream(2, sys.stderr, tells=False)


def _stream(descriptor: int, like: TextIO | None, *, tells: bool) -> TextIO:
    raw = _Watched(descriptor, tells=tells)
    unbuffered = isinstance(like, io.TextIOWrapper) and like.write_through
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=like.encoding if like is not None else "utf-8",
        errors="backslashreplace",
        line_buffering=not tells or os.isatty(descriptor),
        write_through=unbuffered,
    )
