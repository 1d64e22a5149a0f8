"""Models of transformers that are loaded and made in parts: what `pretrained_checks` gives, and what it must be."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import proofs
import pytest

Outcome = Callable[..., list[Any]]
SCRIPT = "pretrained_checks.py"
LOADS_PARTS = int(importlib.metadata.version("transformers").partition(".")[0]) >= 5
WAYS = 2 if LOADS_PARTS else 1
"""In which models are made in parts: transformers 4 does so only because it knows the config."""


def test_from_pretrained_loads_what_it_loads_without_sharding(outcome: Outcome) -> None:
    for rank in outcome(SCRIPT, 2, "loaded"):
        assert len(rank) == 7 * WAYS
        assert {name: found for name, found in rank.items() if found} == {}


def test_what_is_missing_or_of_another_shape_is_initialised(outcome: Outcome) -> None:
    for rank in outcome(SCRIPT, 2, "missing_and_mismatched"):
        assert len(rank) == WAYS
        for found in rank.values():
            assert found == [["score.weight"], ["lm_head.weight", "model.embed_tokens.weight"], [0.02, 0.02], []]


def test_from_config_initialises_and_the_model_trains(outcome: Outcome) -> None:
    first, second = outcome(SCRIPT, 2, "made_from_a_config")
    assert first == second
    for spread, begin, end in first.values():
        assert spread == 0.02 and end < begin - 0.3


def test_embeddings_are_resized(outcome: Outcome) -> None:
    for rank in outcome(SCRIPT, 2, "resized"):
        assert rank == {name: [True, True, [[43, 16], [43, 16]], True, True] for name in ("shards", "t5")}


def test_the_documented_inference_runs_with_an_input_for_each_rank(outcome: Outcome) -> None:
    assert outcome(SCRIPT, 2, "inference_as_documented") == [[True, True]] * 2


@pytest.mark.skipif(not LOADS_PARTS, reason="in transformers 4 rank 0 reads all of a checkpoint")
@pytest.mark.parametrize("world", [2, *proofs.cases([[4]])])
def test_a_rank_needs_memory_for_its_part_only(outcome: Outcome, world: int) -> None:
    """The largest tensor has 7.8 MiB; a fifth of a part is less than the part of one more rank."""
    for rank in outcome(SCRIPT, world, "memory_of_a_load"):
        assert len(rank) == (4 if world == 2 else 2)
        for name, (part, peak) in rank.items():
            assert 0.9 * part <= peak <= 1.3 * part + 7.8125, (name, part, peak)
