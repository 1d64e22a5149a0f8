"""Elements from this rank's memory to where they belong: cast, chunk by chunk, into files, a state dict, or to rank 0.

For `export`. The mover casts; chunks of many small tensors are cast together.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol

import torch

from zckpt.base.errors import OutputError
from zckpt.core.catalog import TensorEntry
from zckpt.core.fragments import Fragment, MemoryStore
from zckpt.core.plan import Plan
from zckpt.engine.checksums import Partial, crc32
from zckpt.engine.move import run
from zckpt.live.parts import LocalModel
from zckpt.live.ranks import Ranks
from zckpt.live.shares import CHUNK_BYTES, Contribution, ContributionPart, chunks
from zckpt.storage.descriptors import forget, write_all
from zckpt.storage.fsync_queue import make_durable
from zckpt.team.meeting import attempt

_LARGE = 1 << 20

Lost = dict[str, tuple[int, float]]
"""Tensor name -> (numbers that became infinite or were clamped, the largest of them)."""


@dataclass(frozen=True, slots=True)
class Brought:
    """What is known of the bytes that a rank wrote.

    Attributes:
        lost: what casts did.
        sums: by file, the CRCs of parts; None for a file that gets many small pieces: it is read again.
    """

    lost: Lost = field(default_factory=dict[str, tuple[int, float]])
    sums: dict[int, list[Partial] | None] = field(default_factory=dict[int, "list[Partial] | None"])


class ContributionSink(Protocol):
    """Where chunks end up."""

    def put(self, chunk: ContributionPart, data: torch.Tensor) -> None:
        """Takes a chunk's bytes."""


