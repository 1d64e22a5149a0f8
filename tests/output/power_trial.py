"""What a test of power failures does to a place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from durable import Moment


class Trial:
    """What is done to a place once, and how it is judged what a power failure has left.

    Attributes:
        place: that everything happens in.
        earlier: moments of what was done before, in the same hours.
    """

    place: Path
    earlier: Sequence[Moment] = ()

    def prepare(self) -> None:
        """Makes what is there before."""

    def run(self) -> None:
        """Does it."""

    def judge(self, *, done: bool) -> None:
        """Says whether what is there now may be; `done`: after the run has said that it is done."""

    def finish(self, *, failing: bool) -> None:
        """Does what comes next, after a run that fails if `failing`, and says whether all ends well."""
