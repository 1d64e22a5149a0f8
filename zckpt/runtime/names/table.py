"""Where what DeepSpeed's names mean is built: by the path of the module in which DeepSpeed defines them.

For `finder`, which makes DeepSpeed's modules of these rows and of `surface_0_19_8.txt`. A row is

- ".module" or "module": what `zckpt.runtime.module` or another module has of that module's own names;
- a dict of single names: ".module:name" (below `zckpt.runtime`), "module:name" or "module"; "=" and a value that is not in
  DeepSpeed's source as a literal, or that older versions had; None for a name of older versions that is not built; "*" stands for
  all others;
- under "path" or "path.**" (that module and all below it): what to use instead of all other names, as sentences.

For names that are not built the row with the longest path counts. Names that a module has from another module of DeepSpeed need
no row, and neither do literals: that file says both.

Stand-ins for what DeepSpeed has and this trainer lacks: each name exists, and raises when called or constructed. Rows say what to
do instead; code that refuses a use of such a thing has them too. A script that imports such a name, or asks `isinstance(model,
PipelineModule)`, runs on.
"""

from __future__ import annotations

from typing import Any, NoReturn

from zckpt.base.errors import UnsupportedError

PLAIN = "Pass the plain model to initialize: stage 3 shares its parameters out over all ranks."
ADAM = "Use optimizer.type AdamW or Lamb."
GENERATE = "Use engine.module.generate, or convert a checkpoint with zckpt to-bf16 and serve that."
DENSE = "Use a dense layer, or the mixture of experts that the model itself brings: it is sharded like any module."
ENCODER = "Use torch.nn.TransformerEncoderLayer."
OWN_FILES = (
    "Set device nvme in zero_optimization.offload_optimizer or offload_param of the config: the trainer reads and writes its "
    "files by itself."
)
ONE_SEQUENCE = "Train with sequence_parallel_size 1."

INSTEAD = {
    name: remedy
    for remedy, names in (
        (PLAIN, "DualPipeVModule LayerSpec PipelineEngine PipelineModule TiedLayerSpec set_autotp_mode tp_model_init"),
        (GENERATE, "DeepSpeedHybridEngine InferenceEngine init_inference replace_transformer_layer"),
        (ENCODER, "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"),
        (ADAM, "OnebitAdam OnebitLamb ZeroOneAdam"),
        ("Use optimizer.type AdamW.", "MuonWithAuxAdam"),
        (DENSE, "MoE"),
        ("Use torch.nn.Linear.", "TiledLinear TiledLinearReturnBias"),
        (ONE_SEQUENCE, "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"),
        ("Use torch.nn.functional.scaled_dot_product_attention on whole sequences.", "DistributedAttention"),
    )
    for name in names.split()
}
"""Name -> the remedy, as sentences. Other names have the remedy of their row in `table`."""


def refuse(name: str, instead: str = "") -> NoReturn:
    """Raises UnsupportedError for a name of DeepSpeed's. `instead`: what to do instead, if `INSTEAD` does not say it."""
    raise UnsupportedError(f"{name!r} of DeepSpeed is not built here", remedy=INSTEAD.get(name, instead))


def make_unbuilt(name: str, instead: str = "", *, is_function: bool | None = None) -> Any:
    """A class or a function that raises `UnsupportedError` when it is constructed or called; `instead` as for `refuse`. By
    default names in lower case are functions. A class with a name that says so is an exception.
    """
    told = f"Not built. {INSTEAD.get(name, instead)}"
    if name[0].islower() if is_function is None else is_function:

        def function(*args: Any, **kwargs: Any) -> NoReturn:
            refuse(name, instead)

        function.__name__ = function.__qualname__ = name
        function.__doc__ = told
        return function

    def construct(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, instead)

    bases = (Exception,) if name.endswith(("Error", "Exception")) else ()
    return type(name, bases, {"__new__": construct, "__doc__": told})


VERSION = "0.19.8"
"""The version of DeepSpeed that these names are from; scripts compare it."""


Names = dict[str, "str | None"]

_FORMULA = "zckpt.estimation.deepspeed_formula"
_COLLECTIVES = ".deepspeed_api.collectives"
_ZERO = ".deepspeed_api.utilities"
_OPTIMIZERS = "adagrad.cpu_adagrad adam.cpu_adam adam.fused_adam lamb.fused_lamb lion.cpu_lion lion.fused_lion"
_PRIVATE_GROUPS = (
    "data_parallel_group", "data_parallel_rank", "data_parallel_world_size", "data_parallel_group_ranks",
    "sequence_data_parallel_group", "sequence_data_parallel_rank", "sequence_data_parallel_world_size",
    "sequence_parallel_group", "sequence_parallel_rank", "sequence_parallel_world_size",
    "model_parallel_world_size", "expert_model_parallel_world_size",
)  # fmt: skip
"""Private names of `utils.groups` that libraries call all the same."""

