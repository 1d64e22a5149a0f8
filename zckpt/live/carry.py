"""Writes elements from this rank's memory to files or a state dict, or sends them to rank 0, cast piece by piece.

For `export`. The engine casts; pieces of many small tensors are cast together. A device's elements come through page-locked
buffers, the next ones while the last ones are cast and written.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from operator import itemgetter
from types import TracebackType
from typing import Literal

import torch

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError
from zckpt.core.catalog import TensorEntry
from zckpt.core.fragments import Fragment
from zckpt.core.plan import Plan
from zckpt.core.stores import MemoryStore
from zckpt.engine.checksums import crc32, share
from zckpt.engine.move import run
from zckpt.live import device
from zckpt.live.assignment import PIECE_BYTES, Contribution, ContributionPart, pieces
from zckpt.live.loading import is_direct
from zckpt.live.parts import LocalModel
from zckpt.live.ranks import Ranks
from zckpt.storage.descriptors import forget, write_all
from zckpt.storage.fsync_queue import make_durable
from zckpt.team.meeting import attempt

_LARGE = 1 << 20

Lost = dict[str, tuple[int, float]]
"""Tensor name -> (numbers that became infinite or were clamped, the largest of them)."""

Sums = dict[int, "dict[int, int] | None"]


@dataclass(frozen=True, slots=True)
class Brought:
    """Facts of the bytes that a rank wrote.

    Attributes:
        lost: numbers that casts changed.
        sums: by file, what was written of each of its ranges adds to the range's CRC (`checksums.share`), by the range's number;
            None for a file that gets many small pieces and is read again for its CRC.
    """

    lost: Lost = field(default_factory=dict[str, tuple[int, float]])
    sums: Sums = field(default_factory=dict[int, "dict[int, int] | None"])

    def and_of(self, later: Brought) -> Brought:
        """The facts of two ranks."""
        lost, sums = dict(self.lost), dict(self.sums)
        for name, (count, largest) in later.lost.items():
            before = lost.get(name, (0, 0.0))
            lost[name] = before[0] + count, max(before[1], largest)
        for place, theirs in later.sums.items():
            known = sums.get(place, {})
            together = None if known is None or theirs is None else dict(known)
            if together is not None and theirs is not None:
                for number, crc in theirs.items():
                    together[number] = together.get(number, 0) ^ crc
            sums[place] = together
        return Brought(lost, sums)


Put = Callable[[ContributionPart, torch.Tensor], None]
"""Puts the bytes of a piece to their places."""


def put_into(tensors: Sequence[torch.Tensor]) -> Put:
    """Copies bytes into the tensors of a state dict."""
    memory = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]

    def put(piece: ContributionPart, data: torch.Tensor) -> None:
        at = 0
        for offset, nbytes in piece.runs:
            memory[piece.of.target.place][offset : offset + nbytes] = data[at : at + nbytes]
            at += nbytes

    return put


class Files:
    """Writes pieces to files that exist in full size. `ranges`: (start, bytes) of each file's ranges of elements, in order; no
    piece is in two. `sums`: as in `Brought`.
    """

    def __init__(self, paths: Sequence[str], ranges: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.sums: Sums = {}
        self._paths = paths
        self._ranges = ranges
        self._open: dict[int, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def put(self, piece: ContributionPart, data: torch.Tensor) -> None:
        """Writes the bytes at their places."""
        place = piece.of.target.place
        with self._failing(place):
            if place not in self._open:
                self._open[place] = os.open(self._paths[place], os.O_WRONLY | os.O_CLOEXEC)
            view = view_of(data)
            self._sum(piece, view)
            for offset, nbytes in piece.runs:
                write_all(self._open[place], view[:nbytes], offset)
                view = view[nbytes:]
            if len(piece.runs) == 1 and piece.nbytes >= _LARGE:  # the system writes it while the next piece is cast
                forget(self._open[place], *piece.runs[0])

    def _sum(self, piece: ContributionPart, view: memoryview) -> None:
        place = piece.of.target.place
        shares = self.sums.setdefault(place, {})
        if len(piece.runs) > 1:
            self.sums[place] = None
        elif shares is not None:
            [(offset, nbytes)] = piece.runs
            number = bisect_right(self._ranges[place], offset, key=itemgetter(0)) - 1
            stop = sum(self._ranges[place][number])
            shares[number] = shares.get(number, 0) ^ share((offset, nbytes, crc32(view)), stop)

    def sync(self) -> None:
        """Syncs what was written, so that it is durable and other nodes see it."""
        for place, descriptor in self._open.items():
            with self._failing(place):
                make_durable(descriptor)

    @contextlib.contextmanager
    def _failing(self, place: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                "cannot be written", file=self._paths[place], found=error.strerror or str(error),
                remedy="Make room or get the right to write there, and save again. The output was not changed.",
            ) from error  # fmt: skip


def bring(
    world: Ranks,
    held: LocalModel,
    mine: Sequence[Contribution],
    sink: Put | Files | None,
    senders: Sequence[int],
    *,
    clamp: bool = False,
) -> Brought | Exception:
    """Writes this rank's pieces to the sink, or sends them to rank 0 if this rank has no sink. `senders`: on rank 0, the ranks
    without a sink, who say what they contribute, and send it; `clamp`: whether numbers too large for their dtype are
    clamped, otherwise they become infinite. Returns what was written, or the error. After an error this rank still sends and
    receives all pieces, so that no rank waits.
    """
    lost: Lost = {}
    source = _cast_pieces(held, mine, clamp, lost)
    if sink is None:
        return _send(world, mine, source) or Brought(lost)
    put = sink.put if isinstance(sink, Files) else sink
    failed = attempt(lambda: _put_all(put, source))
    for rank in senders:
        for contribution in world.receive_value(rank):
            for piece in pieces(contribution):
                data = world.receive(piece.nbytes, rank)
                if failed is None:
                    failed = attempt(lambda piece=piece, data=data: put(piece, data))  # type: ignore[misc]
    if failed is None and isinstance(sink, Files):
        failed = attempt(sink.sync)
    return failed or Brought(lost, sink.sums if isinstance(sink, Files) else {})


def piece_caster(held: LocalModel, lost: Lost) -> Callable[[ContributionPart], torch.Tensor]:
    """A function that casts one piece after the other, through buffers that all pieces share: its bytes, valid until the
    next call. `lost`: numbers that casts changed; filled in.
    """
    batch = _Batch(torch.empty(PIECE_BYTES, dtype=torch.uint8), False, lost)

    def cast_piece(piece: ContributionPart) -> torch.Tensor:
        batch.add(piece, held.elements(piece.of.name, piece.of.target.dtype))
        batch.start()
        [(_, data)] = batch.cast()
        return data

    return cast_piece


def _put_all(put: Put, source: Iterator[tuple[ContributionPart, torch.Tensor]]) -> None:
    for piece, data in source:
        put(piece, data)


def _send(
    world: Ranks, mine: Sequence[Contribution], source: Iterator[tuple[ContributionPart, torch.Tensor]]
) -> Exception | None:
    """Sends rank 0 all pieces; zeros after an error. Returns the error, if any."""
    failed: Exception | None = None
    world.send_value(mine, 0)
    for contribution in mine:
        for piece in pieces(contribution):
            data = attempt(lambda: next(source)[1]) if failed is None else failed
            if isinstance(data, Exception):
                failed, data = data, torch.zeros(piece.nbytes, dtype=torch.uint8)
            world.send(data)
    return failed


def _cast_pieces(
    held: LocalModel, mine: Sequence[Contribution], clamp: bool, lost: Lost
) -> Iterator[tuple[ContributionPart, torch.Tensor]]:
    """The bytes of every piece, cast, in order; each is valid until the next one is requested."""
    results = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    batch, before = (_Batch(results, clamp, lost) for _ in range(2))
    name, local = "", torch.empty(0)
    for contribution in mine:
        if contribution.name != name:
            name, local = contribution.name, held.elements(contribution.name, contribution.target.dtype)
        for piece in pieces(contribution):
            if not batch.has_room_for(piece):
                batch.start()
                yield from before.cast()
                batch, before = before, batch
            batch.add(piece, local)
    batch.start()
    yield from before.cast()
    yield from batch.cast()


class _Batch:
    """Pieces that are cast together. Those that are not dense host memory are copied to a buffer of `PIECE_BYTES` first.

    There are two batches: copies from a device for the one go on while the other is cast and written. They share `results`, a
    buffer of `PIECE_BYTES` for what casts give.
    """

    def __init__(self, results: torch.Tensor, clamp: bool, lost: Lost) -> None:
        self._overflow: Literal["clamp", "inf"] = "clamp" if clamp else "inf"
        self._lost = lost
        self._results = results
        self._copies: torch.Tensor | None = None
        self._waiting: list[tuple[ContributionPart, torch.Tensor, int | None]] = []
        self._devices: set[torch.device] = set()
        self._copied: Callable[[], None] = lambda: None
        self._taken = self._used = 0

    def has_room_for(self, piece: ContributionPart) -> bool:
        """Whether a piece's source and result fit in the buffers."""
        source = piece.count * piece.of.source.itemsize
        return self._taken + source <= PIECE_BYTES and self._used + piece.nbytes <= PIECE_BYTES

    def add(self, piece: ContributionPart, local: torch.Tensor) -> None:
        """Adds a piece that has room, and begins to copy it, if it has to be copied, from this rank's part of its tensor: that is
        in its own dtype or already in the one that the piece is to have.
        """
        nbytes = piece.count * local.element_size()
        if is_direct(local):
            part = local.view(-1)[piece.first : piece.first + piece.count]
        else:
            if self._copies is None:
                self._copies = device.host_buffer(PIECE_BYTES, local.device)
            part = self._copies[self._taken : self._taken + nbytes].view(local.dtype)
            fill(part, local, piece.first)
            self._devices.add(local.device)
        is_cast = str(local.dtype) != f"torch.{piece.of.target.dtype.torch_name}"
        self._waiting.append((piece, part, self._used if is_cast else None))
        self._taken += _align_up(nbytes)
        self._used += _align_up(piece.nbytes)

    def start(self) -> None:
        """Ends the batch: what is copied after this belongs to another one."""
        self._copied = device.copies_of(self._devices)

    def cast(self) -> Iterator[tuple[ContributionPart, torch.Tensor]]:
        """The pieces of a batch that was ended, in order; after that it is empty."""
        self._copied()
        pairs = [_pair(piece, part, self._results, at) for piece, part, at in self._waiting if at is not None]
        moved = run(Plan((), pairs), "", overflow=self._overflow) if pairs else None
        for name, (count, largest) in (moved.overflows if moved else {}).items():
            before = self._lost.get(name, (0, 0.0))
            self._lost[name] = (before[0] + count, max(before[1], largest))
        for piece, part, at in self._waiting:
            yield piece, part.view(torch.uint8) if at is None else self._results[at : at + piece.nbytes]
        self._waiting.clear()
        self._devices.clear()
        self._taken = self._used = 0


