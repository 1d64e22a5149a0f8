"""DeepSpeed's API on two ranks: what `api_checks` gives, and what it must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcome = Callable[..., list[Any]]


def test_one_parameter_is_the_same_at_every_stage(outcome: Outcome) -> None:
    ranks = outcome("api_checks.py", 2, "one_parameter")
    assert ranks[0] == ranks[1]
    by_stage = ranks[0]
    assert by_stage["0"]["frozen.weight"] is None and by_stage["0"]["embed.weight"][0] == [11, 6]
    assert all(by_stage["0"]["embed.weight"][1:])
    for stage in "123":
        for name, told in by_stage[stage].items():
            expected = by_stage["0"][name]
            assert told == expected or told[1:] == pytest.approx(expected[1:], rel=1e-4, abs=1e-7), (stage, name)


def test_whole_batches(outcome: Outcome) -> None:
    for rank in outcome("api_checks.py", 2, "batches_and_rates"):
        for losses, steps, rates in rank.values():
            for one, other in losses:
                assert other == pytest.approx(one, rel=1e-6)
            assert steps == [0, 0, 1] and rates == [0.5]


def test_weights_are_given_and_taken(outcome: Outcome) -> None:
    for rank in outcome("api_checks.py", 2, "weights_given_and_taken"):
        assert rank == {stage: [True, True] for stage in "023"}


def test_states_that_leave_and_come_back_change_nothing(outcome: Outcome) -> None:
    for stayed, moved in outcome("api_checks.py", 2, "states_that_leave"):
        assert stayed == moved and stayed[0] != stayed[-1]


def test_parameters_that_other_modules_use(outcome: Outcome) -> None:
    one, other = outcome("api_checks.py", 2, "parameters_used_elsewhere")
    assert one == other
