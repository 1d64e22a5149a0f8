"""What `make test` does a systematic part of, `make proofs` does whole; and only that, not what stands in the same files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

IS_WHOLE = bool(os.environ.get("ZCKPT_PROOFS"))
MORE = pytest.mark.proof
"""Of a test that does more there than in `make test`."""
ONLY = [MORE, pytest.mark.skipif(not IS_WHOLE, reason="make proofs runs it")]
"""Of a whole file that only `make proofs` runs."""


def only(test: Any) -> Any:
    """A test that only `make proofs` runs."""
    for mark in ONLY:
        test = mark(test)
    return test


def cases(values: Iterable[Any]) -> list[Any]:
    """Cases of a test that only `make proofs` runs; without it there are none."""
    return [pytest.param(*value, marks=MORE) for value in values] if IS_WHOLE else []


def in_turn(rows: Sequence[Any], *axes: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Every row with all combinations of values; without proofs with one, which take turns."""
    every = list(itertools.product(*axes))
    return [(row, *one) for at, row in enumerate(rows) for one in (every if IS_WHOLE else [every[at % len(every)]])]


def covering(*axes: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Few of all combinations, such that every pair of values of two axes is in one."""
    return covering_of(list(itertools.product(*axes)))


def covering_of(rows: Sequence[tuple[Any, ...]], chosen: Sequence[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Few of these, such that every pair of values that is in one is in one of them: the best one first, again and again.

    Args:
        rows: what may be chosen.
        chosen: what is chosen already; it is not returned.
    """

    def pairs(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    missing = set().union(*map(pairs, rows)).difference(*map(pairs, chosen))
    found = []
    while missing:
        found.append(max(rows, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(found[-1])
    return found
