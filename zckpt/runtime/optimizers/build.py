"""The optimizer that a config asks for, and the master weights that it gets from a sharded model's parameters.

For `start`. An optimizer sees this rank's rows of every master weight as a plain fp32 tensor, and nothing of sharding. That
is right for every optimizer that treats each element by itself; others are an error if there are shards. Lamb needs the norm
of whole tensors, and gets a function that sums over shards.
Source: DeepSpeed 0.19.8, runtime/engine.py `_configure_basic_optimizer`.
Parameters are known by the `id` that they had before the model was sharded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.base.words import count, examples, join_words
from zckpt.live.device import has_fused_kernels
from zckpt.runtime.config.read import Settings
from zckpt.runtime.optimizers.lion_lamb import Lamb, Lion
from zckpt.runtime.sharding.parameter import ShardedParameter

Groups = list[dict[str, Any]]

_TORCHS = "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD"
_DEEPSPEEDS = "FusedAdam FusedLamb FusedLion DeepSpeedCPUAdam DeepSpeedCPUAdagrad DeepSpeedCPULion"
ELEMENTWISE = frozenset((*_TORCHS.split(), *_DEEPSPEEDS.split(), "Lion", "Lamb"))
"""Optimizers that may see shards, by the names of their classes; Lamb by its own means."""

_NOT_BUILT = frozenset(("muon", "muadam", "muadamw", "musgd", "onebitadam", "onebitlamb", "zerooneadam"))
_ADAM = frozenset(("adam", "adamw"))
_KNOWN = "Adam, AdamW, Adagrad, Lion, SGD, Lamb, or the name of a class of torch.optim"


def build_optimizer(kind: str, params: Mapping[str, Any], groups: Groups, device: torch.device) -> Optimizer:
    """The optimizer that a config asks for, with torch's fused kernels where torch has them for the device of the masters in
    `groups`. Upper and lower case are the same for DeepSpeed's own names. Raises UsageError if there is no such optimizer, or
    an argument that it does not have or does not take; UnsupportedError for one of DeepSpeed's that is not built.
    """
    kwargs = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    cls: Any
    cls, name = _class_of(kind), kind.lower()
    if name in _ADAM:
        cls, kwargs = _adam(name, kwargs)
    accepted = inspect.signature(cls).parameters
    unknown = [key for key in kwargs if key not in accepted]
    if unknown:
        raise UsageError(
            f"{kind} does not take {count(len(unknown), 'argument')} of optimizer.params", found=examples(unknown),
            expected=examples([key for key in accepted if key != "params"], 20),
            remedy="Remove or correct them in optimizer.params.",
        )  # fmt: skip
    if "fused" in accepted and kwargs.get("fused") is None and not kwargs.get("foreach"):
        kwargs["fused"] = has_fused_kernels(device, cls)
    try:
        if not isinstance(kwargs.get("lr", 0.0), int | float):
            raise TypeError(f"lr is {kwargs['lr']!r}")
        built: Optimizer = cls(groups, **kwargs)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{kind} does not accept these values of optimizer.params", found=f"{dict(params)}: {error}",
            remedy="Correct the value. The groups in model_parameters may have values of their own.",
        ) from error  # fmt: skip
    return built


def _class_of(kind: str) -> type[Optimizer]:
    own = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
    known: dict[str, type[Optimizer]] = {**own, "lion": Lion, "lamb": Lamb}
    if kind.lower() in known:
        return known[kind.lower()]
    found = getattr(torch.optim, kind, None)
    remedy = "Choose one of these, or pass an optimizer to initialize."
    if kind.lower() in _NOT_BUILT:
        raise UnsupportedError(f"optimizer.type {kind!r} is not built", expected=_KNOWN, remedy=remedy)
    if not (isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer):
        raise UsageError(f"optimizer.type {kind!r} is not known", expected=_KNOWN, remedy=remedy)
    return found


def _adam(name: str, kwargs: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    """DeepSpeed's rules: "Adam" decouples weight decay unless `adam_w_mode` is false; no decay unless asked for."""
    decoupled = kwargs.pop("adam_w_mode", True) or name == "adamw"
    if not kwargs.pop("torch_adam", False):
        kwargs.setdefault("weight_decay", 0.0)  # torch's own AdamW has 0.01
    for key in ("fp32_optimizer_states", "bias_correction"):
        if not kwargs.pop(key, True):
            what = f"Adam with {key} set to false is not built"
            raise UnsupportedError(what, remedy=f"Remove {key} from optimizer.params.")
    kwargs.pop("set_grad_none", None)
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), kwargs


