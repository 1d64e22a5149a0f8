"""Who gets an output file's bytes in the file's order, while they are warm: a hash, or an upload.

For `move`. The native engine hands over window by window. What it cannot hand over in order (a tensor of more slices
than a batch can hold), and all that the reference engine writes, is read back from the file at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.core.plan import OutputFile

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
