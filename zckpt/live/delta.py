"""Writes what has changed in a model since an older version of its weights, while it trains; nothing is gathered.

For training scripts, called on every rank. Rank 0 plans; each tensor is encoded by one rank, which gets the other ranks'
elements of it and compares them with the older version. So each element travels at most once, and the ranks encode at the same
time.

[Note: memory] Beside the model, a rank needs three tensors in host memory, each whole, in the dtype of the delta: one that is
encoded, one that waits, one that is received. The device needs nothing but the buffers of `carry`.

[Note: order] All ranks go through the tensors in one order, in which the ranks that encode take turns; within a tensor, ranks
send in order of rank. So no two ranks wait for each other. A rank encodes in a thread of its own, while it sends and receives on.
After an error it still sends and receives everything, so that no rank waits for it.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from queue import Queue
from typing import TYPE_CHECKING

import torch
from torch import nn

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.base.pace import DEFAULT_PACE
from zckpt.base.sizes import group_by_size, to_bytes
from zckpt.core.catalog import TensorPart
from zckpt.core.dtypes import DType
from zckpt.deltas.encode import Encoder, TensorChange
from zckpt.deltas.form import Checksum, DeltaForm, Encoding
from zckpt.deltas.pieces import PieceReader, pieces
from zckpt.deltas.write import end_delta, write_group
from zckpt.jobs.casting import to_dtype
from zckpt.jobs.declarations import APPLY
from zckpt.jobs.delta import DeltaReport, form_for
from zckpt.jobs.opened import WorkingModel
from zckpt.jobs.planned import protected_places
from zckpt.jobs.versions import open_version, pair_tensors
from zckpt.live.assignment import (
    Contribution,
    ContributionPart,
    ElementPlace,
    assign,
    contributions,
    digest_of_names,
)
from zckpt.live.assignment import pieces as pieces_of
from zckpt.live.carry import Lost, piece_caster, view_of
from zckpt.live.parts import LocalModel, local_model
from zckpt.live.ranks import Ranks
from zckpt.output.checks import check_path
from zckpt.output.local_destination import LocalDestination
from zckpt.output.order import overflow_error
from zckpt.storage.location import locate
from zckpt.team.meeting import attempt, first_error

if TYPE_CHECKING:
    from zckpt.core.folds import Bytes


class HeldWeights:
    """The older version of weights, kept in host memory from one delta to the next; see `export_delta`.

    Each rank keeps the tensors that it encodes: together the ranks hold the weights once, in the dtype of the delta.
    `directory`: the version before the first delta.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.fspath(directory)
        self.tensors: dict[str, Bytes] = {}


