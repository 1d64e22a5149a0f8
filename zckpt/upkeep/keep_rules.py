"""Which saves of a run stay and why; the rest may go. A pure function of what is known of the saves, and of their metrics.

For `prune`. Rules count complete saves only, series by series, so a save that a run could not resume from never takes the
place of one that it could.

[Note: metrics of a save] transformers writes `trainer_state.json` into each `checkpoint-N`. Its `log_history` has an entry for
each evaluation, with `step` and metrics with names that begin with `eval_`. A metric belongs to a save if it was measured at the
step of the save. A higher value is better, unless the name ends in `loss`.
Source: transformers 5.23, trainer.py `_determine_best_metric`, training_args.py `greater_is_better`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError, UsageError
from zckpt.base.words import examples
from zckpt.jobs.groups import option
from zckpt.layouts.run_saves import RunSave
from zckpt.storage.location import Location

STATE = "trainer_state.json"


def metric_of(text: str) -> tuple[str, bool]:
    """The name of a metric as a user gives it, `eval_loss`, `accuracy` or `score:min`, and whether a greater value is better.
    Raises UsageError if it has no name, or another word than min and max behind it.
    """
    name, colon, way = text.partition(":")
    if not name or (colon and way not in ("min", "max")):
        raise UsageError(
            "the metric cannot be understood", found=repr(text), expected="a name, NAME:min or NAME:max",
            remedy="Correct --keep-best.",
        )  # fmt: skip
    return name, way == "max" if colon else not name.endswith("loss")


def values_of(saves: Iterable[RunSave], metric: str) -> dict[str, float]:
    """Name of a save -> value of a metric, of saves that have one that is a number. `metric`: its name, from which `eval_` may
    be left out. Raises UsageError if none has; says which metrics there are.
    """
    saves = list(saves)
    states = {save.name: state for save in saves if (state := _state(save.path)) is not None}
    history = [entry for state in states.values() for entry in _history(state)]
    values: dict[str, float] = {}
    for name in (
        metric if metric.startswith("eval_") else f"eval_{metric}",
        metric,
    ):  # the training's loss counts only where there is no `eval_loss`
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
            f"no save has the metric {metric!r}",
            found=f"metrics {examples(known, 6)}" if known else f"no evaluation in any {STATE}",
            expected=f"an evaluation at the step of a save, in its {STATE}",
            remedy="Correct --keep-best, or leave it out.",
        )
    return values


def best_of(values: Mapping[str, float], *, greater: bool) -> str:
    """The save with the best value, the greatest or the least; the first of equal ones, as in transformers."""
    sign = 1 if greater else -1
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


_STAY = "Which saves stay"


@dataclass(frozen=True, slots=True)
class KeepRules:
    """What a user wants to keep, as `zckpt prune` asks for it: rules for saves that stay."""

    last: int | None = option(None, "--keep-last", "number", "The N newest.", _STAY, metavar="N")
    every: int | None = option(None, "--keep-every", "number", "Those at a multiple of M steps.", _STAY, metavar="M")
    best: Sequence[str] = option(
        (), "--keep-best", "texts",
        "The best by a metric in trainer_state.json; repeatable. Less is better if its name ends in loss.", _STAY,
        metavar="METRIC[:min|max]",
    )  # fmt: skip
    incomplete: bool = option(
        False, "--incomplete", "flag", "Let incomplete saves go too, if a newer one is complete.", _STAY
    )

    @property
    def metrics(self) -> tuple[tuple[str, bool], ...]:
        """The metrics that `best` names, as `metric_of` reads them. Raises UsageError if one cannot be understood."""
        return tuple(map(metric_of, self.best))

    def __post_init__(self) -> None:
        """Checks the rules. Raises UsageError if there is no rule, or one keeps nothing or cannot be understood."""
        if self.last is None and self.every is None and not self.best:
            raise UsageError(
                "no rule says which saves stay", expected="--keep-last, --keep-every or --keep-best",
                remedy="Pass at least one of them, such as --keep-last 3.",
            )  # fmt: skip
        for flag, number in (("--keep-last", self.last), ("--keep-every", self.every)):
            if number is not None and number < 1:
                raise UsageError(
                    f"{flag} takes a number from 1 on",
                    found=str(number),
                    remedy=f"Correct {flag}, or leave it out.",
                )
        _ = self.metrics


def reasons_to_stay(
    saves: Sequence[RunSave],
    problems: Mapping[str, str],
    rules: KeepRules,
    values: Mapping[str, Mapping[str, float]],
    needed: Mapping[str, Sequence[str]],
) -> dict[str, list[str]]:
    """Name of each save that stays -> why, of all `saves` in the order of their steps. By the name of a save: `problems`, of
    those that are not complete; `values` of each metric (by its name); `needed`, what else needs it. Raises IncompleteError if no
    save is complete.
    """
    complete = [save for save in saves if save.name not in problems]
    if not complete:
        raise IncompleteError(
            "holds no complete save, so none may go", file=saves[0].path.parent, found=next(iter(problems.values()), ""),
            remedy="Run zckpt verify on a save to see what is wrong with it. Nothing was deleted.",
        )  # fmt: skip
    why: dict[str, list[str]] = {save.name: [] for save in saves}
    for series in dict.fromkeys(save.series for save in saves):
        own = [save for save in complete if save.series == series and save.step is not None]
        for save in own[-1:]:
            why[save.name].append("the newest that is complete")
        for save in own[-(rules.last or 0) :] if rules.last else ():
            if save is not own[-1]:
                why[save.name].append(f"one of the last {rules.last}")
    for save in complete:
        if rules.every and save.step is not None and save.step % rules.every == 0:
            why[save.name].append(f"its step is a multiple of {rules.every:,}")
    for metric, greater in rules.metrics:
        known = {save.name: values[metric][save.name] for save in complete if save.name in values[metric]}
        if known:
            best = best_of(known, greater=greater)
            why[best].append(f"the best {metric} ({known[best]:.6g})")
    for save in saves:
        why[save.name] += needed.get(save.name, ())
        if save.step is None:
            why[save.name].append("its name has no step")
        if save.name in problems:
            newer = [
                other for other in complete if other.series == save.series and (other.step or 0) > (save.step or 0)
            ]
            if not newer:
                why[save.name].append("not complete, but no complete one is newer: it may still be written")
            elif not rules.incomplete:
                why[save.name].append("not complete; --incomplete lets such saves go")
    return {name: reasons for name, reasons in why.items() if reasons}
