"""Finds the elements of a sharded tensor that are in this process's memory.

For `loading` and `parts`: a DTensor, cut along any dimensions of its mesh, as fragments of the whole.
Source: torch 2.13, distributed/tensor/_utils.py; `fully_shard` leaves a DTensor where a parameter was.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from zckpt.base.errors import UnsupportedError
from zckpt.core.fragments import Fragment
from zckpt.core.overlaps import embed
from zckpt.core.stores import MemoryStore

_SHARDED_PARAMETER = "_zckpt_sharded_parameter"  # set by `runtime.sharding` on the parameters that it trains


def local_part(name: str, tensor: DTensor) -> tuple[torch.Tensor, tuple[Fragment, ...]]:
    """This process's part of a tensor, and which elements of the whole it has; the store stands for its dense memory.
    Raises UnsupportedError if the tensor has a placement that zckpt does not know.
    """
    with torch.no_grad():
        local = tensor.to_local().detach()
    mesh, placements = tensor.device_mesh, tensor.placements
    here = mesh.get_coordinate()
    if here is None or not local.numel():
        return local, ()
    if any(not (p.is_replicate() or isinstance(p, Shard | _StridedShard)) for p in placements):
        raise UnsupportedError(
            f"tensor {name!r} has a placement that zckpt does not know",
            found=str(placements),
            expected="Shard and Replicate",
            remedy="Redistribute the tensor first: tensor.redistribute(...).",
        )
    extent, fragments = _fragments(tensor.shape, mesh, tuple(here), placements, local.element_size())
    if extent != tuple(local.shape):
        raise UnsupportedError(
            f"this rank's part of tensor {name!r} has another shape than its placement says",
            found=str(list(local.shape)),
            expected=f"{list(extent)}, by {placements}",
            remedy="Report it to zckpt, with the versions of torch and of what sharded the model.",
        )
    return local, fragments


@lru_cache(1024)  # layers of a model have the same few shapes, and each save asks again
def _fragments(
    shape: torch.Size, mesh: DeviceMesh, here: tuple[int, ...], placements: tuple[Placement, ...], size: int
) -> tuple[tuple[int, ...], tuple[Fragment, ...]]:
    """The shape of this process's part of a tensor, and which elements of the whole it has, of `size` bytes each.

    `here` is this process's place in the mesh, which an equal mesh of later ranks may give to another one.
    """
    extent, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    numel, current = math.prod(extent), list(extent)
    fragments: tuple[Fragment, ...] = (Fragment(MemoryStore(0, numel * size), 0, 0, numel),)
    for dim, (length, offset) in enumerate(zip(shape, offsets)):
        if current[dim] != length:
            fragments = embed(fragments, current, dim, offset, length, size)
            current[dim] = length
    return tuple(extent), fragments


def reshard_modules(model: nn.Module) -> None:
    """Makes every module hold this process's parts: between steps, `fully_shard` may still hold parameters whole."""
    for parameter in model.parameters():
        part_of(parameter)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


COPIES = "_zckpt_copies"
"""The attribute of a module by which the trainer's `Copies` is found."""


def copies_of(model: nn.Module) -> Any:
    """What lets a model that the trainer has sharded hold plain copies of its tensors; None for any other."""
    return vars(model).get(COPIES)


def whole_copy_of(parameter: torch.Tensor) -> Any:
    """The trainer's `ShardedParameter` of a parameter that it registers whole between steps; None for any other."""
    trained: Any = getattr(parameter, _SHARDED_PARAMETER, None)
    return trained if getattr(trained, "whole", None) is parameter else None


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter with this process's part, where the trainer registers a whole copy between steps; any other is itself.

    The part has then what was written to the copy.
    """
    copy = whole_copy_of(parameter)
    if copy is None:
        return parameter
    copy.take_up()
    part: torch.Tensor = copy.weight
    return part


def master_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The fp32 master weight that the trainer keeps beside a whole parameter; None if it keeps none in other memory."""
    trained: Any = getattr(parameter, _SHARDED_PARAMETER, None)
    master: torch.Tensor | None = getattr(trained, "master", None)
    if master is None or trained.weight is not parameter or isinstance(parameter, DTensor):
        return None
    if master.data_ptr() == parameter.data_ptr():
        return None
    return master.data
