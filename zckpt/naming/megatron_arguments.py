"""The arguments of a Megatron run (`args` in a checkpoint) for a Hugging Face model: the way back from `families`.

For `to_mcore`. Megatron compares some with those of a run that loads (`check_checkpoint_args`), and with `--use-checkpoint-args`
takes all that describe the model; zckpt makes a config.json of them.
Source: Megatron-LM (core 0.14 - 0.20), megatron/training/{arguments,checkpointing}.py, tools/checkpoint/loader_mixtral_hf.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zckpt.base.errors import UnsupportedError
from zckpt.base.words import join_words
from zckpt.core.catalog import Catalog
from zckpt.naming.config_keys import ROTARY, WINDOW, Keys, check_keys, fields_of, whole_config
from zckpt.naming.facts import Facts
from zckpt.naming.parts import parse_part_name
from zckpt.naming.rotary import rotary_arguments, rotary_of, unsaid_rotary

_SAME = {
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length"),
    "seq_length": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length"),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
    "layernorm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
    "init_method_std": ("initializer_range",),
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "hidden_dropout": ("resid_pdrop", "hidden_dropout"),
    "moe_router_topk": ("num_experts_per_tok", "num_experts_per_token"),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
"""Argument -> keys of a config that have its value; the first that is there counts."""

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
    "squared_relu": False,
}

_SINKS: dict[str, object] = {
    "softmax_type": "learnable",
    "swiglu": False,
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
}
"""Arguments of a model of gpt-oss, the only family with sinks in its attention."""

_GEMMA = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
"""Keys of Gemma's configs that Megatron Bridge's providers have under the same names."""

_QUERY_KEY_NORMS = {"blocks.{b}.attention.query_norm.weight", "blocks.{b}.attention.key_value_down_norm.weight"}

_ACTIVATIONS: dict[str, dict[str, object]] = {
    "gelu": {"activation": "gelu", "bias_gelu_fusion": False},
    "gelu_fast": {"activation": "gelu", "bias_gelu_fusion": True},
    "gelu_new": {"activation": "gelu_new", "bias_gelu_fusion": True},
    "gelu_pytorch_tanh": {"activation": "gelu_pytorch_tanh", "bias_gelu_fusion": True},
}
"""Activation function of an MLP without a gate -> arguments: Megatron-Core has the exact GELU, and fused with its bias the one by
tanh; `activation` is no argument of Megatron's, and says to zckpt by which formula that one is rounded."""

_BASIC = Keys(
    frozenset({"max_position_embeddings", "seq_length", "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"}),
    {"hidden_act": ("silu", "swish"), "is_encoder_decoder": (False,)},
)
_ROTARY = ROTARY - {"rope_local_base_freq", "rotary_emb_base", "rotary_pct"}
_ROUTED = frozenset({"num_experts_per_tok", "num_experts_per_token", "norm_topk_prob"})
_GROUPED = frozenset({"n_group", "topk_group", "routed_scaling_factor"})
_BOTH_WAYS: dict[str, tuple[object, ...]] = {"use_bidirectional_attention": (False, None)}


def _keys(*said: Iterable[str], activation: bool = False, **only: tuple[object, ...]) -> Keys:
    """What is understood of a model type, beside what is of all."""
    fixed = {key: values for key, values in _BASIC.only.items() if not (activation and key == "hidden_act")}
    return Keys(_BASIC.said.union(*said), {**fixed, **only})


