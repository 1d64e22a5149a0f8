"""The `zero_optimization` section, key by key.

Source: DeepSpeed 0.19.8, runtime/zero/config.py and offload_config.py; MiCS as of 0.15.4. A test compares the names.
"""

from __future__ import annotations

from typing import Any, Literal

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
