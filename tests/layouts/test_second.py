"""Every family's second reader on real saves: it finds all tensors and states in the whole, where the first reader has them."""

from __future__ import annotations

from pathlib import Path

import pytest

import zckpt
from zckpt import layouts
from zckpt.base import limits
from zckpt.base.errors import ZckptError
from zckpt.checks.second import compare_places, compare_states
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog
from zckpt.jobs.options import Options
from zckpt.layouts.save.listing import ReadOptions

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


FLAT = {f"flat/{path.parent.name}": ReadOptions(shapes=str(path)) for path in FIXTURES.glob("flat/*/shapes.json")}
OPTIONS = {
    **FLAT,
    "megatron/llama_zero2_tp2_dp2": ReadOptions(tp_rules="megatron-swiglu"),
    "megatron/neox_pp2_tp2_dp2": ReadOptions(tp_rules="neox", tp=2, pp=2),
}
"""Saves that are read with options only; `tensor/plain_tp2` needs rules of its own (`test_model_parallel`)."""

RULES = {
    "fairscale_parts/metaseq_w4": ReadOptions(tp_rules="metaseq"),
    "megatron_legacy/hf_gpt2_tp2": ReadOptions(tp_rules="megatron"),
    "megatron_legacy/llama_tp2_pp2": ReadOptions(tp_rules="megatron-swiglu"),
}
"""Saves that are joined by the user's rules instead of their own; no second reader follows these."""

UNPROVED = {
    "autoep/folded_zero3_w4": "its experts are shared over tensor ranks at stage 3",
    "moe/zero0_w2 (states)": "an optimizer without masters numbers the experts of a rank among its other parameters",
    **dict.fromkeys(FLAT, "only the user's file says what is in a flat vector"),
}
"""Saves that no second reader proves, and why: `verify` says so. The list may only get shorter."""


@pytest.mark.parametrize("save", SAVES, ids=lambda save: f"{save.parent.name}/{save.name}")
def test_all_tensors_and_states_are_found_again(save: Path) -> None:
    name = str(save.relative_to(FIXTURES))
    try:
        opened = open_catalog(str(save / "checkpoint"), Reading(read_options=OPTIONS.get(name, ReadOptions())))
    except ZckptError:
        assert name == "tensor/plain_tp2"
        pytest.skip("is read with rules of its own only")
    listing = opened.place.listing
    places = compare_places(listing, opened.catalog)
    if name in UNPROVED:
        assert places.by == "none" and not places.problems
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


@pytest.mark.parametrize("name", [*sorted({name for name in UNPROVED if "(" not in name}), *RULES, "moe/zero0_w2"])
def test_what_no_second_reader_finds_is_said_and_nothing_is_called_safe(name: str, tmp_path: Path) -> None:
    save, options = FIXTURES / name / "checkpoint", {**OPTIONS, **RULES}.get(name)
    if f"{name} (states)" in UNPROVED:
        zckpt.reshard(save, tmp_path / "out", world_size=3, progress=False)
    else:
        zckpt.convert(save, tmp_path / "out", options=Options(read_options=options or ReadOptions()), progress=False)
    found = zckpt.verify(save, tmp_path / "out", read_options=options, progress=False)
    assert found.ok and found.deletable is not None and not found.deletable[0]
    assert "not found a second time" in found.deletable[1] and "--trust-reader" in found.deletable[1]
    assert "places" not in found.proved_by and found.not_proved
    if f"{name} (states)" not in UNPROVED:  # weights are told by the check of their own
        told = next(check.answer for check in found.checks if check.name == "places")
        assert told.startswith("not found a second time: ")
    trusted = zckpt.verify(save, tmp_path / "out", read_options=options, trust_reader=True, progress=False)
    assert trusted.deletable is not None and trusted.deletable[0]
