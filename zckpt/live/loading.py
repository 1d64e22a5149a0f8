"""Loads a checkpoint's elements directly into the memory of an existing model.

For `load_state_dict_from_zero_checkpoint` and other callers that have a catalog and a `torch.nn.Module`. It makes no state dict,
which would be a second copy of all weights: a tensor in CPU memory is a `MemoryStore`, and the engine reads, casts and writes
once. Tensors on other devices, and those that are not contiguous, are filled piece by piece through two buffers, page-locked for
a device: one is copied to it while the other is filled.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import repeat
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError, UnsupportedError, UsageError
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, TensorEntry, TensorPart
from zckpt.core.dtypes import BY_TORCH_NAME, DType, can_cast
from zckpt.core.fragments import Block, Fragment
from zckpt.core.overlaps import place, touching
from zckpt.core.plan import Move, Plan, Streamed
from zckpt.core.stores import FileStore, MemoryStore
from zckpt.engine import replicas
from zckpt.engine.move import run
from zckpt.jobs.open import as_named_by
from zckpt.live import device
from zckpt.live.slices import local_part, master_of, reshard_modules
from zckpt.storage.descriptors import OpenFiles

BUFFER_BYTES = 16 << 20
"""Size of the buffer through which tensors outside contiguous CPU memory are filled."""

_ALIGNMENT = 64

_FEW = 4
"""So many fragments of a tensor are looked at one after another."""

_MEMORY = MemoryStore(0, 1 << 62)
"""All memory of this process: places in it are addresses. One store, however many tensors a batch fills."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Names that only one side has.

    Attributes:
        missing: names of the model's tensors that the checkpoint does not hold; they were left as they were.
        unexpected: names of the checkpoint's tensors that the model does not have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_into(model: torch.nn.Module, catalog: Catalog) -> LoadReport:
    """Fills a model's parameters and persistent buffers with a checkpoint's numbers, cast to the dtypes they have.

    The model stays on its device, and sharded if it is: each rank fills its part, and waits for no other. Tied weights
    are loaded once; a name that is tied in the checkpoint or in the model serves for all of its names.

    Args:
        model: the model; its tensors keep their identity, so optimizers that hold them stay valid.
        catalog: the checkpoint.

    Warns:
        UserWarning: there are missing or unexpected names, or numbers too large for the model's dtype became infinite.

    Raises:
        UsageError: the model has no memory to load into: ZeRO-3 placeholders, or tensors on the meta device.
        InconsistentError: no name is the same, shapes differ, or the checkpoint contradicts itself. The model is
            unchanged.
    """
    reshard_modules(model)
    groups = tensors_of(model)
    catalog, _ = as_named_by((name for names, _ in groups for name in names), catalog)
    _refuse_wrong_kinds(groups, catalog)
    pairs: list[tuple[TensorEntry, torch.Tensor]] = []
    missing: list[str] = []
    used: set[str] = set()
    for names, tensor in groups:
        found = [catalog[name] for name in names if _has(catalog, name)]
        used.update(entry.name for entry in found)
        if found:
            pairs.append((found[-1], tensor))  # the last name wins, as in torch
        else:
            missing.extend(names)
    if groups and not pairs:
        raise InconsistentError(
            "has no tensor of this model",
            file=catalog.source.path,
            found=f"names such as {examples(catalog)}",
            expected=f"names of the model, such as {examples(missing)}",
            remedy="Load into the module that was trained, without what wraps it. The model is unchanged.",
        )
    unexpected = tuple(name for name in catalog if name not in used)
    _refuse_wrong_shapes(pairs, catalog)
    replicas.check(catalog)
    with torch.no_grad():
        move([here for entry, tensor in pairs for here in _here(entry, tensor)])
    report = LoadReport(tuple(missing), unexpected)
    _warn_of(report, catalog)
    return report


def _here(entry: TensorEntry, tensor: torch.Tensor) -> list[tuple[TensorEntry, torch.Tensor]]:
    """The parts of a tensor that this process fills: all or its part, and its fp32 master weight if that is other
    memory.
    """
    if isinstance(tensor, DTensor):
        local, fragments = local_part(entry.name, tensor)
        parts = [_cut_out(entry, fragment, local.element_size()) for fragment in fragments]
        return (
            [(replace(entry, shape=tuple(local.shape), fragments=sum(parts, ()), replicas=()), local)] if parts else []
        )
    master = master_of(tensor)
    return [(entry, tensor)] if master is None else [(entry, tensor), (entry, master)]


