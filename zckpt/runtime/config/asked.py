"""Reads what a config of the trainer asks for, as far as memory depends on it.

For `estimate`, and for the command, which imports no torch for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zckpt.base.errors import UnsupportedError
from zckpt.estimation.choices import RunShape
from zckpt.estimation.rehearsal import BYTES
from zckpt.runtime.config.read import Settings, batch_of, read_config

Asked = tuple[int, bool, str]
"""A stage, offload, and precision."""

_AUTO: dict[str, Any] = {
    "optimizer.params.lr": 1e-3,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "gradient_clipping": 1.0,
    "fp16.enabled": False,
    "bf16.enabled": True,
    **dict.fromkeys(
        (f"scheduler.params.{name}" for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")), 1
    ),
}  # fmt: skip
"""Values for "auto" in keys that memory does not depend on, and mixed precision, as in most runs."""


def asked_of(
    config: str | os.PathLike[str] | Mapping[str, Any],
    run: RunShape,
    *,
    auto: Mapping[str, Any] | None = None,
    width: int | None = None,
) -> tuple[RunShape, Asked, str]:
    """Reads a config, as `zckpt.runtime.initialize` takes it: the shape of the run, what the config asks for, and its file
    for messages. `run` has what the config does not say; `auto` values for keys that say "auto", by default bf16 and whatever
    memory does not depend on; `width` is the model's. Raises UsageError if the config is wrong, UnsupportedError if it asks
    for what the estimate does not count.
    """
    values = {**_AUTO, **(auto or {})}
    settings = read_config(config, auto=values, hidden_size=width)
    zero, own = settings.zero, settings.config
    if zero.zero_hpz_partition_size > 1:
        raise UnsupportedError(
            "asks for a secondary partition, which the estimate does not count", file=settings.file,
            found=f"zero_hpz_partition_size {zero.zero_hpz_partition_size}", remedy="Remove it for the estimate.",
        )  # fmt: skip
    if own.train_batch_size or own.train_micro_batch_size_per_gpu:
        batch = batch_of(settings, run.ranks)
        run = replace(run, micro_batch=batch.micro, accumulation=batch.accumulation)
    elif own.gradient_accumulation_steps:
        run = replace(run, accumulation=own.gradient_accumulation_steps)
    reduce = own.communication_data_type
    run = replace(
        run, optimizer=own.optimizer.type or run.optimizer, states=_states(settings), bucket=zero.reduce_bucket_size,
        shards=max(zero.mics_shard_size, 0), reduce_bytes=BYTES[reduce] if reduce else 0,
        fp32_below_2=own.data_types.grad_accum_dtype == "fp32",
    )  # fmt: skip
    return run, (zero.stage, zero.offloads_optimizer or zero.offloads_param, own.precision), settings.file


def _states(settings: Settings) -> int | None:
    """Values that the optimizer keeps for each element, if its arguments determine it; None for the usual number."""
    name, params = (settings.config.optimizer.type or "").lower(), settings.config.optimizer.params
    if name in ("adam", "adamw") and params.get("amsgrad"):
        return 3
    if name == "sgd" and params.get("momentum"):
        return 1
    if name == "rmsprop":
        return 1 + bool(params.get("momentum")) + bool(params.get("centered"))
    return None