def check_elementwise(optimizer: Optimizer, *, allowed: bool) -> None:
    """Raises UsageError for an optimizer that is not known to treat each element by itself, unless `allowed`."""
    name = type(optimizer).__name__
    if not allowed and name not in ELEMENTWISE:
        raise UsageError(
            f"optimizer {name} may need whole tensors, and would see only this rank's rows",
            expected=f"an optimizer that treats each element by itself: {join_words(sorted(ELEMENTWISE), 'or')}",
            remedy="If it treats each element by itself, set zero_allow_untested_optimizer to true. Otherwise train at "
            "stage 0, where it sees whole tensors.",
        )


def groups_of(model: nn.Module, model_parameters: Iterable[Any] | None) -> Groups:
    """Parameter groups, each with its own settings: those given, or one of all parameters. Frozen parameters are left out."""
    given = list(model.parameters() if model_parameters is None else model_parameters)
    groups = [{**group} for group in given] if given and isinstance(given[0], dict) else [{"params": given}]
    for group in groups:
        several = [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
        several = [p[1] if isinstance(p, tuple) else p for p in several]
        group["params"] = [p for p in several if p.requires_grad and p.numel()]
    return [group for group in groups if group["params"]]


def chosen_of(model: nn.Module, groups: Groups, optimizer: object) -> set[nn.Parameter]:
    """The parameters that will be trained, of a model that is not sharded yet: those of an optimizer that was made over
    parameters, or else of the groups. Raises UsageError if some are not the model's.
    """
    if isinstance(optimizer, Optimizer):
        groups = optimizer.param_groups
    chosen = {p for group in groups for p in group["params"] if p.numel()}
    strange = [f"{tuple(p.shape)}" for p in chosen - set(model.parameters())]
    if strange:
        raise UsageError(
            "the optimizer has parameters that the model does not have",
            found=f"{len(strange):,} of them, of shapes {examples(strange)}",
            remedy="Make the optimizer over the parameters of the model that you pass to initialize.",
        )
    return chosen


def optimizer_on_masters(
    settings: Settings,
    given: Optimizer | Callable[[Any], Optimizer] | None,
    groups: Groups,
    masters: Mapping[int, ShardedParameter],
    *,
    is_cut: bool,
) -> Optimizer:
    """Makes the masters, and the optimizer on them: the given one, one by the given function, or the config's. `groups` are
    of the parameters as they were before the model was sharded, `masters` has what this rank holds of each by `id`; `is_cut`:
    they are rows of larger tensors. Raises UsageError if it cannot be made, or may look across elements where masters are
    cut.
    """
    if not masters:
        raise UsageError(
            "the model has no parameter to train", expected="parameters with requires_grad",
            remedy="Set requires_grad of some parameters, or for inference leave out the optimizer.",
        )  # fmt: skip
    for sharded in masters.values():
        sharded.make_master()
    if isinstance(given, Optimizer):
        built = _move_to_masters(given, masters)
    else:
        groups = [{**group, "params": [masters[id(p)].master for p in group["params"]]} for group in groups]
        if given is not None:
            built = given(groups)
        else:
            config, device = settings.config.optimizer, groups[0]["params"][0].device
            built = build_optimizer(config.type or "", config.params, groups, device)
    if is_cut:
        check_elementwise(built, allowed=settings.config.zero_allow_untested_optimizer)
    return built


def _move_to_masters(optimizer: Optimizer, masters: Mapping[int, ShardedParameter]) -> Optimizer:
    """An optimizer that was made over the plain model, moved to the masters with its states."""
    for group in optimizer.param_groups:
        before = [p for p in group["params"] if id(p) in masters]
        group["params"] = [masters[id(p)].master for p in before]
        for p in before:
            state, sharded = optimizer.state.pop(p, None), masters[id(p)]
            if state:
                rows = {name: _rows_of_state(value, sharded) for name, value in state.items()}
                optimizer.state[sharded.master] = rows  # type: ignore[index]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def _rows_of_state(value: Any, sharded: ShardedParameter) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != sharded.shape or not value.ndim:
        return value
    if value.is_meta:
        raise UsageError(
            "the optimizer has states for parameters that have no numbers yet",
            found=f"states of {sharded.name!r}, in a model made under zero.Init",
            remedy="Pass the optimizer as a function: initialize(optimizer=lambda params: Adagrad(params)).",
        )
    part = value.reshape(-1)[sharded.elements].view(sharded.part().shape)
    return part.to(sharded.part().device, copy=True)
