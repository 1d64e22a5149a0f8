"""A job that is planned but not begun, how it is carried out, and what it reports.

For every job that writes an output, and for the commands that show a plan.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, field, replace
from typing import TYPE_CHECKING

from zckpt.base.dataclass import dataclass, public
from zckpt.base.progress import Progress, watch_progress
from zckpt.base.words import count, duration, rate, shorten_text, size
from zckpt.core.catalog import Catalog
from zckpt.core.ledger import TrainedTensor
from zckpt.core.plan import Plan
from zckpt.engine import replicas
from zckpt.jobs.open import Opened
from zckpt.output.order import Order, OutputReport
from zckpt.output.publish import publish
from zckpt.storage.location import Location, locate

if TYPE_CHECKING:
    from zckpt.output.signature import Signing


@dataclass(frozen=True, slots=True)
class Planned:
    """A job that is planned but not begun.

    Attributes:
        opened: the checkpoint.
        order: what is written; its `out` is empty where the caller takes the files of the plan one by one.
        notes: sentences a person should see.
        trained: of a merge, the tensors that were trained.
    """

    opened: Opened
    order: Order
    notes: tuple[str, ...]
    trained: tuple[TrainedTensor, ...] = field(default=(), kw_only=True)

    @property
    def catalog(self) -> Catalog:
        """The tensors that are written, under their new names."""
        return self.order.catalog

    @property
    def plan(self) -> Plan:
        """Where their bytes go."""
        return self.order.plan

    @property
    def out(self) -> str:
        """The output's path or address, for people."""
        return self.order.out.path

    @property
    def made_from(self) -> tuple[Opened, ...]:
        """The checkpoints that the output is made from."""
        return (self.opened,)

    def signing(self) -> Signing | None:
        """The key that signs the output, and what the signature says of the sources; None for no signature."""
        signing = self.order.signing
        if signing is None:
            return None
        from zckpt.jobs.provenance import provenance

        sources = ((one.place.listing, one.catalog) for one in self.made_from)
        return replace(signing, provenance=provenance(sources))

    def check(self) -> tuple[str, ...]:
        """Makes sure that the checkpoint does not contradict itself; returns sentences that a person should see. Raises
        InconsistentError if it does.
        """
        replicas.check(self.catalog)
        return ()


@public
@dataclass(frozen=True, slots=True, repr=False)
class Report(OutputReport):
    """What a job did; further attributes as in `OutputReport`.

    Attributes:
        tensors: tensors written; tied names count once.
        numel: elements written.
        seconds: wall time, opening included.
        out: the output, as it was named.
    """

    tensors: int = 0
    numel: int = 0
    seconds: float = 0.0
    out: str = ""

    def __str__(self) -> str:
        return self.line(count(self.tensors, "tensor"))

    def line(self, what: str) -> str:
        """The line that a command prints: what was written, and how fast; `what`: the output, as in "2 tensors as
        bf16".
        """
        if self.already_done:
            return f"{self.out}: already done; every file matches its checksum, and nothing was written"
        files = f"{size(self.bytes_written)} in {count(len(self.files), 'file')}"
        return f"{self.out}: {what}, {files}, {duration(self.seconds)}{rate(self.bytes_written, self.seconds)}"

    def __repr__(self) -> str:
        return f"<zckpt.{type(self).__name__} {shorten_text(str(self))}>"


def execute(
    planned: Planned, progress: Callable[[int], None] | None = None, on_note: Callable[[str], None] = lambda note: None
) -> Report:
    """Checks, moves and commits; resumes an interrupted run of the same job.

    Args:
        planned: the job.
        progress: called with the bytes written so far.
        on_note: called with those of the report's notes that a person should see before the work is done.

    Raises:
        ZckptError: one of its kinds says what is wrong; what was under the output's name before is still there.
    """
    began = time.perf_counter()
    notes = (*planned.notes, *planned.check())
    done = publish(replace(planned.order, signing=planned.signing()), progress, on_note)
    return Report(
        **{**asdict(done), "notes": (*notes, *done.notes)},
        tensors=len(planned.catalog),
        numel=planned.catalog.numel,
        out=planned.out,
        seconds=time.perf_counter() - began,
    )


def carry_out(prepare: Callable[[], Planned], progress: Progress, label: str) -> Report:
    """Plans a job and carries it out, for a public function, with its progress."""
    began = time.perf_counter()
    planned = prepare()
    with watch_progress(progress, planned.plan.bytes_written, label) as watch:
        return replace(execute(planned, watch), seconds=time.perf_counter() - began)


def protected_places(
    opened: Opened, checkpoint: Location, *, beside: bool = False, named: Iterable[object] = ()
) -> set[Location]:
    """What the output must leave alone: the shards' directories, and the checkpoint's own unless `beside` is set.

    Args:
        opened: the checkpoint.
        checkpoint: where it is, as a person said it.
        beside: whether the output may lie beside the shards' directories.
        named: what else options name; of this, the paths of files are inputs too.
    """
    listing = opened.place.listing
    files: set[Location] = set()
    for one in named:
        if isinstance(one, str | os.PathLike) and (path := locate(one)).is_file():
            files.add(path)
    if listing.directory in listing.files.values():  # one file
        return {listing.directory, *files}
    shards = {*files, *(place.parent for place in listing.files.values())}
    return shards if beside or not listing.tag or not checkpoint.is_dir() else {*shards, checkpoint}
