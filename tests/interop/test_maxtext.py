"""MaxText's trees: saves in Orbax's form, as its conversion scripts order weights, become the model of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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
        more |= {"num_experts": 3, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
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


def newer_model(kind: str, hidden: int = 16) -> Any:
    """A model whose roots are exact, and with norms that one can be added to."""
    import transformers

    torch.manual_seed(3)
    more: dict[str, Any] = {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 16,
    }
    if kind == "gemma3_text":
        more["num_hidden_layers"] = 14
    if kind.startswith("deepseek"):
        more = {
            "num_hidden_layers": 5, "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "n_shared_experts": 2, "moe_intermediate_size": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4, "v_head_dim": 6, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
            "q_lora_rank": None if kind == "deepseek_v2" else 14, "tie_word_embeddings": False,
        }  # fmt: skip
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=20, hidden_size=hidden, intermediate_size=36, num_attention_heads=4, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, own in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or "correction" in name:
                own.copy_(torch.randint(-64, 64, own.shape) / 256)
    return model


def shared_layers(hub: dict[str, torch.Tensor], config: Any) -> list[dict[str, Any]]:
    """Arrays of the layers of Gemma and DeepSeek, under the names that Gemma 3 and DeepSeek have in a layer."""
    heads = config.num_attention_heads
    gemma = config.model_type.startswith("gemma")
    norms = {
        "input_layernorm": "pre_self_attention_layer_norm",
        "post_attention_layernorm": "post_self_attention_layer_norm",
    }
    if gemma:
        norms = {"input_layernorm": "pre_self_attention_norm", "post_attention_layernorm": "post_self_attention_norm",
                 "pre_feedforward_layernorm": "pre_ffw_norm", "post_feedforward_layernorm": "post_ffw_norm"}  # fmt: skip
    norms |= {"self_attn.q_norm": "self_attention.query_norm", "self_attn.k_norm": "self_attention.key_norm",
              "self_attn.q_a_layernorm": "self_attention.q_norm",
              "self_attn.kv_a_layernorm": "self_attention.kv_norm"}  # fmt: skip
    kernels = {"self_attn.q_proj": "query", "self_attn.k_proj": "key", "self_attn.v_proj": "value", "self_attn.o_proj": "out",
               "self_attn.q_a_proj": "wq_a", "self_attn.q_b_proj": "wq_b", "self_attn.kv_a_proj_with_mqa": "wkv_a",
               "self_attn.kv_b_proj": "wkv_b"}  # fmt: skip
    mlp = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}
    block = "DeepSeekMoeBlock_0"
    found: list[dict[str, Any]] = []
    for number in range(config.num_hidden_layers):
        own = {n.split(".", 3)[3]: t.numpy() for n, t in hub.items() if n.startswith(f"model.layers.{number}.")}
        layer: dict[str, Any] = {}
        for name, array in own.items():
            stem, last = name.removesuffix(".weight"), name.removesuffix(".weight").rpartition(".")[2]
            if stem in norms:
                layer[f"{norms[stem]}.scale"] = array + np.float32(1) if gemma else array
            elif stem in kernels:
                count = {"k_proj": 2, "v_proj": 2}.get(last, heads)
                flat = array.T if "_a_proj" not in last else array.T[:, None]
                shape = (heads, -1, flat.shape[-1]) if last == "o_proj" else (len(flat), count, -1)
                scale = np.float32(4) if (last, config.model_type) == ("q_proj", "gemma2") else np.float32(1)
                layer[f"self_attention.{kernels[stem]}.kernel"] = (
                    flat.reshape(array.T.shape if "_a_proj" in last else shape) / scale
                )
            elif stem.startswith("mlp.shared_experts."):
                layer[f"{block}.shared_experts.{mlp[last]}.kernel"] = array.T
            elif stem.startswith("mlp.experts.0."):
                experts = [own[f"mlp.experts.{e}.{last}.weight"].T for e in range(config.n_routed_experts)]
                layer[f"{block}.MoeBlock_0.{mlp[last]}"] = np.stack(experts)
            elif last in mlp and ".experts." not in stem:
                layer[f"mlp.{mlp[last]}.kernel"] = array.T
            elif ".experts." not in stem:
                layer[f"{block}.MoeBlock_0.gate.{'bias' if array.ndim == 1 else 'kernel'}"] = array.T
        found.append(layer)
    return found


def newer_tree(hub: dict[str, torch.Tensor], config: Any, *, scanned: bool) -> dict[str, Any]:
    """MaxText's arrays of Gemma 2 and 3, and of DeepSeek."""
    layers, kind = shared_layers(hub, config), config.model_type
    tree: dict[str, Any] = {}

    def stack(beginning: str, some: list[dict[str, Any]]) -> None:
        if scanned:
            tree.update({f"{beginning}.{name}": np.stack([one[name] for one in some], axis=1) for name in some[0]})
        else:
            tree.update({f"{beginning}_{n}.{name}": array for n, one in enumerate(some) for name, array in one.items()})

    if kind == "gemma2":
        where = {"self_attention.": "self_attention_{}.", "norm.": "norm_{}.", "mlp.": "mlp_{}."}
        pairs: list[dict[str, Any]] = []
        for near, far in zip(layers[::2], layers[1::2], strict=True):
            pairs.append({})
            for which, one in (("local", near), ("global", far)):
                for name, array in one.items():
                    old = next(text for text in where if text in name)
                    pairs[-1][name.replace(old, where[old].format(which), 1)] = array
        stack("decoder.layers", pairs)
    elif kind == "gemma3_text" and scanned:
        whole = len(layers) // 6 * 6
        for place in range(6):
            stack(f"decoder.layers.layers_{place}", layers[place:whole:6])
        for place, one in enumerate(layers[whole:]):
            tree |= {f"decoder.layers_remainder.layers_{place}.{name}": array for name, array in one.items()}
    elif kind == "gemma3_text":
        stack("decoder.layers", layers)
    else:
        stack("decoder.dense_layers", layers[: config.first_k_dense_replace])
        stack("decoder.moe_layers", layers[config.first_k_dense_replace :])
    embedding, norm = hub["model.embed_tokens.weight"].numpy(), hub["model.norm.weight"].numpy()
    if not kind.startswith("gemma"):
        tree["decoder.logits_dense.kernel"] = hub["lm_head.weight"].numpy().T
        return tree | {"token_embedder.embedding": embedding, "decoder.decoder_norm.scale": norm}
    padded = np.concatenate([embedding * np.float32(4), np.zeros((12, config.hidden_size), np.float32)])
    return tree | {"token_embedder.embedding": padded, "decoder.decoder_norm.scale": norm + np.float32(1)}


