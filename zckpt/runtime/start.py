"""Makes an engine from a model and a config.

For scripts, as `zckpt.runtime.initialize`. The config is checked before the model is touched.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.optim import Optimizer
from torch.utils.data import Dataset

from zckpt.base.errors import UsageError
from zckpt.base.version import __version__
from zckpt.runtime.activations import configure_once
from zckpt.runtime.arguments import config_of, refuse_parallel
from zckpt.runtime.config.attributes import DTYPES
from zckpt.runtime.config.read import BatchSizes, Settings, batch_of, flatten, read_config
from zckpt.runtime.engine import Engine
from zckpt.runtime.loader import Loader
from zckpt.runtime.observe.observer import check_libraries
from zckpt.runtime.optimizers.build import chosen_of, groups_of, optimizer_on_masters
from zckpt.runtime.optimizers.handle import EngineOptimizer
from zckpt.runtime.optimizers.schedules import build_schedule
from zckpt.runtime.sharding.on_access import allow_parts, gather_on_access
from zckpt.runtime.sharding.shard import cast_buffers, shard
from zckpt.runtime.sharding.units import Wrap
from zckpt.runtime.sharding.watch import Watch
from zckpt.runtime.swapping.install import Swap
from zckpt.runtime.world import DEFAULT_PORT, init_distributed, join_world, mesh_of
from zckpt.team.meeting import LOAD_S, Meetings
from zckpt.team.sameness import check_same

_log = logging.getLogger("zckpt.runtime")
_numbers = itertools.count()
_OWN = ("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler", "comms_logger", "dump_state", "steps_per_print",
        "wall_clock", "memory_breakdown", "log_level", "aio", "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_param.nvme_path")  # fmt: skip
"""The beginnings of config keys that may differ from rank to rank."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    auto: Mapping[str, Any] | None = None,
    wrap: Wrap | Iterable[Wrap] | None = None,
    allow_unknown: bool = False,
) -> tuple[Engine, Optimizer | None, Loader | None, Any]:
    """Shards a model and returns the engine that trains it. Every rank calls it, under torchrun, or one process alone.

        engine, optimizer, loader, lr_scheduler = zckpt.runtime.initialize(model=model, config="ds_config.json")

    Args:
        args: a namespace; its attribute `deepspeed_config` may be the config.
        model: the model, whole on every rank or made under `zero.Init`. It is sharded in place; rank 0's weights are taken.
        optimizer: an optimizer made over the model's parameters, or a function that makes one from parameters or groups; by
            default the config's.
        model_parameters: parameters or parameter groups for the config's optimizer, or for the function; by default all
            that require gradients.
        training_data: a dataset to make a loader of.
        lr_scheduler: a schedule made over `optimizer`, or a class or function that makes one when it is called with the
            optimizer; by default the config's.
        distributed_port: of rank 0, for processes with a launcher that sets no MASTER_PORT.
        mpu: the script's parallelism, as an object with DeepSpeed's methods; only data parallelism is built.
        dist_init_required: False: there has to be a process group already.
        collate_fn: makes a batch of samples, for the loader; by default torch's own.
        config: DeepSpeed's config: a path, a dict or JSON text. docs/config.md says what each key does.
        mesh_param: sizes of data and sequence parallelism; only data parallelism is built.
        config_params: an old name of `config`.
        auto: values for keys of the config that say "auto", nested as the config is or by dotted name
            (`{"optimizer.params.lr": 1e-4}`).
        wrap: the modules with parameters that are gathered together: class names, classes, modules of the model, functions
            that take a module and return whether it is one; one or several. By default the model's repeated blocks.
        allow_unknown: leave out unknown keys of the config and log them, instead of raising an error.

    Returns:
        The engine, the optimizer, the loader and the schedule; None for each that there is none of.

    Raises:
        UsageError: the config or the arguments are wrong or contradict each other.
        UnsupportedError: the config switches on a feature that is not built.
    """
    config = config_of(args, config, config_params)
    if model is None or config is None:
        missing = "model" if model is None else "config"
        raise UsageError(f"initialize needs a {missing}", remedy=f"Pass it: initialize({missing}=...).")
    if isinstance(model, (Engine, FSDPModule)):
        raise UsageError(
            "initialize got an engine as its model" if isinstance(model, Engine) else "the model is sharded already",
            found=f"a {type(model).__name__}", expected="a model that no engine has",
            remedy="Use the engine that there is, or make a new model.",
        )  # fmt: skip
    refuse_parallel(mpu, mesh_param)
    settings = read_config(config, auto=auto, hidden_size=_hidden_size(model), allow_unknown=allow_unknown)
    asks = optimizer is not None or settings.config.optimizer.type is not None
    trains = asks and (optimizer is not None or any(p.requires_grad for p in model.parameters()))
    _check(settings, optimizer, lr_scheduler, trains=asks)
    check_libraries(settings.config, settings.file)
    configure_once(settings.config.activation_checkpointing)
    if settings.config.disable_python_gc:
        gc.disable()
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    world = join_world()
    batch = batch_of(settings, world.size)
    if world.size > 1:
        meetings = Meetings(f"initialize {next(_numbers)}", world.rank, world.size)
        check_same(meetings, "initialize", _facts(settings, model, optimizer), within_s=LOAD_S)
    if not trains:  # only now: ranks may differ in what they train, and then all of them are told
        _check(settings, optimizer, lr_scheduler, trains=False)
    if world.rank == 0:
        _log_unused(settings)
        _log_chosen(settings, batch, optimizer, lr_scheduler, trains=trains)
    if world.rank == 0 and trains:
        _log_differences(settings)
    groups = groups_of(model, model_parameters)
    chosen = chosen_of(model, groups, optimizer)
    names = [(id(p), name) for name, p in model.named_parameters() if p in chosen]
    cast_buffers(model, settings)
    mesh = mesh_of(settings.zero, world)
    sharded = shard(model, settings.zero, _precision(settings), mesh, world, wrap, trains=trains)
    parts_ended = allow_parts(model)
    if settings.zero.stage == 3:
        gather_on_access(model, sharded.parameters)
    if world.size > 1:
        Watch(model, world)
    swap = Swap(settings, model, sharded, trains=trains) if settings.zero.nvme else None
    built = schedule = loader = None
    if trains:
        by_name = {one.name: one for one in sharded.parameters}
        masters = {key: by_name[name] for key, name in names if by_name[name].trained}
        built = optimizer_on_masters(settings, optimizer, groups, masters, is_cut=sharded.size > 1)
        if swap is not None:
            swap.take(built)
        built = EngineOptimizer(built)
        schedule = _schedule(settings, lr_scheduler, built)
    if training_data is not None:
        drop_last = settings.config.dataloader_drop_last
        loader = Loader(training_data, batch.micro, world, collate_fn=collate_fn, drop_last=drop_last)
    engine = Engine(model, settings, batch, world, sharded, built, schedule, loader)
    parts_ended.append(engine.forward_ended)
    engine.client_optimizer, engine.client_lr_scheduler = optimizer, lr_scheduler
    engine.training_data, engine.collate_fn = training_data, collate_fn
    return engine, built, loader, schedule


