"""Which saves of a run stay and why; the rest may go. A pure function of what is known of the saves.

For `prune`. Rules count complete saves only, series by series, so a save that a run could not resume from never takes the
place of one that it could.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError, UsageError
from zckpt.jobs.groups import option
from zckpt.layouts.run_saves import RunSave
from zckpt.upkeep.metrics import Metric, best_of, metric_of

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
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics that `best` names. Raises UsageError if one cannot be understood."""
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
    values: Mapping[Metric, Mapping[str, float]],
    needed: Mapping[str, Sequence[str]],
) -> dict[str, list[str]]:
    """Name of each save that stays -> why.

    Args:
        saves: all, in the order of their steps.
        problems: name of a save that is not complete -> what is wrong with it.
        rules: what the user wants to keep.
        values: metric -> name of a save -> its value.
        needed: name of a save -> what else needs it.

    Raises:
        IncompleteError: no save is complete.
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
    for metric in rules.metrics:
        known = {save.name: values[metric][save.name] for save in complete if save.name in values[metric]}
        if known:
            best = best_of(known, metric)
            why[best].append(f"the best {metric.name} ({known[best]:.6g})")
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
