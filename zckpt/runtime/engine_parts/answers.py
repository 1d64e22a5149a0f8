"""What an engine says of its config: DeepSpeed's methods without arguments, such as `engine.fp16_enabled()`.

For `engine`. Each is one line of `ANSWERS`; `AnsweringRun` has them as methods.
Source: DeepSpeed 0.19.8, runtime/engine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zckpt.runtime.config.attributes import DTYPES, DeepSpeedConfig, torch_dtype
from zckpt.runtime.config.read import Settings
from zckpt.runtime.saves.engine_part import CheckpointedRun

ANSWERS: dict[str, Callable[[Settings], Any]] = {
    "fp16_enabled": lambda s: s.config.fp16.enabled,
    "fp16_auto_cast": lambda s: s.config.fp16.auto_cast,
    "fp16_master_weights_and_gradients": lambda s: False,
    "bfloat16_enabled": lambda s: s.bf16.enabled,
    "bf16_master_weights_and_gradients": lambda s: False,
    "bf16_optimizer_states": lambda s: False,
    "loss_scale": lambda s: s.config.fp16.loss_scale,
    "dynamic_loss_scale": lambda s: s.config.fp16.enabled and not s.config.fp16.loss_scale,
    "initial_dynamic_scale": lambda s: 2**s.config.fp16.initial_scale_power,
    "torch_autocast_enabled": lambda s: False,
    "gradient_clipping": lambda s: s.config.gradient_clipping,
    "gradient_predivide_factor": lambda s: s.config.gradient_predivide_factor,
    "postscale_gradients": lambda s: not s.config.prescale_gradients,
    "managed_gradient_accumulation": lambda s: s.config.managed_gradient_accumulation,
    "steps_per_print": lambda s: s.config.steps_per_print,
    "dataloader_drop_last": lambda s: s.config.dataloader_drop_last,
    "wall_clock_breakdown": lambda s: s.config.wall_clock_breakdown,
    "memory_breakdown": lambda s: s.config.memory_breakdown,
    "dump_state": lambda s: s.config.dump_state,
    "log_level": lambda s: s.config.log_level,
    "optimizer_name": lambda s: s.config.optimizer.type,
    "optimizer_params": lambda s: dict(s.config.optimizer.params) if s.config.optimizer.type else None,
    "scheduler_name": lambda s: s.config.scheduler.type,
    "scheduler_params": lambda s: dict(s.config.scheduler.params) if s.config.scheduler.type else None,
    "checkpoint_serialization_enabled": lambda s: True,
    "checkpoint_tag_validation_enabled": lambda s: s.config.checkpoint.tag_validation != "IGNORE",
    "checkpoint_tag_validation_fail": lambda s: s.config.checkpoint.tag_validation == "FAIL",
    "load_universal_checkpoint": lambda s: s.config.checkpoint.load_universal,
    "use_node_local_storage": lambda s: s.config.checkpoint.use_node_local_storage,
    "get_data_types": lambda s: (
        DTYPES[s.config.precision],
        torch_dtype(s.config.data_types.grad_accum_dtype) or torch.float32,
    ),
    "zero_optimization": lambda s: s.zero.stage > 0,
    "zero_optimization_partition_gradients": lambda s: s.zero.stage >= 2,
    "zero_optimization_partition_weights": lambda s: s.zero.stage >= 3,
    "zero_allow_untested_optimizer": lambda s: s.config.zero_allow_untested_optimizer,
    "zero_force_ds_cpu_optimizer": lambda s: s.config.zero_force_ds_cpu_optimizer,
    "zero_offload_optimizer": lambda s: s.zero.offload_optimizer,
    "zero_offload_param": lambda s: s.zero.offload_param,
    "zero_cpu_offload": lambda s: s.zero.offloads_optimizer,
    "zero_use_cpu_optimizer": lambda s: s.zero.offloads_optimizer,
    "zero_sub_group_size": lambda s: s.zero.sub_group_size,
    "zero_reduce_scatter": lambda s: s.zero.reduce_scatter,
    "zero_reduce_bucket_size": lambda s: s.zero.reduce_bucket_size,
    "zero_allgather_bucket_size": lambda s: s.zero.allgather_bucket_size,
    "zero_overlap_comm": lambda s: s.zero.overlap_comm,
    "zero_contiguous_gradients": lambda s: s.zero.contiguous_gradients,
    "zero_round_robin_gradients": lambda s: s.zero.round_robin_gradients,
    "zero_load_from_fp32_weights": lambda s: s.zero.load_from_fp32_weights,
    "zero_elastic_checkpoint": lambda s: s.zero.elastic_checkpoint,
    "zero_max_live_parameters": lambda s: s.zero.max_live_parameters,
    "zero_max_reuse_distance": lambda s: s.zero.max_reuse_distance,
    "zero_prefetch_bucket_size": lambda s: s.zero.prefetch_bucket_size,
    "zero_param_persistence_threshold": lambda s: s.zero.param_persistence_threshold,
    "zero_model_persistence_threshold": lambda s: s.zero.model_persistence_threshold,
    "zero_gather_16bit_weights_on_model_save": lambda s: s.zero.gather_16bit_weights_on_model_save,
    "zero_ignore_unused_parameters": lambda s: s.zero.ignore_unused_parameters,
    "zero_compute_grad_norm": lambda s: s.zero.compute_grad_norm,
    "zero_hpz_partition_size": lambda s: s.zero.zero_hpz_partition_size,
    "zero_quantized_weights": lambda s: False,
    "zero_quantized_gradients": lambda s: False,
    "is_deepcompile_enabled": lambda s: False,
    "autotuning_enabled": lambda s: False,
    "autotp_size": lambda s: 0,
    "curriculum_learning_enabled": lambda s: False,
    "data_efficiency_enabled": lambda s: False,
    "random_ltd_enabled": lambda s: False,
}
"""DeepSpeed's name -> what the config says."""


