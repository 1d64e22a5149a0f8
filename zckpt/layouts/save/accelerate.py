"""The directories in which accelerate's `save_state` keeps the models and optimizers of an FSDP run, one beside the other.

For whatever finds, reads, copies or writes them.
Source: accelerate 1.15, utils/fsdp_utils.py `save_fsdp_model`, `save_fsdp_optimizer`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from zckpt.base.patterns import compile_late
from zckpt.layouts.save.trainers import FSDP_MODEL
from zckpt.storage.location import Location

PART = compile_late(r"(?:pytorch_model_fsdp|optimizer|model|optim)_\d+")
"""The pattern of directories of a model or an optimizer, which are parts of a save."""

FIRST_MODEL = "pytorch_model_fsdp_0"
FIRST_OPTIMIZER = "optimizer_0"

_OF_ADAMW: dict[str, object] = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip
"""Settings of torch's AdamW that DeepSpeed's Adam has not, as `torch.optim.AdamW(params)` has them."""


def complete_settings(settings: Mapping[str, object], states: Collection[str]) -> dict[str, object]:
    """A group's settings with all those that accelerate requires; DeepSpeed's Adam has fewer."""
    if {"exp_avg", "exp_avg_sq"} <= {*states} and "lr" in settings:
        return {**_OF_ADAMW, "initial_lr": settings["lr"], **settings}
    return dict(settings)


def optimizer_beside(model: Location) -> Location | None:
    """The optimizer's directory beside a model's; None for directories of other names."""
    match = FSDP_MODEL.fullmatch(model.name)
    return None if match is None else model.absolute().parent / f"optimizer_{match['number']}"