def in_form(tree: dict[str, Any], form: str) -> dict[str, Any]:
    """The names of a tree as Linen or NNX has them."""
    if form == "linen":
        return {f"params.params.{name}": array for name, array in tree.items()} | {"step": np.zeros(1, np.float32)}
    found: dict[str, Any] = {"decoder.dropout.rngs.params.count.value": np.ones(1, np.float32)}
    for name, array in tree.items():
        words = name.split(".")
        if words[1].rpartition("_")[2].isdigit():
            words[1:2] = words[1].rsplit("_", 1)
        found[".".join([*words, "value"])] = array
    return {f"base.{name}": array for name, array in found.items()} if form == "reinforced" else found


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


def check_outcome(run: Path, model: Any, hub: Mapping[str, torch.Tensor], home: Path, *, computes: bool) -> None:
    """Makes a model of transformers of a run, with the config in `home/theirs`; compares names, bits and perhaps logits."""
    import transformers

    options = zckpt.Options(form=Form("hf", str(home / "theirs/config.json")))
    zckpt.convert(home / "run", home / "out", options=options)
    found = load_file(home / "out/model.safetensors")
    assert found.keys() == hub.keys()
    assert [name for name in hub if not same_bits(found[name], hub[name])] == []  # a root of 16 is exact
    verified = zckpt.verify(run, home / "out")
    assert verified.ok, verified
    if computes:
        ours, info = transformers.AutoModelForCausalLM.from_pretrained(home / "out", output_loading_info=True)
        assert not any(info.values()), info
        tokens = torch.arange(18).view(2, 9)
        with torch.no_grad():
            assert torch.equal(ours(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("kind", ["llama 3.1", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_it_is_the_model_of_transformers(kind: str, scanned: bool, tmp_path: Path) -> None:
    model = model_of(kind)
    model.save_pretrained(tmp_path / "theirs")
    hub = load_file(tmp_path / "theirs/model.safetensors")
    run = write(tmp_path / "run/7/items", tree_of(hub, model.config, kind, scanned=scanned))
    check_outcome(run, model, hub, tmp_path, computes=scanned and kind == "llama 3.1")


@pytest.mark.parametrize("form", ["linen", "nnx", "reinforced"])
@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "deepseek_v2", "deepseek_v3"])
def test_layers_of_several_kinds(kind: str, scanned: bool, form: str, tmp_path: Path) -> None:
    """Layers scanned in rows of two or six, those without experts first, and the names of NNX."""
    model = newer_model(kind)
    model.save_pretrained(tmp_path / "theirs")
    hub = load_file(tmp_path / "theirs/model.safetensors")
    run = write(tmp_path / "run/7/items", in_form(newer_tree(hub, model.config, scanned=scanned), form))
    check_outcome(run, model, hub, tmp_path, computes=scanned and form == "linen")
    if scanned and form == "linen":
        with pytest.raises(UnsupportedError, match="--config"):
            zckpt.convert(run, tmp_path / "again", options=zckpt.Options(form=Form("hf")))


def test_roots_that_nothing_records(tmp_path: Path) -> None:
    """Gemma 2 of 27B: of MaxText's two programs each takes another root."""
    model = newer_model("gemma2")
    model.config.query_pre_attn_scalar = 9
    model.save_pretrained(tmp_path / "theirs")
    tree = newer_tree(load_file(tmp_path / "theirs/model.safetensors"), model.config, scanned=True)
    run = write(tmp_path / "run", in_form(tree, "linen"))
    options = zckpt.Options(form=Form("hf", str(tmp_path / "theirs/config.json")))
    with pytest.raises(UnsupportedError, match="to_maxtext"):
        zckpt.convert(run, tmp_path / "out", options=options)


@pytest.mark.parametrize(("kind", "root"), [("gemma2", 24**0.5), ("gemma3_text", 4.90625)])
def test_roots_are_those_of_maxtext(kind: str, root: float, tmp_path: Path) -> None:
    """Embeddings are divided in fp32; Gemma 3's root is rounded to bf16 first."""
    model = newer_model(kind, hidden=24)
    model.save_pretrained(tmp_path / "theirs")
    tree = newer_tree(load_file(tmp_path / "theirs/model.safetensors"), model.config, scanned=True)
    options = zckpt.Options(form=Form("hf", str(tmp_path / "theirs/config.json")))
    zckpt.convert(write(tmp_path / "run", in_form(tree, "linen")), tmp_path / "out", options=options)
    found = load_file(tmp_path / "out/model.safetensors")["model.embed_tokens.weight"].numpy()
    assert np.array_equal(found, tree["token_embedder.embedding"][:20] / np.float32(root))


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
