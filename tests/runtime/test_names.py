"""DeepSpeed's names: scripts find them here, with DeepSpeed's arguments, and what is not built says so."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import proofs
import pytest
import torch
from torch import nn

import zckpt.runtime as deepspeed
from zckpt import runtime
from zckpt.base.errors import UnsupportedError
from zckpt.runtime.engine import Engine
from zckpt.runtime.engine_parts.answers import UNBUILT as UNBUILT_METHODS
from zckpt.runtime.names import finder, table
from zckpt.runtime.names.table import INSTEAD

# Who calls what of an engine: names that these call on what `initialize` returns, read from their sources.
CALLED = {
    "transformers 5.23": "backward step train eval module optimizer lr_scheduler save_checkpoint load_checkpoint "
    "get_global_grad_norm compile zero_optimization_stage zero_gather_16bit_weights_on_model_save save_16bit_model "
    "parameters named_parameters state_dict config",
    "accelerate 1.15": "backward step set_gradient_accumulation_boundary is_gradient_accumulation_boundary no_sync destroy "
    "zero_gather_16bit_weights_on_model_save _zero3_consolidated_16bit_state_dict save_checkpoint load_checkpoint "
    "zero_optimization_stage gradient_accumulation_steps get_lr optimizer lr_scheduler was_step_applied",
    "lightning 2.6": "backward step save_checkpoint load_checkpoint optimizer lr_scheduler zero_optimization_partition_weights "
    "set_train_micro_batch_size set_train_batch_size zero_grad",
    "DeepSpeedExamples": "backward step train eval forward local_rank global_rank device bfloat16_enabled fp16_enabled "
    "gradient_accumulation_steps train_batch training_dataloader save_checkpoint destroy parameters offload_states "
    "reload_states data_parallel_group module optimizer config zero_optimization_stage",
    "Megatron-DeepSpeed": "train_batch eval_batch get_lr micro_steps global_steps global_samples train_batch_size "
    "train_micro_batch_size_per_gpu set_train_batch_size get_batch_info is_gradient_accumulation_boundary wall_clock_breakdown "
    "load_checkpoint save_checkpoint zero_optimization loss_scale skipped_steps dp_world_size mpu set_dataiterator "
    "gradient_clipping communication_data_type",
    "scripts": "set_lr monitor_is_elsewhere module_state_dict load_module_state_dict save_fp16_model deepspeed_io get_mom "
    "dump_state dataloader_drop_last zero_cpu_offload zero_offload_optimizer zero_offload_param optimizer_name "
    "scheduler_name get_data_parallel_rank get_model_parallel_rank world_size mp_world_size empty_partition_cache "
    "dynamic_loss_scale initial_dynamic_scale get_data_types steps_per_print is_compiled client_optimizer "
    "client_lr_scheduler coalesce_grad_reduction",
}  # fmt: skip
CALLED["scripts"] = CALLED["scripts"].replace("monitor_is_elsewhere ", "")
NAMES = sorted({name for names in CALLED.values() for name in names.split()})

# What DeepSpeed's engine has for a while only: while it profiles, or with a feature that is not built.
ONLY_IN_THE_MIDST = {"autotuning_model_info", "first_dataloader_check", "flops", "fwd_duration", "random_ltd_scheduler"}
ONLY_IN_THE_MIDST |= {"summary_events", "update_interval"}

# What differs from DeepSpeed on purpose: its default, or an argument that is added at the end.
OWN_DEFAULTS = {
    ("save_16bit_model", "save_filename"),
    ("compile", "backend"),
    ("compile", "compile_kwargs"),
    ("Init", "tensor_overrides"),
}

PATHS = {
    "": "initialize add_config_arguments init_distributed DeepSpeedEngine DeepSpeedConfig DeepSpeedConfigError "
    "DeepSpeedOptimizer DeepSpeedDataLoader get_accelerator comm zero utils ops checkpointing moe pipe runtime OnDevice logger "
    "log_dist PipelineModule init_inference tp_model_init __version__",
    "comm": "init_distributed get_rank get_world_size get_local_rank is_initialized all_reduce all_gather barrier broadcast "
    "all_gather_into_tensor reduce_scatter_tensor all_to_all_single new_group ReduceOp destroy_process_group send recv",
    "comm.comm": "init_distributed",
    "accelerator": "get_accelerator",
    "zero": "Init GatheredParameters register_external_parameter",
    "runtime.zero": "Init GatheredParameters register_external_parameter TiledLinear",
    "runtime.zero.partition_parameters": "ZeroParamStatus ZeroParamType Init GatheredParameters",
    "runtime.zero.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum",
    "runtime.zero.config": "DeepSpeedZeroConfig ZeroStageEnum",
    "runtime.zero.stage3": "unwrap_model_for_generation",
    "runtime.zero.utils": "is_zero_supported_optimizer is_zero_param",
    "runtime.engine": "DeepSpeedEngine",
    "runtime.config": "DeepSpeedConfig DeepSpeedConfigError ADAM_OPTIMIZER LAMB_OPTIMIZER",
    "runtime.base_optimizer": "DeepSpeedOptimizer",
    "runtime.dataloader": "DeepSpeedDataLoader RepeatingLoader",
    "runtime.lr_schedules": "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest VALID_LR_SCHEDULES",
    "runtime.utils": "see_memory_usage move_to_device set_random_seed clip_grad_norm_ memory_status partition_balanced "
    "partition_uniform get_global_norm ensure_directory_exists",
    "runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "runtime.activation_checkpointing.checkpointing": "checkpoint configure is_configured reset",
    "runtime.constants": "ROUTE_TRAIN ROUTE_EVAL",
    "checkpointing": "checkpoint configure is_configured reset non_reentrant_checkpoint",
    "ops.adam": "FusedAdam DeepSpeedCPUAdam",
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "ops.aio": "AsyncIOBuilder",
    "ops.lamb": "FusedLamb",
    "ops.lion": "FusedLion DeepSpeedCPULion",
    "moe.utils": "split_params_into_different_moe_groups_for_optimizer is_moe_param has_moe_layers",
    "moe.layer": "MoE",
    "pipe": "PipelineModule LayerSpec TiedLayerSpec",
    "utils": "logger log_dist RepeatingLoader OnDevice safe_get_full_fp32_param safe_set_full_fp32_param safe_get_full_grad "
    "safe_set_full_grad safe_get_full_optimizer_state safe_set_full_optimizer_state safe_get_local_fp32_param "
    "safe_set_local_fp32_param safe_get_local_grad safe_set_local_grad safe_get_local_optimizer_state "
    "safe_set_local_optimizer_state safe_update_full_grad_vectorized set_z3_leaf_modules unset_z3_leaf_modules "
    "get_z3_leaf_modules z3_leaf_module set_z3_leaf_module set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix groups "
    "get_full_hp_param instrument_w_nvtx set_log_level_from_string",
    "utils.groups": "get_data_parallel_world_size get_data_parallel_rank _get_data_parallel_group",
    "utils.logging": "logger log_dist print_dist",
    "utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict",
    "checkpoint.utils": "clone_tensors_for_torch_save get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank",
    "checkpoint.constants": "OPTIMIZER_STATE_DICT PARAM_SHAPES ZERO_STAGE",
}  # fmt: skip
"""Module below `deepspeed` -> names that scripts import from it."""

UNBUILT = {
    "": "init_inference tp_model_init PipelineModule DeepSpeedTransformerLayer InferenceEngine",
    "pipe": "LayerSpec",
    "moe.layer": "MoE",
    "runtime.zero": "TiledLinear",
    "runtime.fp16.onebit": "OnebitAdam",
    "ops.adam": "OnebitAdam",
}


def engine_of(config: dict[str, Any] | None = None, **arguments: Any) -> Engine:
    torch.manual_seed(0)
    config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}, **(config or {})}
    return runtime.initialize(model=nn.Linear(3, 1), config=config, **arguments)[0]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of()


def module_of(package: str, path: str) -> Any:
    """A module; one that DeepSpeed has under a second name only as an attribute is found too."""
    try:
        return importlib.import_module(f"{package}.{path}".rstrip("."))
    except ModuleNotFoundError:
        return functools.reduce(getattr, path.split("."), importlib.import_module(package))


def pairs(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(path, name) for path, names in table.items() for name in names.split()]


def test_every_path_has_its_names() -> None:
    missing = [f"{path}.{name}" for path, name in pairs(PATHS) if not hasattr(module_of("zckpt.runtime", path), name)]
    assert missing == []


def test_attributes_are_enough_after_one_import() -> None:
    assert deepspeed.ops.adam.FusedAdam and deepspeed.moe.layer.MoE and deepspeed.utils.logging.logger
    assert deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES and deepspeed.runtime.zero.GatheredParameters
    assert deepspeed.zero.Init is deepspeed.runtime.zero.Init


@pytest.mark.parametrize(("path", "name"), pairs(UNBUILT))
def test_what_is_not_built_says_so(path: str, name: str) -> None:
    found = getattr(module_of("zckpt.runtime", path), name)
    with pytest.raises(UnsupportedError) as caught:
        found(1, two=2)
    assert repr(name) in caught.value.what and caught.value.remedy
    if not name[0].islower():
        assert not isinstance(nn.Linear(1, 1), found)
        with pytest.raises(UnsupportedError):
            type("Own", (found,), {})(3)


def test_device_nvme_may_be_used_and_deepspeeds_library_says_that_it_is_not_here() -> None:
    """As transformers' own test of device nvme asks."""
    builder = deepspeed.ops.aio.AsyncIOBuilder
    assert deepspeed.ops.__compatible_ops__[builder.NAME] and builder().is_compatible()
    with pytest.raises(UnsupportedError, match="not built here") as caught:
        builder().load()
    assert "device nvme" in caught.value.remedy


