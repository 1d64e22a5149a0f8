"""Refuses configs with features that are not built, and with keys that exclude each other.

For `config`. Found at start-up, before a model is touched, not in the middle of the night when a checkpoint is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.base.words import count
from zckpt.runtime.config.names import keys_of_kind
from zckpt.runtime.config.sections import Config


def refuse_unbuilt(config: Config, raw: Mapping[str, Any], file: str) -> None:
    """Raises UnsupportedError if features are switched on that this engine does not have; it names all of them."""
    found = [f"{path} ({why})" for path, why in keys_of_kind(raw, "refused")]
    if found:
        raise UnsupportedError(
            f"switches on {count(len(found), 'feature that is', 'features that are')} not built", file=file,
            found="; ".join(found), remedy=f"Remove {'it' if len(found) == 1 else 'them'} from the config.",
        )  # fmt: skip


def refuse_contradictions(config: Config, raw: Mapping[str, Any], file: str) -> None:
    """Raises for keys that cannot both be meant, all of them at once. Raises UsageError if there are such keys."""
    found = list(_contradictions(config, raw))
    if found:
        raise UsageError(
            "keys contradict each other", file=file, found="; ".join(found), remedy="Change one key of each pair."
        )


def _contradictions(config: Config, raw: Mapping[str, Any]) -> Iterator[str]:
    zero = config.zero_optimization
    stage, precision = zero.stage, config.precision
    if config.fp16.enabled and (config.bfloat16 or config.bf16).enabled:
        yield "fp16.enabled and bf16.enabled"
    if "bf16" in raw and "bfloat16" in raw:
        yield "bf16 and bfloat16, its old name"
    if config.data_types.param_dtype not in (None, precision):
        yield f"data_types.param_dtype {config.data_types.param_dtype} and the precision {precision}"
    if config.fp16.enabled and not config.fp16.loss_scale:
        first = 2.0**config.fp16.initial_scale_power
        if first < config.fp16.min_loss_scale:
            yield f"fp16.initial_scale_power (scale {first:g}) and fp16.min_loss_scale {config.fp16.min_loss_scale:g}"
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if getattr(zero, old) is not None and getattr(zero, new) is not None:
            yield f"zero_optimization.{old} and zero_optimization.{new}"
    if zero.offload_optimizer is not None and zero.offload_optimizer.ratio not in (0.0, 1.0):
        yield "offload_optimizer.ratio between 0 and 1: shards are offloaded whole"
    for name, section in zero.nvme.items():
        if not section.nvme_path:
            yield f"{name}.device 'nvme' and no {name}.nvme_path, the directory for its file"
    if zero.nvme and config.checkpoint.async_save:
        yield "device 'nvme' and checkpoint.async_save, which copies everything into memory first"
    if zero.offloads_optimizer and stage == 0:
        yield "zero_optimization.stage 0 and offload_optimizer (stages 1 to 3)"
    if zero.zero_hpz_partition_size > 1 and stage != 3:
        yield f"zero_optimization.stage {stage} and zero_hpz_partition_size (stage 3)"
    if zero.mics_shard_size > 0 and stage != 3:
        yield f"zero_optimization.stage {stage} and mics_shard_size (stage 3)"
    if zero.mics_shard_size > 0 and zero.zero_hpz_partition_size > 1:
        yield "mics_shard_size and zero_hpz_partition_size"
    if config.gradient_allreduce_op == "sum" and stage == 3:
        yield "gradient_allreduce_op 'sum' and zero_optimization.stage 3"
    if not zero.compute_grad_norm:
        if stage not in (1, 2):
            yield f"compute_grad_norm false and zero_optimization.stage {stage} (1 or 2)"
        if config.gradient_clipping > 0:
            yield f"compute_grad_norm false and gradient_clipping {config.gradient_clipping:g} (0 never clips; 1 is the default)"
        if config.fp16.enabled:
            yield "compute_grad_norm false and fp16.enabled"
    if "max_grad_norm" in config.optimizer.params:
        yield "optimizer.params.max_grad_norm and gradient_clipping, which is the one that is read"
