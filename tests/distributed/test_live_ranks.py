"""Weights out of live models on several ranks: what `live_checks` gives, and what it must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import proofs
import pytest

Outcome = Callable[..., list[Any]]


def wrong(given: dict[str, Any]) -> list[str]:
    return [name for name, value in given.items() if value is not True]


@proofs.MORE
@pytest.mark.parametrize("world", [1, 2, 4])
def test_models_under_fully_shard(outcome: Outcome, world: int) -> None:
    for given in outcome("live_checks.py", world, "foreign"):
        least = 24 if world < 4 else 28 if proofs.IS_WHOLE else 10
        assert len(given) >= least and not wrong(given), wrong(given)


def test_any_dimensions_of_a_mesh(outcome: Outcome) -> None:
    for given in outcome("live_checks.py", 4, "boxes"):
        assert len(given) == 63 and not wrong(given), wrong(given)


@proofs.MORE
@pytest.mark.parametrize("world", [2, 4])
def test_engines_of_every_stage_and_precision(outcome: Outcome, world: int) -> None:
    for given in outcome("live_checks.py", world, "engines"):
        least = 8 if world == 4 else 44 if proofs.IS_WHOLE else 29
        assert len(given) >= least and not wrong(given), wrong(given)


@proofs.MORE
@pytest.mark.parametrize("world", [2, 4])
def test_loading_into_shards(outcome: Outcome, world: int) -> None:
    for given in outcome("live_checks.py", world, "loading"):
        assert len(given) >= (12 if proofs.IS_WHOLE or world < 4 else 5) and not wrong(given), wrong(given)


def test_from_pretrained(outcome: Outcome) -> None:
    names = ["config.json", "generation_config.json", "model.safetensors.index.json", "zckpt.json"]
    for given in outcome("live_checks.py", 2, "transformers_models"):
        assert given == {
            "gpt2": [True, "torch.bfloat16", "GPT2LMHeadModel", names],
            "llama": [True, "torch.bfloat16", "LlamaForCausalLM", names],
        }


@pytest.mark.parametrize("world", [2, 4])
def test_without_a_shared_file_system(outcome: Outcome, world: int) -> None:
    for rank, given in enumerate(outcome("live_checks.py", world, "no_shared_files")):
        told = {name: value for name, value in given.items() if "told" in name}
        assert all(value is True for name, value in given.items() if name not in told)
        for name, lines in told.items():
            count = name.split()[0]
            assert len(lines) == (rank == 0) and all(
                f"{count} of {world} ranks do not see" in line and "Rank 0 writes their weights" in line
                for line in lines
            )


def test_failures_are_everybodys(outcome: Outcome) -> None:
    for given in outcome("live_checks.py", 2, "failures"):
        assert given.pop("clamp") == [65504.0] and "found a file" in given.pop("a file")
        words = {
            "meta": "'late' is on the meta device",
            "shapes": "found F32 [3, 3] on rank 1; expected F32 [2, 3]",
            "large": "'blocks.1.up.weight' (78 elements, largest 1e+06)",
            "large whole": "'blocks.1.up.weight' (78 elements, largest 1e+06)",
            "file": "'a/b.bin'",
            "sparse": "torch.sparse_coo",
        }
        assert given.keys() == words.keys()
        for name, text in words.items():
            message, left = given[name]
            assert text in message and left == []


def test_ranks_that_do_not_come_are_named(outcome: Outcome) -> None:
    for rank, given in enumerate(outcome("live_checks.py", 2, "some_ranks_only")):
        assert given.pop("within") < 60 and given.pop("saved") is True and given.pop("left") == []
        assert len(given) == 3
        for name, told in given.items():
            assert (
                told.startswith(f"not every rank called {name.split()[0]}") and f"rank {1 - rank} did not come" in told
            )


def test_an_engine_without_an_optimizer(outcome: Outcome) -> None:
    for given in outcome("live_checks.py", 2, "inference"):
        for dtype in ("torch.float32", "torch.bfloat16"):
            assert "save_16bit_model" in given[f"{dtype} told"] and given[f"{dtype} left"] == []
            assert given[f"{dtype} weights"] is True


def test_a_save_replaces_the_one_before(outcome: Outcome) -> None:
    [given, other] = outcome("live_checks.py", 2, "directories")
    for size, shards in (("400", 5), ("5GB", 1), ("900", 3)):
        weights = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
        weights = [*weights, "model.safetensors.index.json"] if shards > 1 else ["model.safetensors"]
        assert given[size] == other[size] == ["global_step1", *weights, "tokenizer.json", "zckpt.json"]
        assert given[f"{size} equal"] is True and given[f"{size} sound"] is True
    assert given["bin"] is True and given["crc"] is None and given["columns"] is True
    assert {"halves", "frozen.weight"}.isdisjoint(given["frozen"]) and "embed.weight" in given["frozen"]
    assert other["frozen"] == []


def test_memory(outcome: Outcome) -> None:
    """Ranks hold 64 MiB each; the state dict that rank 0 gets has 128 MiB."""
    for rank, (saving, consolidating) in enumerate(outcome("live_checks.py", 4, "memory")):
        assert saving < 60 and consolidating < (190 if rank == 0 else 60)
