"""Who takes part: ranks, device, process groups.

For `start`, `zero` and `sharding`. A process group that exists is used, or one is made from torchrun's variables; without either,
one process trains alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.live.device import default_backend, use_device
from zckpt.runtime.config.zero import Zero


@dataclass(frozen=True, slots=True)
class World:
    """All ranks, and this one."""

    rank: int
    size: int
    local_rank: int
    device: torch.device


def join_world() -> World:
    """The world of this process; makes the default process group if there is none."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not dist.is_initialized():
        backend = default_backend()
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return World(dist.get_rank(), dist.get_world_size(), local_rank, use_device(local_rank))


def mesh_of(zero: Zero, world: World) -> DeviceMesh:
    """The ranks as (replicate, shard): parameters are cut over the last dim and repeated over the first.

    Stage 0 shards over one rank. MiCS shards over groups of neighbours.

    Raises:
        UsageError: a group size does not divide the number of ranks.
    """
    size = 1 if zero.stage == 0 else world.size
    for name, value in (
        ("mics_shard_size", zero.mics_shard_size),
        ("zero_hpz_partition_size", zero.zero_hpz_partition_size),
    ):
        if value > 0 and world.size % value:
            raise UsageError(
                f"zero_optimization.{name} does not divide the number of ranks", found=f"{value}",
                expected=f"a divisor of {world.size}", remedy="Correct it in the config, or use another number of ranks.",
            )  # fmt: skip
    if zero.mics_shard_size > 0:
        size = zero.mics_shard_size
    if size == world.size:
        return init_device_mesh(world.device.type, (size,), mesh_dim_names=("shard",))
    shape = (world.size // size, size)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def rows_of(length: int, size: int, rank: int) -> range:
    """The rows of dim 0 that one of `size` ranks holds: ceil(length / size) each, the last ones fewer or none.

    Source: torch 2.13, `fully_shard` cuts with `torch.chunk`.
    """
    step = -(-length // size)
    return range(min(rank * step, length), min((rank + 1) * step, length))


def elements_of(shape: Sequence[int], size: int, rank: int) -> tuple[int, int]:
    """The elements of a tensor, row-major, in the rows that one of `size` ranks holds: the first, and how many."""
    rows, width = rows_of(shape[0], size, rank), math.prod(shape[1:])
    return rows.start * width, len(rows) * width
