"""The arguments of a Megatron run (`args` in a checkpoint) for a model of transformers: the way back from `families`.

For `to_mcore`. Megatron compares some with those of a run that loads (`check_checkpoint_args`), and with `--use-checkpoint-args`
takes all that describe the model; zckpt makes a config.json of them.
Source: Megatron-LM (core 0.14 - 0.20), megatron/training/{arguments,checkpointing}.py, tools/checkpoint/loader_mixtral_hf.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from zckpt.core.catalog import Catalog
from zckpt.naming.facts import Facts
from zckpt.naming.parts import numbered

_SAME = {
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length"),
    "seq_length": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length"),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
    "layernorm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
    "init_method_std": ("initializer_range",),
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "hidden_dropout": ("resid_pdrop", "hidden_dropout"),
    "moe_router_topk": ("num_experts_per_tok", "num_experts_per_token"),
    "moe_router_num_groups": ("n_group",),
    "moe_router_group_topk": ("topk_group",),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
"""Argument -> keys of a config that have its value; the first that is there counts."""

_ROPE = {
    "rotary_base": ("rope_theta",),
    "rotary_percent": ("partial_rotary_factor", "rotary_pct"),
}
"""The same, of a config's keys or those in its `rope_parameters`."""

_YARN = {
    "rotary_scaling_factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "original_max_position_embeddings": "original_max_position_embeddings",
}

_ALWAYS: dict[str, object] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "ckpt_format": "torch_dist",
    "no_save_optim": True,
    "no_save_rng": True,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "tokenizer_type": "HuggingFaceTokenizer",
    "apply_layernorm_1p": False,
    "rotary_interleaved": False,
    "squared_relu": False,
}

_SINKS: dict[str, object] = {
    "softmax_type": "learnable",
    "swiglu": False,
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
}
"""Arguments of a model of gpt-oss, the only family whose attention has sinks."""

_SILU = ("silu", "swish")
_QUERY_KEY_NORMS = {"blocks.{b}.attention.query_norm.weight", "blocks.{b}.attention.key_value_down_norm.weight"}
_SIGMOID = ("deepseek_v3", "glm4_moe")
"""Types of models whose routers choose by sigmoid without saying so in their config."""


def megatron_arguments(facts: Facts, parts: Catalog, config: Mapping[str, object], multiple: int) -> dict[str, object]:
    """The arguments of a model.

    Args:
        facts: of the model, with what its parts show.
        parts: of the model.
        config: transformers' config of it.
        multiple: of which the padded vocabulary is one.
    """
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    there = {numbered(name).part for name in parts.tensors}
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    learned = "positions.weight" in there
    rotary = not learned and ("rope_theta" in config or "rope_theta" in rope or "rotary_pct" in config)
    query, key = facts.whole("query_heads"), facts.whole("key_heads")
    found = _ALWAYS | {
        "num_layers": facts.get("blocks"),
        "hidden_size": facts.get("hidden"),
        "ffn_hidden_size": facts.get("intermediate") or config.get("intermediate_size") or facts.get("expert_intermediate"),
        "num_attention_heads": query,
        "group_query_attention": key is not None and key != query,
        "num_query_groups": key or query,
        "kv_channels": facts.get("head_size") or config.get("head_dim"),
        "position_embedding_type": "learned_absolute" if learned else "rope" if rotary else "none",
        "add_position_embedding": learned,
        "use_rotary_position_embeddings": rotary,
        "normalization": "LayerNorm" if "final_norm.bias" in there else "RMSNorm",
        "swiglu": facts.get("gated") is True and _activation(config) in _SILU,
        "add_bias_linear": "blocks.{b}.mlp.down.bias" in there or "blocks.{b}.experts.{e}.down.bias" in there,
        "add_qkv_bias": "blocks.{b}.attention.query.bias" in there,
        "parallel_attn": True if facts.get("parallel") is True else None,
        "qk_layernorm": bool(there & _QUERY_KEY_NORMS),
        "untie_embeddings_and_output_weights": facts.get("tied") is not True,
        "vocab_size": facts.get("vocabulary"),
        "padded_vocab_size": facts.get("padded_vocabulary") or facts.get("vocabulary"),
        "make_vocab_size_divisible_by": multiple,
    }  # fmt: skip
    found |= _said(_SAME, config) | (_said(_ROPE, {**config, **rope}) if rotary else {})
    found |= _scaled(rope, "blocks.{b}.attention.key_value_down.weight" in there)
    found |= _window(config)
    if "blocks.{b}.attention.sinks" in there:
        found |= _SINKS | {"activation_func_clamp_value": config.get("swiglu_limit")}
    if (base := found.get("rotary_base")) is not None and isinstance(base, float) and base.is_integer():
        found["rotary_base"] = int(base)
    if "blocks.{b}.router.weight" in there:
        found |= _experts(facts, parts, config, there)
    return {name: value for name, value in found.items() if value is not None}


