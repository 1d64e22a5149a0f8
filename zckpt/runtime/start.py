"""From a model and a config to an engine.

For scripts, as `zckpt.runtime.initialize`. The config is checked before the model is touched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from zckpt.base.errors import UsageError
from zckpt.base.words import examples
from zckpt.runtime.buffers import cast_buffers
from zckpt.runtime.config import Settings, batch_of, read_config
from zckpt.runtime.data import Loader
from zckpt.runtime.engine import Engine
from zckpt.runtime.inference import allow_inference_mode
from zckpt.runtime.optim import Groups, build_optimizer, check_elementwise
from zckpt.runtime.schedules import build_schedule
from zckpt.runtime.sharded_parameter import ShardedParameter
from zckpt.runtime.sharding import DTYPES, Precision, Sharded, shard
from zckpt.runtime.units import Wrap
from zckpt.runtime.watch import Watch
from zckpt.runtime.world import join_world, mesh_of

_log = logging.getLogger("zckpt.runtime")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    auto: Mapping[str, Any] | None = None,
    wrap: Wrap | Iterable[Wrap] | None = None,
    allow_unknown: bool = False,
) -> tuple[Engine, Optimizer | None, Loader | None, Any]:
    """Shards a model and gives the engine that trains it.

    Args:
        args: a namespace whose `deepspeed_config` is the config, for scripts that hand it over so.
        model: the model; it is sharded in place. On every rank whole, or made under `zero.Init`.
        optimizer: made over the model's parameters, or a function that makes one from parameters or groups; None takes
            the config's.
        model_parameters: parameters or parameter groups for the config's optimizer; all that require gradients where not
            given.
        training_data: a dataset to make a loader of.
        lr_scheduler: a schedule made over `optimizer`, or a function that makes one from the optimizer; None takes the
            config's.
        collate_fn: for the loader.
        config: a path, a dict or JSON text: DeepSpeed's JSON.
        config_params: an old name of `config`.
        auto: values for keys that say "auto".
        wrap: which modules are gathered as one unit; see `zckpt.runtime.units.find_units`.
        allow_unknown: leave out unknown keys of the config instead of refusing them.

    Returns:
        engine, optimizer, loader, schedule; what there is none of is None.

    Raises:
        UsageError: the config or the arguments contradict themselves.
        UnsupportedError: the config asks for what is not built.
    """
    config = next((c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None), None)
    if model is None or config is None:
        raise UsageError("nothing to begin with", expected="initialize(model=..., config=...)")
    settings = read_config(config, auto=auto, hidden_size=_hidden_size(model), allow_unknown=allow_unknown)
    _check(settings, optimizer, lr_scheduler)
    world = join_world()
    batch = batch_of(settings, world.size)
    if world.rank == 0:
        _speak(settings)
    trains = optimizer is not None or settings.config.optimizer.type is not None
    groups = _groups(model, model_parameters)
    chosen = {id(p): p for group in groups for p in group["params"]}
    if isinstance(optimizer, Optimizer):
        chosen = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.numel()}
    _check_parameters(model, chosen)
    names = {id(p): name for name, p in model.named_parameters()}
    cast_buffers(model, settings)
    precision = _precision(settings, trains=trains)
    sharded = shard(model, settings.zero, precision, mesh_of(settings.zero, world), world, wrap)
    allow_inference_mode(model)
    if world.size > 1:
        Watch(model, world)
    built = None
    if trains:
        held = {one.name: one for one in sharded.held}
        masters = {key: held[names[key]].make_master() for key in chosen if held[names[key]].trained}
        built = _optimizer(settings, sharded, optimizer, groups, masters, {k: held[names[k]] for k in masters})
    loader = None
    if training_data is not None:
        drop_last = settings.config.dataloader_drop_last
        loader = Loader(training_data, batch.micro, world, collate_fn=collate_fn, drop_last=drop_last)
    engine = Engine(model, settings, batch, world, sharded, built, loader)
    engine.lr_scheduler = _schedule(settings, lr_scheduler, built)
    return engine, built, loader, engine.lr_scheduler


def _hidden_size(model: nn.Module) -> int | None:
    """A model's width, as transformers finds it for its "auto" values."""
    config = getattr(model, "config", None)
    for place in (config, getattr(config, "text_config", None)):
        width = getattr(place, "hidden_size", None) or max(getattr(place, "hidden_sizes", None) or [0])
        if isinstance(width, int) and width:
            return width
    return None


