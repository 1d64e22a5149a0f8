"""The optimizer's states for a Megatron-Core save: Adam's moments and fp32 weights, under Megatron-Core's names.

For `to_mcore`. States lie as the weights do, so they are renamed, fused, stacked and padded by the same rules. Megatron-Core's
optimizer has its own groups, made by rule: matrices decay, vectors and biases do not. Their settings are the run's.
Source: megatron-core 0.14 and 0.16.1, optimizer/distrib_optimizer.py `load_state_dict`; Megatron-LM, megatron/training/
{checkpointing,optimizer_param_scheduler}.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zckpt import layouts
from zckpt.base.errors import OTHER_SAVE, InconsistentError, UnsupportedError, ZckptError
from zckpt.base.words import examples, join_words
from zckpt.containers import TensorRef
from zckpt.core.catalog import Catalog
from zckpt.layouts.megatron_core.write import MegatronOptimizer
from zckpt.layouts.places import Place
from zckpt.layouts.run.training import Training
from zckpt.layouts.run.values import number_in
from zckpt.naming.writers import RenamedModel, SchemeNames, name_for_writer

_MOMENTS = ("exp_avg", "exp_avg_sq")


def megatron_states(
    place: Place,
    chosen: Catalog,
    known: Mapping[str, str],
    model: RenamedModel,
    naming: SchemeNames,
    *,
    experts_apart: bool,
    allow_unknown: bool = False,
) -> tuple[MegatronOptimizer, tuple[str, ...]]:
    """Names the optimizer's states as Megatron-Core does; returns notes for a person beside them.

    Args:
        place: the checkpoint.
        chosen: all of its tensors, without wrappers' prefixes.
        known: their names -> those in the files.
        model: they, under Megatron-Core's names.
        naming: by which they were named.
        experts_apart: whether experts have an optimizer of their own.
        allow_unknown: go on though optimizer files hold keys that zckpt does not know.

    Raises:
        UnsupportedError: the states are not Adam's, or not those of all parameters.
        InconsistentError: parameters were updated in different numbers of steps.
    """
    training = layouts.read_training(place.listing, allow_unknown=allow_unknown)
    _check(training, chosen.source.path)
    weights = [entry for entry in model.catalog.tensors.values() if entry.role != "buffer"]
    places = [("param", entry) for entry in weights]
    for moment in _MOMENTS:
        held = {
            name: replace(training.state(known[name], moment), name=name) if entry.role == "parameter" else entry
            for name, entry in chosen.tensors.items()
            if entry.role != "frozen"  # a tied head is, in some saves
        }
        try:
            composed = name_for_writer(replace(chosen, tensors=held), place, naming).catalog
        except ZckptError as error:
            raise _untrained_error(chosen) or error from error
        states = [entry for entry in composed.tensors.values() if entry.role != "buffer"]
        if [entry.name for entry in states] != [entry.name for entry in weights]:
            raise _untrained_error(chosen) or InconsistentError(
                "the optimizer states have other names than the weights", file=chosen.source.path, remedy=OTHER_SAVE
            )
        places += [(moment, entry) for entry in states]
    settings, notes = _settings(training)
    step = _step(training, chosen.source.path)
    return MegatronOptimizer(tuple(places), settings, step, experts_apart), notes


def _check(training: Training, path: str) -> None:
    """Raises UnsupportedError for states that Megatron-Core's Adam does not have."""
    kinds = {state for group in training.groups for state in group.states}
    if kinds != set(_MOMENTS):
        raise UnsupportedError(
            "has states that are not those of Adam", file=path, found=join_words(sorted(kinds)) or "none",
            expected=join_words(list(_MOMENTS)), remedy="Leave --optimizer out, and write the weights alone.",
        )  # fmt: skip


def _untrained_error(weights: Catalog) -> UnsupportedError | None:
    """The error for parameters without states; None if every parameter has some."""
    frozen = [entry.name for entry in weights.tensors.values() if entry.role == "frozen"]
    return UnsupportedError(
        "some parameters were not trained, and have no states", file=weights.source.path, found=examples(frozen),
        remedy="Leave --optimizer out, and write the weights alone.",
    ) if frozen else None  # fmt: skip


def _settings(training: Training) -> tuple[dict[str, object], tuple[str, ...]]:
    """The settings that all of Megatron-Core's groups get, with notes where the run's groups differ."""
    decays = [
        number for group in training.groups if (number := _number(group.settings.get("weight_decay"))) is not None
    ]
    first = training.groups[0].settings
    several = [
        key for key in ("lr", "betas", "eps") if len({repr(group.settings.get(key)) for group in training.groups}) > 1
    ]
    betas = first.get("betas")
    found: dict[str, object] = {
        "lr": _number(first.get("lr")) or 0.0,
        "betas": tuple(betas) if isinstance(betas, list | tuple) and len(betas) == 2 else (0.9, 0.999),
        "eps": _number(first.get("eps")) or 1e-8,
        "weight_decay": max(decays, default=0.0),
    }
    note = f"The run's parameter groups differ in {join_words(several)}; Megatron-Core's have those of the first."
    return found, (note,) if several else ()


def _number(value: object) -> float | None:
    """A number, or the one in a tensor."""
    if isinstance(value, TensorRef) and value.numel == 1:
        value = number_in(value)
    return float(value) if isinstance(value, int | float) else None


def _step(training: Training, path: str) -> int:
    """The number of steps of the optimizer."""
    steps: set[int] = set()
    for group in training.groups:
        scalars: Mapping[str, object] = group.scalars
        steps.add(int(_number(scalars.get("step")) or 0))
    if len(steps) != 1 or 0 in steps:
        raise InconsistentError(
            "the optimizer's step is not one", file=path,
            found=f"steps {join_words([str(step) for step in sorted(steps)])}",
            expected="the same step of all parameters, 1 or more",
            remedy="Leave --optimizer out, and write the weights alone.",
        )  # fmt: skip
    return steps.pop()
