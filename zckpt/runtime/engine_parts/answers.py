"""What an engine says of its config and of itself, under the names that DeepSpeed's engine has.

For `engine`, which gets a method for each name of `ANSWERS` and `UNBUILT`, and an attribute for each of `CONSTANTS` and
`VALUES`. What DeepSpeed has and this trainer has not is answered as DeepSpeed answers when it is switched off.
Source: DeepSpeed 0.19.8, runtime/engine.py; a test compares the names.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

from torch import distributed as dist

from zckpt.runtime.config.attributes import DTYPES, DeepSpeedConfig
from zckpt.runtime.names.table import refuse
from zckpt.runtime.training_run import TrainingRun

Answer = Callable[[TrainingRun], Any]

_KEYS = (
    ("_config", "", "gradient_clipping gradient_predivide_factor managed_gradient_accumulation steps_per_print log_level "
     "dataloader_drop_last wall_clock_breakdown memory_breakdown dump_state zero_allow_untested_optimizer "
     "zero_force_ds_cpu_optimizer bfloat16_enabled optimizer_params scheduler_name scheduler_params "
     "checkpoint_tag_validation_enabled checkpoint_tag_validation_fail load_universal_checkpoint use_node_local_storage "
     "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"),
    ("settings.config.fp16", "fp16_", "enabled auto_cast"),
    ("settings.config.flops_profiler", "flops_profiler_", "enabled detailed module_depth output_file profile_step "
     "recompute_fwd_factor top_modules"),
    ("settings.zero", "zero_", "offload_optimizer offload_param sub_group_size reduce_scatter reduce_bucket_size "
     "allgather_bucket_size allgather_partitions allgather_sequential contiguous_gradients round_robin_gradients legacy_stage1 "
     "load_from_fp32_weights elastic_checkpoint max_live_parameters max_reuse_distance prefetch_bucket_size parameter_alignment "
     "param_persistence_threshold model_persistence_threshold module_granularity_threshold log_trace_cache_warnings "
     "gather_16bit_weights_on_model_save ignore_unused_parameters compute_grad_norm save_muon_momentum_buffer_in_memory"),
)  # fmt: skip
"""Where the engine has some values, the prefix of DeepSpeed's methods, the names of the values."""

_SWITCHED_OFF = (
    (False, "fp16_master_weights_and_gradients bf16_master_weights_and_gradients bf16_optimizer_states torch_autocast_enabled "
     "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights is_deepcompile_enabled "
     "is_deepcompile_active compile_autosp compile_autotp autotuning_enabled autotuning_profile_model_info "
     "curriculum_learning_enabled data_efficiency_enabled data_sampling_enabled random_ltd_enabled checkpoint_writer_enabled "
     "optimizer_legacy_fusion uses_parallelization_pass_only super_offload"),
    (True, "checkpoint_serialization_enabled zero_multi_rank_bucket_allreduce"),
    (0, "autotp_size get_model_parallel_rank get_tensor_parallel_rank"),
    (None, "get_sequence_parallel_group torch_autocast_dtype zenflow_config"),
)  # fmt: skip
"""DeepSpeed's answer without a feature -> its methods."""


def _always(value: Any) -> Answer:
    return lambda run: value


