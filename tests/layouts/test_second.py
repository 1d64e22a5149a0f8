"""Every family's second reader on real saves: it finds all tensors and states in the whole, where the first reader has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zckpt import layouts
from zckpt.base import limits
from zckpt.base.errors import ZckptError
from zckpt.checks.second import compare_places, compare_states
from zckpt.jobs.open import open_catalog

FIXTURES = Path(__file__).parents[2] / "fixtures"
SAVES = sorted(path.parent for path in FIXTURES.glob("*/*/checkpoint"))


def test_metadata_of_many_chunks_cost_the_second_reader_no_more_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_catalog(str(FIXTURES / "dcp/hsdp_w4/checkpoint"))
    monkeypatch.setattr(
        limits, "PICKLE_COST", 1 << 12
    )  # as metadata of a million chunks are to what any pickle may cost
    monkeypatch.setattr(limits, "PICKLE_COST_FREE", 1)
    monkeypatch.setattr(limits, "METADATA_COST_PER_BYTE", 1 << 10)
    assert compare_places(opened.place.listing, opened.catalog).found == len(opened.catalog)


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
