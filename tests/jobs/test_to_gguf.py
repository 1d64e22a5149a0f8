"""GGUF from shards: what is the job's own, beside tensors and metadata, which tests/interop/test_gguf.py compares."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import proofs
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from hangs import HANG_S
from safetensors.torch import load_file, save_file

import zckpt
from zckpt.base.errors import CastError, IncompleteError, InconsistentError, UnsupportedError, UsageError
from zckpt.jobs.declarations import TO_GGUF, Asked
from zckpt.jobs.own_groups import Gguf
from zckpt.jobs.to_gguf import prepare
from zckpt.naming import config_keys
from zckpt.naming.gguf_keys import KEYS, check_config, filled_in

FIXTURES = Path(__file__).parents[2] / "fixtures"
SHARDS = FIXTURES / "transformers" / "llama_zero3"
LLAMA = FIXTURES / "gguf" / "llama" / "model"


def read(path: Path) -> dict[str, Any]:
    return {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}


def test_from_shards_it_is_what_it_is_from_whole_weights(tmp_path: Path) -> None:
    """The optimizer's fp32 weights, not the model's in half precision; a tied head is left out; one file, and its manifest."""
    for name in ("config.json",):
        shutil.copy(SHARDS / "checkpoint" / name, tmp_path / name)
    report = zckpt.to_gguf(SHARDS / "checkpoint", tmp_path / "x.gguf", type="f32", tokenizer="none", progress=False)
    assert any("no vocabulary" in note for note in report.notes)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "x.gguf", "x.gguf.zckpt.json"]
    (tmp_path / "weights").mkdir()
    zckpt.convert(SHARDS / "checkpoint", tmp_path / "weights", dtype="fp32", progress=False)
    zckpt.to_gguf(
        tmp_path / "weights", tmp_path / "y.gguf", type="f32", tokenizer="none", model_name="Checkpoint", progress=False
    )
    one, other = read(tmp_path / "x.gguf"), read(tmp_path / "y.gguf")
    assert one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)
    assert "output.weight" not in one
    verified = zckpt.verify(SHARDS / "checkpoint", tmp_path / "x.gguf")
    assert verified.ok and verified.deletable is not None and verified.deletable[0]
    found = zckpt.diff(tmp_path / "x.gguf", tmp_path / "weights")
    assert found.only_b == ("lm_head.weight",) and not found.only_a and all(tensor.same for tensor in found.tensors)
    zckpt.to_gguf(SHARDS / "checkpoint", tmp_path / "q.gguf", type="q8_0", tokenizer="none", progress=False)
    verified = zckpt.verify(SHARDS / "checkpoint", tmp_path / "q.gguf")
    assert verified.ok and "Q8_0" in "".join(verified.lines())
    assert not all(tensor.same for tensor in zckpt.diff(tmp_path / "q.gguf", tmp_path / "weights").tensors)
    data = bytearray((tmp_path / "q.gguf").read_bytes())
    data[-40] ^= 1
    (tmp_path / "q.gguf").write_bytes(data)
    assert not zckpt.verify(SHARDS / "checkpoint", tmp_path / "q.gguf").ok


def model(home: Path, **config: Any) -> Path:
    shutil.copytree(LLAMA, home)
    said = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps({**said, **config}))
    return home


def options(**more: Any) -> Asked[Gguf]:
    return TO_GGUF.ask(**{"pre_tokenizer": "llama-bpe", **more})


def test_parts_are_as_gguf_split_makes_them(tmp_path: Path) -> None:
    zckpt.to_gguf(LLAMA, tmp_path / "one.gguf", pre_tokenizer="llama-bpe", progress=False)
    report = zckpt.to_gguf(LLAMA, tmp_path / "parts", pre_tokenizer="llama-bpe", split_max_size="30KB", progress=False)
    names = sorted(path for path, _ in report.files)
    assert len(names) > 2 and names[0].endswith(f"-00001-of-{len(names):05d}.gguf") and names[0].startswith("Model-")
    whole, seen = read(tmp_path / "one.gguf"), {}
    for number, name in enumerate(names):
        reader = GGUFReader(tmp_path / "parts" / name)
        said = {key: reader.get_field(f"split.{key}").contents() for key in ("no", "count", "tensors.count")}  # type: ignore[union-attr]
        assert said == {"no": number, "count": len(names), "tensors.count": len(whole)}
        assert len(reader.fields) == 3 + 3 or number == 0
        held = read(tmp_path / "parts" / name)
        assert len(held) == 1 or sum(t.n_bytes for t in reader.tensors) <= 30_000
        seen |= held
    assert seen.keys() == whole.keys() and all(np.array_equal(seen[n], whole[n]) for n in whole)
    for given in (tmp_path / "parts", tmp_path / "parts" / names[1]):
        assert zckpt.diff(given, tmp_path / "one.gguf").same
    assert zckpt.verify(LLAMA, tmp_path / "parts").ok
    (tmp_path / "parts" / names[1]).rename(tmp_path / "parts" / "away")
    with pytest.raises(IncompleteError, match="no part 2"):
        zckpt.open_checkpoint(tmp_path / "parts" / names[0])
    shutil.copy(tmp_path / "parts" / names[2], tmp_path / "parts" / names[1])
    with pytest.raises(InconsistentError, match=r"split.no 2"):
        zckpt.open_checkpoint(tmp_path / "parts" / names[0])


def test_what_is_asked_wrongly(tmp_path: Path) -> None:
    for out, more, words in (
        ("x.gguf", {"split_max_size": "30KB"}, "does not fit into one file"),
        ("x.safetensors", {}, "suffix of another format"),
        ("hf://me/x", {}, "page of the hub"),
        ("x.gguf", {"tokenizer": str(tmp_path / "none such")}, "no such directory"),
        ("x.gguf", {"tokenizer": str(SHARDS)}, "there is no tokenizer"),
    ):
        with pytest.raises(UsageError, match=words):
            prepare(LLAMA, out if "://" in out else tmp_path / out, options(**more))
    with pytest.raises(UsageError, match="not a type"):
        options(type="q2_k")
    with pytest.raises(UnsupportedError, match="pre-tokenizer is not known"):
        prepare(LLAMA, tmp_path / "x.gguf", options(pre_tokenizer=None))
    with pytest.raises(UsageError, match="more tokens than the model"):
        prepare(FIXTURES / "gguf" / "mistral" / "model", tmp_path / "x.gguf", options(tokenizer=str(large(tmp_path))))
    with pytest.raises(UnsupportedError, match="model_type 'phi3'"):
        prepare(model(tmp_path / "phi", model_type="phi3"), tmp_path / "x.gguf", options())
    with pytest.raises(UnsupportedError, match="is GGUF already"):
        prepare(FIXTURES / "gguf" / "llama" / "llama.q8_0.gguf", tmp_path / "x.gguf", options())
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedError, match="rope_type 'dynamic'"):
        prepare(model(tmp_path / "dynamic", rope_parameters=scaled), tmp_path / "x.gguf", options())
    assert not (tmp_path / "x.gguf").exists()


def config_of(family: str, more: dict[str, Any]) -> dict[str, Any]:
    return {**json.loads((FIXTURES / "gguf" / family / "model" / "config.json").read_text()), **more}


def check(config: dict[str, Any]) -> None:
    check_config(config, filled_in(config, ""), "")


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"partial_rotary_factor": 0.5}),
    ("llama", {"embedding_multiplier": 2.0}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3", {"attention_bias": True}),
    *(("qwen2", {"rope_parameters": {**YARN, key: value}}) for key, value in (
        ("attention_factor", 2.0), ("mscale", 1.2), ("mscale_all_dim", 0.7), ("truncate", False), ("extrapolation_factor", 0.5),
        ("partial_rotary_factor", 0.5), ("rope_type", "longrope"), ("factor", None),
    )),
    ("gemma2", {"query_pre_attn_scalar": 7}),
    ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("gemma2", {"hidden_activation": "gelu"}),
    ("gemma3", {"use_bidirectional_attention": True}),
    ("gemma3", {"_sliding_window_pattern": 4}),
    ("gemma3", {"attn_logit_softcapping": 50.0}),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
                                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "more"), REFUSED)
def test_what_llama_cpp_does_not_have_is_refused_by_name(family: str, more: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check(config_of(family, more))
    inner = more.get("rope_parameters", {})
    assert any(key in str(caught.value.found) for key in (*more, *inner, *inner.get("full_attention", {})))


@pytest.mark.parametrize("family", sorted(home.name for home in (FIXTURES / "gguf").iterdir()))
def test_each_key_of_the_class_is_written_or_refused(family: str) -> None:
    """And one that nobody knows; what the class has by itself is taken."""
    config = config_of(family, {})
    check(config)
    kind = config["model_type"]
    keys = KEYS[kind]
    for key in {*config_keys.fields_of(kind), "nobody_knows"} - config_keys.FREE - config_keys.SHOWN - keys.said:
        other = {**config, key: "another"}
        with pytest.raises(UnsupportedError) as caught:
            check_config(other, filled_in(config, ""), "")
        assert key in str(caught.value.found)


def test_a_key_that_llama_cpp_does_not_have_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match='hidden_act "gelu"'):
        zckpt.to_gguf(model(tmp_path / "gelu", hidden_act="gelu"), tmp_path / "x.gguf", progress=False)
    assert not (tmp_path / "x.gguf").exists()


def large(tmp_path: Path) -> Path:
    """A tokenizer with a token behind those of the model."""
    home = tmp_path / "large"
    shutil.copytree(LLAMA, home)
    said = json.loads((home / "tokenizer.json").read_text())
    said["added_tokens"].append({**said["added_tokens"][-1], "id": 5000, "content": "<far>"})
    said["model"]["vocab"]["<far>"] = 5000
    (home / "tokenizer.json").write_text(json.dumps(said))
    return home


def test_large_numbers_are_an_error_for_f16(tmp_path: Path) -> None:
    home = model(tmp_path / "large")
    weights = load_file(home / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].float() * 1e6
    save_file(weights, home / "model.safetensors", {"format": "pt"})
    with pytest.raises(CastError, match=r"output\.weight"):
        zckpt.to_gguf(home, tmp_path / "x.gguf", pre_tokenizer="llama-bpe", progress=False)
    assert sorted(os.listdir(tmp_path)) == ["large"]
    zckpt.to_gguf(home, tmp_path / "x.gguf", type="bf16", pre_tokenizer="llama-bpe", progress=False)


def test_a_gguf_of_another_architecture_keeps_its_names(tmp_path: Path) -> None:
    data = (FIXTURES / "gguf" / "llama" / "llama.q8_0.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(data.replace(b"llama", b"lamma"))
    zckpt.convert(tmp_path / "x.gguf", tmp_path / "out.safetensors", progress=False)
    assert "blk.0.attn_q.weight" in load_file(tmp_path / "out.safetensors")


def test_unknown_factors_of_frequencies_need_the_config(tmp_path: Path) -> None:
    rotary = {"rope_type": "llama3", "factor": 9.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    home = model(tmp_path / "model", rope_parameters=rotary)
    zckpt.to_gguf(home, tmp_path / "x.gguf", pre_tokenizer="llama-bpe", progress=False)
    with pytest.raises(UsageError, match="how its rotary embeddings are scaled"):
        zckpt.convert(tmp_path / "x.gguf", tmp_path / "out", progress=False)
    form = zckpt.Form(to="hf", config=str(home / "config.json"))
    zckpt.convert(tmp_path / "x.gguf", tmp_path / "out", options=zckpt.Options(form=form), progress=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]["factor"] == 9.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@proofs.only
def test_several_processes_share_the_work(tmp_path: Path) -> None:
    """Blocks of Q8_0, in a file that is cut between the two."""
    home = tmp_path / "model"
    home.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 20_000, "hidden_size": 512, "head_dim": 64,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    (home / "config.json").write_text(json.dumps(config))
    shapes = {f"self_attn.{part}_proj": (512, 512) for part in "qkvo"}
    shapes |= {"mlp.gate_proj": (64, 512), "mlp.up_proj": (64, 512), "mlp.down_proj": (512, 64)}
    shapes |= {"input_layernorm": (512,), "post_attention_layernorm": (512,)}
    tensors = {f"model.layers.0.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {"model.embed_tokens.weight": torch.randn(20_000, 512), "model.norm.weight": torch.randn(512)}
    save_file({n: t.to(torch.bfloat16) for n, t in tensors.items()}, home / "model.safetensors", {"format": "pt"})
    command = [sys.executable, "-m", "zckpt", "to-gguf", str(home), str(tmp_path / "x.gguf"), "--type", "q8_0"]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen([*command, "--tokenizer", "none"], env={**os.environ, **group, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [run.wait(timeout=HANG_S) for run in runs] == [0, 0]
    assert zckpt.verify(home, tmp_path / "x.gguf").ok
