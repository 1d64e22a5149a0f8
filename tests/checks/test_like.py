"""`verify OUT --like MODEL`: no alarm on good weights, and every mutation named; transformers' own loader says the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import proofs
import pytest
import torch
from mutated import loads, mutants, problems_of, write
from safetensors.torch import load_file, save, save_file
from schemas import check
from typer.testing import CliRunner

import zckpt
from zckpt.base.errors import NotACheckpointError, UnsupportedError, UsageError
from zckpt.checks import like as likeness
from zckpt.cli import app
from zckpt.storage import fsspec_io

transformers = pytest.importorskip("transformers", minversion="5")

SMALL = {
    "vocab_size": 34, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 6, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 4}
LATENT = {
    "q_lora_rank": 6, "kv_lora_rank": 6, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 2, "n_routed_experts": 3,
    "n_shared_experts": 1, "moe_intermediate_size": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2,
}  # fmt: skip
VISION = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
          "patch_size": 4}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {**SMALL, "tie_word_embeddings": True},
    "LlamaForSequenceClassification": SMALL,
    "Qwen3MoeForCausalLM": {**SMALL, **EXPERTS},
    "DeepseekV3ForCausalLM": {**SMALL, **LATENT},
    "GPTNeoXForCausalLM": {k: v for k, v in SMALL.items() if k != "num_key_value_heads"},
    "LlavaForConditionalGeneration": {
        "text_config": {"model_type": "llama", **SMALL}, "vision_config": {"model_type": "clip_vision_model", **VISION},
    },
}  # fmt: skip
"""Those of which memory and hub differ in every way: fused experts, a head of another name, parts of a vision model."""

SHORT = {
    "Qwen2ForCausalLM": "drop rename transpose double cut vocabulary", "LlamaForSequenceClassification": "layer",
    "Qwen3MoeForCausalLM": "expert part of an expert head", "DeepseekV3ForCausalLM": "part of an expert",
    "GPTNeoXForCausalLM": "drop", "LlavaForConditionalGeneration": "layer",
}  # fmt: skip
"""What is tried outside of proofs."""

BY_DATA = ("Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GPTNeoXForCausalLM")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of a class, as `save_pretrained` writes it; made once."""
    root = tmp_path_factory.mktemp("models")

    def made(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            chosen = getattr(transformers, kind)
            torch.manual_seed(1)
            chosen(chosen.config_class(**MODELS[kind])).save_pretrained(path)
        return path

    return made


@pytest.mark.parametrize("kind", MODELS)
def test_by_the_class_on_the_meta_device(kind: str, home: Callable[[str], Path], tmp_path: Path) -> None:
    model = home(kind)
    found = zckpt.verify(model, like=model / "config.json")
    assert found.ok and found.loads_as and found.loads_as.startswith(f"{kind} of transformers"), found
    every = list(mutants(load_file(model / "model.safetensors")))
    for what, state, name in every if proofs.IS_WHOLE else [one for one in every if one[0] in SHORT[kind]]:
        out = write(tmp_path / "out", state, model)
        found = zckpt.verify(out, like=model)
        assert not found.ok and name in problems_of(found), what
        assert found.like and not found.like["loads"] and found.loads_as == ""
        assert not loads(kind, out), what


@pytest.mark.parametrize("reference", ["data", "headers"])
def test_without_transformers(
    reference: str, home: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likeness, "load_on_meta", lambda config, tensors: None)
    for kind in BY_DATA if reference == "data" else MODELS:
        model = home(kind)
        like = model / "config.json" if reference == "data" else model
        found = zckpt.verify(model, like=like)
        assert found.ok and found.loads_as and ("zckpt" in found.loads_as or reference == "headers"), found
        for what, state, name in mutants(load_file(model / "model.safetensors")):
            found = zckpt.verify(write(tmp_path / "out", state, model), like=like)
            assert not found.ok and name in problems_of(found), (kind, what)
    with pytest.raises(UnsupportedError, match="is not known"):
        zckpt.verify(home("LlavaForConditionalGeneration"), like=home("LlavaForConditionalGeneration") / "config.json")


def test_two_models_under_one_name(home: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers takes `model.` off names that it does not know: of two models it loads some of each, without a word."""
    model = home("Qwen2ForCausalLM")
    weights = load_file(model / "model.safetensors")
    out = write(tmp_path / "out", {f"model.{name}": weight for name, weight in weights.items()}, model)
    assert zckpt.verify(out, like=model).ok
    out = write(
        tmp_path / "two", {**weights, **{f"model.{name}": weight + 1 for name, weight in weights.items()}}, model
    )
    found = zckpt.verify(out, like=model)
    assert not found.ok and "model.model.norm.weight" in problems_of(found)


def test_names_of_memory(home: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers itself loads them; other loaders do not."""
    model = home("Qwen3MoeForCausalLM")
    loaded = transformers.Qwen3MoeForCausalLM.from_pretrained(model)
    out = write(tmp_path / "out", {n: t.clone() for n, t in loaded.state_dict().items()}, model)
    assert loads("Qwen3MoeForCausalLM", out)
    found = zckpt.verify(out, like=model)
    assert not found.ok and "model.layers.0.mlp.experts.gate_up_proj" in problems_of(found)
    assert "names that a model has in memory" in problems_of(found)
    assert zckpt.verify(out, like=out).ok  # where the hub has them so


def test_files_and_index(home: Callable[[str], Path], tmp_path: Path) -> None:
    model = home("Qwen2ForCausalLM")
    state = load_file(model / "model.safetensors")
    names = sorted(state)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    out = write(tmp_path / "out", state, model)
    (out / "model.safetensors").unlink()
    for file, own in files.items():
        save_file({name: state[name] for name in own}, out / file)
    assert "no loader looks for" in problems_of(zckpt.verify(out, like=model))
    index = {"metadata": {}, "weight_map": {name: file for file, own in files.items() for name in own}}
    for said, change in (
        ("", {}),
        ("another file", {names[0]: "model-00002-of-00002.safetensors"}),
        ("no file has", {"model.nothing": "model-00002-of-00002.safetensors"}),
    ):
        text = json.dumps({**index, "weight_map": {**index["weight_map"], **change}})
        (out / "model.safetensors.index.json").write_text(text)
        found = zckpt.verify(out, like=model)
        assert found.ok is (said == "") and said in problems_of(found)
    (out / "model-00002-of-00002.safetensors").unlink()
    assert "shards are missing" in problems_of(zckpt.verify(out, like=model))


def test_another_config_and_other_numbers(home: Callable[[str], Path], tmp_path: Path) -> None:
    model = home("LlamaForSequenceClassification")
    state = load_file(model / "model.safetensors")
    out = write(tmp_path / "out", {**state, "score.weight": state["score.weight"].int()}, model)
    assert "not of the model's kind of numbers: 'score.weight'" in problems_of(zckpt.verify(out, like=model))
    out = write(tmp_path / "out", state, model)
    config = json.loads((model / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0}))
    assert zckpt.verify(out, like=model).ok
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "does not fit" in problems_of(zckpt.verify(out, like=model))
    found = zckpt.verify(write(tmp_path / "out", {n: t.half() for n, t in state.items()}, model), like=model)
    assert found.ok and any("Loaders cast them" in note for note in found.notes)


def test_quantised_weights(home: Callable[[str], Path], tmp_path: Path) -> None:
    kind = "Qwen2ForCausalLM"
    fp8 = tmp_path / "fp8"
    zckpt.to_fp8(home(kind), fp8)
    assert zckpt.verify(fp8, like=home(kind)).ok
    state = load_file(fp8 / "model.safetensors")
    name = next(name for name in state if name.endswith("weight_scale_inv"))
    del state[name]
    assert not (found := zckpt.verify(write(tmp_path / "out", state, fp8), like=home(kind))).ok
    assert name.removesuffix("_scale_inv") in problems_of(found)


def test_the_command(home: Callable[[str], Path], tmp_path: Path) -> None:
    model = home("Qwen2ForCausalLM")
    good = CliRunner().invoke(app, ["verify", str(model), "--like", str(model)])
    assert good.exit_code == 0 and "loads       yes, as Qwen2ForCausalLM of transformers" in good.stdout
    state = load_file(model / "model.safetensors")
    state.pop("model.norm.weight")
    out = write(tmp_path / "out", state, model)
    bad = CliRunner().invoke(app, ["verify", str(out), "--like", str(model), "--json"])
    assert bad.exit_code == 1 and check("verify", bad.stdout)["like"]["missing"] == ["model.norm.weight"]  # type: ignore[index]
    assert "--as-part" not in bad.stdout  # nobody asked for a part
    both = zckpt.verify(model, like=model, deep=True)
    assert both.ok and both.loads_as and any(check.name == "bytes" for check in both.checks)
    with pytest.raises(NotACheckpointError, match="no such file"):
        zckpt.verify(model, like=tmp_path / "nothing")
    with pytest.raises(UsageError, match="not a set of weights"):
        zckpt.verify(Path(__file__).parents[2] / "fixtures/zero3/bf16_w2/checkpoint", like=model)


def test_headers_alone_are_read_at_an_address(home: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """163 shards cost less than a megabyte, in whatever they hold."""
    from fsspec.implementations.memory import MemoryFileSystem

    fs, model = MemoryFileSystem(), home("Qwen2ForCausalLM")
    state = load_file(model / "model.safetensors")
    large = {f"more.{n}.weight": torch.zeros(256, 256) for n in range(163 - len(state))}
    every = {**state, **large}
    files = {name: f"model-{n:05d}-of-00163.safetensors" for n, name in enumerate(sorted(every), 1)}
    index = {"metadata": {}, "weight_map": files}
    fs.pipe("/like/config.json", (model / "config.json").read_bytes())
    fs.pipe("/like/model.safetensors.index.json", json.dumps(index).encode())
    for name, file in files.items():
        fs.pipe(f"/like/{file}", save({name: every[name]}))
    read: list[int] = []
    own = fsspec_io._one

    def counted(fs: Any, path: str, start: int, stop: int) -> bytes:
        data = own(fs, path, start, stop)
        read.append(len(data))
        return data

    monkeypatch.setattr(fsspec_io, "_one", counted)
    monkeypatch.setattr(likeness, "load_on_meta", lambda config, tensors: None)
    found = zckpt.verify(model, like="memory://like")
    assert not found.ok and "more.0.weight" in problems_of(found) and 0 < sum(read) < 1_000_000


def test_an_output_says_what_a_loader_would_lack(home: Callable[[str], Path], tmp_path: Path) -> None:
    """Of jobs that write weights with a config: by zckpt's own data, without a byte read."""
    model = home("Qwen3MoeForCausalLM")
    report = zckpt.convert(model, tmp_path / "good")
    assert not any("A loader of" in note for note in report.notes)
    state = load_file(model / "model.safetensors")
    state.pop("model.layers.1.mlp.experts.2.up_proj.weight")
    report = zckpt.convert(write(tmp_path / "in", state, model), tmp_path / "out")
    assert any("lacks 'model.layers.1.mlp.experts.2.up_proj.weight'" in note for note in report.notes)
