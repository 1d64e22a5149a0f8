"""Groups of ranks, as scripts ask for them: all ranks are data parallel, and every other axis has one rank.

Source: DeepSpeed 0.19.8, utils/groups.py.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zckpt.runtime.names.unbuilt import refuse


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Makes groups of experts in DeepSpeed. Raises UnsupportedError if experts should lie on more than one rank."""
    if ep_size > 1:
        refuse("MoE")


def get_data_parallel_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def get_data_parallel_world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size()


def get_data_parallel_rank() -> int:
    """The number of this rank."""
    return dist.get_rank()


def get_model_parallel_world_size() -> int:
    """1: no parameter is cut for the computation."""
    return 1


def get_model_parallel_rank() -> int:
    """0, since there is one model-parallel rank."""
    return 0


get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
_get_sequence_data_parallel_group = get_data_parallel_group
_get_sequence_data_parallel_rank = get_data_parallel_rank
_get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_rank = get_model_parallel_rank
_get_expert_model_parallel_world_size = get_model_parallel_world_size


def _get_data_parallel_group_ranks() -> list[int]:
    """All ranks."""
    return list(range(dist.get_world_size()))


def _get_sequence_parallel_group() -> None:
    """None: no sequence is cut."""
