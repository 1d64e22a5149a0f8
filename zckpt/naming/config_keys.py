"""Which keys of a model's config change what it computes, and which of them another program's form of the model can say.

For `megatron_arguments` and `gguf_metadata`. A config.json that leaves a key out means the default of transformers' class:
"defaults" of the family's file; its "names" are the class's other names of keys. Each key is one of these: it has no effect on
what the model computes (`FREE`), the tensors or the facts of the model say it (`SHOWN`), the writer says it (`Keys.said`), the
writer's form has only some values of it (`Keys.only`). Every other key must be at its default, and is an error otherwise.
Source: transformers 5.23, models/*/configuration_*.py and modeling_*.py; tests/naming/test_config_keys.py compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.base.words import join_words
from zckpt.naming.schemes import family_of

FREE = frozenset({
    "_name_or_path", "add_bos_token", "add_eos_token", "architectures", "attention_dropout", "attn_pdrop", "auto_map",
    "aux_loss_alpha", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "classifier_dropout", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
    "early_stopping", "embd_pdrop", "encoder_no_repeat_ngram_size", "eos_token_id", "ep_size",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "hidden_dropout", "id2label", "init_std", "initializer_range", "is_decoder", "label2id",
    "length_penalty", "max_length", "max_sequence_length", "min_length", "model_type", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_labels", "num_return_sequences", "offset_alibi", "output_attentions",
    "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "quantization_config", "remove_invalid_values", "reorder_and_upcast_attn", "repetition_penalty",
    "resid_pdrop", "return_dict", "return_dict_in_generate", "router_aux_loss_coef", "router_jitter_noise", "sep_token_id",
    "seq_aux", "slow_but_exact", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class",
    "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version", "typical_p", "unk_token_id", "use_bfloat16",
    "use_cache",
})  # fmt: skip
"""Keys of any config without effect on what a model computes: numbers of tokens, what is random, what training adds, how
text is made, forms of an answer, and how exactly it is computed."""

_FREE_BEGINNINGS = ("_attn_implementation", "_commit_hash", "_experts_implementation", "_unsloth", "unsloth_")

SHOWN = frozenset({
    "attention_bias", "bias", "decoder_sparse_step", "ffn_hidden_size", "first_k_dense_replace", "head_dim", "hidden_size",
    "intermediate_size", "kv_lora_rank", "mlp_bias", "mlp_only_layers", "moe_intermediate_size", "multi_query", "n_ctx",
    "n_embd", "n_embed", "n_head", "n_inner", "n_layer", "n_positions", "n_routed_experts", "n_shared_experts",
    "new_decoder_architecture", "num_attention_heads", "num_experts", "num_hidden_layers", "num_key_value_heads",
    "num_kv_heads", "num_ln_in_parallel_attn", "num_local_experts", "num_mtp_layers", "num_nextn_predict_layers",
    "parallel_attn", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "qkv_bias",
    "shared_expert_intermediate_size", "tie_word_embeddings", "use_qk_norm", "v_head_dim", "vocab_size",
})  # fmt: skip
"""Keys of any config that the tensors' shapes show, or that are facts of every model."""

ROTARY = frozenset({
    "original_max_position_embeddings", "partial_rotary_factor", "rope_local_base_freq", "rope_parameters", "rope_scaling",
    "rope_theta", "rotary_emb_base", "rotary_pct",
})  # fmt: skip
"""Keys of rotary positions, which `rotary` reads; a model type has those that its class reads."""

WINDOW = frozenset(
    {"layer_types", "max_window_layers", "sliding_window", "sliding_window_pattern", "use_sliding_window"}
)
"""Keys of how far attention looks back, which `windows` reads."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What a writer understands of the configs of a model type.

    Attributes:
        said: keys that it writes, whatever they are, or refuses itself.
        only: key -> the values that its form of the model has; what is not of the class may be missing, too.
    """

    said: frozenset[str] = frozenset()
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict[str, "tuple[object, ...]"])


def fields_of(model_type: object) -> Mapping[str, Any]:
    """The class's fields and their defaults; empty for a type that is not known."""
    family = family_of(model_type)
    return {} if family is None else family.defaults


def whole_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the class's defaults for what it leaves out, under the class's own keys, with the text model's at
    its top.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and "text_config" not in fields_of(config.get("model_type")):
        config = {**{key: value for key, value in config.items() if key != "text_config"}, **text}
    family = family_of(config.get("model_type"))
    if family is None:
        return dict(config)
    said = (*family.defaults.items(), *config.items())
    return {family.spellings.get(key, key): value for key, value in said}


def check_keys(config: Mapping[str, Any], keys: Mapping[str, Keys], writer: str, path: str, remedy: str) -> None:
    """Checks that a writer's form of the model can express all that changes what the model computes.

    Args:
        config: as `whole_config` makes it.
        keys: model type -> what the writer understands.
        writer: its name, for the error.
        path: of the checkpoint, for the error.
        remedy: for the error.

    Raises:
        UnsupportedError: it cannot; names each key.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in keys:
        raise UnsupportedError(
            f"it is not known what {writer} of such a model", file=path, found=f"model_type {kind!r}",
            expected=f"one of {', '.join(sorted(keys))}", remedy=remedy,
        )  # fmt: skip
    wrong = [
        f"{key} {_as_text(value)}{why}"
        for key, value in sorted(config.items())
        if (why := _why_not(key, value, keys[kind], fields_of(kind))) is not None
    ]
    if wrong:
        raise UnsupportedError(
            f"the model's config says something that {writer}", file=path, found="; ".join(wrong), remedy=remedy,
        )  # fmt: skip


def _why_not(key: str, value: object, keys: Keys, fields: Mapping[str, Any]) -> str | None:
    """Why a value cannot be expressed, as the end of a sentence; None if it can."""
    if key in FREE or key in SHOWN or key in keys.said or key.startswith(_FREE_BEGINNINGS):
        return None
    if key in keys.only:
        wanted = keys.only[key]
        is_fit = (value is None and key not in fields) or any(_is_same(value, one) for one in wanted)
        return None if is_fit else f" (only {join_words([_as_text(one) for one in wanted], 'or')})"
    if key in fields:
        return None if _is_same(value, fields[key]) else f" (only {_as_text(fields[key])})"
    return None if value is None or value is False or value in ([], {}, "") else " (a key that zckpt does not know)"


def _is_same(value: object, other: object) -> bool:
    """Whether two values of a config are equal; true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _as_text(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else f"{text[:97]}..."