def view_of(data: torch.Tensor) -> memoryview:
    """A view of a vector's bytes, valid as long as the vector. torch would never free a storage that numpy shares."""
    return memoryview((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr()))


def _align_up(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def fill(out: torch.Tensor, tensor: torch.Tensor, first: int) -> None:
    """Fills a vector with a tensor's elements from number `first` (row-major) on, in as few copies as rows of dim 0 allow."""
    if tensor.dim() < 2 or tensor.is_contiguous():
        device.copy(out, tensor.view(-1)[first : first + out.numel()])
        return
    width = tensor[0].numel()
    while out.numel():
        row, column = divmod(first, width)
        rows = out.numel() // width if not column else 0
        taken = rows * width if rows else min(out.numel(), width - column)
        if rows:
            device.copy(out[:taken].view(rows, *tensor.shape[1:]), tensor[row : row + rows])
        else:
            fill(out[:taken], tensor[row], column)
        out, first = out[taken:], first + taken


def _pair(
    piece: ContributionPart, part: torch.Tensor, buffer: torch.Tensor, at: int
) -> tuple[TensorEntry, TensorEntry]:
    """The move of a piece from the elements `part` to byte `at` of the buffer."""
    of, count = piece.of, piece.count
    source = MemoryStore(part.data_ptr(), part.numel() * part.element_size(), part)
    target = MemoryStore(buffer.data_ptr(), buffer.numel(), buffer)
    return (
        TensorEntry(of.name, (count,), of.source, "parameter", (Fragment(source, 0, 0, count),)),
        TensorEntry(of.name, (count,), of.target.dtype, "parameter", (Fragment(target, at, 0, count),)),
    )
