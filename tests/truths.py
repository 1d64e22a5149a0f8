"""The truth beside a fixture: what the live model held."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def how_of(fixture: Path) -> dict[str, Any]:
    """What is known of a fixture; `roles` has the tensors that are not parameters, `aliases` the tied names that are dropped."""
    return {"roles": {}, "aliases": {}, "tag": None} | json.loads((fixture / "how.json").read_text())


def kept_of(fixture: Path) -> dict[str, torch.Tensor]:
    """Every tensor once; of parameters the fp32 weights, if the optimizer had any."""
    truth = load_file(fixture / "truth.safetensors")
    states = fixture / "optimizer.safetensors"
    masters = load_file(states) if states.exists() and how_of(fixture).get("masters") else {}
    return {name: masters.get(f"param/{name}", tensor) for name, tensor in truth.items()}