ANSWERS: dict[str, Answer] = {
    **{f"{before}{key}": attrgetter(f"{at}.{key}") for at, before, keys in _KEYS for key in keys.split()},
    **{name: _always(value) for value, names in _SWITCHED_OFF for name in names.split()},
    "loss_scale": lambda run: run.settings.config.fp16.loss_scale,
    "dynamic_loss_scale": lambda run: not run.settings.config.fp16.loss_scale,
    "initial_dynamic_scale": lambda run: 2**run.settings.config.fp16.initial_scale_power,
    "dynamic_loss_scale_args": lambda run: {
        "init_scale": 2**run.settings.config.fp16.initial_scale_power,
        **run.settings.config.fp16.arguments_of_scaler(),
    },
    "get_data_types": lambda run: (
        DTYPES[run.settings.config.precision],
        DTYPES[run.settings.config.data_types.grad_accum_dtype or run.settings.config.precision],
    ),
    "postscale_gradients": lambda run: not run.settings.config.prescale_gradients,
    "optimizer_name": lambda run: (
        type(run.client_optimizer).__name__ if run.client_optimizer else run._config.optimizer_name
    ),
    "aio_config": lambda run: run.settings.config.aio.model_dump(),
    "zero_optimization": lambda run: run.settings.zero.stage > 0,
    "zero_optimization_partition_gradients": lambda run: run.settings.zero.stage >= 2,
    "zero_optimization_partition_weights": lambda run: run.settings.zero.stage >= 3,
    "is_first_weights_partition_group": lambda run: run.settings.zero.stage >= 3,
    "is_sanity_checks_enabled": lambda run: run.settings.zero.enable_sanity_checks,
    "zero_overlap_comm": lambda run: (
        run.settings.zero.stage == 3 if run.settings.zero.overlap_comm is None else run.settings.zero.overlap_comm
    ),
    "zero_cpu_offload": lambda run: run.settings.zero.offloads_optimizer,
    "zero_use_cpu_optimizer": lambda run: run.settings.zero.offloads_optimizer,
    "zero_nvme_offload_optimizer": lambda run: "offload_optimizer" in run.settings.zero.nvme,
    "zero_partial_offload": lambda run: getattr(run.settings.zero.offload_optimizer, "ratio", 1.0),
    "cpuadam_cores_perc": lambda run: getattr(run.settings.zero.offload_optimizer, "cpuadam_cores_perc", 0.9),
    "zero_hpz_partition_size": lambda run: run.settings.zero.zero_hpz_partition_size,
    "get_data_parallel_rank": lambda run: run.world.rank,
    "get_batch_info": lambda run: (run.batch.total, run.batch.micro, run.batch.accumulation),
    "get_type": lambda run: [group.get("type", 0.0) for group in run.groups],
    "get_compile_time": lambda run: [],
    "collect_python_gc": lambda run: gc.collect(),
}
"""DeepSpeed's method without arguments -> the function that answers it."""

CONSTANTS = {
    name: value
    for value, names in (
        (None, "mpu seq_parallel_group all_to_all_group local_all_to_all_group mesh_device losses scale_wrt_gas "
         "torch_autocast_z0_gradscaler"),
        (False, "pipeline_parallelism has_moe_layers dont_change_device optimized_linear_base_weight_sharding "
         "optimized_linear_lora_enabled use_ds_comm zenflow"),
        (True, "enable_backward_allreduce warn_unscaled_loss"),
        (0, "checkpoint_mp_rank"),
        (1, "mp_world_size sequence_parallel_size"),
    )
    for name in names.split()
}  # fmt: skip
"""DeepSpeed's attribute -> its value in an engine without experts, model parallelism and so on."""

VALUES: dict[str, Answer] = {
    **dict.fromkeys(("num_experts", "moe_layers", "gate_modules"), lambda run: []),
    **dict.fromkeys(("expert_parallel_group", "expert_data_parallel_group"), lambda run: {}),
    **dict.fromkeys(("dp_world_size", "seq_dp_world_size"), lambda run: run.world.size),
    **dict.fromkeys(("data_parallel_group", "seq_data_parallel_group"), lambda run: dist.group.WORLD),
    "dist_backend": lambda run: dist.get_backend(),
    "_config": lambda run: DeepSpeedConfig.of(run.settings, run.batch, run.world.size),
    "communication_data_type": lambda run: DTYPES[
        run.settings.config.communication_data_type or run.settings.config.precision
    ],
    "gradient_average": lambda run: run.settings.config.gradient_allreduce_op != "sum",
    "save_zero_checkpoint": lambda run: run.settings.zero.stage > 0,
    "save_non_zero_checkpoint": lambda run: run.world.rank == 0 or run.settings.zero.stage == 3,
    "param_names": lambda run: {
        (one.weight if one.whole is None else one.whole): one.name for one in run.sharded.parameters
    },
}
"""DeepSpeed's attribute -> the function that computes it."""

