"""Saves of Megatron-Core as it writes them: weights, fp32 weights, states, the run's arguments; what is wrong with them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file

from zckpt.jobs.open import open_catalog, read_tensor

FIXTURES = Path(__file__).parents[2] / "fixtures" / "mcore"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/how.json"))
NAMELESS = ("buckets", "gathered_dp2_0_12")
"""Their optimizers do not name parameters."""


def truth_of(name: str, kind: str = "truth") -> dict[str, torch.Tensor]:
    path = FIXTURES / name / f"{kind}.safetensors"
    return load_file(path) if path.exists() else {}


def copy_of(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / name))


def tensor(entry: Any) -> torch.Tensor:
    found = read_tensor(entry, "pt")
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_live_models(name: str) -> None:
    catalog = open_catalog(str(FIXTURES / name / "checkpoint")).catalog
    truth, states = truth_of(name), truth_of(name, "optimizer")
    named = bool(states) and name not in NAMELESS
    assert catalog.source.layout == "megatron-core" and catalog.tensors.keys() == truth.keys()
    for key, entry in catalog.tensors.items():
        assert same_bits(tensor(entry), states[f"param/{key}"] if named else truth[key]), key
        assert bool(entry.replicas) == named
        assert entry.role == "parameter"