class Memory:
    """Tensors of a state dict."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]

    def put(self, chunk: ContributionPart, data: torch.Tensor) -> None:
        """Copies them into place."""
        at = 0
        for offset, nbytes in chunk.runs:
            self._bytes[chunk.job.target.place][offset : offset + nbytes] = data[at : at + nbytes]
            at += nbytes


class Files:
    """Files that exist in full size; they are synced when all is written.

    Attributes:
        sums: as in `Brought`.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.sums: dict[int, list[Partial] | None] = {}
        self._paths = paths
        self._open: dict[int, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def put(self, chunk: ContributionPart, data: torch.Tensor) -> None:
        """Writes them at their places."""
        place = chunk.job.target.place
        with self._failing(place):
            if place not in self._open:
                self._open[place] = os.open(self._paths[place], os.O_WRONLY | os.O_CLOEXEC)
            view = memoryview(data.numpy())  # type: ignore[arg-type]
            self._sum(chunk, view)
            for offset, nbytes in chunk.runs:
                write_all(self._open[place], view[:nbytes], offset)
                view = view[nbytes:]
            if len(chunk.runs) == 1 and chunk.nbytes >= _LARGE:  # its way to the disk begins while the next is cast
                forget(self._open[place], *chunk.runs[0])

    def _sum(self, chunk: ContributionPart, view: memoryview) -> None:
        parts = self.sums.setdefault(chunk.job.target.place, [])
        if len(chunk.runs) > 1:
            self.sums[chunk.job.target.place] = None
        elif parts is not None:
            [(offset, nbytes)] = chunk.runs
            parts.append((offset, nbytes, crc32(view)))

    def sync(self) -> None:
        """Makes what was written durable, and seen by other nodes."""
        for place, descriptor in self._open.items():
            with self._failing(place):
                make_durable(descriptor)

    @contextlib.contextmanager
    def _failing(self, place: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                "an output that cannot be written", file=self._paths[place], found=error.strerror or str(error),
                remedy="Nothing was published.",
            ) from error  # fmt: skip


def bring(
    world: Ranks,
    held: LocalModel,
    mine: Sequence[Contribution],
    sink: ContributionSink | None,
    senders: Sequence[tuple[int, Sequence[Contribution]]],
    *,
    clamp: bool = False,
) -> Brought | Exception:
    """Brings this rank's chunks to the sink, or to rank 0 where there is none; rank 0 also those of the senders.

    Returns:
        What was written; or what went wrong: others are not left waiting.
    """
    lost: Lost = {}
    source = _carried(held, mine, clamp, lost)
    if sink is None:
        return _send(world, mine, source) or Brought(lost)
    failed = attempt(lambda: _put_all(sink, source))
    for rank, share in senders:
        for job in share:
            for chunk in chunks(job):
                data = world.receive(chunk.nbytes, rank)
                if failed is None:
                    failed = attempt(lambda chunk=chunk, data=data: sink.put(chunk, data))  # type: ignore[misc]
    if failed is None and isinstance(sink, Files):
        failed = attempt(sink.sync)
    return failed or Brought(lost, sink.sums if isinstance(sink, Files) else {})


def _put_all(sink: ContributionSink, source: Iterator[tuple[ContributionPart, torch.Tensor]]) -> None:
    for chunk, data in source:
        sink.put(chunk, data)


def _send(
    world: Ranks, mine: Sequence[Contribution], source: Iterator[tuple[ContributionPart, torch.Tensor]]
) -> Exception | None:
    """Every chunk that rank 0 waits for; zeros after an error."""
    failed: Exception | None = None
    for job in mine:
        for chunk in chunks(job):
            data = attempt(lambda: next(source)[1]) if failed is None else failed
            if isinstance(data, Exception):
                failed, data = data, torch.zeros(chunk.nbytes, dtype=torch.uint8)
            world.send(data)
    return failed


def _carried(
    held: LocalModel, share: Sequence[Contribution], clamp: bool, lost: Lost
) -> Iterator[tuple[ContributionPart, torch.Tensor]]:
    """The bytes of every chunk, cast, in order; valid until the next is asked for."""
    batch = _Batch(clamp, lost)
    name, local = "", torch.empty(0)
    for job in share:
        if job.name != name:
            name, local = job.name, held.read[job.name]().detach()
        for chunk in chunks(job):
            if not batch.has_room_for(chunk):
                yield from batch.cast()
            part = batch.dense(local, chunk)
            if job.source == job.target.dtype:
                yield from batch.cast()
                yield chunk, part.view(torch.uint8)
            else:
                batch.add(chunk, part)
    yield from batch.cast()


class _Batch:
    """Chunks that are cast together, in two buffers of `CHUNK_BYTES`: for copies of what is not dense, and for the results.

    Args:
        clamp: whether numbers too large for their dtype are clamped.
        lost: which there were; filled in.
    """

    def __init__(self, clamp: bool, lost: Lost) -> None:
        self._overflow: Literal["clamp", "inf"] = "clamp" if clamp else "inf"
        self._lost = lost
        self._copies, self._results = (torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2))
        self._waiting: list[tuple[ContributionPart, torch.Tensor, int]] = []
        self._copied = self._used = 0

    def has_room_for(self, chunk: ContributionPart) -> bool:
        """Whether its source and its result fit in the buffers."""
        source = chunk.count * chunk.job.source.itemsize
        return self._copied + source <= CHUNK_BYTES and self._used + chunk.nbytes <= CHUNK_BYTES

    def dense(self, local: torch.Tensor, chunk: ContributionPart) -> torch.Tensor:
        """A chunk's elements as a vector: a view of the model's memory where that is dense and this machine's, else a copy."""
        if local.device.type == "cpu" and local.is_contiguous() and not (local.is_conj() or local.is_neg()):
            return local.view(-1)[chunk.first : chunk.first + chunk.count]
        nbytes = chunk.count * chunk.job.source.itemsize
        out = self._copies[self._copied : self._copied + nbytes].view(local.dtype)
        if local.device.type == "cpu":
            fill(out, local, chunk.first)
        else:
            out.copy_(elements(local, chunk.first, chunk.count))
        self._copied += _aligned(nbytes)
        return out

    def add(self, chunk: ContributionPart, part: torch.Tensor) -> None:
        """Takes a chunk that has room, and its elements."""
        self._waiting.append((chunk, part, self._used))
        self._used += _aligned(chunk.nbytes)

    def cast(self) -> Iterator[tuple[ContributionPart, torch.Tensor]]:
        """What was taken, cast; the buffers are free again after that."""
        pairs = [_pair(chunk, part, self._results, at) for chunk, part, at in self._waiting]
        moved = run(Plan((), pairs), "", overflow=self._overflow) if pairs else None
        for number, found in (moved.overflows if moved else {}).items():
            count, largest = self._lost.get(pairs[number][0].name, (0, 0.0))
            self._lost[pairs[number][0].name] = (count + found.count, max(largest, found.largest))
        for chunk, _, at in self._waiting:
            yield chunk, self._results[at : at + chunk.nbytes]
        self._waiting.clear()
        self._copied = self._used = 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def elements(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """A run of a tensor's elements in row-major order, as a vector: a view where its memory is dense, else a copy of the run."""
    if tensor.is_contiguous():
        return tensor.view(-1)[first : first + count]
    out = torch.empty(count, dtype=tensor.dtype, device=tensor.device)
    fill(out, tensor, first)
    return out


def fill(out: torch.Tensor, tensor: torch.Tensor, first: int) -> None:
    """Copies a run from `first` on: the end of a row of dim 0, whole rows, the beginning of a row."""
    if tensor.dim() == 1:
        out.copy_(tensor[first : first + out.numel()])
        return
    width = tensor[0].numel()
    while out.numel():
        row, column = divmod(first, width)
        rows = out.numel() // width if not column else 0
        taken = rows * width if rows else min(out.numel(), width - column)
        if rows:
            out[:taken].view(rows, *tensor.shape[1:]).copy_(tensor[row : row + rows])
        else:
            fill(out[:taken], tensor[row], column)
        out, first = out[taken:], first + taken


def _pair(
    chunk: ContributionPart, part: torch.Tensor, buffer: torch.Tensor, at: int
) -> tuple[TensorEntry, TensorEntry]:
    job = chunk.job
    of = MemoryStore(part.data_ptr(), part.numel() * part.element_size(), part)
    to = MemoryStore(buffer.data_ptr(), buffer.numel(), buffer)
    shape = (chunk.count,)
    return (
        TensorEntry(job.name, shape, job.source, "parameter", (Fragment(of, 0, 0, chunk.count),)),
        TensorEntry(job.name, shape, job.target.dtype, "parameter", (Fragment(to, at, 0, chunk.count),)),
    )
