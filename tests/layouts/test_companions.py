"""Which config and tokenizer belong to a model: in a save, beside it, and in the directories in which programs keep them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import zckpt

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4}
TENSORS = {"model.embed_tokens.weight": torch.ones(3, 4), "model.norm.weight": torch.ones(4)}


def write_json(value: object, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def save_dcp(path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # it is one process
        dcp.save({"model": TENSORS}, checkpoint_id=path, no_dist=True)


def test_a_config_of_a_run_is_not_the_model_s(tmp_path: Path) -> None:
    """OLMo-core has the run's settings in a config.json beside the save."""
    save_dcp(tmp_path / "step10" / "model_and_optim")
    settings = {"model": {"_CLASS_": "olmo_core.nn.transformer.config.TransformerConfig"}, "trainer": {}}
    for place in (tmp_path / "step10", tmp_path / "step10" / "model_and_optim"):
        write_json(settings, place / "config.json")
        zckpt.convert(place, tmp_path / f"{place.name}-out", progress=False)
        assert not (tmp_path / f"{place.name}-out" / "config.json").exists()


def test_a_config_above_plain_weights_is_not_theirs(tmp_path: Path) -> None:
    """Llama's `original/` has other names than the model of transformers above it."""
    write_json(LLAMA, tmp_path / "llama" / "config.json")
    (tmp_path / "llama" / "original").mkdir()
    save_file(TENSORS, tmp_path / "llama" / "original" / "model.safetensors")
    zckpt.convert(tmp_path / "llama" / "original", tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_config_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """It may be the model's."""
    save_dcp(tmp_path / "run" / "save")
    (tmp_path / "run" / "config.json").write_text('{"model_type": ')
    with pytest.raises(zckpt.CorruptError, match=r"config\.json"):
        zckpt.convert(tmp_path / "run" / "save", tmp_path / "out", progress=False)


@pytest.mark.parametrize("ckpt", ["step_5/policy/weights", "step_5/policy/weights/model"])
@pytest.mark.parametrize(("config", "tokenizer"), [
    ("policy/huggingface", "policy/huggingface"), ("policy/huggingface", "policy/tokenizer"), ("policy", "policy/tokenizer"),
    ("{ckpt}/.hf_metadata", "{ckpt}/.hf_metadata"), ("{ckpt}/huggingface", "{ckpt}/huggingface"),
])  # fmt: skip
@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_where_programs_keep_them(ckpt: str, config: str, tokenizer: str, form: str, tmp_path: Path) -> None:
    """NeMo-RL beside the directory of the weights, Automodel in `.hf_metadata`."""
    save = tmp_path / ckpt
    save.mkdir(parents=True)
    if form == "dcp":
        save_dcp(save)
    else:
        save_file(TENSORS, save / "model.safetensors")
    for place, name, value in ((config, "config.json", LLAMA), (tokenizer, "tokenizer_config.json", {"a": 1})):
        own = save / place.removeprefix("{ckpt}/") if place.startswith("{") else tmp_path / "step_5" / place
        write_json(value, own / name)
    zckpt.convert(save, tmp_path / "out", dtype="bf16", progress=False)
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found == {**LLAMA, "dtype": "bfloat16"}
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"a": 1}
    assert zckpt.verify(save, tmp_path / "out", progress=False).ok
