"""The loop behind `zckpt train`: what `train_checks` gives, and what it must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcome = Callable[..., list[Any]]


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_stopped_ends_like_one_that_did_not(outcome: Outcome, world: int) -> None:
    for rank, given in enumerate(outcome("train_checks.py", world, "straight_and_resumed")):
        for stage in "30":
            assert given.pop(f"{stage} steps") == [[1, 2, 3, 4]] * 2
            if rank == 0:
                assert given.pop(f"{stage} tags") == ["global_step2", "global_step3", "global_step4"]
        assert len(given) == (12 if rank == 0 else 6) and all(value is True for value in given.values()), given


def test_a_model_of_transformers(outcome: Outcome) -> None:
    for given in outcome("train_checks.py", 2, "transformers_model"):
        assert given == dict.fromkeys(("weights", "learnt", "loss", "again"), True)


def test_tiny_gpt_is_gpt2(outcome: Outcome) -> None:
    for given in outcome("train_checks.py", 2, "tiny_is_gpt2"):
        assert given == {"loss": True, "logits": True, "kind": "GPT2LMHeadModel"}