def _facts(settings: Settings, model: nn.Module, optimizer: object) -> dict[str, str]:
    """The facts that must be equal on all ranks: config, parameters, versions. What a rank shows and logs may differ."""
    facts = {path: json.dumps(value) for path, value in flatten(settings.raw).items() if not path.startswith(_OWN)}
    for name, one in model.named_parameters():
        shape, dtype = list(getattr(one, "ds_shape", one.shape)), str(one.dtype).removeprefix("torch.")
        facts[f"parameter {name}"] = f"{dtype} {shape}{'' if one.requires_grad else ', not trained'}"
    facts["optimizer"] = type(optimizer).__name__
    return facts | {"torch": torch.__version__, "zckpt": __version__}


def _hidden_size(model: nn.Module) -> int | None:
    """A model's width, as transformers finds it for its "auto" values."""
    config = getattr(model, "config", None)
    for place in (config, getattr(config, "text_config", None)):
        width = getattr(place, "hidden_size", None) or max(getattr(place, "hidden_sizes", None) or [0])
        if isinstance(width, int) and width:
            return width
    return None


def _check(settings: Settings, optimizer: object, lr_scheduler: object, *, trains: bool) -> None:
    """Raises UsageError if config and arguments contradict each other, or an argument is of no use."""
    stage = settings.zero.stage
    if not trains and stage in (1, 2):
        what = "parameter to train" if settings.config.optimizer.type else "optimizer"
        raise UsageError(
            f"ZeRO stage {stage} shards an optimizer's states, and there is no {what}", file=settings.file,
            remedy="Pass an optimizer to initialize, or add a section 'optimizer' to the config, and set requires_grad of some "
            "parameters. For inference choose stage 3 (sharded) or 0 (whole).",
        )  # fmt: skip
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise UsageError(
            "optimizer is neither an optimizer nor a function that makes one", found=f"a {type(optimizer).__name__}",
            remedy="Pass a torch.optim.Optimizer, or a function: initialize(optimizer=lambda params: SGD(params, lr=0.1)).",
        )  # fmt: skip
    if lr_scheduler is not None:
        _check_schedule(lr_scheduler, over_given=isinstance(optimizer, Optimizer))


