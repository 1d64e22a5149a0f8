"""MaxText's trees: saves in Orbax's form, as its conversion scripts order weights, become the model of transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import InconsistentError, UnsupportedError
from zckpt.jobs.groups import Form

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def model_of(kind: str) -> Any:
    import transformers

    torch.manual_seed(3)
    more: dict[str, Any] = {"rope_scaling": LLAMA3} if kind == "llama 3.1" else {}
    if kind == "mixtral":
        more |= {"num_local_experts": 3}
    if kind == "qwen3_moe":
        more |= {"num_experts": 3, "moe_intermediate_size": 10, "num_experts_per_tok": 2}
    config = transformers.AutoConfig.for_model(
        kind.partition(" ")[0], vocab_size=20, hidden_size=24, intermediate_size=36, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=None,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, **more,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def interleaved(array: Any) -> Any:
    """Halves of heads as pairs."""
    half = array.shape[-1] // 2
    return np.stack([array[..., :half], array[..., half:]], axis=-1).reshape(array.shape)


def tree_of(hub: dict[str, torch.Tensor], config: Any, kind: str, *, scanned: bool) -> dict[str, Any]:
    """MaxText's arrays of a model, layer for layer or stacked in axis 1."""
    heads, keys, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    is_qwen, turned = kind.startswith("qwen"), kind == "llama 3.1"
    layers: list[dict[str, Any]] = []
    for number in range(config.num_hidden_layers):
        own = {n.split(".", 3)[3]: t.numpy() for n, t in hub.items() if n.startswith(f"model.layers.{number}.")}
        query = own["self_attn.q_proj.weight"].T.reshape(-1, heads, size)
        key = own["self_attn.k_proj.weight"].T.reshape(-1, keys, size)
        if turned:
            query, key = interleaved(query), interleaved(key)
        layer = {
            "pre_self_attention_layer_norm.scale": own["input_layernorm.weight"],
            "post_self_attention_layer_norm.scale": own["post_attention_layernorm.weight"],
            "self_attention.query.kernel": query if is_qwen else query / np.float32(math.sqrt(size)),
            "self_attention.key.kernel": key,
            "self_attention.value.kernel": own["self_attn.v_proj.weight"].T.reshape(-1, keys, size),
            "self_attention.out.kernel": own["self_attn.o_proj.weight"].T.reshape(heads, size, -1),
        }
        for name in ("query", "key"):
            if f"self_attn.{name[0]}_norm.weight" in own:
                layer[f"self_attention.{name}_norm.scale"] = own[f"self_attn.{name[0]}_norm.weight"]
        for name, count in (("query", heads), ("key", keys), ("value", keys)):
            if f"self_attn.{name[0]}_proj.bias" in own:
                layer[f"self_attention.{name}.bias"] = own[f"self_attn.{name[0]}_proj.bias"].reshape(count, size)
        if kind == "mixtral":
            layer["MoeBlock_0.gate.kernel"] = own["block_sparse_moe.gate.weight"].T
            for theirs, ours in (("wi_0", "w1"), ("wi_1", "w3"), ("wo", "w2")):
                experts = [
                    own[f"block_sparse_moe.experts.{e}.{ours}.weight"].T for e in range(config.num_local_experts)
                ]
                layer[f"MoeBlock_0.{theirs}"] = np.stack(experts)
        elif kind == "qwen3_moe":
            layer["moe_block.gate.kernel"] = own["mlp.gate.weight"].T
            for theirs, ours in (("wi_0", "gate_proj"), ("wi_1", "up_proj"), ("wo", "down_proj")):
                experts = [own[f"mlp.experts.{e}.{ours}.weight"].T for e in range(config.num_experts)]
                layer[f"moe_block.{theirs}"] = np.stack(experts)
        else:
            for theirs, ours in (("wi_0", "gate_proj"), ("wi_1", "up_proj"), ("wo", "down_proj")):
                layer[f"mlp.{theirs}.kernel"] = own[f"mlp.{ours}.weight"].T
        layers.append(layer)
    tree = {
        "token_embedder.embedding": hub["model.embed_tokens.weight"].numpy(),
        "decoder.decoder_norm.scale": hub["model.norm.weight"].numpy(),
        "decoder.logits_dense.kernel": hub["lm_head.weight"].numpy().T,
    }
    if scanned:
        tree |= {f"decoder.layers.{name}": np.stack([one[name] for one in layers], axis=1) for name in layers[0]}
    else:
        tree |= {f"decoder.layers_{n}.{name}": array for n, one in enumerate(layers) for name, array in one.items()}
    return {f"params.params.{name}": array for name, array in tree.items()}


def write(home: Path, tree: dict[str, Any]) -> Path:
    """A save of Orbax with arrays in directories, each in two chunks."""
    said: dict[str, Any] = {}
    for name, array in {**tree, "opt_state.mu.w": np.zeros(3, np.float32)}.items():
        keys = name.split(".")
        said[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
        rows = -(-array.shape[0] // 2)
        (home / name).mkdir(parents=True)
        meta = {
            "zarr_format": 2,
            "shape": array.shape,
            "chunks": [rows, *array.shape[1:]],
            "dtype": "<f4",
            "order": "C",
        }
        (home / name / ".zarray").write_text(
            json.dumps({**meta, "compressor": None, "fill_value": None, "filters": None})
        )
        for number in range(-(-array.shape[0] // rows)):
            chunk = np.zeros((rows, *array.shape[1:]), np.float32)
            part = array[number * rows : (number + 1) * rows]
            chunk[: len(part)] = part
            (home / name / ".".join([str(number), *"0" * (array.ndim - 1)])).write_bytes(chunk.tobytes())
    facts = {"tree_metadata": said, "use_ocdbt": False, "store_array_data_equal_to_fill_value": True}
    (home / "_METADATA").write_text(json.dumps(facts))
    return home


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("kind", ["llama 3.1", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_it_is_the_model_of_transformers(kind: str, scanned: bool, tmp_path: Path) -> None:
    import transformers

    model = model_of(kind)
    model.save_pretrained(tmp_path / "theirs")
    hub = load_file(tmp_path / "theirs/model.safetensors")
    run = write(tmp_path / "run/7/items", tree_of(hub, model.config, kind, scanned=scanned))
    options = zckpt.Options(form=Form("hf", str(tmp_path / "theirs/config.json")))
    zckpt.convert(tmp_path / "run", tmp_path / "out", options=options)
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == hub.keys()
    assert all(same_bits(found[name], hub[name]) for name in hub)  # a root of 16 is exact
    verified = zckpt.verify(run, tmp_path / "out")
    assert verified.ok, verified
    if scanned and kind == "llama 3.1":
        ours, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(info.values()), info
        tokens = torch.arange(18).view(2, 9)
        with torch.no_grad():
            assert torch.equal(ours(tokens).logits, model(tokens).logits)


def test_what_only_a_config_says(tmp_path: Path) -> None:
    """How rotary pairs lie; and a config of other heads."""
    model = model_of("llama 3.1")
    model.save_pretrained(tmp_path / "theirs")
    hub = load_file(tmp_path / "theirs/model.safetensors")
    run = write(tmp_path / "run", tree_of(hub, model.config, "llama 3.1", scanned=True))
    with pytest.raises(UnsupportedError, match="--config"):
        zckpt.convert(run, tmp_path / "out", options=zckpt.Options(form=Form("hf:llama")))
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 8, "head_dim": 8}))
    with pytest.raises(InconsistentError, match="query"):
        zckpt.convert(run, tmp_path / "out", options=zckpt.Options(form=Form("hf", str(tmp_path / "config.json"))))
