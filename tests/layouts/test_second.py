"""Every family's second reader on real saves: it finds all tensors and states in the whole, where the first reader has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zckpt import layouts
from zckpt.base.errors import ZckptError
from zckpt.checks.second import compare_places, compare_states
from zckpt.jobs.open import open_catalog
from zckpt.layouts.save.second import UnprovedFamily

FIXTURES = Path(__file__).parents[2] / "fixtures"
SAVES = sorted(path.parent for path in FIXTURES.glob("*/*/checkpoint"))


UNPROVED = {
    "autoep/folded_zero3_w4": "its experts are shared over tensor ranks at stage 3",
    "moe/zero0_w2 (states)": "an optimizer without masters numbers the experts of a rank among its other parameters",
}
"""Saves that no second reader proves, and why: `verify` says so. The list may only get shorter."""


@pytest.mark.parametrize("save", SAVES, ids=lambda save: f"{save.parent.name}/{save.name}")
def test_all_tensors_and_states_are_found_again(save: Path) -> None:
    try:
        opened = open_catalog(str(save / "checkpoint"))
    except ZckptError:
        pytest.skip("is read with options only")
    listing = opened.place.listing
    if isinstance(layouts.family_of(listing).second, UnprovedFamily):
        pytest.skip("has no second reader")
    places = compare_places(listing, opened.catalog)
    name = str(save.relative_to(FIXTURES))
    if name in UNPROVED:
        assert places.by == "none"
        return
    assert places == ("second reader", len(opened.catalog), "", ())
    try:
        training = layouts.read_training(listing)
    except ZckptError:
        return
    states = compare_states(listing, training, opened.catalog.tensors)
    if f"{name} (states)" in UNPROVED:
        assert states.by == "none" and not states.problems
        return
    assert states == ("second reader", sum(map(len, training.states.values())), "", ())
