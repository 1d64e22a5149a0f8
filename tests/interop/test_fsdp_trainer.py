"""transformers' Trainer and accelerate under FSDP go on, at another world size, from what zckpt made of their directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import proofs
import pytest
from ranks import TRAINER, run_ranks

import zckpt

pytestmark = proofs.ONLY

WORKER = Path(__file__).with_name("fsdp_trainer_worker.py")
BOUND = 2e-6
"""Of a loss: four of fp32's steps at 4; other ranks add the gradients in another order."""
TRAINERS = {"trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"}


def run(ranks: int, home: Path) -> None:
    run_ranks(ranks, home, WORKER, TRAINER, HF_HUB_OFFLINE="1")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two ranks; on four, what zckpt made of their saves goes on; on two, what it made of four ranks' saves."""
    home = tmp_path_factory.mktemp("fsdp")
    run(2, home)
    runs = home / "runs"
    for way in ("Trainer 2S", "accelerate 2S"):
        zckpt.to_dcp(runs / way / "checkpoint-2", home / "on 4" / way, accelerate=True)
    for way in ("1S", "2F"):
        out = home / "on 4" / f"Trainer 2S of {way}"
        zckpt.to_dcp(runs / f"Trainer {way}", out, accelerate=True, tag="checkpoint-2")
    zckpt.reshard(runs / "Trainer 2S", home / "zero", world_size=3, stage=3, tag="checkpoint-2")
    zckpt.to_dcp(home / "zero", home / "on 4" / "Trainer 2S of zero", accelerate=True)
    run(4, home)
    source = home / "runs on 4" / "Trainer 2S" / "checkpoint-3"
    assert {*TRAINERS, "rng_state_3.pth"} <= {path.name for path in source.iterdir()}
    zckpt.to_dcp(source, home / "on 2" / "Trainer 2S", accelerate=True)
    run(2, home)
    return home


def results(home: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / f"{name}.json").read_text())
    return found


def assert_alike(found: list[list[float]], wanted: list[list[float]]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=BOUND), (found, wanted)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(4, "Trainer 2S"), (4, "Trainer 2S of 1S"), (4, "Trainer 2S of 2F"), (4, "Trainer 2S of zero"), (2, "Trainer 2S")],
)
def test_the_trainer_goes_on_with_other_ranks(ranks: int, name: str, home: Path) -> None:
    """Losses, norms, rates and evaluations of the run that never stopped; all that a resume needs was carried.

    FSDP1's saves go on under `fully_shard`: accelerate 1.15 loses the optimizer's states when it loads one under FSDP1, its own
    too, since it asks an optimizer that has none yet which states to load.
    """
    whole = results(home, "2")["Trainer 2S"]
    found = results(home, f"{ranks} resumed")[name]
    assert found["steps"] == 4 and [row[0] for row in found["history"]] == [1, 2, 3, 4, 2, 4]
    assert_alike(found["history"], whole["history"])
    assert {path.name for path in (home / f"on {ranks}" / name).iterdir()} >= TRAINERS


def test_accelerate_goes_on_with_more_ranks(home: Path) -> None:
    whole, found = results(home, "2"), results(home, "4 resumed")
    assert len(found["accelerate 2S"]["history"]) == 2
    assert_alike(found["accelerate 2S"]["history"], whole["accelerate 2S"]["history"][2:])
