"""Names of training programs: to-mcore and to-dcp --names, of a ZeRO run of a model of transformers, and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import zckpt
from zckpt.base.errors import UsageError
from zckpt.jobs.inspection import inspect_checkpoint

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA = FIXTURES / "transformers" / "llama_zero3" / "checkpoint"
MIXTRAL = FIXTURES / "fused" / "mixtral_zero3" / "checkpoint"
HF = zckpt.Options(form=zckpt.Form(to="hf"))


def same_as(run: Path, back: Path, truth: Path) -> None:
    """Exports a run and compares it with a model that went there and back; tied heads come back without a name."""
    zckpt.convert(run, truth, progress=False)
    found = zckpt.diff(truth, back, progress=False)
    assert found.tensors and all(tensor.same for tensor in found.tensors)
    assert set(found.only_a) <= {"lm_head.weight"} and not found.only_b


@pytest.mark.parametrize("run", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
@pytest.mark.parametrize("names", ["megatron-core", "torchtitan"])
def test_names_of_programs_and_back(run: Path, names: str, tmp_path: Path) -> None:
    zckpt.to_dcp(run, tmp_path / "dcp", names=names, under="", progress=False)
    assert zckpt.verify(run, tmp_path / "dcp", progress=False).ok
    zckpt.convert(tmp_path / "dcp", tmp_path / "hf", options=HF, progress=False)
    same_as(run, tmp_path / "hf", tmp_path / "truth")


@pytest.mark.parametrize("run", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
@pytest.mark.parametrize("numbered", [False, True], ids=["stacked", "numbered"])
def test_a_run_for_megatron_core(run: Path, numbered: bool, tmp_path: Path) -> None:
    """Names, padding, arguments and objects that a model asks for; verify; the same model back."""
    out = tmp_path / "run"
    report = zckpt.to_mcore(run, out, numbered_layers=numbered, make_vocab_size_divisible_by=48, progress=False)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    items = FileSystemReader(out / "release").read_metadata().state_dict_metadata
    common = torch.load(out / "release" / "common.pt", weights_only=False)
    config = json.loads((out / "config.json").read_text())
    rows, layers = items["embedding.word_embeddings.weight"].size[0], config["num_hidden_layers"]
    assert rows % 48 == 0 and rows >= config["vocab_size"] and common["args"].padded_vocab_size == rows
    assert any("was padded" in note for note in report.notes) == (rows > config["vocab_size"])
    assert common["args"].num_layers == layers and common["checkpoint_version"] == 3.0
    assert common["content_metadata"]["non_homogeneous_layers"] is numbered
    last = layers - 1
    prefix = f"decoder.layers.{last}." if numbered else "decoder.layers."
    place = "shard_0_1" if numbered else f"shard_{last}_{layers}"
    asked = [f"{prefix}self_attention.{module}._extra_state/{place}" for module in ("linear_qkv", "core_attention")]
    if run is MIXTRAL:
        experts = config["num_local_experts"]
        one = f"shard_{experts - 1}_{experts}" if numbered else f"shard_{last}.{experts - 1}_{layers}.{experts}"
        asked.append(f"{prefix}mlp.experts.experts.linear_fc1._extra_state/{one}")
        assert common["args"].num_experts == experts
    assert all(isinstance(items[name], BytesStorageMetadata) for name in asked)
    for name in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
        assert items[prefix + name].size[-1] == config["hidden_size"]
    assert zckpt.verify(run, out, progress=False).ok
    shown = "\n".join(inspect_checkpoint(out).lines(width=None))
    assert f"{prefix}mlp.linear_fc1.layer_norm_weight is also called {prefix}pre_mlp_layernorm.weight" in shown
    assert "tied" not in shown
    zckpt.convert(out, tmp_path / "hf", options=HF, progress=False)
    same_as(run, tmp_path / "hf", tmp_path / "truth")


def test_wishes_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        zckpt.to_dcp(LLAMA, tmp_path / "out", names="nosuch")
    assert "nosuch" in caught.value.found and "megatron-core" in caught.value.expected
    with pytest.raises(UsageError, match="optimizer states would keep names"):
        zckpt.to_dcp(LLAMA, tmp_path / "out", names="megatron-core", optimizer="optim")
    with pytest.raises(UsageError):
        zckpt.to_mcore(LLAMA, tmp_path / "out", tensor_parallel=0)
    assert not (tmp_path / "out").exists()
