"""DeepSpeed's JSON, key by key: the top level and every section.

For `read`, which reads by these models, and for docs/config.md, which is made from them. Sections that this engine
has no part in are known by the names of their keys, so that a typo in them is found too.
Source: DeepSpeed 0.19.8, runtime/config.py, runtime/constants.py, runtime/precision_config.py and the modules of each
section; keys that only older versions know are among the refused. A test compares the names.
Of `zero_optimization`: runtime/zero/config.py and offload_config.py; MiCS as of 0.15.4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, field_validator

from zckpt.runtime.config import fields
from zckpt.runtime.config.fields import Section, foreign, own_key, refused_key, unused_key, used_key

_BUCKETS = "one collective per unit; on CPUs see `reduce_bucket_size`"
_IN_TURN = "units are gathered one by one, one ahead"
_OVERLAPPED = "reads and writes overlap the arithmetic unless `buffer_count` is 1"
_QUANTIZED = "ZeRO++ quantization is not built"

Device = Literal["none", "cpu", "nvme"]


class OffloadParam(Section):
    """The place of the parameters' shards between steps."""

    device: Device = used_key("none", "`cpu` keeps the shards of parameters in host memory, `nvme` in a file")
    nvme_path: str | None = used_key(None, "for device nvme: the directory of the file, on a local disk")
    buffer_count: int = used_key(5, "for device nvme: times `buffer_size` elements are read ahead of the gathers", ge=0)
    buffer_size: int = used_key(int(1e8), "for device nvme: see `buffer_count`", ge=0)
    max_in_cpu: int = used_key(int(1e9), "for device nvme: elements of a rank that stay in host memory; 0: none", ge=0)
    pin_memory: bool = used_key(True, "page-locked host memory, if there is an accelerator")


class OffloadOptimizer(Section):
    """The place of the master weights and the optimizer's states."""

    device: Device = used_key(
        "none",
        "`cpu` keeps master weights, their gradients and the states in host memory; `nvme` keeps the states in a file, and in "
        "half precision the master weights",
    )
    nvme_path: str | None = used_key(None, "for device nvme: the directory of the file, on a local disk")
    buffer_count: int = used_key(4, "for device nvme: sub-groups in memory: one updated, others read or written", ge=0)
    pin_memory: bool = used_key(True, "page-locked host memory, if there is an accelerator")
    pipeline: bool = unused_key(False, _OVERLAPPED)
    pipeline_read: bool = unused_key(False, _OVERLAPPED)
    pipeline_write: bool = unused_key(False, _OVERLAPPED)
    fast_init: bool = unused_key(False, "states begin as zeros that nobody writes")
    ratio: float = used_key(1.0, "all or nothing: only 0 and 1", ge=0.0, le=1.0)
    super_offload: bool = refused_key(False, "not built")
    cpuadam_cores_perc: float = unused_key(0.8, "for `super_offload`")


