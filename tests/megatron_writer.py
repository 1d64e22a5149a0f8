"""Writes a transformers model as GPT-NeoX or Megatron-DeepSpeed would have saved it; knows nothing of the converter.

Everything is done with whole torch tensors: renamed, put in the other program's order of rows, sliced over tensor-parallel
ranks, and saved in DeepSpeed's files.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int, order: str) -> torch.Tensor:
    """Queries, keys and values (rows of heads of `size`) in one tensor.

    Args:
        q: of all query heads.
        k: of all key heads.
        v: as `k`.
        size: rows of a head.
        order: "heads" (n, 3, h), "groups" (one group of queries per key head), "elements" (n, h, 3), "stacked" (3, n, h).
    """
    if order == "stacked":
        return torch.cat([q, k, v])
    if order == "elements":
        return torch.stack([q, k, v], dim=1).flatten(0, 1)
    heads = q.shape[0] // size if order == "heads" else k.shape[0] // size
    parts = [tensor.unflatten(0, (heads, -1)) for tensor in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def neox(state: dict[str, torch.Tensor], config: Any) -> dict[int, dict[str, torch.Tensor]]:
    """GPTNeoXForCausalLM or LlamaForCausalLM as GPT-NeoX's layers: 0 embeddings, 2.. blocks, then norm and head."""
    blocks = config.num_hidden_layers
    layers: dict[int, dict[str, torch.Tensor]] = {n: {} for n in (0, *range(2, blocks + 2), blocks + 3)}
    size = config.hidden_size // config.num_attention_heads
    if config.model_type == "gpt_neox":
        layers[0]["word_embeddings.weight"] = state["gpt_neox.embed_in.weight"]
        for name, tensor in state.items():
            if name.startswith("gpt_neox.layers."):
                number, local = name.removeprefix("gpt_neox.layers.").split(".", 1)
                layers[int(number) + 2][local] = tensor
        for kind in ("weight", "bias"):
            layers[blocks + 3][f"norm.{kind}"] = state[f"gpt_neox.final_layer_norm.{kind}"]
        if not config.tie_word_embeddings:
            layers[blocks + 4] = {"final_linear.weight": state["lm_head.weight"]}
        return layers
    layers[0]["word_embeddings.weight"] = state["model.embed_tokens.weight"]
    for block in range(blocks):
        old, new = f"model.layers.{block}.", layers[block + 2]
        q, k, v = (state[f"{old}self_attn.{n}_proj.weight"] for n in "qkv")
        new["attention.query_key_value.weight"] = fused(q, k, v, size, "heads")
        new["attention.dense.weight"] = state[old + "self_attn.o_proj.weight"]
        for ours, theirs in {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.items():
            new[f"mlp.{ours}.weight"] = state[f"{old}mlp.{theirs}.weight"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            new[f"{norm}.scale"] = state[f"{old}{norm}.weight"]
        new["attention.rotary_emb.inv_freq"] = torch.arange(size // 2).float()
    layers[blocks + 3]["norm.scale"] = state["model.norm.weight"]
    layers[blocks + 4] = {"final_linear.weight": state["lm_head.weight"]}
    return layers


def megatron(state: dict[str, torch.Tensor], config: Any, order: str = "groups") -> dict[str, torch.Tensor]:
    """GPT2LMHeadModel or LlamaForCausalLM as Megatron-DeepSpeed's `GPTModel`."""
    out: dict[str, torch.Tensor] = {}
    layer = "language_model.encoder.layers.{}."
    if config.model_type == "gpt2":
        size = config.n_embd // config.n_head
        out["language_model.embedding.word_embeddings.weight"] = state["transformer.wte.weight"]
        out["language_model.embedding.position_embeddings.weight"] = state["transformer.wpe.weight"]
        for block in range(config.n_layer):
            old, new = f"transformer.h.{block}.", layer.format(block)
            for kind in ("weight", "bias"):
                out[f"{new}input_layernorm.{kind}"] = state[f"{old}ln_1.{kind}"]
                out[f"{new}post_attention_layernorm.{kind}"] = state[f"{old}ln_2.{kind}"]
                names = {
                    "self_attention.dense": "attn.c_proj",
                    "mlp.dense_h_to_4h": "mlp.c_fc",
                    "mlp.dense_4h_to_h": "mlp.c_proj",
                }
                for ours, theirs in names.items():
                    out[f"{new}{ours}.{kind}"] = state[f"{old}{theirs}.{kind}"].t().contiguous()
                q, k, v = state[f"{old}attn.c_attn.{kind}"].t().contiguous().chunk(3)
                out[f"{new}self_attention.query_key_value.{kind}"] = fused(q, k, v, size, order)
        for kind in ("weight", "bias"):
            out[f"language_model.encoder.final_layernorm.{kind}"] = state[f"transformer.ln_f.{kind}"]
        return out
    size = config.head_dim
    out["language_model.embedding.word_embeddings.weight"] = state["model.embed_tokens.weight"]
    for block in range(config.num_hidden_layers):
        old, new = f"model.layers.{block}.", layer.format(block)
        q, k, v = (state[f"{old}self_attn.{n}_proj.weight"] for n in "qkv")
        out[new + "self_attention.query_key_value.weight"] = fused(q, k, v, size, order)
        out[new + "self_attention.dense.weight"] = state[old + "self_attn.o_proj.weight"]
        gate, up = state[old + "mlp.gate_proj.weight"], state[old + "mlp.up_proj.weight"]
        out[new + "mlp.dense_h_to_4h.weight"] = torch.cat([gate, up])
        out[new + "mlp.dense_4h_to_h.weight"] = state[old + "mlp.down_proj.weight"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{new}{norm}.weight"] = state[f"{old}{norm}.weight"]
    out["language_model.encoder.final_layernorm.weight"] = state["model.norm.weight"]
    out["language_model.output_layer.weight"] = state["lm_head.weight"]
    return out


def as_pipeline(state: dict[str, torch.Tensor], first: int = 2) -> dict[int, dict[str, torch.Tensor]]:
    """Megatron-DeepSpeed's `GPTModelPipe`: 1 embeddings, `first`.. blocks, then the final norm and the head."""
    layers: dict[int, dict[str, torch.Tensor]] = {1: {}}
    for name, tensor in state.items():
        local = name.removeprefix("language_model.")
        if local.startswith("embedding."):
            layers[1][local.removeprefix("embedding.")] = tensor
        elif local.startswith("encoder.layers."):
            number, rest = local.removeprefix("encoder.layers.").split(".", 1)
            layers.setdefault(first + int(number), {})[rest] = tensor
    last = max(layers) + 1
    for name, tensor in state.items():
        if ".final_layernorm." in name:
            layers.setdefault(last, {})[name.rpartition(".")[2]] = tensor
        elif name.endswith("output_layer.weight"):
            layers[last + 1] = {"lm_head.weight": tensor}
    return layers


HIDDEN = 16
COLUMNS = (
    "query_key_value",
    "dense_h_to_4h",
    "linear1",
    "w1",
    "w3",
    "word_embeddings",
    "final_linear",
    "output_layer",
    "lm_head",
)
ROWS = ("attention.dense.weight", "dense_4h_to_h.weight", "linear2.weight", "w2.weight")


def sliced(
    name: str, tensor: torch.Tensor, rank: int, tp: int, *, summed: bool, halves: bool, stacked: bool
) -> torch.Tensor:
    """One tensor-parallel rank's part.

    Args:
        name: of the tensor.
        tensor: whole.
        rank: whose.
        tp: of how many.
        summed: biases of row-parallel layers are parts of a sum, as in GPT-NeoX.
        halves: the first MLP matrix is two stacked ones.
        stacked: queries, keys and values are three stacked tensors.
    """
    if any(part in name for part in COLUMNS):
        parts = [tensor]
        if halves and ("dense_h_to_4h" in name or "linear1" in name):
            parts = list(tensor.chunk(2))
        elif stacked and "query_key_value" in name:
            key = (tensor.shape[0] - HIDDEN) // 2
            parts = list(tensor.split([HIDDEN, key, key]))
        return torch.cat([part.chunk(tp)[rank] for part in parts]).clone()
    if name.endswith(ROWS):
        return tensor.chunk(tp, 1)[rank].clone()
    if summed and name.endswith(("attention.dense.bias", "dense_4h_to_h.bias")):
        share = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))).mul(8).round().div(8)
        return tensor - share if rank else share if tp > 1 else tensor.clone()
    return tensor.clone()


def save(
    home: Path, states: dict[str, torch.Tensor] | dict[int, dict[str, torch.Tensor]], client: dict[str, Any], tp: int = 1,
    pp: int = 1, **how: bool,
) -> Path:  # fmt: skip
    """Files of a run without ZeRO: layer files for layers, one model file per rank otherwise."""
    tag = home / "global_step3"
    tag.mkdir(parents=True)
    (home / "latest").write_text("global_step3")
    words = {"summed": False, "halves": False, "stacked": False, **how}
    root = {
        "optimizer": None, "lr_scheduler": None, "csr_tensor_module_names": set(), "skipped_steps": 0, "global_steps": 3,
        "global_samples": 6, "dp_world_size": 1, "mp_world_size": tp * pp, "ds_config": {}, "ds_version": "0.19.8",
        "buffer_names": [], "param_shapes": None, "frozen_param_shapes": None, "frozen_param_fragments": None,
        "shared_params": {}, **client,
    }  # fmt: skip
    for rank in range(tp * pp):
        module = None
        if not isinstance(next(iter(states)), int):
            module = {name: sliced(str(name), t, rank, tp, **words) for name, t in states.items()}
        torch.save({**root, "module": module}, tag / f"mp_rank_{rank:02d}_model_states.pt")
    for layer, state in states.items():
        if isinstance(layer, int):
            for rank in range(tp):
                own = {name: sliced(name, tensor, rank, tp, **words) for name, tensor in state.items()}
                torch.save(own, tag / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    return home


def megatron_client(config: Any, version: float = 3.0, **more: object) -> dict[str, Any]:
    """Megatron's client state, its `args` a namespace."""
    heads = config.num_attention_heads
    args = argparse.Namespace(
        num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, num_attention_heads=heads,
        max_position_embeddings=config.max_position_embeddings, layernorm_epsilon=1e-5, bias_gelu_fusion=True, **more,
    )  # fmt: skip
    return {"args": args, "checkpoint_version": version, "iteration": 3}
