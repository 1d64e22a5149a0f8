"""What a Trainer's run recorded of its saves: metrics at their steps, and which is the best.

For `prune` and `keep_rules`. [Note: metrics of a save] transformers writes `trainer_state.json` into each `checkpoint-N`.
Its `log_history` has an entry for each evaluation, with `step` and metrics with names that begin with `eval_`. A metric
belongs to a save if it was measured at the step of the save. A higher value is better, unless the name ends in `loss`.
Source: transformers 5.23, trainer.py `_determine_best_metric`, training_args.py `greater_is_better`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.base.words import examples
from zckpt.layouts.run_saves import RunSave
from zckpt.storage.location import Location

STATE = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric by which saves are compared.

    Attributes:
        name: as the user gives it; `eval_` before it may be left out.
        greater: whether a greater value is better.
    """

    name: str
    greater: bool

    @property
    def names(self) -> tuple[str, str]:
        """The names of the metric in a log, in the order in which they count."""
        return (self.name if self.name.startswith("eval_") else f"eval_{self.name}"), self.name


def metric_of(text: str) -> Metric:
    """A metric as a user gives it: `eval_loss`, `accuracy`, `score:min`. Raises UsageError if it has no name, or
    another word than min and max behind it.
    """
    name, colon, way = text.partition(":")
    if not name or (colon and way not in ("min", "max")):
        raise UsageError(
            "the metric cannot be understood", found=repr(text), expected="a name, NAME:min or NAME:max",
            remedy="Correct --keep-best.",
        )  # fmt: skip
    return Metric(name, way == "max" if colon else not name.endswith("loss"))


def values_of(saves: Iterable[RunSave], metric: Metric) -> dict[str, float]:
    """Name of a save -> value of the metric, of saves that have one that is a number. Raises UsageError if none has;
    says which metrics there are.
    """
    saves = list(saves)
    states = {save.name: state for save in saves if (state := _state(save.path)) is not None}
    history = [entry for state in states.values() for entry in _history(state)]
    values: dict[str, float] = {}
    for name in metric.names:  # the training's loss counts only where there is no `eval_loss`
        for save in saves if not values else ():
            own = states.get(save.name, {})
            steps = {save.step, own.get("global_step")} - {None}
            for entry in (*_history(own), *history):
                value = entry.get(name)
                if entry.get("step") in steps and _is_number(value):
                    values.setdefault(save.name, float(value))
    if not values:
        known = sorted({key for entry in history for key in entry if key.startswith("eval_")})
        raise UsageError(
            f"no save has the metric {metric.name!r}",
            found=f"metrics {examples(known, 6)}" if known else f"no evaluation in any {STATE}",
            expected=f"an evaluation at the step of a save, in its {STATE}",
            remedy="Correct --keep-best, or leave it out.",
        )
    return values


def best_of(values: Mapping[str, float], metric: Metric) -> str:
    """The save with the best value; the first of equal ones, as in transformers."""
    sign = 1 if metric.greater else -1
    return max(values, key=lambda name: sign * values[name])


def best_by_trainer(saves: Iterable[RunSave]) -> dict[str, str]:
    """The save that the newest `trainer_state.json` calls the best, with the reason why it stays: the run loads it at
    its end.
    """
    for save in sorted(saves, key=lambda save: save.step or 0, reverse=True):
        if (state := _state(save.path)) is not None:
            best = state.get("best_model_checkpoint")
            return (
                {os.path.basename(best): f"{STATE} of {save.name!r} calls it the best"} if isinstance(best, str) else {}
            )
    return {}


def _state(path: Location) -> dict[str, Any] | None:
    """A save's `trainer_state.json`; None if there is none that can be read."""
    try:
        state = json.loads((path / STATE).read())
    except (OSError, ValueError, RecursionError):
        return None
    return state if isinstance(state, dict) else None


def _history(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = state.get("log_history")
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