def _cut_out(entry: TensorEntry, of: Fragment, itemsize: int) -> tuple[Fragment, ...]:
    """The elements of a fragment of memory, numbered by their places in that memory."""
    rows = Block(of.start, of.count, of.rows, of.pitch, of.pitch, 1)
    return place(entry.fragments, rows, of.byte_offset // itemsize, of.store_pitch, entry.dtype.itemsize)


def move(wanted: Iterable[tuple[TensorEntry | TensorPart, torch.Tensor]], starts: Iterable[int] | None = None) -> None:
    """Fills tensors with the elements of entries, cast to the tensors' dtypes. A tensor has its entry's shape, or holds a run of
    its elements; `starts`: the first element of each such run, 0 if not given. Warns if numbers too large for a dtype became
    infinite.
    """
    direct: list[tuple[TensorEntry | TensorPart, _Room]] = []
    pieces: list[tuple[TensorEntry | TensorPart, torch.Tensor, DType, int]] = []
    for (entry, tensor), start in zip(wanted, repeat(0) if starts is None else starts):
        dtype = BY_TORCH_NAME.get(str(tensor.dtype).removeprefix("torch."))
        if not tensor.numel():
            continue
        if dtype is None or not can_cast(entry.dtype, dtype):
            pieces.append((entry, tensor.detach(), entry.dtype, start))  # torch casts, on the way out of the buffer
        elif is_direct(tensor):
            direct.append((entry, _Room(entry.name, dtype, tensor.data_ptr(), start, tensor.numel())))
        else:
            pieces.append((entry, tensor.detach(), dtype, start))
    too_large: set[str] = set()
    if direct and not _is_read_at_once(direct):
        direct.sort(key=lambda pair: pair[1].address)
        too_large |= _run(Streamed((), direct, _moves_to(direct)))  # type: ignore[arg-type]
    if pieces:
        too_large |= _through_buffer(pieces)
    if too_large:
        warnings.warn(
            f"Numbers too large for their dtype became infinite in {count(len(too_large), 'tensor')}: "
            f"{examples(sorted(too_large))}.",
            stacklevel=3,
        )


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether the engine can read and write a tensor's memory as a vector."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class _Room(NamedTuple):
    """Memory for `count` elements of a tensor, from number `start` on, at an address."""

    name: str
    dtype: DType
    address: int
    start: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.count * self.dtype.itemsize

    def part(self, entry: TensorEntry | TensorPart) -> TensorPart:
        """As a part of the tensor."""
        return TensorPart(
            self.name, entry.shape, self.dtype, (Fragment(_MEMORY, self.address, self.start, self.count),)
        )


_dense = Move._make  # half the time of `Move`
_ONE_ROW = (1, 0, 0, 1, 1)
"""Rows, pitches and steps of a dense run."""


def _moves_to(wanted: Sequence[tuple[TensorEntry | TensorPart, _Room]]) -> Iterator[Move | None]:
    """As `Plan.moves`, with rooms in place of destinations: of a file's own rows, without a part for each room."""
    for number, (entry, room) in enumerate(wanted):
        held = entry.fragments
        if not entry.flat or not all(type(one.store) is FileStore and one.store.at_hand for one in held):
            for move in Plan((), ((entry, room.part(entry)),)).moves():
                yield None if move is None else move._replace(tensor=number)
            continue
        dtype, address, start, count = room[1:]
        for one in touching(held, start, start + count, flat=True) if len(held) > _FEW else held:
            first, stop = max(one.start, start), min(one.start + one.count, start + count)
            if first < stop:
                at = one.byte_offset + (first - one.start) * entry.dtype.itemsize
                to = address + (first - start) * dtype.itemsize
                yield _dense(
                    (one.store, at, _MEMORY, to, stop - first, entry.dtype, dtype, number, *_ONE_ROW, first, 0)
                )


def _is_read_at_once(wanted: Sequence[tuple[TensorEntry | TensorPart, _Room]]) -> bool:
    """Reads rows of files into memory as they are, if they are few bytes: threads and plans would take longer than the bytes.

    Returns False if it has not read all of them: that is left to the engine, and so is what to say of a file that it cannot read.
    """
    if sum(room.nbytes for _, room in wanted) > _AT_ONCE_BYTES:
        return False
    reads: list[tuple[FileStore, int, int, int]] = []
    for entry, (_, dtype, address, start, numel) in wanted:
        if dtype != entry.dtype or not entry.flat:
            return False
        for one in entry.fragments:
            first, stop = max(one.start, start), min(one.start + one.count, start + numel)
            if first < stop:
                store, size = one.store, dtype.itemsize
                if type(store) is not FileStore or not store.at_hand or dtype.swap(store.byteorder):
                    return False
                at, to = one.byte_offset + (first - one.start) * size, address + (first - start) * size
                reads.append((store, at, to, (stop - first) * size))
    with OpenFiles() as files, suppress(OSError):
        for store, at, to, nbytes in reads:
            if os.preadv(files.of(store)[0], [(ctypes.c_char * nbytes).from_address(to)], at) != nbytes:
                return False
        files.check_sources()
        return True
    return False


_AT_ONCE_BYTES = 32 << 20


def _run(plan: Plan) -> set[str]:
    """Carries out moves. Returns the names of tensors in which numbers became infinite."""
    return set(run(plan, "", overflow="inf").overflows)


def _through_buffer(wanted: Iterable[tuple[TensorEntry | TensorPart, torch.Tensor, DType, int]]) -> set[str]:
    """Fills tensors of any device and strides piece by piece; many small pieces share one run of the engine. `wanted`:
    entries, their tensors, the dtypes that the elements have in the buffer, and the first element of each.
    """
    filling, leaving = _Buffer(), _Buffer()
    too_large: set[str] = set()
    for entry, tensor, dtype, first in wanted:
        for start, part in _parts(tensor, BUFFER_BYTES // dtype.itemsize, first):
            if not filling.has_room_for(part.numel() * dtype.itemsize):
                too_large |= filling.empty()
                filling, leaving = leaving, filling
            filling.add(entry, start, part, dtype)
    too_large |= filling.empty()
    leaving.wait()
    filling.wait()
    return too_large


class _Buffer:
    """A buffer of `BUFFER_BYTES` on the way to tensors. There are two: one is copied to a device while the other is
    filled.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._pairs: list[tuple[TensorEntry | TensorPart, TensorPart]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._used = 0
        self.wait: Callable[[], None] = lambda: None

    def has_room_for(self, nbytes: int) -> bool:
        """Whether `nbytes` more bytes fit in."""
        return self._used + nbytes <= BUFFER_BYTES

    def add(self, entry: TensorEntry | TensorPart, start: int, part: torch.Tensor, dtype: DType) -> None:
        """Adds elements of an entry, from number `start` on, for a part of a tensor."""
        if self._memory is None:
            self._memory = device.host_buffer(BUFFER_BYTES, part.device)
        memory, nbytes = self._memory, part.numel() * dtype.itemsize
        store = MemoryStore(memory.data_ptr(), BUFFER_BYTES, memory)
        fragment = Fragment(store, self._used, start, part.numel())
        self._pairs.append((entry, TensorPart(entry.name, entry.shape, dtype, (fragment,))))
        elements = memory[self._used : self._used + nbytes].view(getattr(torch, dtype.torch_name))
        self._copies.append((part, elements.view(part.shape)))
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def empty(self) -> set[str]:
        """Reads the elements that were added, when the copies before have ended, and begins to copy them to the
        tensors. Returns the names of tensors in which numbers became infinite.
        """
        self.wait()
        too_large = _run(Plan((), self._pairs))
        for target, elements in self._copies:
            device.copy(target, elements)
        self.wait = device.copies_of(target.device for target, _ in self._copies)
        self._pairs.clear()
        self._copies.clear()
        self._used = 0
        return too_large


def _parts(tensor: torch.Tensor, most: int, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """Views of at most `most` elements that make up the tensor in row-major order, with each one's first element."""
    if tensor.numel() <= most:
        yield start, tensor
        return
    width = tensor.numel() // tensor.shape[0]
    rows = most // width
    if rows == 0:
        for index in range(tensor.shape[0]):
            yield from _parts(tensor[index], most, start + index * width)
        return
    for low in range(0, tensor.shape[0], rows):
        yield start + low * width, tensor[low : low + rows]


def tensors_of(model: torch.nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Parameters and persistent buffers with all their names, in the state dict's order; names that share memory are
    one tensor.
    """
    groups: dict[object, tuple[list[str], torch.Tensor]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own: dict[str, torch.Tensor | None] = dict(module._parameters)
        passing = module._non_persistent_buffers_set
        own |= {name: value for name, value in module._buffers.items() if name not in passing}
        for name, tensor in own.items():
            if tensor is not None:
                groups.setdefault(_place(tensor), ([], tensor))[0].append(f"{prefix}.{name}" if prefix else name)
    return list(groups.values())


def _place(tensor: torch.Tensor) -> object:
    if not is_plain(tensor) or tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided memory, neither a subclass nor sparse."""
    # A DTensor is a subclass, and takes long to give its data.
    return not isinstance(tensor, DTensor) and type(tensor.data) is torch.Tensor and tensor.layout is torch.strided


def _has(catalog: Catalog, name: str) -> bool:
    return name in catalog.tensors or name in catalog.aliases


def _refuse_wrong_kinds(groups: Sequence[tuple[list[str], torch.Tensor]], catalog: Catalog) -> None:
    placeholders: list[str] = []
    meta: list[str] = []
    strange: list[str] = []
    for names, tensor in groups:
        whole = getattr(tensor, "ds_shape", None)
        if isinstance(tensor, DTensor):
            continue
        if not is_plain(tensor):
            strange.append(f"{names[0]} ({type(tensor.data).__name__})")
        elif tensor.shape == (0,) and (whole is not None or (_has(catalog, names[0]) and catalog[names[0]].numel)):
            if whole is None or tuple(whole) != (0,):
                placeholders.append(names[0])
        elif whole is not None and tuple(whole) != tuple(tensor.shape):
            placeholders.append(names[0])
        elif tensor.is_meta:
            meta.append(names[0])
    if placeholders:
        raise UsageError(
            "the model has ZeRO-3 placeholders: its weights are spread over the ranks",
            found=f"{count(len(placeholders), 'parameter')} without elements ({examples(placeholders)})",
            remedy="Load before deepspeed.initialize and outside zero.Init, or inside "
            "deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0).",
        )
    if meta:
        raise UsageError(
            "the model has no memory to load into",
            found=f"{count(len(meta), 'tensor')} on the meta device ({examples(meta)})",
            remedy="Call model.to_empty(device='cpu') first.",
        )
    if strange:
        raise UnsupportedError(
            "the model has tensors that are not plain memory",
            found=examples(strange),
            remedy="Load before the model is quantized.",
        )


def _refuse_wrong_shapes(pairs: Sequence[tuple[TensorEntry, torch.Tensor]], catalog: Catalog) -> None:
    bad = [
        f"{entry.name!r} {list(entry.shape)}, in the model {list(tensor.shape)}"
        for entry, tensor in pairs
        if entry.shape != tuple(tensor.shape)
    ]
    if bad:
        raise InconsistentError(
            f"{count(len(bad), 'tensor')} of the checkpoint and of the model differ in shape",
            file=catalog.source.path,
            found="; ".join(bad),
            remedy="Build the model with the configuration that it was trained with. It is unchanged.",
        )


def _warn_of(report: LoadReport, catalog: Catalog) -> None:
    sentences: list[str] = []
    if report.missing:
        sentences.append(
            f"not in the checkpoint: {count(len(report.missing), 'tensor')} of the model ({examples(report.missing)})"
        )
    if report.unexpected:
        sentences.append(
            f"not in the model: {count(len(report.unexpected), 'tensor')} of the checkpoint ({examples(report.unexpected)})"
        )
    if sentences:
        warnings.warn(f"{catalog.source.path!r}: {'; '.join(sentences)}.", stacklevel=3)
