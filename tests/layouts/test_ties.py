"""A tied weight that FSDP saved under each of its names is one weight; what only looks like it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bits import same_bits
from safetensors import safe_open
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import InconsistentError
from zckpt.jobs.open import open_catalog

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dcp"
ROWS = 4000


@pytest.mark.parametrize("name", ["fsdp2_nested_w2", "fsdp1_w2"])
def test_a_tied_weight_is_written_once(name: str, tmp_path: Path) -> None:
    zckpt.convert(FIXTURES / name / "checkpoint", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert "head.weight" not in found and found.keys() == load_file(FIXTURES / name / "truth.safetensors").keys()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["head.weight"] == "embed.weight"
    assert zckpt.verify(FIXTURES / name / "checkpoint", tmp_path / "out").ok
    zckpt.to_dcp(FIXTURES / name / "checkpoint", tmp_path / "dcp", optimizer="optim")
    assert open_catalog(str(tmp_path / "dcp")).catalog.aliases == {"head.weight": "embed.weight"}
    zckpt.reshard(FIXTURES / name / "checkpoint", tmp_path / "zero", world_size=2, stage=2)
    assert open_catalog(str(tmp_path / "zero")).catalog.aliases == {"head.weight": "embed.weight"}
    with zckpt.open_checkpoint(FIXTURES / name / "checkpoint") as ckpt:
        assert same_bits(ckpt["head.weight"], found["embed.weight"])


def saved(path: Path, head: torch.Tensor, embed: torch.Tensor, step: int | None = 2, owns_head: bool = False) -> Path:
    """A save with an embedding and a head, and an optimizer that has taken steps with the one or with both."""
    state: dict[str, object] = {"model": {"embed.weight": embed, "head.weight": head}}
    if step is not None:
        owned = ["embed.weight", *(["head.weight"] if owns_head else [])]
        moments = {"exp_avg": torch.ones_like(embed), "step": torch.tensor(float(step))}
        groups = [{"params": owned, "lr": 0.1}]
        state["optim"] = {"state": {name: dict(moments) for name in owned}, "param_groups": groups}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.filterwarnings("ignore")
def test_what_is_taken_for_one_weight(tmp_path: Path) -> None:
    embed = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
    other = embed.clone()
    other[0, 3] += 1
    tied = {"head.weight": "embed.weight"}
    cases: dict[str, tuple[Path, dict[str, str]]] = {
        "one is not trained": (saved(tmp_path / "tied", embed.clone(), embed), tied),
        "both are trained": (saved(tmp_path / "both", embed.clone(), embed, owns_head=True), {}),
        "no step was taken": (saved(tmp_path / "new", embed.clone(), embed, step=0), {}),
        "other numbers": (saved(tmp_path / "other", other, embed), {}),
        "one number alone": (saved(tmp_path / "zeros", torch.zeros(9, 2), torch.zeros(9, 2)), {}),
        "weights alone": (saved(tmp_path / "weights", embed.clone(), embed, step=None), {}),
    }
    for says, expected in {True: tied, None: tied, False: {}}.items():
        path = saved(tmp_path / f"config {says}", embed.clone(), embed, step=None)
        config = {"model_type": "gemma", "vocab_size": ROWS} | ({} if says is None else {"tie_word_embeddings": says})
        (path / "config.json").write_text(json.dumps(config))
        cases[f"a config that says {says}"] = path, expected
    for what, (path, expected) in cases.items():
        assert dict(open_catalog(str(path)).catalog.aliases) == expected, what


@pytest.mark.filterwarnings("ignore")
def test_all_numbers_are_compared_before_one_is_left_out(tmp_path: Path) -> None:
    embed = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
    head = embed.clone()
    head[7, 3] += 1  # not among those that are compared when the save is opened
    path = saved(tmp_path / "save", head, embed)
    assert open_catalog(str(path)).catalog.aliases
    with pytest.raises(InconsistentError, match=r"head\.weight"):
        zckpt.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
