"""Sinks: what is handed an output file's bytes in the file's order, while they are warm: a hash, or an upload.

For `mover`. The native engine hands over window by window. What it cannot hand over in order (a tensor of so many slices
that a batch could not hold them), and all that the reference engine writes, is read back from the file at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.core.plan import OutputFile

Sink = Callable[[memoryview], object]
"""Is called with the next bytes of a file; the view is valid during the call only. The buffer behind it is used again: a slice
or an array of it that is kept is an error of the job, and keeps the bytes that it had."""


@dataclass(slots=True)
class Ordered:
    """A sink, and how much of its file it has been handed."""

    sink: Sink
    at: int = 0

    def __call__(self, view: memoryview, offset: int) -> None:
        """Hands over what comes next; anything else is left for `finish`."""
        if offset == self.at:
            self.sink(view)
            self.at += len(view)

    def finish(self, fd: int, output: OutputFile) -> None:
        """Hands over the rest, from the file.

        Raises:
            UnsupportedError: there is no file to read it from.
            UsageError: the sink keeps what it was handed.
        """
        while self.at < output.size:
            data = bytearray(os.pread(fd, min(output.size - self.at, 1 << 20), self.at))
            if not data:
                raise UnsupportedError(
                    "a file that cannot be sent while it is made", file=output.path,
                    found="its tensors are slices of too many files", remedy="Convert to a local directory, and copy that.",
                )  # fmt: skip
            view = memoryview(data)
            self(view, self.at)
            try:
                view.release()
                data.clear()  # refused while anything looks into it
            except BufferError as error:
                raise kept(output.path) from error


def kept(path: str) -> UsageError:
    """The error for a sink that still looks into what it was handed when its call is over."""
    return UsageError(
        "a sink that keeps what it is handed", file=path, found="a slice or an array of the view",
        expected="the view is valid during the call only", remedy="Copy the bytes: bytes(view).",
    )  # fmt: skip
