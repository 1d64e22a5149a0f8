"""Moves what a config wants on NVMe into swap files: parameters after they are sharded, states after the optimizer is made.

For `start`. Where what is, by the config:
- `offload_param` nvme (stage 3): this rank's rows of every parameter, in fp32 where they are trained, but for the first
  `max_in_cpu` elements. Gathers read them.
- `offload_optimizer` nvme: the states. In half precision the fp32 weights too: memory keeps the rows in the precision of the
  computation, for gathers. In fp32 these are the same numbers, and stay in memory.
What `fully_shard` cannot cut, and gradients, stay in memory.
"""

from __future__ import annotations

import gc
import logging
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zckpt.base.errors import UsageError
from zckpt.base.words import size
from zckpt.live.device import pins
from zckpt.runtime.config.read import Settings
from zckpt.runtime.optimizers.build import check_elementwise
from zckpt.runtime.optimizers.lion_lamb import Lamb
from zckpt.runtime.sharding.gradients import names_of_places, place_of, units_of
from zckpt.runtime.sharding.parameter import ShardedParameter
from zckpt.runtime.sharding.shard import Sharded
from zckpt.runtime.swapping.files import SwapFile, Transfers, padded_size
from zckpt.runtime.swapping.gathering import Reader, SwappedRows, SwappedUnit, serve
from zckpt.runtime.swapping.stepping import SwappedStep

MOST_ELEMENTS = 8 << 20
"""The most elements of a sub-group: with Adam's two states and the weights, 96 MiB."""

_log = logging.getLogger("zckpt.runtime")
_ATTRIBUTE = "_zckpt_swapped_step"


class Swap:
    """The parts of a run that are in files. Raises OutputError if no swap file can be made, or the disk has no room."""

    def __init__(self, settings: Settings, model: nn.Module, sharded: Sharded, *, trains: bool) -> None:
        self._settings, self._zero = settings, settings.zero
        self._trains = trains
        self._param = param = self._zero.offload_param if "offload_param" in self._zero.nvme else None
        sections = [one for one in (param, self._zero.offload_optimizer) if one is not None]
        aio = settings.config.aio
        pin = all(one.pin_memory for one in sections) and pins()
        block = max(1, aio.block_size // 4096) * 4096
        self._transfers = Transfers(min(64, aio.queue_depth * aio.intra_op_parallelism), block, pin=pin)
        self._files: dict[str, SwapFile] = {}
        self._rows: dict[int, SwappedRows] = {}  # by the `id` of a sharded parameter
        self._sharded = sharded
        room = param.buffer_count * param.buffer_size * 4 if param is not None else 0
        self._reader = Reader(self._transfers, room)
        self._move(model)

    def take(self, optimizer: Optimizer) -> None:
        """Lets an optimizer on masters step through files. Raises UsageError if it looks across elements, OutputError if
        the disk has no room.
        """
        zero, section = self._zero, self._zero.offload_optimizer
        check_elementwise(optimizer, allowed=self._settings.config.zero_allow_untested_optimizer)
        if isinstance(optimizer, Lamb):
            raise UsageError(
                "device 'nvme' gives an optimizer parts of tensors, and Lamb needs whole ones",
                found="optimizer Lamb",
                expected="an optimizer that treats each element by itself, such as AdamW",
                remedy="Choose another optimizer, or offload to 'cpu'.",
            )  # fmt: skip
        file = None
        if section is not None and section.device == "nvme":
            file = self._file(section.nvme_path)
        moved = [one for one in self._sharded.parameters if one.master is not None and id(one) in self._rows]
        rows = {id(one.master): self._rows[id(one)] for one in moved}
        elements = max(1024, min(zero.sub_group_size, MOST_ELEMENTS) // 1024 * 1024)
        count = max(1, section.buffer_count) if section is not None else 4
        swapped = SwappedStep(optimizer, rows, file, self._transfers, count, elements, self._reader.forget)
        setattr(optimizer, _ATTRIBUTE, swapped)
        optimizer.step = MethodType(lambda _, closure=None: swapped.step(closure), optimizer)  # type: ignore[method-assign]
        told = ", ".join(f"{size(one.nbytes)} in {one.path}" for one in self._files.values())
        _log.info("Rank %d keeps %s.", torch.distributed.get_rank(), told or "nothing in files: all fits max_in_cpu")

    def _file(self, directory: str | None) -> SwapFile:
        assert directory is not None  # checked with the config
        if directory not in self._files:
            self._files[directory] = SwapFile(directory)
        return self._files[directory]

    def _move(self, model: nn.Module) -> None:
        """Moves rows of parameters to a file."""
        names, by_name = names_of_places(self._sharded.parameters), {one.name: one for one in self._sharded.parameters}
        groups: list[tuple[SwappedUnit, list[tuple[Any, ShardedParameter]]]] = []
        left = 0 if self._param is None else self._param.max_in_cpu
        for group in units_of(model):
            unit, members = SwappedUnit(), []
            for parameter in group.fsdp_params:
                one = by_name[names[place_of(parameter)]]
                parameter.reset_sharded_param()
                numel = parameter._sharded_param_data.numel()
                if self._is_moved(one, numel, left):
                    members.append((parameter, one))
                elif self._param is not None:
                    left -= numel
            groups.append((unit, members))
        total = sum(padded_size(one._sharded_param_data.nbytes) for _, members in groups for one, _ in members)
        if not total:
            return
        section = self._param or self._zero.offload_optimizer
        assert section is not None
        file = self._file(section.nvme_path)
        file.reserve(total)
        for unit, members in groups:
            for parameter, one in members:
                serve(parameter, self._moved(parameter, one, file, unit), self._reader, unit)
        gc.collect()  # cycles of the model as it was before hold the memory

    def _is_moved(self, one: ShardedParameter, numel: int, left: int) -> bool:
        if one.replicated or not numel:
            return False
        if self._param is not None:
            return numel > left
        return self._trains and one.trained and one.dtype != torch.float32 and one.local().dtype == torch.float32

    @torch.no_grad()
    def _moved(self, parameter: Any, one: ShardedParameter, file: SwapFile, unit: SwappedUnit) -> SwappedRows:
        """Moves a parameter's rows into the file; everything that used their memory uses the file's map now."""
        before, shape = parameter._sharded_param_data, one.local().shape
        region = file.region(before.numel(), before.dtype)
        region.tensor.copy_(before)
        local = region.tensor[: shape.numel()].view(shape)
        parameter._sharded_param_data = region.tensor
        one.weight._local_tensor = local  # type: ignore[attr-defined]
        rows = SwappedRows(region, local)
        if self._param is None:
            rows.cache = before.to(one.dtype)
            if self._transfers.pin:
                rows.cache = rows.cache.pin_memory()
            rows.is_updated()
        unit.add(rows)
        self._rows[id(one)] = rows

        def used() -> None:
            rows.is_stale = True
            self._reader.forget()

        one.on_use = used
        return rows


def state_room(optimizer: Optimizer, master: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor for a state that an optimizer lacks: in its swap file, if it has one."""
    swapped = getattr(optimizer, _ATTRIBUTE, None)
    if not isinstance(swapped, SwappedStep):
        return torch.empty_like(master, memory_format=torch.contiguous_format)
    return swapped.room(master, name)


def mend(optimizer: Optimizer) -> None:
    """Lets the optimizer step again, after weights and states were loaded."""
    swapped = getattr(optimizer, _ATTRIBUTE, None)
    if isinstance(swapped, SwappedStep):
        swapped.mend()
