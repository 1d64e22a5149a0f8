"""A tied weight that FSDP saved under each of its names is one weight; what only looks like it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bits import same_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_llama import CONFIG as LLAMA
from small_llama import weights as weights_of_llama

import zckpt
from zckpt.base.errors import InconsistentError
from zckpt.jobs.open import open_catalog
from zckpt.layouts.save.known_shapes import known_shapes

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


@pytest.mark.parametrize("form", ["weights", "gguf", "mlx", "fp8", "dcp", "--to hf", "average"])
def test_a_trained_head_is_not_lost_to_a_config_that_ties_it(form: str, tmp_path: Path) -> None:
    """The head of a tied model trained apart (an adapter merged into it, a framework that forgets ties): transformers 5 keeps it,
    loaders that believe the config do not. Outputs hold it, and their config says that the two are apart.
    """
    torch.manual_seed(0)
    source, out = tmp_path / "model", tmp_path / ("out.gguf" if form == "gguf" else "out")
    source.mkdir()
    config = {**LLAMA, "hidden_size": 48, "intermediate_size": 64, "tie_word_embeddings": True}
    shapes = known_shapes({**config, "tie_word_embeddings": False})
    assert shapes is not None
    truth = {name: torch.randn(shape).bfloat16().float() for name, shape in shapes.shapes.items()}
    save_file(truth, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    report: Any = {
        "weights": lambda: zckpt.convert(source, out, progress=False),
        "gguf": lambda: zckpt.to_gguf(source, out, type="f32", tokenizer="none", progress=False),
        "mlx": lambda: zckpt.to_mlx(source, out, progress=False),
        "fp8": lambda: zckpt.to_fp8(source, out, scheme="channel", progress=False),
        "dcp": lambda: zckpt.to_dcp(source, out, progress=False),
        "--to hf": lambda: zckpt.convert(source, out, options=zckpt.Options(form=zckpt.Form("hf")), progress=False),
        "average": lambda: zckpt.average([source, source], out, progress=False),
    }[form]()
    assert [note for note in report.notes if "'lm_head.weight': holds other numbers than the embedding" in note]
    if form == "gguf":
        zckpt.convert(out, out := tmp_path / "again", progress=False)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    with zckpt.open_checkpoint(out) as checkpoint:
        assert same_bits(checkpoint["lm_head.weight"].float(), truth["lm_head.weight"])
        assert same_bits(checkpoint["model.embed_tokens.weight"].float(), truth["model.embed_tokens.weight"])


def test_a_head_that_is_the_embedding_stays_tied(tmp_path: Path) -> None:
    weights = weights_of_llama()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    source = tmp_path / "model"
    source.mkdir()
    save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": True}))
    report = zckpt.convert(source, tmp_path / "out", progress=False)
    assert not [note for note in report.notes if "lm_head" in note]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
