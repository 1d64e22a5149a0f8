"""A model as Megatron Bridge's tables of names have it, put together by hand from the tensors of the hub.

The names are those of Bridge's `mapping_registry` of each model, and where a layer of Mamba is cut, of Megatron-Core's
`MambaMixer.sharded_state_dict`. Layers are numbered here.
"""

from __future__ import annotations

import re
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

WHOLE = {
    "embed_tokens.weight": "embedding.word_embeddings.weight",
    "embeddings.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "norm_f.weight": "decoder.final_norm.weight",
    "final_layernorm.weight": "decoder.final_norm.weight",
    "lm_head.weight": "output_layer.weight",
}
IN_A_LAYER = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "block_sparse_moe.gate.weight": "mlp.router.weight",
    "block_sparse_moe.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attn.indexer.wq_b.weight": "self_attention.core_attention.indexer.linear_wq_b.weight",
    "self_attn.indexer.wk.weight": "self_attention.core_attention.indexer.linear_wk.weight",
    "self_attn.indexer.k_norm.weight": "self_attention.core_attention.indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "self_attention.core_attention.indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "self_attention.core_attention.indexer.linear_weights_proj.weight",
    "mixer.o_proj.weight": "self_attention.linear_proj.weight",
    "mixer.up_proj.weight": "mlp.linear_fc1.weight",
    "mixer.down_proj.weight": "mlp.linear_fc2.weight",
    "mixer.gate.weight": "mlp.router.weight",
    "mixer.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mixer.shared_experts.up_proj.weight": "mlp.shared_experts.linear_fc1.weight",
    "mixer.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "mixer.fc1_latent_proj.weight": "mlp.fc1_latent_proj.weight",
    "mixer.fc2_latent_proj.weight": "mlp.fc2_latent_proj.weight",
    "pre_ff_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "feed_forward.down_proj.weight": "mlp.linear_fc2.weight",
    **{f"mamba.{name}": f"mamba_mixer.{name}" for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")},
    **{f"mixer.{name}": f"mixer.{name}" for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")},
}
SEEING = {
    "norm1": "self_attention.linear_qkv.layer_norm_",
    "norm2": "mlp.linear_fc1.layer_norm_",
    "attn.proj": "self_attention.linear_proj.",
    "mlp.linear_fc1": "mlp.linear_fc1.",
    "mlp.linear_fc2": "mlp.linear_fc2.",
}


def in_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """For each head of keys its queries, its keys and its values."""
    return torch.cat([part for own in zip(*(t.chunk(groups) for t in (q, k, v)), strict=True) for part in own])


def mamba(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Tensors:
    """The rows of a layer of Mamba 2, one tensor each."""
    falcon = name.startswith("mamba.")
    keys = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
    if falcon:
        keys = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")
        name = name.replace("mamba.", "mamba_mixer.")
    heads, size, groups, states = (config[key] for key in keys)
    inner, state = heads * size, groups * states
    sizes = {"z": inner, "x": inner, "B": state, "C": state, "dt": heads}
    if "conv1d" in name:
        del sizes["z"], sizes["dt"]
    return {f"{name}.{key}": part for key, part in zip(sizes, tensor.split([*sizes.values()]), strict=True)}


def of_a_layer(own: Tensors, config: dict[str, Any], family: str) -> Tensors:
    """The tensors of one layer of a language model."""
    found, groups = Tensors(), config["num_key_value_heads"]
    routed = any(name.endswith(("gate.weight", "experts.gate_up_proj")) for name in own)
    mlp_norm = "pre_mlp_layernorm.weight" if routed else "mlp.linear_fc1.layer_norm_weight"
    for name, tensor in own.items():
        if (family, name) == ("falcon-h1", "input_layernorm.weight"):  # of Mamba and of attention
            found["norm.weight"] = tensor
        elif name == "feed_forward.gate_proj.weight":
            found["mlp.linear_fc1.weight"] = torch.cat([tensor, own["feed_forward.up_proj.weight"]])
        elif name in IN_A_LAYER:
            found[IN_A_LAYER[name]] = tensor
        elif name == "norm.weight":  # of whatever the layer is
            found["norm.weight"] = tensor
        elif name == "post_attention_layernorm.weight":
            behind = family in ("exaone4", "gemma3-vl")
            found["self_attention.linear_proj.post_layernorm.weight" if behind else mlp_norm] = tensor
        elif name == "pre_feedforward_layernorm.weight":
            found[mlp_norm] = tensor
        elif name == "post_feedforward_layernorm.weight":
            found["mlp.linear_fc2.post_layernorm.weight"] = tensor
        elif name.endswith(("in_proj.weight", "conv1d.weight", "conv1d.bias")):
            found |= mamba(name, tensor, config)
        elif match := re.fullmatch(r"(self_attn|mixer)\.q_proj\.(\w+)", name):
            q, k, v = (own[f"{match[1]}.{key}_proj.{match[2]}"] for key in "qkv")
            found[f"self_attention.linear_qkv.{match[2]}"] = in_groups(q, k, v, groups)
        elif match := re.fullmatch(r"mlp\.(shared_experts\.|)gate_proj\.weight", name):
            found[f"mlp.{match[1]}linear_fc1.weight"] = torch.cat([tensor, own[f"mlp.{match[1]}up_proj.weight"]])
        elif match := re.fullmatch(r"(.*experts)\.0\.(gate_proj|w1|up_proj)\.weight", name):
            up = {"gate_proj": "up_proj", "w1": "w3"}.get(match[2])
            number = sum(bool(re.fullmatch(rf".*experts\.\d+\.{match[2]}\.weight", key)) for key in own)
            if match[2] == "up_proj" and f"{match[1]}.0.gate_proj.weight" in own:
                continue
            one = [own[f"{match[1]}.{e}.{match[2]}.weight"] for e in range(number)]
            two = [own[f"{match[1]}.{e}.{up}.weight"] for e in range(number)] if up else [t[:0] for t in one]
            down = "w2" if match[2] == "w1" else "down_proj"
            found["mlp.experts.experts.linear_fc1.weight"] = torch.stack([torch.cat(x) for x in zip(one, two)])
            found["mlp.experts.experts.linear_fc2.weight"] = torch.stack(
                [own[f"{match[1]}.{e}.{down}.weight"] for e in range(number)]
            )
    return found


def by_hand(family: str, hub: Tensors, config: dict[str, Any]) -> Tensors:
    """Megatron's tensors for those of the hub."""
    text = {**config, **config.get("text_config", {})}
    lead = "language_model." if "text_config" in config else ""
    heads = config.get("vision_config", {}).get("num_heads")
    found, layers = Tensors(), dict[str, Tensors]()
    for name, tensor in hub.items():
        plain = re.sub(
            r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.|backbone\.)", "", name
        )
        if name.startswith("vision_tower."):
            found[name.replace(".vision_model", "")] = tensor
        elif name == "multi_modal_projector.mm_input_projection_weight":
            found["multi_modal_projector.proj.weight"] = tensor.T
        elif name == "multi_modal_projector.mm_soft_emb_norm.weight":
            found["multi_modal_projector.mm_soft_embed_norm.weight"] = tensor
        elif name.startswith("visual."):
            found[name] = tensor
        elif match := re.fullmatch(r"visual\.blocks\.(\d+)\.(.*)\.(\w+)", plain):
            at = f"vision_model.decoder.layers.{match[1]}."
            if match[2] == "attn.qkv":
                found[f"{at}self_attention.linear_qkv.{match[3]}"] = in_groups(*tensor.chunk(3), heads)
            else:
                found[at + SEEING[match[2]] + match[3]] = tensor
        elif plain.startswith("visual."):
            inner = re.sub(r"(merger|merger_list\.\d+)\.norm\.", r"\1.patch_norm.", plain.removeprefix("visual."))
            found["vision_model." + "decoder." * inner.startswith("deepstack") + inner] = tensor
        elif match := re.fullmatch(r"layers\.(\d+)\.(.*)", plain):
            layers.setdefault(match[1], {})[match[2]] = tensor
        elif plain in WHOLE:
            more = (-len(tensor)) % 128
            rows = torch.cat([tensor, tensor.new_zeros(more, tensor.shape[1])]) if tensor.ndim == 2 else tensor
            found[lead + WHOLE[plain]] = rows
    for number, own in layers.items():
        found |= {f"{lead}decoder.layers.{number}.{k}": v for k, v in of_a_layer(own, text, family).items()}
    return found
