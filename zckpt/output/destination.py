"""Where an output goes, and the calls that bring it there whole or not at all.

For `publish`, which makes these calls, and for `local_destination` and `address_destination`, which answer them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from zckpt.output.files import FileSource
from zckpt.output.journal import Finished
from zckpt.output.manifest import Manifest


class Destination(Protocol):
    """The place of one output: a context manager on which these calls are made once each, in this order.

     1. `begin` finishes or gives back what other runs left, finds what an interrupted run of this job left, and refuses an
        output that must not be written. If the job has been done (`published`), nothing else is called.
     2. `keep` begins the work: of what was left, only what is named stays.
     3. `take` takes the other files as it can: all at once, or one after the other.
     4. `seal` leaves a durable record that the output is complete, with its manifest, and of what it replaces.
     5. `commit` gives the output its name, and deletes what it replaces.

    The end of the context is the sixth: without a commit it takes back what was done, or keeps files for the next run of the same
    job; what had the output's name is as it was. After a seal, whoever comes next finishes the commit or gives it up.

    Attributes:
        directory: where files are made on this machine; "" if each is sent while it is made.
        published: whether an earlier run of the same job has made the output.
        files: of the output, when it is published or sealed, without the manifest.
        notes: sentences for a person.
    """

    published: bool
    files: Sequence[Finished]
    notes: tuple[str, ...]

    @property
    def directory(self) -> str:
        """Where files are made."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def begin(self) -> Mapping[str, Finished]:
        """Finds what an earlier run of this job left, whole, by name. Raises OutputError if the output must not be
        written, or another run writes it.
        """

    def keep(self, kept: Collection[str]) -> None:
        """Begins the work, and keeps these of the files that were left."""

    def take(self, source: FileSource, kept: Mapping[str, Finished]) -> dict[str, Finished]:
        """Takes all files that are not kept, but small ones that are known only at the end. Returns what is known of
        these and of those that are kept, by name.
        """

    def seal(self, manifest: Manifest, source: FileSource) -> None:
        """Records that the output is complete; `source` has the small files, and hashes for a signature."""

    def commit(self) -> None:
        """Gives the output its name.

        Raises:
            OutputError: a step failed. The old output, if there was one, is unchanged; or no file is lost, and the next run on
                this output finishes the commit.
        """
