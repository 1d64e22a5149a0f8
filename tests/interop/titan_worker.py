"""Loads saves of `to-dcp --names torchtitan` into torchtitan's own models by torch's own loader; all is there, bit by bit.

For test_torchtitan, in an interpreter that finds torchtitan. Arguments: directories of pairs (save, fixture).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "fixtures"))

import generate_torchtitan
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file


def main(save: Path, fixture: Path) -> None:
    generate_torchtitan.stand_in_for_data()
    import titan_models

    family = fixture.name.rpartition("_w")[0].rsplit("_", 3)[0]
    truth = load_file(fixture / "truth.safetensors")
    layers = 1 + max(int(name.split(".")[1]) for name in truth if name.startswith("layers."))
    model = titan_models.build(family, layers).model
    state = {name: torch.full_like(tensor, 7.0) for name, tensor in model.state_dict().items() if name != "freqs_cis"}
    dcp.load(state, checkpoint_id=save, no_dist=True)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys in ([], ["freqs_cis"]) and not result.unexpected_keys, result
    found = model.state_dict()
    for name, tensor in truth.items():
        is_balance = "expert_bias" in name and family != "deepseek_v3"
        if name != "freqs_cis":
            assert torch.equal(found[name], torch.zeros_like(tensor) if is_balance else tensor), name
    print(f"{fixture.name} equal")


if __name__ == "__main__":
    for number in range(1, len(sys.argv), 2):
        main(Path(sys.argv[number]), Path(sys.argv[number + 1]))
