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

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from queue import Queue
from typing import TYPE_CHECKING

import torch
from torch import nn

from zckpt.base.errors import UnsupportedError
from zckpt.base.pace import DEFAULT_PACE
from zckpt.base.sizes import to_bytes
from zckpt.core.dtypes import DType
from zckpt.deltas.encode import Encoder, TensorChange
from zckpt.deltas.form import Checksum, DeltaForm, Encoding
from zckpt.deltas.pieces import PieceReader, pieces
from zckpt.deltas.write import end_delta, grouped, write_group
from zckpt.jobs.delta import DeltaReport, form_for
from zckpt.jobs.options import Options, to_dtype
from zckpt.jobs.planned import protected
from zckpt.jobs.versions import TensorPair, WeightsVersion, opened_version, paired_with
from zckpt.live.assignment import Contribution, ContributionPart, ElementPlace, assign, contributions
from zckpt.live.assignment import pieces as pieces_of
from zckpt.live.carry import Lost, PieceCaster
from zckpt.live.parts import LocalModel, local_model
from zckpt.live.ranks import Ranks
from zckpt.output.checks import check_path
from zckpt.output.order import overflow_error
from zckpt.output.staging import Staging
from zckpt.storage.location import locate
from zckpt.team.meeting import attempt, first_error

if TYPE_CHECKING:
    from zckpt.deltas.pieces import Bytes


