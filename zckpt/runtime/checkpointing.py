"""Recomputing activations in the backward: what DeepSpeed scripts find under `deepspeed.checkpointing`.

x = checkpointing.checkpoint(block, x)      # the backward calls block again instead of keeping what it computed

For scripts, with DeepSpeed's names, arguments and defaults; torch.utils.checkpoint does the work.
Source: DeepSpeed 0.19.8, runtime/activation_checkpointing/checkpointing.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils import checkpoint as torchs

from zckpt.base.errors import UsageError

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]


@dataclass(frozen=True, slots=True)
class CheckpointingOptions:
    """What `configure` was told; the names are those of its arguments.

    Attributes:
        partition_activations: share kept activations out over the ranks of a tensor-parallel group.
        contiguous_checkpointing: keep them end to end in one buffer.
        num_checkpoints: how many there will be, for the size of that buffer.
        checkpoint_in_cpu: keep them in host memory.
        synchronize: wait for the device before and after each call.
        profile: log how long each forward takes.
    """

    partition_activations: bool = False
    contiguous_checkpointing: bool = False
    num_checkpoints: int | None = None
    checkpoint_in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False


_options: CheckpointingOptions | None = None


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function, keeps its arguments only, and calls it again in the backward. Returns what the function returns.

    Random numbers in the second call are those of the first.
    """
    return torchs.checkpoint(function, *args, use_reentrant=False, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same as `checkpoint`, by the name that DeepSpeed has for this form."""
    return checkpoint(function, *args)


def configure(
    mpu_: Any,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Sets what `checkpoint` does from now on. An argument that is given wins over the config.

    Args:
        mpu_: the ranks of model parallelism, as an object with DeepSpeed's methods; None without any.
        deepspeed_config: a config, whose section `activation_checkpointing` is read.
        partition_activations: see `CheckpointingOptions`, for this and the following.
        contiguous_checkpointing: likewise.
        num_checkpoints: likewise.
        checkpoint_in_cpu: likewise.
        synchronize: likewise.
        profile: likewise.

    Raises:
        UsageError: contiguous checkpointing without partitioned activations, or without their number.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    _set(replace(CheckpointingOptions(), **chosen))


def is_configured() -> bool:
    """Whether `configure` has been called."""
    return _options is not None


def reset() -> None:
    """Frees buffers between evaluations in DeepSpeed. Nothing is kept between two calls here."""


def set_num_layers(nlayers: int) -> None:
    """Sets `num_checkpoints`."""
    _set(replace(_options or CheckpointingOptions(), num_checkpoints=nlayers))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Sets `partition_activations`."""
    _set(replace(_options or CheckpointingOptions(), partition_activations=partition_activation))


def _set(options: CheckpointingOptions) -> None:
    global _options
    if options.contiguous_checkpointing and not (options.partition_activations and options.num_checkpoints):
        raise UsageError(
            "contiguous checkpointing needs partitioned activations and their number",
            found=f"partition_activations {options.partition_activations}, num_checkpoints {options.num_checkpoints}",
            remedy="Pass partition_activations=True and num_checkpoints, or leave contiguous_checkpointing out.",
        )
    _options = options