_TANH = ("gelu_pytorch_tanh",)
KEYS: dict[str, Keys] = {
    "bloom": _keys({"apply_residual_connection_post_layernorm"}),
    "deepseek_v2": _keys(
        _ROTARY, _ROUTED - {"norm_topk_prob"}, _GROUPED, {"topk_method"},
        norm_topk_prob=(False,), scoring_func=("softmax",), moe_layer_freq=(1,),
    ),
    "deepseek_v3": _keys(
        _ROTARY, _ROUTED, _GROUPED, topk_method=("noaux_tc",), scoring_func=("sigmoid",), moe_layer_freq=(1,),
    ),
    "falcon": _keys(_ROTARY, {"activation"}),
    "gemma2": _keys(
        _ROTARY, WINDOW, {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}, activation=True,
        hidden_activation=_TANH, hidden_act=_TANH, **_BOTH_WAYS,
    ),
    "gemma3_text": _keys(
        _ROTARY, WINDOW, {"query_pre_attn_scalar", "rope_local_base_freq", "_sliding_window_pattern"}, activation=True,
        hidden_activation=_TANH, hidden_act=_TANH, **_BOTH_WAYS,
    ),
    "glm4": _keys(_ROTARY),
    "glm4_moe": _keys(
        _ROTARY, _ROUTED, _GROUPED, topk_method=("noaux_tc",), scoring_func=("sigmoid",),
    ),
    "gpt2": _keys({"activation_function", "n_positions", "n_ctx"}, activation=True),
    "gpt_neox": _keys(
        _ROTARY, {"hidden_act", "rotary_emb_base", "rotary_pct", "use_parallel_residual"}, activation=True
    ),
    "gpt_oss": _keys(_ROTARY, _ROUTED, WINDOW, {"swiglu_limit", "experts_per_token", "initial_context_length"}),
    "llama": _keys(_ROTARY),
    "mistral": _keys(_ROTARY, {"sliding_window"}),
    "mixtral": _keys(_ROTARY, _ROUTED - {"norm_topk_prob"}, {"sliding_window"}),
    "phi3": _keys(_ROTARY, {"sliding_window"}),
    "qwen2": _keys(_ROTARY, WINDOW),
    "qwen2_moe": _keys(_ROTARY, WINDOW, _ROUTED),
    "qwen3": _keys(_ROTARY, WINDOW),
    "qwen3_moe": _keys(_ROTARY, WINDOW, _ROUTED),
}  # fmt: skip
"""Model type -> the keys of its config that become arguments, and the values of others that Megatron-Core has."""

_WRITER = "Megatron-Core's arguments cannot say"
_REMEDY = (
    "Write the tensors alone, without arguments: zckpt to-dcp CKPT OUT --names megatron-core --under ''. If the key does not "
    "change what the model computes, pass a config.json without it with --config."
)

_NOT_TAKEN: dict[str, object] = {
    "activation_func_clamp_value": None, "apply_residual_connection_post_layernorm": False, "beta_fast": 32, "beta_slow": 1,
    "bias_gelu_fusion": True, "glu_linear_offset": 0.0, "kv_lora_rank": None, "moe_router_group_topk": None,
    "moe_router_num_groups": None, "moe_shared_expert_gate": False, "mscale": 1.0, "mscale_all_dim": 0.0,
    "multi_latent_attention": False, "norm_epsilon": 1e-5, "original_max_position_embeddings": 4096, "q_lora_rank": None,
    "qk_head_dim": None, "qk_layernorm": False, "qk_pos_emb_head_dim": None, "quick_geglu": False, "rope_scaling_factor": 8.0,
    "rope_type": None, "rotary_scaling_factor": 1.0, "rotary_seq_len_interpolation_factor": None, "softmax_type": "vanilla",
    "use_rope_scaling": False, "v_head_dim": None, "window_attn_skip_freq": None, "window_size": None,
    "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": True,
    "yarn_original_max_position_embeddings": 4096,
}  # fmt: skip
"""Arguments that describe the model, and that Megatron-LM does not take from a checkpoint -> their defaults.
Source: Megatron-LM (core 0.20), megatron/training/checkpointing.py `load_args_from_checkpoint`."""