class Zero(Section):
    """The settings of sharding."""

    stage: int = used_key(0, "0 replicates, 1 shards optimizer states, 2 also gradients, 3 also parameters", ge=0, le=3)
    offload_param: OffloadParam | None = used_key(None, "see below; without effect below stage 3, as in DeepSpeed")
    offload_optimizer: OffloadOptimizer | None = used_key(None, "see below; stages 1 to 3")
    zero_hpz_partition_size: int = used_key(1, "hpZ, stage 3: ranks per group that keeps what forward gathers", ge=0)
    mics_shard_size: int = used_key(-1, "MiCS: shard over groups of this many ranks, replicate across groups; stage 3")
    mics_hierarchical_params_gather: bool = unused_key(False, "one all-gather inside the shard group does it")
    ignore_unused_parameters: bool = used_key(True, "a missing gradient counts as zeros; false: an error that names it")
    compute_grad_norm: bool = used_key(True, "false skips the norm at stages 1 and 2, without clipping and fp16")
    sub_group_size: int = used_key(
        int(1e9),
        "elements after which a checkpoint of stage 3 begins the next sub-group; with device nvme at most so many are updated "
        "at a time",
        ge=0,
    )
    load_from_fp32_weights: bool = used_key(True, "load exact fp32 weights; false rounds them as the computation does")
    cpu_offload: bool | None = used_key(None, "old name: true is `offload_optimizer: {device: cpu}`")
    cpu_offload_param: bool | None = used_key(None, "old name: true is `offload_param: {device: cpu}`")
    cpu_offload_use_pin_memory: bool | None = used_key(None, "old name: `pin_memory` of the two above")
    elastic_checkpoint: bool = unused_key(False, "checkpoints are written in DeepSpeed's rigid form, and read in both")
    round_robin_gradients: bool = used_key(False, "the order of parameters in checkpoints; ranks reduce their own rows")
    parameter_alignment: bool = used_key(False, "checkpoints have this padding between parameters")
    contiguous_gradients: bool = unused_key(True, _BUCKETS)
    reduce_scatter: bool = unused_key(True, "gradients are always reduce-scattered from stage 1 on")
    reduce_bucket_size: int = used_key(
        int(5e8), "stage 2 on CPUs: parameters per collective; their gradients are whole until then; on GPUs a unit's"
    )
    use_multi_rank_bucket_allreduce: bool = unused_key(True, _BUCKETS)
    allgather_partitions: bool = unused_key(True, _BUCKETS)
    allgather_bucket_size: int = unused_key(int(5e8), _BUCKETS)
    overlap_comm: bool | None = unused_key(None, "always overlapped, if the device can")
    prefetch_bucket_size: int | float = unused_key(int(5e7), _IN_TURN, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: int = unused_key(
        int(1e5),
        "small parameters are gathered with their unit at no extra call",
        alias="stage3_param_persistence_threshold",
    )
    model_persistence_threshold: int = unused_key(2**63 - 1, _IN_TURN, alias="stage3_model_persistence_threshold")
    max_live_parameters: int = unused_key(int(1e9), _IN_TURN, alias="stage3_max_live_parameters")
    max_reuse_distance: int = unused_key(int(1e9), _IN_TURN, alias="stage3_max_reuse_distance")
    module_granularity_threshold: int = unused_key(0, "see `wrap`", alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = unused_key(False, _IN_TURN, alias="stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: bool = unused_key(False, _IN_TURN, alias="stage3_allgather_sequential")
    gather_16bit_weights_on_model_save: bool = unused_key(
        False, "weights are saved without gathering them", alias="stage3_gather_16bit_weights_on_model_save"
    )
    stage3_gather_fp16_weights_on_model_save: bool = unused_key(False, "weights are saved without gathering them")
    memory_efficient_linear: bool = unused_key(True, "gathered weights are never kept")
    pipeline_loading_checkpoint: bool = unused_key(False, "each rank reads only its own bytes")
    override_module_apply: bool = unused_key(True, "`zero.Init` follows every initialisation, `Module.apply` too")
    log_trace_cache_warnings: bool = unused_key(False, "there is no trace cache")
    enable_sanity_checks: bool = unused_key(False, "all checks are always made")
    save_muon_momentum_buffer_in_memory: bool = unused_key(False, "for Muon, which is not built")
    leaf_module: Any = foreign("leaf_module", "a unit is gathered whole, whatever is in it; see `wrap`")
    legacy_stage1: bool = refused_key(False, "DeepSpeed refuses it too")
    zero_quantized_weights: bool = refused_key(False, _QUANTIZED)
    zero_quantized_nontrainable_weights: bool = refused_key(False, _QUANTIZED)
    zero_quantized_gradients: bool = refused_key(False, _QUANTIZED)
    zeropp_loco_param: Any = foreign("zeropp_loco_param", _QUANTIZED, "refused")
    zenflow: Any = foreign("zenflow", "not built", "refused")
    wrap: str | list[str] | None = own_key(None, "names of classes gathered as one unit; by default repeated blocks")

    @property
    def offloads_optimizer(self) -> bool:
        """Whether masters and states are in host memory or in files."""
        section = self.offload_optimizer
        return bool(self.cpu_offload) or (section is not None and section.device != "none" and section.ratio > 0)

    @property
    def offloads_param(self) -> bool:
        """Whether the shards of parameters are in host memory or in files."""
        section = self.offload_param
        return self.stage == 3 and (bool(self.cpu_offload_param) or (section is not None and section.device != "none"))

    @property
    def nvme(self) -> dict[str, OffloadParam | OffloadOptimizer]:
        """The sections with the device nvme, by their keys."""
        param = self.offload_param if self.stage == 3 else None
        both = {"offload_param": param, "offload_optimizer": self.offload_optimizer}
        return {name: one for name, one in both.items() if one is not None and one.device == "nvme"}


Dtype = Literal["fp32", "fp16", "bf16"]
_MASTERS = "master weights and optimizer states are always fp32"
_WRITER = "zckpt has one writer"
_GONE = "DeepSpeed has removed it"


class FP16(Section):
    """fp16 compute with fp32 master weights and a loss scale."""

    enabled: bool = used_key(False, "compute and reduce in fp16")
    auto_cast: bool = used_key(False, "cast floating-point inputs of the model to fp16")
    loss_scale: float = used_key(0.0, "a fixed scale; 0 adjusts it", ge=0.0, allow_inf_nan=False)
    initial_scale_power: int = used_key(16, "the first scale is 2 to this power", ge=0, le=126)
    loss_scale_window: int = used_key(1000, "steps without overflow after which the scale doubles", gt=0)
    hysteresis: int = used_key(2, "overflows before the scale is halved", ge=1)
    consecutive_hysteresis: bool = used_key(False, "count again after each step without overflow")
    min_loss_scale: float = used_key(1, "the scale is never below; an overflow there ends the run", gt=0)
    fp16_master_weights_and_grads: bool = refused_key(False, _MASTERS)

    def arguments_of_scaler(self) -> dict[str, float | bool]:
        """The arguments of DeepSpeed's scaler that follows the gradients, without its first scale."""
        return {
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }

    @field_validator("loss_scale", "initial_scale_power", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _no_bool(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("a number, not true or false")
        return value


class BF16(Section):
    """bf16 compute with fp32 master weights."""

    enabled: bool = used_key(False, "compute and reduce in bf16")
    check_grad_overflow: bool = used_key(True, "skip a step with gradients that are not finite")
    immediate_grad_update: bool = unused_key(False, "gradients are added to fp32 shards as soon as they are reduced")
    bf16_master_weights_and_grads: bool = refused_key(False, _MASTERS)
    bf16_optimizer_states: bool = refused_key(False, _MASTERS)


class DataTypes(Section):
    """Dtypes other than that of the computation."""

    grad_accum_dtype: Dtype | None = used_key(
        None,
        "fp32 accumulates the gradients of stages 0 and 1 in fp32 and reduces them so; stages 2 and 3 always accumulate in fp32",
    )
    param_dtype: Dtype | None = used_key(None, "must agree with `fp16` and `bf16`")
    buffer_dtype: Dtype | None = used_key(None, "casts floating-point buffers; none keeps them as they are")
    keep_in_fp32_modules: Literal["auto"] | list[str] | None = used_key(
        "auto", "names (`*` is any text) of buffers kept in fp32; `auto` takes the model's own list"
    )


def _numbers(value: Any) -> Any:
    """Arguments with numbers in place of texts: YAML reads 1e-3 as a text, which every other key accepts too."""
    if isinstance(value, Mapping):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        return int(value) if value.strip().lstrip("+-").isdecimal() else float(value)
    return value


_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)

Arguments = Annotated[dict[str, Any], AfterValidator(_numbers)]


class OptimizerSection(Section):
    """The optimizer that the engine builds."""

    type: str | None = used_key(None, "Adam, AdamW, Adagrad, Lion, SGD, Lamb, or a class of torch.optim")
    params: Arguments = used_key({}, "its arguments: see below")
    legacy_fusion: bool = unused_key(False, "torch's fused kernels are used wherever torch has them")


class Scheduler(Section):
    """The learning rate schedule that the engine builds."""

    type: str | None = used_key(
        None, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a class of torch.optim.lr_scheduler"
    )
    params: Arguments = used_key({}, "its arguments: see below")


class CheckpointSection(Section):
    """How checkpoints are written."""

    tag_validation: Literal["WARN", "IGNORE", "FAIL"] = used_key("WARN", "what to do when ranks disagree on the tag")
    use_node_local_storage: bool = used_key(False, "each node writes its own files; no shared file system is needed")
    load_universal: bool = unused_key(False, "a load finds out the kind of checkpoint by itself")
    parallel_write: Any = foreign("parallel_write", _WRITER)
    checkpoint_serialization: bool = unused_key(True, "files are always torch's zip files")
    writer: Any = foreign("writer", _WRITER)
    keep_last: int | None = own_key(None, "after a good save, older tags beyond this many are deleted", ge=1)
    async_save: bool = own_key(False, "training continues while the files are written from a copy in host memory")

    @field_validator("tag_validation", mode="before")
    @classmethod
    def _upper(cls, value: object) -> object:
        return value.upper() if isinstance(value, str) else value


class Aio(Section):
    """How files of device nvme are read and written: past the page cache, many blocks at a time."""

    block_size: int = used_key(1 << 20, "bytes of one read or write, at most; rounded to whole pages", gt=0)
    queue_depth: int = used_key(8, "times `intra_op_parallelism`: reads and writes under way at once, at most 64", gt=0)
    intra_op_parallelism: int = used_key(1, "see `queue_depth`", gt=0)
    single_submit: bool = unused_key(False, "each block is a call of its own")
    overlap_events: bool = unused_key(True, "blocks are always under way at the same time")
    use_gds: bool = refused_key(False, "not built: files are read into host memory")


class Config(Section):
    """The config's top level."""

    train_batch_size: int | None = used_key(None, "samples per step: micro batch x accumulation x world size", gt=0)
    train_micro_batch_size_per_gpu: int | None = used_key(None, "samples per rank and forward", gt=0)
    gradient_accumulation_steps: int | None = used_key(None, "forwards per optimizer step", gt=0)
    managed_gradient_accumulation: bool = used_key(True, "false: each `step()` is the boundary, whatever went before")
    zero_optimization: Zero = used_key(Zero(), "see below")
    fp16: FP16 = used_key(FP16(), "see below")
    bf16: BF16 = used_key(BF16(), "see below")
    bfloat16: BF16 | None = used_key(None, "old name of `bf16`")
    data_types: DataTypes = used_key(DataTypes(), "see below")
    optimizer: OptimizerSection = used_key(OptimizerSection(), "see below")
    scheduler: Scheduler = used_key(Scheduler(), "see below")
    checkpoint: CheckpointSection = used_key(CheckpointSection(), "see below")
    communication_data_type: Dtype | None = used_key(None, "dtype of gradient reductions; by default the computation's")
    gradient_clipping: float = used_key(1.0, "largest global norm of the gradients; 0 never clips", ge=0.0)
    gradient_allreduce_op: Literal["mean", "sum"] = used_key("mean", "over ranks; `sum` not at stage 3")
    prescale_gradients: bool = unused_key(False, "the mean is the same; fp16 is divided before and after the sum")
    gradient_predivide_factor: float = unused_key(1.0, "the mean is the same; fp16 is divided before and after the sum")
    zero_allow_untested_optimizer: bool = used_key(
        False, "let an optimizer of unknown kind see shards: right only where every element is updated by itself"
    )
    zero_force_ds_cpu_optimizer: bool = unused_key(True, "torch's own CPU kernels are used")
    steps_per_print: int | None = used_key(None, "log step, skipped steps and rates every so many steps")
    dataloader_drop_last: bool = used_key(False, "of the loader made from `training_data`")
    wall_clock_breakdown: bool = used_key(False, "rank 0 prints the milliseconds of parts of each micro batch and step")
    memory_breakdown: bool = used_key(False, "rank 0 prints the memory in use before and after each of these parts")
    dump_state: bool = used_key(False, "rank 0 prints the engine's attributes and the config at the start")
    disable_allgather: bool = unused_key(False, "there is only one way")
    disable_python_gc: bool = used_key(False, "switches Python's garbage collector off; `gc.collect()` collects")
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = used_key(
        None, "of what the trainer logs, by the logger `zckpt.runtime`"
    )
    vocabulary_size: int | None = unused_key(None, "only a hint in DeepSpeed")
    seq_parallel_communication_data_type: Dtype | None = unused_key(None, "for sequence parallelism")
    use_data_before_expert_parallelism: bool = unused_key(False, "for expert parallelism")
    cuda_visible_devices: Any = unused_key(None, "set the variable CUDA_VISIBLE_DEVICES")
    allgather_size: int | None = unused_key(None, "for the oldest form of `zero_optimization`")
    activation_checkpointing: fields.ActivationSection = used_key(fields.ActivationSection(), "see below")
    aio: Aio = used_key(Aio(), "see below")
    comms_logger: Any = foreign("comms_logger", "collectives are not timed: torch.profiler shows them", "missed")
    flops_profiler: fields.FlopsProfilerSection = used_key(fields.FlopsProfilerSection(), "see below")
    timers: fields.TimersSection = used_key(fields.TimersSection(), "see below")
    tensorboard: fields.TensorBoardSection = used_key(fields.TensorBoardSection(), "see below")
    wandb: fields.WandbSection = used_key(fields.WandbSection(), "see below")
    csv_monitor: fields.CSVSection = used_key(fields.CSVSection(), "see below")
    comet: fields.CometSection = used_key(fields.CometSection(), "see below")
    pipeline: Any = foreign("pipeline", "pipeline parallelism is not built; plain models do not need it")
    autotuning: Any = foreign("autotuning", "not built", "refused")
    torch_autocast: Any = foreign("torch_autocast", "use `bf16` or `fp16`, or torch.autocast in your code", "refused")
    compile: Any = foreign("compile", "call torch.compile on the model first", "refused")
    tensor_parallel: Any = foreign("tensor_parallel", "not built", "refused")
    expert_parallel: Any = foreign("expert_parallel", "not built", "refused")
    sequence_parallel_size: int = refused_key(1, "not built")
    data_efficiency: Any = foreign("data_efficiency", "not built", "refused")
    hybrid_engine: Any = foreign("hybrid_engine", "not built", "refused")
    weight_quantization: Any = foreign("weight_quantization", "not built", "refused")
    datastates_ckpt: Any = unused_key(None, _WRITER)
    amp: Any = foreign("amp", f"use `bf16` or `fp16`; {_GONE}", "refused")
    nebula: Any = refused_key(None, _GONE)
    compression_training: Any = refused_key(None, _GONE)
    quantize_training: Any = refused_key(None, _GONE)
    sparse_gradients: bool = refused_key(False, _GONE)
    eigenvalue: Any = refused_key(None, _GONE)
    sparse_attention: Any = refused_key(None, _GONE)
    elasticity: Any = refused_key(None, _GONE)
    graph_harvesting: bool = refused_key(False, _GONE)
    curriculum_learning: Any = refused_key(None, _GONE)
    progressive_layer_drop: Any = refused_key(None, _GONE)

    @field_validator("zero_optimization", mode="before")
    @classmethod
    def _oldest_form(cls, value: object) -> object:
        return {"stage": int(value)} if isinstance(value, bool) else value

    @field_validator("steps_per_print", mode="before")
    @classmethod
    def _never(cls, value: object) -> object:
        return None if value == math.inf else value  # what accelerate writes

    @field_validator("communication_data_type", "gradient_allreduce_op", "log_level", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @property
    def precision(self) -> Dtype:
        """The dtype of the computation; fp32 leaves every parameter its own dtype."""
        return "fp16" if self.fp16.enabled else "bf16" if (self.bfloat16 or self.bf16).enabled else "fp32"
