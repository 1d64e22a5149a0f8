"""Provides rows of swapped parameters for a gather, from the swap file or from a copy in the dtype of the computation.

For `install`. `fully_shard` asks each of its parameters for the rows to gather; `SwappedParameter` is such a parameter with
rows that are not in memory. [Note: reading ahead] The rows of a unit are read together. While a unit computes, those of the
unit that followed it last time are read, as far as there is room. What was read ahead is read again if anything may have
changed it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from zckpt.base.dataclass import dataclass
from zckpt.runtime.swapping.files import BufferPlaces, Region, Transfer, Transfers, elements_in


class SwappedParameter(FSDPParam):
    """A parameter of `fully_shard` with rows that come from `rows_to_gather`; an existing one gets this class."""

    rows_to_gather: Callable[[], torch.Tensor]

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        """This rank's rows, on the device and in the dtype of the computation."""
        if self.sharded_state != ShardedState.SHARDED:
            return super().all_gather_inputs
        rows = self.rows_to_gather().to(self.device)
        return [rows if self.param_dtype in (None, rows.dtype) else rows.to(self.param_dtype)]


@dataclass(slots=True, eq=False)
class SwappedRows:
    """The rows of one parameter.

    Attributes:
        region: of the fp32 weights, or of a frozen parameter.
        local: the tensor that everything but a gather sees, in the file's memory map.
        cache: the same rows in memory in the dtype of the computation; None reads them from the file for each gather.
        is_stale: the cache may be out of date.
        at: their place in the buffer of the unit, in bytes.
    """

    region: Region
    local: torch.Tensor
    cache: torch.Tensor | None = None
    is_stale: bool = True
    at: int = 0
    _version: int = -1

    def cached(self) -> torch.Tensor:
        """The rows in memory."""
        assert self.cache is not None
        if self.is_stale or self._version != self.local._version:
            self.cache.copy_(self.region.tensor)
            self.is_updated()
        return self.cache

    def is_updated(self) -> None:
        """Records that the cache has the file's rows."""
        self.is_stale, self._version = False, self.local._version


@dataclass(slots=True, eq=False)
class SwappedUnit:
    """Parameters that are gathered together."""

    rows: list[SwappedRows] = field(default_factory=list)
    places: BufferPlaces = field(default_factory=BufferPlaces)

    def add(self, rows: SwappedRows) -> None:
        """Adds a parameter."""
        rows.at = self.places.add(rows.region.file, rows.region.offset, rows.region.tensor.nbytes)
        self.rows.append(rows)


@dataclass(slots=True, eq=False)
class _Read:
    unit: SwappedUnit
    buffer: torch.Tensor
    transfers: list[Transfer]
    versions: list[int]


class Reader:
    """Reads the rows of units for their gathers."""

    def __init__(self, transfers: Transfers, room: int) -> None:
        self._transfers, self._room = transfers, room
        self._now: _Read | None = None
        self._ahead: dict[int, _Read] = {}
        self._free: list[torch.Tensor] = []
        self._next: dict[tuple[int, int], SwappedUnit] = {}
        self._trail: tuple[SwappedUnit | None, SwappedUnit | None] = (None, None)

    def read(self, unit: SwappedUnit, rows: SwappedRows) -> torch.Tensor:
        """The rows of a unit's parameter, until another unit's are asked for. Raises OutputError if unreadable."""
        if self._now is None or self._now.unit is not unit or self._now.versions != _versions(unit):
            self._turn_to(unit)
        assert self._now is not None
        tensor = rows.region.tensor
        return elements_in(self._now.buffer, rows.at, tensor.numel(), tensor.dtype)

    def forget(self) -> None:
        """Drops everything that was read: the file changes, or may have changed."""
        for read in [*self._ahead.values(), *([] if self._now is None else [self._now])]:
            self._drop(read)
        self._ahead.clear()
        self._now = None

    def _turn_to(self, unit: SwappedUnit) -> None:
        if self._now is not None:
            self._free.append(self._now.buffer)
            self._now = None
        read = self._ahead.pop(id(unit), None)
        if read is not None and read.versions != _versions(unit):
            self._drop(read)
            read = None
        read = read or self._begin(unit)
        before, last = self._trail
        if last is not unit:
            if before is not None and last is not None:
                self._next[id(before), id(last)] = unit
            self._trail = (last, unit)
        for transfer in read.transfers:
            transfer.wait()
        self._now = read
        self._read_ahead()

    def _read_ahead(self) -> None:
        before, last = self._trail
        spent = sum(read.unit.places.nbytes for read in self._ahead.values())
        while before is not None and last is not None:
            following = self._next.get((id(before), id(last)))
            if following is None or id(following) in self._ahead or spent + following.places.nbytes > self._room:
                return
            self._ahead[id(following)] = self._begin(following)
            spent += following.places.nbytes
            before, last = last, following

    def _begin(self, unit: SwappedUnit) -> _Read:
        nbytes = unit.places.nbytes
        fitting = [number for number, one in enumerate(self._free) if nbytes <= one.numel() <= 2 * nbytes]
        buffer = self._free.pop(fitting[0]) if fitting else self._transfers.make_buffer(nbytes)
        del self._free[2:]
        versions = _versions(unit)
        return _Read(unit, buffer, unit.places.begin(self._transfers, buffer, write=False), versions)

    def _drop(self, read: _Read) -> None:
        for transfer in read.transfers if read is not self._now else ():
            transfer.wait()
        self._free.append(read.buffer)


def _versions(unit: SwappedUnit) -> list[int]:
    return [one.local._version for one in unit.rows]


def serve(parameter: Any, rows: SwappedRows, reader: Reader, unit: SwappedUnit) -> None:
    """Makes a parameter of `fully_shard` gather these rows."""
    parameter.__class__ = SwappedParameter
    parameter.rows_to_gather = partial(reader.read, unit, rows) if rows.cache is None else rows.cached