_BEYOND = {
    "falcon": "attention and MLP side by side",
    "gemma2": "GELU in a gated MLP, norms behind attention and MLP, and caps of scores and logits",
    "gemma3_text": "GELU in a gated MLP, norms behind attention and MLP, and two kinds of rotary positions",
    "glm4": "norms behind attention and MLP",
    "gpt_neox": "attention and MLP side by side",
}
"""Type of a model -> what it computes, and Megatron-LM's own GPT model does not."""

_SIGMOID = ("deepseek_v3", "glm4_moe")
"""Types of models with routers that choose by sigmoid without saying so in their config."""
_BEST_OF_GROUP = {"deepseek_v2": 1, "deepseek_v3": 2, "glm4_moe": 2}
"""Model type -> how many of the best experts of a group count when groups are chosen."""
_PARTIAL = ("glm4", "glm4_moe", "gpt_neox", "phi3")
"""Types of models that turn a part of a head only."""
_ALTERNATING = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}
"""Type of a model -> every so many layers attention looks back to the beginning, if its config says nothing."""
_FROM_ONE = ("gemma2", "gemma3_text")
"""Types of models with weights of norms that are counted from one."""


def megatron_arguments(facts: Facts, parts: Catalog, config: Mapping[str, object], multiple: int) -> dict[str, object]:
    """The arguments of a model.

    Args:
        facts: of the model, with what its parts show.
        parts: of the model.
        config: transformers' config of it.
        multiple: the padded vocabulary is a multiple of it.

    Raises:
        UnsupportedError: the config says something that changes what the model computes, and that no argument says.
    """
    config = whole_config(config)
    check_keys(config, KEYS, _WRITER, facts.path, _REMEDY)
    kind = str(config["model_type"])
    there = {parse_part_name(name).part for name in parts.tensors}
    learned, latent = "positions.weight" in there, "blocks.{b}.attention.key_value_down.weight" in there
    rotary = "rope_parameters" in fields_of(kind)
    query, key = facts.whole("query_heads"), facts.whole("key_heads")
    gated, biased = facts.get("gated") is True, "blocks.{b}.mlp.down.bias"
    found = _ALWAYS | {
        "num_layers": facts.get("blocks"),
        "hidden_size": facts.get("hidden"),
        "ffn_hidden_size": facts.get("intermediate") or config.get("intermediate_size") or facts.get("expert_intermediate"),
        "num_attention_heads": query,
        "group_query_attention": key is not None and key != query,
        "num_query_groups": key or query,
        "kv_channels": facts.get("head_size") or config.get("head_dim"),
        "position_embedding_type": "learned_absolute" if learned else "rope" if rotary else "alibi",
        "add_position_embedding": learned,
        "use_rotary_position_embeddings": rotary,
        "rotary_interleaved": kind == "glm4",
        "normalization": "LayerNorm" if "final_norm.bias" in there else "RMSNorm",
        "apply_layernorm_1p": kind in _FROM_ONE,
        "swiglu": gated and kind not in _FROM_ONE,
        "add_bias_linear": biased in there or "blocks.{b}.experts.{e}.down.bias" in there,
        "add_qkv_bias": "blocks.{b}.attention.query.bias" in there,
        "parallel_attn": True if facts.get("parallel") is True else None,
        "apply_residual_connection_post_layernorm": config.get("apply_residual_connection_post_layernorm"),
        "qk_layernorm": bool(there & _QUERY_KEY_NORMS),
        "untie_embeddings_and_output_weights": facts.get("tied") is not True,
        "vocab_size": facts.get("vocabulary"),
        "padded_vocab_size": facts.get("padded_vocabulary") or facts.get("vocabulary"),
        "make_vocab_size_divisible_by": multiple,
    }  # fmt: skip
    found |= _read_arguments(_SAME, config) | _window(kind, config, facts.whole("blocks") or 0)
    wrong: list[str] = []
    if rotary:
        rope, unsaid = _rope_of(kind, config)
        wrong += unsaid or unsaid_rotary(rope, latent=latent, partial=kind in _PARTIAL)
        found |= {} if wrong else rotary_arguments(rope, latent=latent)
    if kind in _FROM_ONE:
        found |= {"gated_linear_unit": True, **{key: config.get(key) for key in _GEMMA}}
    elif not gated and kind != "bloom":
        said = next(key for key in ("activation_function", "activation", "hidden_act") if key in config)
        found |= _ACTIVATIONS.get(str(config[said]), {})
        wrong += [] if config[said] in _ACTIVATIONS else [f"{said} {config[said]} (only {', '.join(_ACTIVATIONS)})"]
    if "blocks.{b}.attention.sinks" in there:
        found |= _SINKS | {"activation_func_clamp_value": config.get("swiglu_limit")}
    if "blocks.{b}.router.weight" in there:
        found |= _experts(facts, parts, config, there)
        wrong += _unsaid_routing(kind, config)
    if wrong:
        raise UnsupportedError(
            f"the model's config says something that {_WRITER}", file=facts.path, found="; ".join(wrong), remedy=_REMEDY
        )
    return {name: value for name, value in found.items() if value is not None}


