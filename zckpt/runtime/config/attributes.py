"""A config as DeepSpeed's scripts and libraries read it: `DeepSpeedConfig(config).train_batch_size`.

For scripts, and for the engine's `_config`. Source: DeepSpeed 0.19.8, runtime/config.py, for the names.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from zckpt.runtime.config.read import BatchSizes, Settings, batch_of, read_config

_log = logging.getLogger("zckpt.runtime")
_SAME_NAMES = (
    "managed_gradient_accumulation", "steps_per_print", "dump_state", "wall_clock_breakdown", "memory_breakdown",
    "gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "log_level",
)  # fmt: skip
_IN_LOWER_CASE = ("adam", "adamw", "adagrad", "lamb", "lion", "sgd")
"""Optimizers of DeepSpeed's own, by their names there."""


class DeepSpeedConfig:
    """The values of a config, by DeepSpeed's names. `mpu` and `mesh_device` are not read: batch sizes are those of data
    parallelism. Raises UsageError if the config is wrong; see `read_config`.
    """

    def __init__(
        self, config: str | os.PathLike[str] | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        settings = read_config(config)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._set(settings, batch_of(settings, world_size), world_size)

    @classmethod
    def of(cls, settings: Settings, batch: BatchSizes, world_size: int) -> DeepSpeedConfig:
        """The values of a config that has been read."""
        made = cls.__new__(cls)
        made._set(settings, batch, world_size)
        return made

    def _set(self, settings: Settings, batch: BatchSizes, world_size: int) -> None:
        config, zero = settings.config, settings.zero
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = world_size
        self.train_batch_size = batch.total
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self._param_dict = settings.raw
        vars(self).update({name: getattr(config, name) for name in _SAME_NAMES})
        self.communication_data_type = DTYPES.get(config.communication_data_type or "")
        self.zero_config = zero
        self.zero_optimization_stage = zero.stage
        self.zero_enabled = zero.stage > 0
        self.float16_config = config.fp16
        self.bfloat16_config = settings.bf16
        self.fp16_enabled = config.fp16.enabled
        self.bfloat16_enabled = settings.bf16.enabled
        self.torch_autocast_enabled = False
        kind = config.optimizer.type
        self.optimizer_name = kind.lower() if kind is not None and kind.lower() in _IN_LOWER_CASE else kind
        self.optimizer_params = dict(config.optimizer.params) if config.optimizer.type else None
        self.scheduler_name = config.scheduler.type
        self.scheduler_params = dict(config.scheduler.params) if config.scheduler.type else None
        self.checkpoint_tag_validation_enabled = config.checkpoint.tag_validation != "IGNORE"
        self.checkpoint_tag_validation_fail = config.checkpoint.tag_validation == "FAIL"
        self.use_node_local_storage = config.checkpoint.use_node_local_storage
        self.load_universal_checkpoint = config.checkpoint.load_universal
        self.grad_accum_dtype = config.data_types.grad_accum_dtype

    def print_user_config(self) -> None:
        """Logs the config as it was given, with every "auto" filled in."""
        _log.info("json = %s", json.dumps(self._param_dict, sort_keys=True, indent=4))

    def print(self, name: str) -> None:
        """Logs every value, under a name."""
        _log.info("%s:", name)
        for key, value in sorted(vars(self).items()):
            if not key.startswith("_"):
                _log.info("  %s %s %s", key, "." * (29 - len(key)), value)


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