def _check_schedule(lr_scheduler: object, *, over_given: bool) -> None:
    remedy = "Pass a function of the optimizer: initialize(lr_scheduler=lambda optimizer: StepLR(optimizer, 100))."
    if isinstance(lr_scheduler, type):
        try:
            inspect.signature(lr_scheduler).bind(None)
        except TypeError as error:
            what = f"lr_scheduler {lr_scheduler.__name__} cannot be made from an optimizer alone"
            raise UsageError(what, found=str(error), remedy=remedy) from error
    elif not callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        raise UsageError(
            "lr_scheduler is neither a schedule nor a function that makes one",
            found=f"a {type(lr_scheduler).__name__}, without a method step", remedy=remedy,
        )  # fmt: skip
    if isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler) and not over_given:
        raise UsageError(
            "lr_scheduler is a schedule over an optimizer that initialize did not get",
            found=f"a {type(lr_scheduler).__name__}",
            remedy="Pass its optimizer too. Or pass a function of the optimizer: initialize(lr_scheduler=lambda optimizer: ...).",
        )


def _log_unused(settings: Settings) -> None:
    """Logs the keys of the config that change nothing, with the reasons."""
    logger = logging.getLogger("zckpt")
    if not logger.hasHandlers():  # the script has set up no logging: notes go to stderr
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
    if settings.config.log_level is not None:
        _log.setLevel(settings.config.log_level.upper())
    if importlib.util.find_spec("zckpt._core") is None:
        _log.warning("zckpt's C++ engine was not built, so saves are slower: install zckpt with a C++ compiler.")
    if settings.missed:
        lines = "\n".join(f"  {key}: {why}" for key, why in settings.missed)
        _log.warning("Keys of %s that ask for what is not shown here:\n%s", settings.file, lines)
    if settings.unused:
        lines = "\n".join(f"  {key}: {why}" for key, why in settings.unused)
        _log.info("Keys of %s that change nothing here:\n%s", settings.file, lines)


def _log_chosen(settings: Settings, batch: BatchSizes, optimizer: object, schedule: object, *, trains: bool) -> None:
    """Logs the config with all computed values, and which of two optimizers or schedules is used."""
    config = settings.config
    for name, given in (("optimizer", optimizer), ("scheduler", schedule)):
        own = getattr(config, name).type
        if given is not None and own is not None:
            _log.warning("initialize was given its own %s, so that of the config (%s) is left aside.", name, own)
    if not trains and config.optimizer.type:
        _log.warning("No parameter requires gradients: the optimizer of the config is left aside, nothing is trained.")
    if not trains and (schedule is not None or config.scheduler.type):
        _log.info("There is no optimizer, so the schedule is left aside.")
    computed = json.dumps({**settings.raw, **batch.by_key()})
    logging.getLogger("zckpt.runtime.config").info("The config with what was computed: %s", computed)


def _log_differences(settings: Settings) -> None:
    """Warns where losses are known to differ from DeepSpeed's. Measured by tests/interop/test_styles.py."""
    precision = settings.config.precision
    if settings.zero.stage or precision == "fp32":
        return
    scale = ", and divides gradients by a loss scale that it has not multiplied the loss by, so SGD hardly trains"
    _log.warning(
        "At stage 0 in %s losses differ from DeepSpeed's: with AdamW by 3 %% in the first steps. DeepSpeed 0.19.8 begins there "
        "with a step on gradients that are zero%s. See 'Where DeepSpeed trains otherwise' in docs/training.md.",
        precision, scale * (precision == "fp16"),
    )  # fmt: skip


def _precision(settings: Settings) -> MixedPrecisionPolicy:
    config, own = settings.config, settings.config.precision
    reduce = config.communication_data_type or own
    if settings.zero.stage < 2 and config.data_types.grad_accum_dtype == "fp32":
        reduce = "fp32"
    compute = None if own == "fp32" else DTYPES[own]
    return MixedPrecisionPolicy(compute, DTYPES[reduce], cast_forward_inputs=False)


def _schedule(settings: Settings, given: Any, optimizer: Optimizer) -> Any:
    """The schedule: the given one, one from the given class or function, or the config's; None without any."""
    if given is not None:
        return given(optimizer) if callable(given) else given
    config = settings.config.scheduler
    return build_schedule(config.type, config.params, optimizer) if config.type else None