def test_every_part_that_deepspeed_can_build_is_told_of(theirs: Any) -> None:
    real = importlib.import_module("deepspeed.ops.op_builder.all_ops").ALL_OPS
    assert set(real) - set(deepspeed.ops.__compatible_ops__) == set()
    assert importlib.import_module("deepspeed.ops.aio").AsyncIOBuilder.NAME == deepspeed.ops.aio.AsyncIOBuilder.NAME


@pytest.mark.parametrize("who", CALLED)
def test_the_engine_has_what_is_called(engine: Engine, who: str) -> None:
    own = [name for name in CALLED[who].split() if not hasattr(type(engine), name) and name not in vars(engine)]
    assert [name for name in own if name not in engine._modules] == []


@pytest.fixture(scope="module")
def theirs() -> Any:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    import logging

    logging.getLogger("DeepSpeed").handlers.clear()
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    batches = {name: getattr(PipelineEngine, name) for name in ("train_batch", "eval_batch", "set_dataiterator")}
    return type("DeepSpeeds", (DeepSpeedEngine,), batches)


def test_the_engine_has_every_name_of_deepspeeds(engine: Engine, theirs: Any) -> None:
    """Its public methods, and the attributes that its methods set; or a word on what to do instead."""
    source = Path(inspect.getfile(theirs.__mro__[1])).read_text()
    whole = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "DeepSpeedEngine")
    methods = {node.name for node in getattr(whole, "body", ()) if isinstance(node, ast.FunctionDef)}
    stored = [node for node in ast.walk(whole) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    attributes = {node.attr for node in stored if getattr(node.value, "id", "") == "self"}
    public = {name for name in methods | attributes if not name.startswith("_")}
    missing = {name for name in public if not hasattr(engine, name)}
    assert missing - ONLY_IN_THE_MIDST == set(engine.instead)
    for name in missing & set(engine.instead):
        with pytest.raises(AttributeError, match=re.escape(engine.instead[name])):
            getattr(engine, name)


@pytest.mark.parametrize("name", sorted(UNBUILT_METHODS))
def test_what_the_engine_cannot_do_says_what_to_do(engine: Engine, name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        getattr(engine, name)(1, two=2)
    assert name in caught.value.what and caught.value.remedy == UNBUILT_METHODS[name]


def test_the_engine_answers_as_deepspeeds_does(engine: Engine) -> None:
    assert engine.flops_profiler_enabled() is False and engine.flops_profiler_top_modules() == 1
    assert engine.zero_nvme_offload_optimizer() is False and engine.get_batch_info() == (4, 4, 1)
    assert engine.aio_config()["queue_depth"] == 8 and engine.get_type() == [0.0]
    scale = engine.dynamic_loss_scale_args()
    assert scale["init_scale"] == 65536 and scale["delayed_shift"] == 2
    with engine.no_sync():
        assert engine.inside_no_sync_ctxt
    assert not engine.inside_no_sync_ctxt and engine.mpu is None


def test_samples_per_second_are_counted_and_can_be_told_of_epochs() -> None:
    engine = engine_of({"gradient_accumulation_steps": 2, "steps_per_print": 3})
    timer = engine.tput_timer
    lines: list[str] = []
    timer.logging = lines.append
    for _ in range(8):
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()
    assert (timer.global_step_count, timer.micro_step_count, timer.epoch_count) == (4, 8, 0)
    assert timer.avg_samples_per_sec() == pytest.approx(4 * 2 / timer.total_elapsed_time)
    assert [line.split(", ")[0] for line in lines] == ["epoch=0/micro_step=6/global_step=3"]
    timer.update_epoch_count()
    timer.start()  # a script of its own may time a step too
    timer.stop(global_step=True, report_speed=False)
    timer.stop(global_step=True)  # one that was not begun
    assert (timer.global_step_count, timer.micro_step_count, timer.epoch_count) == (5, 1, 1)


def differences(ours: Any, real: Any, name: str) -> list[str]:
    """What a call that fits DeepSpeed's signature may meet here that is other."""
    if getattr(real, "__name__", "") == "log_wrapper":  # a collective that DeepSpeed's logger counts
        real = inspect.getclosurevars(real).nonlocals["func"]
    try:
        one, other = inspect.signature(ours).parameters, inspect.signature(inspect.unwrap(real)).parameters
    except (TypeError, ValueError):
        return []
    if any(p.kind is p.VAR_KEYWORD for p in one.values()):
        return []
    found = []
    for place, (key, parameter) in enumerate(other.items()):
        if key == "debug" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if key not in one:
            found.append(f"{name} has no argument {key}")
        elif list(one).index(key) != place:
            found.append(f"{name}: {key} is not argument {place}")
        elif (name, key) not in OWN_DEFAULTS and not _alike(one[key].default, parameter.default):
            found.append(f"{name}: {key} = {one[key].default!r}, not {parameter.default!r}")
    return found


def _alike(ours: object, real: object) -> bool:
    if inspect.isclass(real) or callable(real) or real is None or isinstance(real, dict):
        return True
    return getattr(ours, "value", ours) == getattr(real, "value", real)


def test_the_engines_methods_take_deepspeeds_arguments(theirs: Any) -> None:
    found = []
    for name in NAMES:
        real, ours = getattr(theirs, name, None), getattr(Engine, name, None)
        if inspect.isfunction(real) and inspect.isfunction(ours):
            found += differences(ours, real, name)
    assert found == []


_MADE_BY_THE_ENGINE = (
    "DeepSpeedDataLoader",
    "DeepSpeedZeroConfig",
    "LossScaler",
    "DynamicLossScaler",
    "DeepSpeedEngine",
)


def test_functions_take_deepspeeds_arguments(theirs: Any) -> None:
    found: list[str] = []
    for path, name in pairs(PATHS):
        real, ours = getattr(module_of("deepspeed", path), name, None), getattr(module_of("zckpt.runtime", path), name)
        if not callable(real) or not callable(ours) or name in _MADE_BY_THE_ENGINE:
            continue
        if inspect.isclass(ours) and issubclass(
            ours, (torch.nn.Module, Exception, torch.optim.lr_scheduler.LRScheduler)
        ):
            continue
        found += differences(ours, real, name)
    assert found == []


def test_every_name_is_deepspeeds(theirs: Any) -> None:
    strange = [f"{path}.{name}" for path, name in pairs(PATHS) if not hasattr(module_of("deepspeed", path), name)]
    assert strange == []


def rows_of_the_page() -> tuple[str, list[str]]:
    """The section of docs/training.md on names, and what is in the first cells of its tables."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    section = page.split("\n## DeepSpeed's names\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return section, [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]


def test_the_page_tells_names_that_are_there(engine: Engine) -> None:
    section, names = rows_of_the_page()
    assert len(names) > 60
    for name in names:
        if name != "set":
            found = functools.reduce(lambda place, part: getattr(place, part, None), name.split("."), deepspeed)
            assert found is not None or hasattr(engine, name), name
    assert [path for path in PATHS if path and not any(name.startswith(path.split(".")[0]) for name in names)] == []
    told = section.split("among many others:")[1]
    assert re.findall(r"`(\w+)`", told) == sorted(INSTEAD)


# Every name of DeepSpeed's, whether it is built or not.

ROOT = Path(__file__).parents[2]
OLDER = {"runtime.fp16.onebit"}
"""Modules of older versions."""

CHANGING = {
    *(f"accelerator.real_accelerator.{name}" for name in ("accel_logger", "ds_accelerator", "dsa2")),
    *(f"git_version_info.{name}" for name in ("accelerator_name", "git_branch", "git_hash", "torch_info", "version")),
    "compile.util.sym_size_ops",
    "ops.op_builder.op_builder_dir",
    "profiling.flops_profiler.profiler.old_functions",
    "utils.timer.PSUTILS_INSTALLED",
}
"""Names that DeepSpeed assigns more than once, by what it finds on a machine or when it runs; the data has the last value."""

STAY = {
    path: names.split()
    for path, _, names in (
        line.partition(":") for line in (Path(__file__).parent / "names_that_stay.txt").read_text().splitlines()
    )
}
"""Module below `deepspeed` -> names that this trainer has had there. A name may be added, and never go."""


def is_unbuilt(found: Any) -> bool:
    return getattr(found, "__module__", None) == "zckpt.runtime.names.table"


def test_names_that_were_there_stay() -> None:
    lost = []
    for path, names in STAY.items():
        module = importlib.import_module(f"zckpt.runtime.{path}".rstrip("."))
        lost += [
            f"{path}.{name}" for name in names
            if not hasattr(module, name) or (is_unbuilt(getattr(module, name)) and name not in INSTEAD)
        ]  # fmt: skip
    assert lost == ["utils.tensor_fragment"]  # DeepSpeed's class of that name, which hides the module there too


def test_deepspeeds_modules_are_all_there() -> None:
    """Under `zckpt.runtime`; tests/runtime/test_alias.py asks for them and their names under `deepspeed`."""
    assert len(finder.read_lines()) == 750
    for path in finder.read_lines():
        module = importlib.import_module(f"zckpt.runtime.{path}".rstrip("."))
        assert not path or set(module.__all__) >= finder.all_names_of(path)
    constants = importlib.import_module("zckpt.runtime.runtime.constants")
    assert constants.TRAIN_BATCH_SIZE == "train_batch_size" and constants.GRADIENT_CLIPPING_DEFAULT == 1.0


def test_what_deepspeed_has_not_is_an_error() -> None:
    for name in ("ops.adam.Nosuch", "runtime.nosuch", "utils.logging.Nosuch", "utils.logging._nosuch", "nosuch"):
        path, _, last = f"zckpt.runtime.{name}".rpartition(".")
        with pytest.raises(AttributeError, match=last):
            getattr(importlib.import_module(path), last)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"zckpt.runtime.{name}")


def test_a_name_without_a_row_says_what_to_do() -> None:
    told = {
        "inference.v2.engine_v2.InferenceEngineV2": "zckpt to-bf16",
        "autotuning.autotuner.Autotuner": "zckpt estimate",
        "sequence.layer.single_all_to_all": "sequence_parallel_size 1",
        "env_report.op_report": "--verbose",
    }
    for name, remedy in told.items():
        path, _, last = name.rpartition(".")
        found = getattr(importlib.import_module(f"zckpt.runtime.{path}"), last)
        assert inspect.isfunction(found) is last[0].islower()
        with pytest.raises(UnsupportedError, match="not built here") as caught:
            found()
        assert repr(last) in caught.value.what and remedy in caught.value.remedy


def test_rows_name_what_is_there() -> None:
    lines = finder.read_lines()
    assert {path for path in table.BUILT if path not in lines} == OLDER
    assert [path for path in table.UNBUILT if path != "**" and path.removesuffix(".**") not in lines] == []
    for path, row in table.BUILT.items():
        own = set(finder.names_of(path).own)
        for name, target in ({"*": row} if isinstance(row, str) else row).items():
            if isinstance(target, str):
                found = finder._import_target(target)
                assert name != "*" or any(hasattr(found, one) for one in own), path


def test_what_is_built_has_a_row() -> None:
    """No name is called unbuilt that a module of `deepspeed_api` has, or that of a row; of several of one name, one is built."""
    targets = {row for row in table.BUILT.values() if isinstance(row, str) and row[0] == "."}
    targets |= {f".deepspeed_api.{path.stem}" for path in (ROOT / "zckpt/runtime/deepspeed_api").glob("[a-z]*.py")}
    built = {}
    for target in targets:
        module = importlib.import_module(target, "zckpt.runtime")
        built |= {
            name: target for name, value in vars(module).items()
            if name[0] != "_" and getattr(value, "__module__", None) == module.__name__
        }  # fmt: skip
    found = [
        f"{path}.{name} is in {built[name]}" for path in finder.read_lines() for name in finder.names_of(path).own
        if name in built and path.rpartition(".")[2] != "async_io" and is_unbuilt(finder.find_name(path, name))
        and not any(name in finder.names_of(row).own and not is_unbuilt(finder.find_name(row, name)) for row in table.BUILT)
    ]  # fmt: skip
    assert found == []
    assert [name for path, row in table.BUILT.items() if isinstance(row, dict) for name, one in row.items()
            if (one is None or one[0] == "=") and name in built] == []  # fmt: skip


def test_no_own_module_has_deepspeeds_name() -> None:
    home = ROOT / "zckpt" / "runtime"
    own = {path.stem for path in home.glob("[a-z]*.py")} | {path.parent.name for path in home.glob("*/__init__.py")}
    assert own & {path.partition(".")[0] for path in finder.read_lines()} == set()
    assert own & finder.all_names_of("") == set()


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("deepspeed_surface", ROOT / ".ci" / "deepspeed_surface.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.proof
def test_the_data_is_of_the_installed_deepspeed(theirs: Any, script: Any) -> None:
    root = Path(importlib.import_module("deepspeed").__file__ or "").parent
    assert script.read_surface(root) == script.OUTPUT.read_text()


OF_OTHERS = {"TYPE_CHECKING", "REMAINDER", "inf", "member_name", "module_name", "is_triton_available", "tl", "triton"}
"""What modules of DeepSpeed leave over: loops' variables, what other libraries lack here, and a name of a private module."""


@proofs.only
@pytest.mark.filterwarnings("ignore")
def test_every_name_that_deepspeeds_modules_have_when_they_run_is_here(theirs: Any) -> None:
    """All of them are imported: what they set by loops and take by stars counts too. 15 need what this machine lacks."""
    missing, imported = [], 0
    for path in finder.read_lines():
        try:
            real = importlib.import_module(f"deepspeed.{path}".rstrip("."))
        except (ImportError, AttributeError, AssertionError):
            continue
        imported += 1
        ours = importlib.import_module(f"zckpt.runtime.{path}".rstrip("."))
        for name, value in list(vars(real).items()):
            home = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None) or "deepspeed."
            if name[0] != "_" and home.startswith("deepspeed.") and not hasattr(ours, name):
                missing.append(f"{path}.{name}")
    assert [name for name in missing if name.rpartition(".")[2] not in OF_OTHERS] == [] and imported > 730


def test_the_builders_of_deepspeeds_parts_have_names(theirs: Any) -> None:
    builders = {name for name in vars(importlib.import_module("deepspeed.ops.op_builder")) if name.endswith("Builder")}
    assert len(builders) > 25 and [name for name in builders if not hasattr(deepspeed.ops.op_builder, name)] == []
    with pytest.raises(UnsupportedError, match="'CPUAdamBuilder' of DeepSpeed is not built here"):
        deepspeed.ops.op_builder.CPUAdamBuilder().load()


def test_the_data_is_true(theirs: Any) -> None:
    """Of the modules that `import deepspeed` imports: each name is there, and each literal has the value that it has there."""
    wrong = []
    for path in finder.read_lines():
        real = sys.modules.get(f"deepspeed.{path}".rstrip("."))
        for name, kind in finder.names_of(path).own.items() if real else ():
            if not hasattr(real, name) or (
                kind not in ("", "()", "=?") and getattr(real, name) != ast.literal_eval(kind[1:])
            ):
                wrong.append(f"{path}.{name}")
    assert set(wrong) <= CHANGING


def test_the_engine_has_of_deepspeeds_names_what_it_had(engine: Engine) -> None:
    line = finder._FILE.read_text().splitlines()[-1]
    names = [name.removesuffix("()") for name in line.removeprefix(f"{finder._ENGINE}: ").split()]
    assert len([name for name in names if hasattr(engine, name)]) >= 138  # of 251; this figure may only rise
