"""Deltas out of live models on several ranks: what `delta_checks` gives, and what it must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Outcome = Callable[..., list[Any]]


def wrong(given: dict[str, Any]) -> list[str]:
    return [name for name, value in given.items() if value is not True]


def test_what_changed_in_a_model(outcome: Outcome) -> None:
    for given in outcome("delta_checks.py", 2, "deltas"):
        assert len(given) == 12 and not wrong(given), wrong(given)


def test_what_a_step_of_the_trainer_changed(outcome: Outcome) -> None:
    first, _ = outcome("delta_checks.py", 2, "a_trainer")
    assert len(first) == 4 and not wrong(first), wrong(first)


def test_errors_are_those_of_all_ranks(outcome: Outcome) -> None:
    for given in outcome("delta_checks.py", 2, "refusals"):
        assert len(given) == 5 and not wrong(given), wrong(given)
