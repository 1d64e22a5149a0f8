"""The optimizer that a config asks for.

For `masters`. An optimizer sees this rank's rows of every master weight as a plain fp32 tensor, and nothing of sharding. That
is right for every optimizer that treats each element by itself; others are an error if there are shards. Lamb needs the norm
of whole tensors, and gets a function that sums over shards.
Source: DeepSpeed 0.19.8, runtime/engine.py `_configure_basic_optimizer`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.base.words import count, examples, join_words
from zckpt.live.device import has_fused_kernels
from zckpt.runtime.optimizers.lion_lamb import Lamb, Lion

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
