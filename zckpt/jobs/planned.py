"""A job that is planned but not begun, how it is carried out, and what it reports.

For every job that writes an output, and for the commands that show a plan. `find_left_out` says which tensors of a checkpoint
an output leaves out, and why: the ledger of a job that writes weights, closed before anything is written; the manifest records
it, and a dry run prints it. `provenance` is what a signed output says of its source: its files,
and the SHA-256 of each one's index.

[Note: indexes] The index of a file is what says which tensors are in it and where: the header of a safetensors file, the pickle
of a torch file. Of any other file (`latest`, an index of shards, `.metadata`), and of small files, it is the whole file. Elements
are not hashed: what became of them is in the output, and its bytes are signed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING

from zckpt.base.dataclass import dataclass, public
from zckpt.base.errors import ZckptError
from zckpt.base.progress import Progress, watch_progress
from zckpt.base.words import count, duration, matches, rate, shorten_text, size
from zckpt.containers import is_torch_zip
from zckpt.containers.torch_zip import pickle_of
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.ledger import Fate, TrainedTensor, close, names_unread
from zckpt.core.plan import Plan
from zckpt.engine import replicas
from zckpt.jobs.groups import Selecting
from zckpt.jobs.open import Opened
from zckpt.layouts.save.listing import Listing
from zckpt.output.order import Order, OutputReport
from zckpt.output.publish import publish
from zckpt.storage.location import Location, locate

if TYPE_CHECKING:
    from zckpt.output.signature import Signing


_WHOLE_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
"""The most bytes of files that are not weights and are hashed whole; of larger ones, only the size is recorded."""


def provenance(
    sources: Iterable[tuple[Listing, Catalog]], others: Iterable[tuple[str, Location]] = ()
) -> dict[str, object]:
    """The sources of an output for its signature: the facts of `zckpt.json` and the files of each.

    Args:
        sources: what weights were read from.
        others: name and place of further files that it was made from.

    Raises:
        ZckptError, OSError: a file cannot be read.
    """
    further = [_facts(name, file) for name, file in others]
    made_from = [
        {
            **catalog.source_facts(),
            "files": [_facts(name, file) for name, file in sorted(listing.files.items())],
        }
        for listing, catalog in sources
    ]
    return {"made_from": made_from, **({"deltas": further} if further else {})}


def _facts(name: str, file: Location) -> dict[str, object]:
    """The facts of one file: its name, its bytes, and its index's SHA-256; see [Note: indexes]."""
    nbytes = file.size()
    facts: dict[str, object] = {"name": name, "bytes": nbytes}
    kind, data = "", b""
    if nbytes <= _WHOLE_BYTES:
        kind, data = "whole", file.read()
    elif file.name.endswith(".safetensors"):
        kind, data = "header", file.read(8 + int.from_bytes(file.read(8), "little"))
    else:
        with contextlib.suppress(ZckptError):  # several torch files in one, as torch.distributed.checkpoint writes them
            if is_torch_zip(file):
                kind, data = "pickle", pickle_of(file)
            elif nbytes <= _MOST_BYTES:
                kind, data = "whole", file.read()
    return {**facts, "index": kind, "sha256": sha256(data).hexdigest()} if kind else facts


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


def find_left_out(
    source: Catalog,
    written: Mapping[str, TensorEntry],
    selecting: Selecting,
    *,
    selectable: Mapping[str, TensorEntry] | None = None,
    rules: Mapping[str, str] | None = None,
) -> tuple[Fate, ...]:
    """The tensors of a checkpoint that an output reads nothing of, each with the option or the rule that left it out.

    Args:
        source: the checkpoint.
        written: the tensors of the output.
        selecting: what was asked for.
        selectable: the tensors from which `include` and `exclude` chose; None for the checkpoint's.
        rules: name of a tensor -> the key of `RULES` that left it out.

    Raises:
        InconsistentError: a tensor would be lost that no option and no rule leaves out.
    """
    by_rule = rules or {}
    cut_before = functools.cache(lambda: {*names_unread(source, selectable)} if selectable is not None else set[str]())

    def fate_of(name: str) -> Fate | None:
        if name in by_rule:
            return Fate(name, "rule", by_rule[name])
        if selecting.exclude_frozen and source.tensors[name].role == "frozen":
            return Fate(name, "option", "--exclude-frozen")
        if matches(name, selecting.exclude) or (selecting.exclude and name not in cut_before()):
            return Fate(name, "option", "--exclude")
        return Fate(name, "option", "--include") if selecting.include and name not in cut_before() else None

    return close(source, written, fate_of)