def megatron_notes(arguments: Mapping[str, object], model_type: object) -> tuple[str, ...]:
    """Sentences for a person on what a run of Megatron-LM does not do by itself with such arguments."""
    notes: tuple[str, ...] = ()
    beyond = _BEYOND.get(str(model_type))
    if beyond is not None and (not beyond.endswith("side by side") or arguments.get("parallel_attn") is True):
        notes += (f"Megatron-LM's own GPT model has no {beyond}: load this into a model of yours that has them.",)
    wanted = [
        f"{name} {arguments[name]}"
        for name, usual in _NOT_TAKEN.items()
        if name in arguments and arguments[name] != usual
    ]
    if wanted:
        notes += (
            f"Megatron-LM's --use-checkpoint-args does not take {join_words(wanted)} from a checkpoint: "
            "pass these as options, too.",
        )
    return notes


def _rope_of(kind: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The rotary positions of a model, and what of them cannot be said. Gemma 3 has two kinds; one is always the same."""
    if kind != "gemma3_text":
        return rotary_of(config), []
    nested = config.get("rope_parameters")
    nested = nested if isinstance(nested, Mapping) else {}
    whole, near = (dict(nested.get(name) or {}) for name in ("full_attention", "sliding_attention"))
    whole |= config.get("rope_scaling") or {}
    whole.setdefault("rope_theta", config.get("rope_theta") or 1e6)
    near.setdefault("rope_theta", config.get("rope_local_base_freq") or 1e4)
    whole, near = rotary_of({"rope_parameters": whole}), rotary_of({"rope_parameters": near})
    wrong = [
        f"rope_type {rope['rope_type']!r} (only 'default')" for rope in (whole, near) if rope["rope_type"] != "default"
    ]
    if near["rope_theta"] != 1e4:
        wrong.append(f"rope_theta {near['rope_theta']} of sliding_attention (only 10000.0)")
    return whole, wrong


def _read_arguments(keys: Mapping[str, tuple[str, ...]], config: Mapping[str, object]) -> dict[str, object]:
    return {
        argument: next(value for key in names if (value := config.get(key)) is not None)
        for argument, names in keys.items()
        if any(config.get(key) is not None for key in names)
    }


def _window(kind: str, config: Mapping[str, Any], blocks: int) -> dict[str, object]:
    """How far attention looks back, and in which layers it looks back to the beginning.

    Source: transformers 5.23, the classes' `__post_init__`.
    """
    tokens = config.get("sliding_window")
    if not isinstance(tokens, int) or tokens < 1 or config.get("use_sliding_window") is False:
        return {}
    usual = _windows(kind, config, blocks)
    kinds = config.get("layer_types") if "layer_types" in fields_of(kind) else None
    near = [one != "full_attention" for one in kinds] if isinstance(kinds, list) else usual
    if not any(near) and kind not in _ALTERNATING:
        return {}
    found: dict[str, object] = {"window_size": [tokens - 1, 0]}
    if not all(near) or (kind in _ALTERNATING and near != usual):
        each = 1 + near.index(False) if not all(near) else 1
        regular = each > 1 and all(is_near is (number % each != 0) for number, is_near in enumerate(near, 1))
        found["window_attn_skip_freq"] = each if regular else [int(is_near) for is_near in near]
    return found


def _windows(kind: str, config: Mapping[str, Any], blocks: int) -> list[bool]:
    """Whether each layer of a model has a window, if its config does not list them."""
    most = config.get("max_window_layers")
    most = most if isinstance(most, int) else 0
    if kind in ("qwen2", "qwen3"):
        return [block >= most for block in range(blocks)]
    if kind == "qwen2_moe":
        return [block % 2 == 0 and block < most for block in range(blocks)]
    if kind in _ALTERNATING:
        each = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
        each = each if kind == "gemma3_text" and isinstance(each, int) else _ALTERNATING[kind]
        return [(block + 1) % each != 0 for block in range(blocks)]
    return [True] * blocks


def _unsaid_routing(kind: str, config: Mapping[str, Any]) -> list[str]:
    """What of the way in which experts are chosen and weighed Megatron-Core's router does not have."""
    chosen, sums = config.get("num_experts_per_tok"), config.get("norm_topk_prob")
    wrong = []
    if kind in _SIGMOID and isinstance(chosen, int) and sums is not (chosen > 1):
        wrong.append(f"norm_topk_prob {sums} (only {chosen > 1}, with num_experts_per_tok {chosen} and sigmoid)")
    groups, some = config.get("n_group"), config.get("topk_group")
    if not _has_groups(kind, config):
        return wrong
    if not (isinstance(chosen, int) and isinstance(some, int) and some > 0 and isinstance(groups, int)):
        wrong.append(f"n_group {groups}, topk_group {some}, num_experts_per_tok {chosen} (only whole numbers)")
    elif (best := chosen // some) != (own := _BEST_OF_GROUP[kind]):
        wrong.append(
            f"topk_group {some} of n_group {groups} (Megatron-Core judges a group by its best {best}, not {own})"
        )
    return wrong


def _has_groups(kind: str, config: Mapping[str, Any]) -> bool:
    """Whether the groups of experts have a part in which ones are chosen."""
    if kind not in _BEST_OF_GROUP or (kind == "deepseek_v2" and config.get("topk_method") == "greedy"):
        return False
    return config.get("n_group") != config.get("topk_group")


def _experts(facts: Facts, parts: Catalog, config: Mapping[str, Any], there: set[str]) -> dict[str, object]:
    """What describes experts and their router."""
    routed = {
        block
        for name in parts.tensors
        for part, block, _ in (parse_part_name(name),)
        if part == "blocks.{b}.router.weight"
    }
    blocks = facts.whole("blocks") or 0
    kind = str(config["model_type"])
    sigmoid, grouped = kind in _SIGMOID, _has_groups(kind, config)
    correction = "blocks.{b}.router.correction" in there
    return {
        "num_experts": facts.get("experts"),
        "moe_ffn_hidden_size": facts.get("expert_intermediate"),
        "moe_layer_freq": 1 if len(routed) == blocks else [int(block in routed) for block in range(blocks)],
        "moe_shared_expert_intermediate_size": facts.get("shared_intermediate"),
        "moe_shared_expert_gate": "blocks.{b}.shared_gate.weight" in there,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_enable_expert_bias": correction,
        "moe_router_num_groups": config.get("n_group") if grouped else None,
        "moe_router_group_topk": config.get("topk_group") if grouped else None,
        "moe_router_pre_softmax": not sigmoid and config.get("norm_topk_prob") is False,
    }
