"""Which tests several workers get together, and which first."""

from __future__ import annotations

from collections import Counter

import pytest
from budget import BUDGET

_A_TEST_S = 0.05
"""Of a file that the budget does not name."""


def share(items: list[pytest.Item]) -> None:
    """Makes a group of each file's tests that are in none, and sorts groups by what they cost, longest first.

    So what a module's tests share is made by one worker, and no long group is left for the end, when the others are done.
    """
    files = {item: item.nodeid.partition("::")[0] for item in items}
    tests = Counter(files.values())
    groups: dict[pytest.Item, str] = {}
    costs: Counter[str] = Counter()
    for item, file in files.items():
        own = item.get_closest_marker("xdist_group")
        if own is None:
            item.add_marker(pytest.mark.xdist_group(file))
        groups[item] = str(own.args[0]) if own else file
        costs[groups[item]] += BUDGET[file] / tests[file] if file in BUDGET else _A_TEST_S  # type: ignore[assignment]
    items.sort(key=lambda item: (-costs[groups[item]], groups[item]))