class HeldWeights:
    """The older version of weights, kept in host memory from one delta to the next; see `export_delta`.

    Each rank keeps the tensors that it encodes: together the ranks hold the weights once, in the dtype of the delta.

    Args:
        directory: the version before the first delta.
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
        max_shard_size: bytes of weights whose differences one file holds.

    Returns:
        What changed, on every rank.

    Raises:
        CastError: numbers too large for the dtype.
        InconsistentError: the model and the older weights have different tensors; or some ranks did not call it within a minute.
        OutputError: `out` exists or cannot be written.
        ZckptError: another kind says what is wrong. Every rank raises it, and nothing was published.
    """
    world = Ranks("export_delta")
    directory = old.directory if isinstance(old, HeldWeights) else os.fspath(old)
    given = attempt(lambda: local_model(engine_or_model))
    before = attempt(lambda: opened_version(directory, Options()))
    said = world.gather(given if isinstance(given, Exception) else given.offers)
    opened = world.gather(before if isinstance(before, Exception) else None)
    staging: Staging | None = None
    wanted = None if dtype is None else to_dtype(str(dtype) if isinstance(dtype, torch.dtype) else dtype)
    most = to_bytes(max_shard_size)
    try:

        def plan() -> list[_Share]:
            nonlocal staging
            offers = first_error(said)
            first_error(opened)
            assert isinstance(given, LocalModel) and isinstance(before, WeightsVersion)
            place = locate(out)
            form = form_for(place, version, encoding, checksum)
            check_path(place, single=False, overwrite=False, protected=protected(before.opened, locate(directory)))
            tensors = assign(offers)
            entries = {name: tensor.entry for name, tensor in tensors.items()}
            aliases = {dropped: kept for dropped, kept in given.aliases.items() if kept in tensors}
            pairs = paired_with(before, entries, aliases, "the live model", wanted)
            own = {pair.old.name: aliases.get(pair.old.name, pair.old.name) for pair in pairs}
            parts = {
                pair.old.name: contributions(tensors, {own[pair.old.name]: ElementPlace(0, 0, pair.dtype)}, world.size)
                for pair in pairs
            }
            share = -(-sum(pair.nbytes for pair in pairs) // world.size)
            groups = grouped(((pair, pair.nbytes) for pair in pairs), max(1, min(most, share)))
            staging = Staging(place.path, single=False).__enter__()
            staging.keep(())
            return _shares(staging.directory, form, groups, parts, world.size)

        share = world.scatter(attempt(plan) if world.rank == 0 else [])
        sees = os.path.isdir(share.directory)
        blind = [rank for rank, seen in enumerate(first_error(world.gather(sees))) if not seen]
        world.scatter(attempt(lambda: _refuse_blind(blind, os.fspath(out), world.size)) if world.rank == 0 else [])
        assert isinstance(given, LocalModel) and isinstance(before, WeightsVersion)
        work = _Work(world, given, before, share, old if isinstance(old, HeldWeights) else None)
        outcomes = world.gather(attempt(work.carry_out))

        def publish() -> list[DeltaReport]:
            for lost in first_error(outcomes):
                if lost:
                    raise overflow_error(lost, share.dtypes)
            assert staging is not None
            source: dict[str, object] = {
                "layout": "live",
                "base": before.catalog.source.as_json(before.catalog.topology),
            }
            manifest, counts = end_delta(staging.directory, share.groups, share.form, source)
            staging.commit(manifest)
            files = tuple((file.path, file.nbytes) for file in manifest.files)
            report = DeltaReport(share.form, counts, files, 0, False, work.engine, (*before.notes, *staging.notes), 0.0)
            return [report] * world.size

        report = world.scatter(attempt(publish) if world.rank == 0 else [])
        work.keep()
        return report
    finally:
        if staging is not None:
            staging.__exit__(None, None, None)


@dataclass(frozen=True, slots=True)
class _Task:
    """One tensor: who encodes it, and who sends what of it.

    Attributes:
        name: in the older version.
        dtype: of its bytes.
        owner: the rank that encodes it.
        sent: rank -> its contributions, of those that this rank sends or receives.
    """

    name: str
    dtype: DType
    owner: int
    sent: Mapping[int, list[Contribution]]


@dataclass(frozen=True, slots=True)
class _Share:
    """What rank 0 sends to a rank.

    Attributes:
        directory: that the delta is staged in.
        form: of the delta.
        groups: files, in all.
        tasks: all tensors, in the order in which all ranks go through them.
        mine: number of a file -> names of the tensors in it, of the files that this rank makes, in order.
    """

    directory: str
    form: DeltaForm
    groups: int
    tasks: list[_Task]
    mine: Mapping[int, list[str]]

    @property
    def dtypes(self) -> set[DType]:
        """That numbers are cast to."""
        return {task.dtype for task in self.tasks}


def _shares(
    directory: str,
    form: DeltaForm,
    groups: list[list[TensorPair]],
    parts: Mapping[str, list[list[Contribution]]],
    size: int,
) -> list[_Share]:
    """Groups go to the ranks in turn; tensors are gone through so that the ranks' turns are spread evenly."""
    queues: list[list[TensorPair]] = [[] for _ in range(size)]
    for number, group in enumerate(groups):
        queues[number % size] += group
    order = [(rank, pair) for step in zip_longest(*queues) for rank, pair in enumerate(step) if pair is not None]
    shares: list[_Share] = []
    for rank in range(size):
        tasks = [
            _Task(
                pair.old.name, pair.dtype, owner,
                {sender: some for sender, some in enumerate(parts[pair.old.name]) if some and rank in (sender, owner)},
            )
            for owner, pair in order
        ]  # fmt: skip
        mine = {
            number + 1: [pair.old.name for pair in group]
            for number, group in enumerate(groups)
            if number % size == rank
        }
        shares.append(_Share(directory, form, len(groups), tasks, mine))
    return shares


def _refuse_blind(blind: list[int], out: str, size: int) -> list[None]:
    if blind:
        raise UnsupportedError(
            "some ranks do not see the delta's directory", file=out,
            found=f"{len(blind):,} of {size:,} ranks, the first is {blind[0]}",
            expected="a file system that all ranks share", remedy="Choose an out there. Nothing was written.",
        )  # fmt: skip
    return [None] * size


class _Work:
    """What a rank does: sends its elements, receives those of the tensors that it encodes, and encodes them."""

    def __init__(
        self, world: Ranks, given: LocalModel, old: WeightsVersion, share: _Share, held: HeldWeights | None
    ) -> None:
        self._world, self._old, self._share, self._held = world, old, share, held
        self._lost: Lost = {}
        self._caster = PieceCaster(given, self._lost)
        self._queue: Queue[tuple[_Task, Bytes]] = Queue(1)
        self._new: dict[str, Bytes] = {}
        self._error: Exception | None = None
        nbytes = sum(self._nbytes(task) for task in share.tasks if task.owner == world.rank)
        self._reader = PieceReader({**DEFAULT_PACE, "threads": 1}, nbytes)
        self.engine = self._reader.engine

    def carry_out(self) -> Lost:
        """Goes through all tensors; returns numbers that casts changed."""
        with self._reader:
            encoding = threading.Thread(target=self._encode_all, name="delta", daemon=True)
            encoding.start()
            for task in self._share.tasks:
                buffer = self._exchanged(task)
                if buffer is not None:
                    self._queue.put((task, buffer))
            encoding.join()
        if self._error is not None:
            raise self._error
        return self._lost

    def keep(self) -> None:
        """Makes the new version the one that is held."""
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
                    at, view = 0, data.numpy()
                    for offset, nbytes in piece.runs:
                        buffer[offset : offset + nbytes] = view[at : at + nbytes]
                        at += nbytes
        return buffer

    def _cast(self, piece: ContributionPart) -> torch.Tensor:
        """The bytes of a piece; after an error, zeros."""
        if self._error is None:
            data = attempt(lambda: self._caster.cast(piece))
            if not isinstance(data, Exception):
                return data
            self._error = data
        return torch.zeros(piece.nbytes, dtype=torch.uint8)

    def _encode_all(self) -> None:
        """Makes this rank's files; after an error, takes the rest of the queue all the same."""
        left = sum(len(names) for names in self._share.mine.values())
        taken = 0

        def taken_from_queue(names: list[str]) -> Iterator[tuple[TensorChange, int]]:
            nonlocal taken
            for _ in names:
                task, new = self._queue.get()
                taken += 1
                yield self._encoded(task, new), len(new)

        try:
            for number, names in self._share.mine.items():
                share = self._share
                for _ in write_group(share.directory, number, share.groups, share.form, names, taken_from_queue(names)):
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