_REDUCED = "Remove the call: engine.backward(loss) reduces the gradients."
_PASSES = "Call engine.compile() without a schedule: it is torch.compile."
_TUNED = "Count what fits before a run: zckpt.runtime.estimate(model, config)."
_DATA = "Choose the samples in the dataset, or in a sampler: engine.deepspeed_io(dataset, data_sampler=...)."
_EXPERTS = "Call engine.load_checkpoint: experts are loaded as any other parameters."
_LOOKED = "Ask isinstance(dataset, torch.utils.data.IterableDataset)."

UNBUILT = {
    name: remedy
    for remedy, names in (
        (_REDUCED, "allreduce_gradients allreduce_and_copy allreduce_bucket allreduce_no_retain buffered_allreduce_fallback "
         "all_gather_scalar sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain"),
        (_PASSES, "compile_zero_optimization_stage get_autosp_backend get_autotp_backend get_deepcompile_backend "
         "get_deepspeed_compile_backend register_compile_pass torch_autocast_lower_precision_safe_modules"),
        (_TUNED, "autotuning_end_profile_step autotuning_metric autotuning_metric_path autotuning_model_info_path "
         "autotuning_start_profile_step"),
        (_DATA, "curriculum_learning_config data_efficiency_config data_sampling_config random_ltd_config random_ltd_initialize "
         "set_custom_curriculum_learning_schedule set_data_post_process_func"),
        (_EXPERTS, "load_moe_state_dict"),
        (_LOOKED, "is_map_style_dataset is_iterable_style_dataset"),
        ("Set gradient_clipping in the config: engine.step() clips.", "clip_fp32_gradients"),
        ("Read engine.get_wall_clock_timers(), with wall_clock_breakdown in the config.", "print_forward_breakdown"),
        ("Read engine.optimizer.param_groups.", "get_optimizer_configuration"),
        ("Read engine.config: files of device nvme need no config of their own.", "swap_tensor_config"),
        ("Train with autotp_size 0: ranks are data-parallel.", "tensor_parallel_config"),
    )
    for name in names.split()
}  # fmt: skip
"""DeepSpeed's method that is not built -> what to do instead."""


_HOOKS = "Register a hook of your own: engine.module.register_forward_hook."
_INNER = "Read engine.timers and engine.get_wall_clock_timers()."

ABSENT = {
    "checkpoint_engine": "Call engine.save_checkpoint, and engine.wait_for_checkpoint before you read its files.",
    "engine_timers": _INNER,
    "engine_timers_cache": _INNER,
    "flatten": "Call torch._utils._flatten_dense_tensors.",
    "module_forward_post_hook": _HOOKS,
    "module_forward_pre_hook": _HOOKS,
    "unflatten": "Call torch._utils._unflatten_dense_tensors.",
}
"""DeepSpeed's attribute that has no meaning here -> what to do instead."""


def add_answers(engine: type[TrainingRun]) -> None:
    """Adds the methods and attributes of the tables to the engine's class."""
    engine.instead = ABSENT
    for name, value in CONSTANTS.items():
        setattr(engine, name, value)
    for name, answer in VALUES.items():
        setattr(engine, name, property(answer, doc="What DeepSpeed's engine has under this name."))
    for name, answer in ANSWERS.items():
        setattr(engine, name, _method(name, answer, "What the run's config says; docs/config.md has each key."))
    for name, remedy in UNBUILT.items():
        setattr(engine, name, _method(name, partial(_refuse, name), f"Not built. {remedy}"))


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    refuse(f"engine.{name}", UNBUILT[name])


def _method(name: str, answer: Callable[..., Any], doc: str) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        return answer(*args, **kwargs)

    method.__name__, method.__qualname__, method.__doc__ = name, f"Engine.{name}", doc
    return method
