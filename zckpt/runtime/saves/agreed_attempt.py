"""Runs work that may fail on one rank; all ranks agree afterwards on whether it did.

For `engine_part`, `saving` and `loading`: a rank that fails has to come to the next meeting all the same.
"""

from __future__ import annotations

from types import TracebackType


class Attempt:
    """A `with` block with an error that is kept instead of raised; `Meetings.agree` raises it, on every rank. `error`:
    that the block ended with; None if it succeeded.
    """

    error: Exception | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None
