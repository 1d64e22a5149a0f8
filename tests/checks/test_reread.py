"""The second reader: what it may cost, and that it looks at what the first one read."""

from __future__ import annotations

from pathlib import Path

import pytest

from zckpt.base import limits
from zckpt.checks.reread import misplaced
from zckpt.jobs.open import open_catalog

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize("fixture", ["zero1/bf16_w3", "zero3/mics_w4", "autoep/zero3_w4", "zero0/fp32", "dcp/boxes_w4"])
def test_every_tensor_is_found_again(fixture: str) -> None:
    opened = open_catalog(str(FIXTURES / fixture / "checkpoint"))
    count, bad = misplaced(opened.place.listing, opened.catalog)
    assert count == len(opened.catalog) and not bad


def test_metadata_of_many_chunks_cost_the_second_reader_no_more_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_catalog(str(FIXTURES / "dcp/hsdp_w4/checkpoint"))
    monkeypatch.setattr(limits, "PICKLE_COST", 1)  # as metadata of a million chunks are to what any pickle may cost
    monkeypatch.setattr(limits, "PICKLE_COST_FREE", 1)
    monkeypatch.setattr(limits, "METADATA_COST_PER_BYTE", 1 << 10)
    count, bad = misplaced(opened.place.listing, opened.catalog)
    assert count == len(opened.catalog) and not bad