def export_delta(
    engine_or_model: nn.Module,
    old: str | os.PathLike[str] | HeldWeights,
    out: str | os.PathLike[str],
    dtype: str | DType | torch.dtype | None = None,
    *,
    version: int | None = None,
    encoding: Encoding = "xor",
    checksum: Checksum = "xxh3-128",
    max_shard_size: int | str = "5GB",
) -> DeltaReport:
    """Writes the delta from older weights to those of a live model. Call it on every rank, between two steps.

    Args:
        engine_or_model: as for `save_pretrained`.
        old: the directory with the older weights, which every rank reads; or `HeldWeights` of it, which has the newest version
            in host memory after each call.
        out: the delta's directory, which all ranks see.
        dtype: as in `zckpt.delta`.
        version: of the new weights; by default the one in `out`'s name, or 1.
        encoding: as in `zckpt.delta`.
        checksum: as in `zckpt.delta`.
        max_shard_size: bytes of weights with differences that one file holds.

    Returns:
        What changed, on every rank.

    Raises:
        CastError: numbers too large for the dtype.
        InconsistentError: the model and the older weights have different tensors; or some ranks did not call it within a minute.
        OutputError: `out` exists or cannot be written.
        ZckptError: another kind says what is wrong. Every rank raises it, and nothing was published.
    """
    directory = old.directory if isinstance(old, HeldWeights) else os.fspath(old)
    given = attempt(lambda: local_model(engine_or_model))
    before = attempt(lambda: open_version(directory, APPLY.ask()))
    world = Ranks("export_delta", digest_of_names(given))
    offers = given if isinstance(given, Exception) else given.offers
    mine, tensors = assign(world, before if isinstance(before, Exception) else offers)
    staging: LocalDestination | None = None
    wanted = None if dtype is None else to_dtype(str(dtype) if isinstance(dtype, torch.dtype) else dtype)
    most = to_bytes(max_shard_size)
    try:

        def plan() -> _Share:
            nonlocal staging
            [entries] = first_error([tensors])
            assert isinstance(given, LocalModel) and isinstance(before, WorkingModel)
            place = locate(out)
            form = form_for(place, version, encoding, checksum)
            check_path(
                place, single=False, overwrite=False, protected=protected_places(before.opened, locate(directory))
            )
            aliases = {dropped: kept for dropped, kept in given.aliases.items() if kept in entries}
            pairs = pair_tensors(before, entries, aliases, "the live model", wanted)
            share = -(-sum(pair.nbytes for pair in pairs) // world.size)
            groups = group_by_size(((pair, pair.nbytes) for pair in pairs), max(1, min(most, share)))
            staging = LocalDestination(place.path, single=False)
            staging.begin()
            staging.keep({})
            own = {pair.old.name: aliases.get(pair.old.name, pair.old.name) for pair in pairs}
            named = [[(pair.old.name, own[pair.old.name], pair.dtype) for pair in group] for group in groups]
            return _Share(staging.directory, form, named)

        share = world.tell(attempt(plan) if world.rank == 0 else None)
        blind = world.fold([] if os.path.isdir(share.directory) else [world.rank], operator.add)
        world.tell(attempt(lambda: _refuse_blind(blind or [], os.fspath(out), world.size)) if world.rank == 0 else None)
        assert isinstance(given, LocalModel) and isinstance(before, WorkingModel)
        tasks = _tasks(world, share, mine)
        work = _Work(world, given, before, share, tasks, old if isinstance(old, HeldWeights) else None)
        outcome = world.fold(attempt(work.carry_out), lambda one, later: attempt(lambda: _first_lost(one, later)))

        def publish() -> DeltaReport:
            [lost] = first_error([outcome])
            if lost:
                raise overflow_error(lost, {task.dtype for task in tasks})
            assert staging is not None
            source: dict[str, object] = {
                "layout": "live",
                "base": before.catalog.source_facts(),
            }
            manifest, counts = end_delta(staging.directory, len(share.groups), share.form, source)
            staging.seal(manifest)
            staging.commit()
            files = tuple((file.path, file.nbytes) for file in manifest.files)
            return DeltaReport(share.form, counts, files, 0, False, work.engine, (*before.notes, *staging.notes), 0.0)

        report = world.tell(attempt(publish) if world.rank == 0 else None)
        work.keep()
        return report
    finally:
        if staging is not None:
            staging.__exit__(None, None, None)


@dataclass(frozen=True, slots=True)
class _Task:
    """One tensor, with the ranks that encode and send it.

    Attributes:
        name: in the older version.
        dtype: of its bytes.
        owner: the rank that encodes it.
        sent: rank -> its contributions, of those that this rank sends or receives.
    """

    name: str
    dtype: DType
    owner: int
    sent: dict[int, list[Contribution]]


@dataclass(frozen=True, slots=True)
class _Share:
    """The plan that rank 0 sends to all ranks.

    Attributes:
        directory: that the delta is staged in.
        form: of the delta.
        groups: for each file, name in the older version, name in the model, and dtype of each tensor, in order. The ranks make
            files in turn.
    """

    directory: str
    form: DeltaForm
    groups: list[list[tuple[str, str, DType]]]

    def mine(self, rank: int, size: int) -> dict[int, list[str]]:
        """Number of a file -> names of the tensors in it, of the files that a rank makes, in order."""
        several = enumerate(self.groups)
        return {number + 1: [name for name, *_ in group] for number, group in several if number % size == rank}


def _tasks(world: Ranks, share: _Share, parts: Mapping[str, TensorPart]) -> list[_Task]:
    """All tensors, in an order in which the ranks' turns are spread evenly; each rank says to those that encode what it sends of
    its `parts`.
    """
    queues: list[list[tuple[str, str, DType]]] = [[] for _ in range(world.size)]
    for number, group in enumerate(share.groups):
        queues[number % world.size] += group
    order = [(rank, one) for step in zip_longest(*queues) for rank, one in enumerate(step) if one is not None]
    mine = {name: contributions(parts, {own: ElementPlace(0, 0, dtype)}) for _, (name, own, dtype) in order}
    sent: list[dict[str, list[Contribution]]] = [{} for _ in range(world.size)]
    for owner, (name, _, _) in order:
        if mine[name]:
            sent[owner][name] = mine[name]
    tasks = [
        _Task(name, dtype, owner, {world.rank: mine[name]} if mine[name] else {}) for owner, (name, _, dtype) in order
    ]
    by_name = {task.name: task for task in tasks}
    for sender, some in enumerate(world.swap([one or None for one in sent])):
        for name, theirs in (some or {}).items():
            by_name[name].sent[sender] = theirs
    return tasks


def _first_lost(one: Lost | Exception, later: Lost | Exception) -> Lost:
    """The first rank's losses in casts, or its error."""
    first, second = first_error([one, later])
    return first or second


def _refuse_blind(blind: list[int], out: str, size: int) -> None:
    if blind:
        raise UnsupportedError(
            "some ranks do not see the delta's directory", file=out,
            found=f"{len(blind):,} of {size:,} ranks, the first is {blind[0]}",
            expected="a file system that all ranks share", remedy="Choose an out there. Nothing was written.",
        )  # fmt: skip


class _Work:
    """The work of one rank: it sends its elements, and receives and encodes those of its own tensors."""

    def __init__(
        self,
        world: Ranks,
        given: LocalModel,
        old: WorkingModel,
        share: _Share,
        tasks: list[_Task],
        held: HeldWeights | None,
    ) -> None:
        self._world, self._old, self._share, self._tasks, self._held = world, old, share, tasks, held
        self._mine = share.mine(world.rank, world.size)
        self._lost: Lost = {}
        self._cast_piece = piece_caster(given, self._lost)
        self._queue: Queue[tuple[_Task, Bytes]] = Queue(1)
        self._new: dict[str, Bytes] = {}
        self._error: Exception | None = None
        nbytes = sum(self._nbytes(task) for task in tasks if task.owner == world.rank)
        self._reader = PieceReader({**DEFAULT_PACE, "threads": 1}, nbytes)
        self.engine = self._reader.engine

    def carry_out(self) -> Lost:
        """Goes through all tensors; returns the numbers that casts changed."""
        with self._reader:
            encoding = threading.Thread(target=self._encode_all, name="delta", daemon=True)
            encoding.start()
            for task in self._tasks:
                buffer = self._exchanged(task)
                if buffer is not None:
                    self._queue.put((task, buffer))
            encoding.join()
        if self._error is not None:
            raise self._error
        return self._lost

    def keep(self) -> None:
        """Makes the new version the held one."""
        if self._held is not None:
            self._held.tensors.update(self._new)

    def _nbytes(self, task: _Task) -> int:
        return self._old.catalog.tensors[task.name].numel * task.dtype.itemsize

    def _exchanged(self, task: _Task) -> Bytes | None:
        """Sends this rank's elements of a tensor; returns all of its bytes if this rank encodes it."""
        import numpy as np

        mine = task.owner == self._world.rank
        buffer = np.empty(self._nbytes(task), np.uint8) if mine else None
        for sender, some in sorted(task.sent.items()):
            for piece in (piece for contribution in some for piece in pieces_of(contribution)):
                if sender == self._world.rank:
                    data = self._cast(piece)
                    if not mine:
                        self._world.send(data, task.owner)
                else:
                    data = self._world.receive(piece.nbytes, sender)
                if buffer is not None:
                    at, view = 0, np.frombuffer(view_of(data), np.uint8)
                    for offset, nbytes in piece.runs:
                        buffer[offset : offset + nbytes] = view[at : at + nbytes]
                        at += nbytes
        return buffer

    def _cast(self, piece: ContributionPart) -> torch.Tensor:
        """The bytes of a piece; after an error, zeros."""
        if self._error is None:
            data = attempt(lambda: self._cast_piece(piece))
            if not isinstance(data, Exception):
                return data
            self._error = data
        return torch.zeros(piece.nbytes, dtype=torch.uint8)

    def _encode_all(self) -> None:
        """Encodes this rank's files; after an error, still takes everything from the queue."""
        left = sum(len(names) for names in self._mine.values())
        taken = 0

        def taken_from_queue(names: list[str]) -> Iterator[tuple[TensorChange, int]]:
            nonlocal taken
            for _ in names:
                task, new = self._queue.get()
                taken += 1
                yield self._encoded(task, new), len(new)

        try:
            for number, names in self._mine.items():
                share = self._share
                for _ in write_group(
                    share.directory, number, len(share.groups), share.form, names, taken_from_queue(names)
                ):
                    pass
            self._reader.check_sources()
        except Exception as error:
            self._error = self._error or error
        for _ in range(left - taken):
            self._queue.get()

    def _encoded(self, task: _Task, new: Bytes) -> TensorChange:
        entry, size = self._old.catalog.tensors[task.name], task.dtype.itemsize
        held = self._held.tensors.get(task.name) if self._held is not None else None
        encoder = Encoder(task.name, entry.numel, task.dtype, self._share.form, self._share.directory)
        try:
            for start, stop in pieces(entry.numel, task.dtype):
                if held is not None:
                    old = held[start * size : stop * size]
                else:
                    old = self._reader.read(entry, start, stop, task.dtype)
                encoder.feed(old, new[start * size : stop * size])
            if self._held is not None:
                self._new[task.name] = new
            return encoder.finish()
        except BaseException:
            encoder.close()
            raise