def _said(keys: Mapping[str, tuple[str, ...]], config: Mapping[str, object]) -> dict[str, object]:
    return {
        argument: next(value for key in names if (value := config.get(key)) is not None)
        for argument, names in keys.items()
        if any(config.get(key) is not None for key in names)
    }


def _activation(config: Mapping[str, object]) -> object:
    return next(
        (config[key] for key in ("hidden_act", "hidden_activation", "activation_function") if key in config), "silu"
    )


def _window(config: Mapping[str, object]) -> dict[str, object]:
    """How far attention looks back, and in which layers it looks back to the beginning."""
    tokens, kinds = config.get("sliding_window"), config.get("layer_types")
    if not isinstance(tokens, int) or tokens < 1 or config.get("use_sliding_window") is False:
        return {}
    found: dict[str, object] = {"window_size": [tokens - 1, 0]}
    if isinstance(kinds, list) and "full_attention" in kinds:
        every = 1 + kinds.index("full_attention")
        regular = all((kind == "full_attention") is (number % every == 0) for number, kind in enumerate(kinds, 1))
        found["window_attn_skip_freq"] = every if regular else [int(kind != "full_attention") for kind in kinds]
    return found


def _scaled(rope: Mapping[str, object], latent: bool) -> dict[str, object]:
    """What scales rotary positions."""
    kind = rope.get("rope_type", rope.get("type"))
    found: dict[str, object] = {"multi_latent_attention": latent}
    if latent:
        found["rope_type"] = "yarn" if kind == "yarn" else "rope"
    if kind == "yarn":
        found |= {argument: rope.get(key) for argument, key in _YARN.items()}
        if not latent:
            prefixed = ("beta_fast", "beta_slow", "original_max_position_embeddings")
            found |= {f"yarn_{name}": found.pop(name) for name in prefixed}
            found |= {
                "position_embedding_type": "yarn",
                "yarn_correction_range_round_to_int": rope.get("truncate", True),
            }
    elif kind == "llama3":
        found |= {"use_rope_scaling": True, "rope_scaling_factor": rope.get("factor")}
    return found


def _experts(facts: Facts, parts: Catalog, config: Mapping[str, object], there: set[str]) -> dict[str, object]:
    """What describes experts and their router."""
    routed = {
        block for name in parts.tensors for part, block, _ in (numbered(name),) if part == "blocks.{b}.router.weight"
    }
    blocks = facts.whole("blocks") or 0
    sigmoid = config.get("scoring_func") == "sigmoid" or config.get("model_type") in _SIGMOID
    correction = "blocks.{b}.router.correction" in there
    return {
        "num_experts": facts.get("experts"),
        "moe_ffn_hidden_size": facts.get("expert_intermediate"),
        "moe_layer_freq": 1 if len(routed) == blocks else [int(block in routed) for block in range(blocks)],
        "moe_shared_expert_intermediate_size": facts.get("shared_intermediate"),
        "moe_shared_expert_gate": "blocks.{b}.shared_gate.weight" in there,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_enable_expert_bias": correction,
        "moe_router_pre_softmax": not sigmoid and config.get("norm_topk_prob") is False,
    }