_VERSION: Names = {
    "version": f"={VERSION!r}",
    **dict.fromkeys(("git_hash", "git_branch"), "='unknown'"),
    "installed_ops": ".deepspeed_api.utilities:COMPATIBLE_OPS",
}

BUILT: dict[str, str | Names] = {
    "": {
        "DeepSpeedEngine": ".engine:Engine",
        "add_config_arguments": ".arguments:add_config_arguments",
        "dist": "zckpt.runtime.comm",
        "initialize": ".start:initialize",
    },
    **dict.fromkeys(
        ("checkpoint.utils", "runtime.utils", "utils.init_on_device", "utils.module_utils", "utils.nvtx"),
        ".deepspeed_api.utilities",
    ),
    "accelerator": {"Accelerator": ".deepspeed_api.accelerator:Accelerator"},
    **{f"accelerator.{name}_accelerator": ".deepspeed_api.accelerator" for name in ("abstract", "real")},
    "comm": {name: f"{_COLLECTIVES}:{name}" for name in ("GroupMember", "get_backend")},
    "comm.comm": {"*": _COLLECTIVES, **{name: f"{_COLLECTIVES}:{name}" for name in ("GroupMember", "get_backend")}},
    "comm.reduce_op": _COLLECTIVES,
    "constants": {"default_pg_timeout": ".world:default_pg_timeout"},
    "git_version_info": _VERSION,
    "git_version_info_installed": _VERSION,
    "launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": ".deepspeed_api.utilities:DEEPSPEED_ENVIRONMENT_NAME"},
    "moe.utils": _COLLECTIVES,
    **{f"monitor.{name}": ".observe.observer" for name in ("comet", "config", "monitor", "tensorboard", "wandb")},
    "monitor.csv_monitor": {"csvMonitor": ".observe.observer:CSVMonitor"},
    "ops": {"__compatible_ops__": ".deepspeed_api.utilities:COMPATIBLE_OPS"},
    **{f"ops.{name}": ".deepspeed_api.optimizer_names" for name in _OPTIMIZERS.split()},
    "ops.adam": {"OnebitAdam": None},
    "ops.aio": {"AsyncIOBuilder": ".deepspeed_api.utilities:AsyncIOBuilder"},
    "ops.lamb": {"OnebitLamb": None},
    "ops.op_builder.async_io": ".deepspeed_api.utilities",
    "profiling.flops_profiler.profiler": ".observe.flops_profiler",
    "runtime.activation_checkpointing.checkpointing": ".activations",
    "runtime.base_optimizer": {"DeepSpeedOptimizer": "torch.optim:Optimizer", "ZeROOptimizer": "torch.optim:Optimizer"},
    "runtime.config": {
        "DeepSpeedConfig": ".config.attributes:DeepSpeedConfig",
        "DeepSpeedConfigError": "zckpt.base.errors:UsageError",
        "ONEBIT_ADAM_OPTIMIZER": "='onebitadam'",
        "ONEBIT_LAMB_OPTIMIZER": "='onebitlamb'",
        "ZERO_ONE_ADAM_OPTIMIZER": "='zerooneadam'",
    },
    "runtime.dataloader": {
        "DeepSpeedDataLoader": ".loader:Loader",
        "RepeatingLoader": ".deepspeed_api.utilities:RepeatingLoader",
    },
    "runtime.engine": {"DeepSpeedEngine": ".engine:Engine"},
    "runtime.fp16": {"onebit": "zckpt.runtime.runtime.fp16.onebit"},
    "runtime.fp16.loss_scaler": ".optimizers.handle",
    "runtime.fp16.onebit": dict.fromkeys(("OnebitAdam", "OnebitLamb", "ZeroOneAdam")),
    "runtime.lr_schedules": ".optimizers.schedules",
    "runtime.pipe": {name: f"zckpt.runtime:{name}" for name in ("DualPipeVModule", "PipelineEngine")},
    "runtime.zero": {"unregister_external_parameter": ".sharding.units:unregister_external_parameter"},
    "runtime.zero.config": {"DeepSpeedZeroConfig": ".config.sections:Zero", "ZeroStageEnum": f"{_ZERO}:ZeroStageEnum"},
    "runtime.zero.offload_config": {
        "DeepSpeedZeroOffloadOptimizerConfig": ".config.sections:OffloadOptimizer",
        "DeepSpeedZeroOffloadParamConfig": ".config.sections:OffloadParam",
        "OffloadDeviceEnum": ".engine_parts.weights:OffloadDeviceEnum",
        "OffloadStateTypeEnum": ".engine_parts.weights:OffloadStateTypeEnum",
    },
    "runtime.zero.partition_parameters": {
        "GatheredParameters": ".init_context:GatheredParameters",
        "Init": ".init_context:Init",
        "ZeroParamStatus": ".sharding.labels:ZeroParamStatus",
        "ZeroParamType": ".sharding.labels:ZeroParamType",
        "_orig_torch_arange": "torch:arange",
        "register_external_parameter": ".sharding.units:register_external_parameter",
        "unregister_external_parameter": ".sharding.units:unregister_external_parameter",
        "zero_wrapper_for_fp_tensor_constructor": f"{_ZERO}:zero_wrapper_for_fp_tensor_constructor",
    },
    "runtime.zero.stage3": {
        "*": _FORMULA,
        "model_to_params": f"{_FORMULA}:parameters_of",
        "unwrap_model_for_generation": f"{_ZERO}:unwrap_model_for_generation",
    },
    "runtime.zero.stage_1_and_2": {"*": _FORMULA, "model_to_params": f"{_ZERO}:model_to_params"},
    "runtime.zero.utils": {"*": _ZERO, "ZeRORuntimeException": "zckpt.base.errors:UnsupportedError"},
    "utils.groups": {"*": _COLLECTIVES, **{f"_get_{name}": f"{_COLLECTIVES}:_get_{name}" for name in _PRIVATE_GROUPS}},
    "utils.logging": ".deepspeed_api.utilities",
    "utils.tensor_fragment": {
        "*": ".parameters",
        **{name: f"{_ZERO}:{name}" for name in ("get_full_hp_param", "set_full_hp_param")},
        "get_full_hp_grad": ".parameters:safe_get_full_grad",
    },
    "utils.timer": ".observe.timer",
    "utils.z3_leaf_module": ".sharding.units",
    "utils.zero_to_fp32": {
        "*": "zckpt.drop_in",
        "load_state_dict_from_zero_checkpoint": f"{_ZERO}:load_state_dict_from_zero_checkpoint",
    },
}
"""Path of a module below `deepspeed` -> the place where its names are built."""

