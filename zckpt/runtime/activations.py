"""Recomputes activations in the backward: the functions under DeepSpeed's `deepspeed.checkpointing`.

x = checkpointing.checkpoint(block, x)      # the backward calls block again instead of keeping what it computed

For scripts, with DeepSpeed's names, arguments and defaults; torch.utils.checkpoint does the work.
Source: DeepSpeed 0.19.8, runtime/activation_checkpointing/checkpointing.py.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import checkpoint as torchs

from zckpt.base.errors import UsageError
from zckpt.live.device import pins, synchronize
from zckpt.runtime.config.fields import ActivationSection
from zckpt.runtime.config.read import read_activations

_options: ActivationSection | None = None


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function, keeps its arguments only, and calls it again in the backward. Returns what the function returns.

    Random numbers in the second call are those of the first. `configure`, or the config's section `activation_checkpointing`,
    says where the arguments are kept, and whether calls are timed.
    """
    chosen = _options or ActivationSection()
    timed = chosen.synchronize_checkpoint_boundary or chosen.profile
    called = _with_times(function, chosen) if timed else function
    leaves_device = chosen.cpu_checkpointing and pins()  # without an accelerator they are in host memory as it is
    with torch.autograd.graph.save_on_cpu(pin_memory=True) if leaves_device else nullcontext():
        return torchs.checkpoint(called, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def _with_times(function: Callable[..., Any], chosen: ActivationSection) -> Callable[..., Any]:
    """The function, with its calls timed; the first is the forward, others are in the backward."""
    names = itertools.chain(["forward"], itertools.repeat("forward again, in backward"))

    def called(*args: Any, **kwargs: Any) -> Any:
        synchronize()
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            synchronize()
            name, spent = next(names), (time.perf_counter() - began) * 1000.0
            if chosen.profile and not (dist.is_initialized() and dist.get_rank()):
                sys.stdout.write(f"[Rank 0] time (ms) | {name}: {spent:.2f}\n")
                sys.stdout.flush()

    return called


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
        deepspeed_config: a config; its section `activation_checkpointing` is read.
        partition_activations: share kept activations out over the ranks of a tensor-parallel group; there is none, and it
            changes nothing, as in DeepSpeed without one.
        contiguous_checkpointing: keep them end to end in one buffer; without effect.
        num_checkpoints: how many there will be, for the size of that buffer.
        checkpoint_in_cpu: keep arguments in host memory until the backward.
        synchronize: wait for the device before and after each call.
        profile: print how long each call takes, in the backward too.

    Raises:
        UsageError: contiguous checkpointing without partitioned activations, or without their number.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section = ActivationSection() if deepspeed_config is None else read_activations(deepspeed_config)
    _apply_options(section, **{name: value for name, value in given.items() if value is not None})


def configure_once(section: ActivationSection) -> None:
    """Sets the config of an engine, unless the script has called `configure` itself."""
    if not is_configured() and section != ActivationSection():
        global _options
        _options = section


def is_configured() -> bool:
    """Whether `configure` has been called."""
    return _options is not None


def reset() -> None:
    """Frees buffers between evaluations in DeepSpeed. Nothing is kept between two calls here."""


def set_num_layers(nlayers: int) -> None:
    """Sets `num_checkpoints`."""
    _apply_options(_options or ActivationSection(), number_checkpoints=nlayers)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Sets `partition_activations`."""
    _apply_options(_options or ActivationSection(), partition_activations=partition_activation)


def _apply_options(section: ActivationSection, **chosen: Any) -> None:
    global _options
    options = section.model_copy(update=chosen)
    if options.contiguous_memory_optimization and not (options.partition_activations and options.number_checkpoints):
        raise UsageError(
            "contiguous checkpointing needs partitioned activations and their number",
            found=f"partition_activations {options.partition_activations}, num_checkpoints {options.number_checkpoints}",
            remedy="Pass partition_activations=True and num_checkpoints, or leave contiguous_checkpointing out.",
        )
    _options = options
