"""Sinks: what is handed an output file's bytes in the file's order, while they are warm: a hash, or an upload.

For `mover`. The native engine hands over window by window. What it cannot hand over in order (a tensor of so many slices
that a batch could not hold them), and all that the reference engine writes, is read back from the file at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from zckpt.errors import UnsupportedError
from zckpt.plan import OutputFile

Sink = Callable[[memoryview], object]
"""Is called with the next bytes of a file; the view is valid during the call only."""


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
        """
        while self.at < output.size:
            data = os.pread(fd, min(output.size - self.at, 1 << 20), self.at)
            if not data:
                raise UnsupportedError(
                    "a file that cannot be sent while it is made", file=output.path,
                    found="its tensors are slices of too many files", remedy="Convert to a local directory, and copy that.",
                )  # fmt: skip
            self(memoryview(data), self.at)