class AnsweringRun(CheckpointedRun):
    """A run that says what its config asks for, and where it is among the ranks.

    Attributes:
        config: the JSON, with every "auto" filled in.
        mpu: None: there is no model parallelism.
        client_optimizer: what the script passed as optimizer; None if the config's is used.
        client_lr_scheduler: what it passed as schedule.
        training_data: the dataset that it passed.
        collate_fn: makes a batch of its samples.
    """

    mpu = None
    mp_world_size = sequence_parallel_size = 1
    seq_parallel_group = None
    pipeline_parallelism = has_moe_layers = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config = self.settings.raw
        self.num_experts: list[int] = []
        self.remember_arguments(None, None, None, None)

    def remember_arguments(self, optimizer: Any, lr_scheduler: Any, training_data: Any, collate_fn: Any) -> None:
        """Keeps what `initialize` got, under the names that DeepSpeed's engine has for it."""
        self.client_optimizer, self.client_lr_scheduler = optimizer, lr_scheduler
        self.training_data, self.collate_fn = training_data, collate_fn

    @property
    def _config(self) -> DeepSpeedConfig:
        return DeepSpeedConfig.of(self.settings, self.batch, self.world_size)

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that see other samples: all."""
        return self.world_size

    @property
    def seq_dp_world_size(self) -> int:
        """Likewise."""
        return self.world_size

    @property
    def data_parallel_group(self) -> Any:
        """The group of all ranks."""
        return torch.distributed.group.WORLD

    @property
    def dist_backend(self) -> str:
        """The name of the backend between ranks."""
        return torch.distributed.get_backend()

    @property
    def training_dataloader(self) -> Any:
        """The loader of `training_data`; None without it."""
        return self.loader

    @training_dataloader.setter
    def training_dataloader(self, loader: Any) -> None:
        self.loader = loader

    @property
    def param_names(self) -> dict[torch.nn.Parameter, str]:
        """The module's parameters with their names."""
        return {(one.weight if one.whole is None else one.whole): one.name for one in self.sharded.parameters}

    def communication_data_type(self) -> torch.dtype:
        """The dtype of gradient reductions."""
        return DTYPES[self.settings.config.communication_data_type or self.settings.config.precision]

    def get_data_parallel_rank(self) -> int:
        """The number of this process among all."""
        return self.world.rank

    def get_model_parallel_rank(self) -> int:
        """0: there is no model parallelism."""
        return 0

    def get_tensor_parallel_rank(self) -> int:
        """0, likewise."""
        return 0

    def get_sequence_parallel_group(self) -> None:
        """None, likewise."""

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per optimizer step over all ranks, samples per rank and forward, forwards per step."""
        return self.batch.total, self.batch.micro, self.batch.accumulation


def _method(name: str, answer: Callable[[Settings], Any]) -> Callable[[AnsweringRun], Any]:
    def method(self: AnsweringRun) -> Any:
        return answer(self.settings)

    method.__name__, method.__qualname__ = name, f"AnsweringRun.{name}"
    method.__doc__ = "What the config says; docs/config.md has each key."
    return method


for _name, _answer in ANSWERS.items():
    setattr(AnsweringRun, _name, _method(_name, _answer))