UNBUILT = {
    "**": "Do without it: docs/training.md lists the names that are built, and docs/config.md what the config can say.",
    **dict.fromkeys(("compile.**", "runtime.compiler"), "Use engine.compile(), which is torch.compile."),
    **dict.fromkeys(("inference.**", "model_implementations.**"), GENERATE),
    **dict.fromkeys(("module_inject.**", "pipe.**", "runtime.pipe.**", "runtime.tensor_parallel.**"), PLAIN),
    **dict.fromkeys(("nvme.**", "ops.aio.**", "ops.gds.**", "runtime.swap_tensor.**"), OWN_FILES),
    **dict.fromkeys(("runtime.sequence_parallel.**", "sequence.**"), ONE_SEQUENCE),
    "accelerator.**": "Use get_accelerator(), which answers for every device that torch knows.",
    "autotuning.**": "Use zckpt estimate, which says what a config needs on your devices.",
    "checkpoint.**": "Use zckpt's commands on the checkpoint: to-bf16, to-universal, reshard, inspect.",
    "comm.**": "Use torch.distributed, or the functions of comm that have its names.",
    "datastates.**": "Call engine.save_checkpoint: it can write in the background by itself.",
    "env_report": "Use zckpt --version --verbose.",
    "io.**": "Call engine.save_checkpoint, which needs no writer of yours.",
    "launcher.**": "Start the processes with torchrun, or with zckpt run --nproc.",
    "linear.**": "Use torch.nn.Linear, and peft for LoRA.",
    "moe.**": DENSE,
    "monitor.**": "Use the sections tensorboard, wandb, csv_monitor and comet of the config.",
    "ops.**": "Use what torch has for it. optimizer.type may be Adam, AdamW, Lamb, Lion, Adagrad or one of torch.optim.",
    "ops.op_builder.**": "Remove that call: the trainer needs nothing that is built at run time.",
    "ops.transformer.**": ENCODER,
    "profiling.**": "Use get_model_profile and FlopsProfiler, or torch.profiler.",
    "runtime.**": "Use the engine that initialize returns; docs/config.md says what it does by which key.",
    "runtime.checkpoint_engine.**": "Call engine.save_checkpoint, which writes as the config's section checkpoint says.",
    "runtime.data_pipeline.**": "Order the data in your own sampler, and pass the loader to the loop.",
    "runtime.zero.**": "Use zero.Init, and the engine that initialize returns with zero_optimization.stage in the config.",
}
"""Path of a module below `deepspeed`, or of all modules below one -> the remedy for names that are not built."""