def _check(settings: Settings, optimizer: object, lr_scheduler: object) -> None:
    """What config and arguments may not ask of each other.

    Raises:
        UsageError: they do.
    """
    config, stage = settings.config, settings.zero.stage
    trains = optimizer is not None or config.optimizer.type is not None
    schedules = lr_scheduler is not None or config.scheduler.type is not None
    if not trains and schedules:
        raise UsageError("a schedule without an optimizer", file=settings.file)
    if not trains and stage in (1, 2):
        raise UsageError(
            f"ZeRO stage {stage} without an optimizer: there is nothing to shard",
            file=settings.file,
            remedy="Give an optimizer, or for inference choose stage 3 (sharded) or 0 (whole).",
        )
    if isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler) and not isinstance(optimizer, Optimizer):
        raise UsageError(
            "a schedule over an optimizer that was not given",
            remedy="Give both, or give the schedule as a function of the optimizer.",
        )


def _speak(settings: Settings) -> None:
    """Says once which keys change nothing, and why."""
    logger = logging.getLogger("zckpt")
    if not logger.hasHandlers():  # nobody has set up logging: notes go to stderr
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
    if settings.unused:
        _log.info(
            "Keys of %s that change nothing here:\n%s",
            settings.file,
            "\n".join(f"  {key}: {why}" for key, why in settings.unused),
        )


def _groups(model: nn.Module, model_parameters: Iterable[Any] | None) -> Groups:
    """Parameter groups, each with its own settings; one group of all parameters where none are given."""
    given = list(model.parameters() if model_parameters is None else model_parameters)
    if given and isinstance(given[0], dict):
        groups = [{**group, "params": _as_list(group["params"])} for group in given]
    else:
        groups = [{"params": given}]
    for group in groups:
        group["params"] = [p for p in group["params"] if p.requires_grad and p.numel()]
    return [group for group in groups if group["params"]]


def _as_list(params: Any) -> list[nn.Parameter]:
    several: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
    return [p[1] if isinstance(p, tuple) else p for p in several]


def _check_parameters(model: nn.Module, chosen: Mapping[int, nn.Parameter]) -> None:
    known = {id(p) for p in model.parameters()}
    strange = [f"{tuple(p.shape)}" for key, p in chosen.items() if key not in known]
    if strange:
        raise UsageError(
            "parameters that the model does not have",
            found=f"{len(strange):,} in the optimizer, of shapes {examples(strange)}",
            remedy="Make the optimizer over the parameters of the model that you hand in.",
        )


def _precision(settings: Settings, *, trains: bool) -> Precision:
    config, own = settings.config, settings.config.precision
    reduce = config.communication_data_type or own
    if settings.zero.stage < 2 and config.data_types.grad_accum_dtype == "fp32":
        reduce = "fp32"
    return Precision(None if own == "fp32" else DTYPES[own], DTYPES[reduce], trains)


def _optimizer(
    settings: Settings,
    sharded: Sharded,
    given: Optimizer | Callable[[Any], Optimizer] | None,
    groups: Groups,
    masters: Mapping[int, nn.Parameter],
    held: Mapping[int, ShardedParameter],
) -> Optimizer:
    """The optimizer on the masters.

    Args:
        settings: the config.
        sharded: the model.
        given: what the caller gave.
        groups: parameter groups of the model's parameters as they were before sharding.
        masters: by the `id` of these.
        held: likewise.
    """
    if isinstance(given, Optimizer):
        built = _move(given, masters, held)
    else:
        groups = [{**group, "params": [masters[id(p)] for p in group["params"]]} for group in groups]
        if given is not None:
            built = given(groups)
        else:
            config = settings.config.optimizer
            device = next(iter(masters.values())).device
            built = build_optimizer(config.type or "", config.params, groups, device)
    if sharded.mesh["shard"].size() > 1:
        check_elementwise(built, allowed=settings.config.zero_allow_untested_optimizer)
    return built


def _move(optimizer: Optimizer, masters: Mapping[int, nn.Parameter], held: Mapping[int, ShardedParameter]) -> Optimizer:
    """Lets an optimizer that was made over the plain model go on with the masters, its states cut likewise."""
    for group in optimizer.param_groups:
        before = [p for p in group["params"] if id(p) in masters]
        group["params"] = [masters[id(p)] for p in before]
        for p in before:
            state, one = optimizer.state.pop(p, None), held[id(p)]
            if state:
                optimizer.state[masters[id(p)]] = {name: _cut(value, one) for name, value in state.items()}
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def _cut(value: Any, held: ShardedParameter) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != held.shape or not value.ndim:
        return value
    if value.is_meta:
        raise UsageError(
            "an optimizer with states for parameters that have no numbers yet",
            found=held.name,
            remedy="Give the optimizer as a function: initialize(optimizer=lambda params: Adagrad(params)).",
        )
    assert held.master is not None
    part = value.reshape(-1)[held.start : held.start + held.count].view(held.master.shape)
    return part.to(held.master.device, copy=True)


def _schedule(settings: Settings, given: Any, optimizer: Optimizer | None) -> Any:
    if optimizer is None:
        return None
    if given is not None:
        return given if hasattr(given, "step") else given(optimizer)
    config = settings.config.scheduler
    return build_schedule(config.type, config.params, optimizer) if config.type else None
