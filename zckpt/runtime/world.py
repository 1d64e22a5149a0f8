"""The participants of a run: ranks, device, process groups.

For `start`, `init_context` and `sharding`. A process group that exists is used, or one is made from torchrun's variables;
without either, one process trains alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.live.device import default_backend, end_group_with_process, use_device
from zckpt.runtime.config.sections import Zero

DEFAULT_PORT = 29500

_MINUTES = int(os.environ.get("DEEPSPEED_TIMEOUT", "10"))
default_pg_timeout = timedelta(minutes=_MINUTES)


@dataclass(frozen=True, slots=True)
class World:
    """All ranks, and this one among them."""

    rank: int
    size: int
    local_rank: int
    device: torch.device


def join_world() -> World:
    """The world of this process; makes the default process group if there is none."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not dist.is_initialized():
        alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(default_backend(), **alone)
        end_group_with_process()
    return World(dist.get_rank(), dist.get_world_size(), local_rank, use_device(local_rank))


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Makes the default process group, if there is none: of torchrun's variables, or of this process alone.

    Args:
        dist_backend: as in torch, such as "gloo"; by default the one that torch names for the device.
        auto_mpi_discovery: take rank and size from Open MPI's variables where torchrun's are missing.
        distributed_port: of rank 0, where MASTER_PORT is not set.
        verbose: for DeepSpeed's sake; nothing is logged.
        timeout: of collectives.
        init_method: torch's.
        dist_init_required: False: there has to be a group already.
        config: for DeepSpeed's logger of collectives; not read.
        rank: this process's number, where no variable says it.
        world_size: the number of processes, where no variable says it.

    Raises:
        UsageError: `dist_init_required` is False, and there is no process group.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise UsageError(
            "dist_init_required is False, and there is no process group",
            remedy="Call torch.distributed.init_process_group first, or leave dist_init_required out.",
        )
    if auto_mpi_discovery and "RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" in os.environ:
        for name in ("RANK", "SIZE", "LOCAL_RANK"):
            own = "WORLD_SIZE" if name == "SIZE" else name
            os.environ[own] = os.environ[f"OMPI_COMM_WORLD_{name}"]
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "RANK" in os.environ:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    given: dict[str, Any] = {"rank": rank, "world_size": world_size} if rank >= 0 and world_size > 0 else {}
    if init_method is None and not given and "RANK" not in os.environ:
        join_world()
        return
    dist.init_process_group(dist_backend or default_backend(), init_method=init_method, timeout=timeout, **given)
    end_group_with_process()


def mesh_of(zero: Zero, world: World) -> DeviceMesh:
    """The ranks as (replicate, shard): parameters are cut over the last dim and repeated over the first.

    Stage 0 shards over one rank. MiCS shards over groups of neighbours. Raises UsageError if a group size does not
    divide the number of ranks.
    """
    size = 1 if zero.stage == 0 else world.size
    for name in ("mics_shard_size", "zero_hpz_partition_size"):
        value = getattr(zero, name)
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
    """The elements, row-major, in the rows of a tensor that one of `size` ranks holds: the first, and their number."""
    rows, width = rows_of(shape[0], size, rank), math.prod(shape[1:])
    return rows.start * width, len(rows) * width
