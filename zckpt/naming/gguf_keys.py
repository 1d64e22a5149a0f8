"""Which keys of a model's config a GGUF file says, or llama.cpp has as they are; every other one is an error that names it.

For `gguf_metadata`; the tables of `config_keys` say which keys there are and what a class takes for those that are left out.
Source: llama.cpp of 2026, src/llama-model.cpp `load_hparams` and the graphs of LLM_ARCH_LLAMA, QWEN2, QWEN2MOE, QWEN3, QWEN3MOE,
GEMMA2, GEMMA3; ggml.c `rope_yarn`, llama-context.cpp (`yarn_attn_factor`); gguf 0.19.0, constants.py `Keys`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zckpt.base.errors import UnsupportedError
from zckpt.naming.config_keys import ROTARY, Keys, check_keys, whole_config

BLOCKS_OF_27B = {"gemma2": 46, "gemma3": 62, "gemma3_text": 62}
"""`model_type` -> blocks of the model of that family with queries scaled by another number than the size of a head."""

SUMS_OF_EXPERTS = {"qwen2_moe": False, "qwen3_moe": True}
"""Whether llama.cpp makes the weights of a token's experts add up to one."""

_SAID = (ROTARY - {"partial_rotary_factor", "rotary_emb_base", "rotary_pct"}) | {
    "max_position_embeddings",
    "num_experts_per_tok",
    "num_experts_per_token",
    "rms_norm_eps",
}
_WINDOW = frozenset({"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"})
_SILU, _TANH = ("silu", "swish"), ("gelu_pytorch_tanh",)
_WHOLE = {"partial_rotary_factor": (1.0,)}
_LLAMA = Keys(_SAID | {"sliding_window"}, {"hidden_act": _SILU, **_WHOLE})
_QWEN = Keys(_SAID | _WINDOW, {"hidden_act": _SILU, **_WHOLE})
_GEMMA = Keys(
    _SAID | {"attn_logit_softcapping", "final_logit_softcapping", "layer_types", "query_pre_attn_scalar", "sliding_window"},
    {
        "hidden_activation": (None, *_TANH), "hidden_act": _TANH, "use_bidirectional_attention": (None, False),
        "sliding_window_pattern": (6,), "_sliding_window_pattern": (6,), **_WHOLE,
    },
)  # fmt: skip
KEYS = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), _LLAMA),
    **dict.fromkeys(("qwen2", "qwen3"), _QWEN),
    **{kind: Keys(_QWEN.said, {**_QWEN.only, "norm_topk_prob": (sums,)}) for kind, sums in SUMS_OF_EXPERTS.items()},
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
}
"""Model type -> the keys of its config that the file says, and the values of others that llama.cpp has."""

_NEAR_EACH = {"gemma2": 2, "gemma3_text": 6}
"""`model_type` -> the period of layers with full attention in llama.cpp."""
_UNBIASED = ("gemma2", "gemma3_text", "qwen3", "qwen3_moe")
"""Types of models with attention that has no biases in llama.cpp."""

_ALWAYS = frozenset({"rope_theta", "rope_type", "type"})
_TURNED: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}),
}
"""Kind of rotary positions -> the keys that the file says."""
_USUAL: Mapping[str, tuple[object, ...]] = {
    "attention_factor": (None,), "attn_factor": (None,), "mscale": (None,), "mscale_all_dim": (None,), "truncate": (None, True),
    "partial_rotary_factor": (None, 1.0), "extrapolation_factor": (None, 1.0), "finetuned": (None, True, False),
}  # fmt: skip
"""Keys of rotary positions that it does not say -> the values that llama.cpp has."""

_WRITER = "llama.cpp cannot say or compute"
_REMEDY = (
    "Run it with transformers: llama.cpp has no such model. If the key does not change what the model computes, pass a "
    "config.json without it with --config."
)


def check_config(config: Mapping[str, Any], filled: Mapping[str, Any], path: str) -> None:
    """Checks that a GGUF file and llama.cpp express what a model's config says.

    Args:
        config: transformers' config of the model.
        filled: the same with the class's values for what it leaves out, as `config_defaults` makes it.
        path: of the checkpoint, for errors.

    Raises:
        UnsupportedError: they do not; names each key.
    """
    if config.get("model_type") == "gemma3":  # beside the text model stand numbers of pictures
        text = config.get("text_config")
        config = {**(text if isinstance(text, Mapping) else {}), "model_type": "gemma3_text"}
    check_keys(whole_config(config), KEYS, _WRITER, path, _REMEDY)
    if wrong := [*_of_family(str(config["model_type"]), filled), *_of_positions(str(config["model_type"]), filled)]:
        raise UnsupportedError(
            f"the model's config says something that {_WRITER}", file=path, found="; ".join(wrong), remedy=_REMEDY
        )


def _of_family(kind: str, config: Mapping[str, Any]) -> Iterator[str]:
    """The differences between a config and the family in llama.cpp."""
    blocks, heads = config["num_hidden_layers"], config["num_attention_heads"]
    if kind in _UNBIASED and config.get("attention_bias"):
        yield "attention_bias True (only False)"
    if (each := _NEAR_EACH.get(kind)) is None:
        return
    usual = config["hidden_size"] // heads if blocks == BLOCKS_OF_27B[kind] else config["head_dim"]
    if config["query_pre_attn_scalar"] != usual:
        yield f"query_pre_attn_scalar {config['query_pre_attn_scalar']} (only {usual})"
    kinds = config.get("layer_types")
    wanted = ["sliding_attention" if number % each else "full_attention" for number in range(1, blocks + 1)]
    if kinds is not None and kinds != wanted:
        yield f"layer_types {kinds} (only full_attention in every layer with a number that is a multiple of {each})"
    if kind == "gemma3_text" and (cap := config.get("attn_logit_softcapping")):
        yield f"attn_logit_softcapping {cap} (only null)"
    if not config.get("sliding_window"):
        yield f"sliding_window {config.get('sliding_window')} (only numbers)"


def _of_positions(kind: str, config: Mapping[str, Any]) -> Iterator[str]:
    """The rotary positions that the file does not express, and that llama.cpp has otherwise."""
    rope = config["rope_parameters"]
    both = [rope["full_attention"], rope["sliding_attention"]] if "full_attention" in rope else [rope]
    for number, one in enumerate(both):
        how = str(one.get("rope_type") or "default")
        fixed = kind == "gemma2" or number == 1
        if how not in _TURNED or (fixed and how != "default"):
            yield f"rope_type {how!r} (only {'default' if fixed else ', '.join(_TURNED)})"
            continue
        if kind == "gemma2" and one.get("rope_theta") != 1e4:
            yield f"rope_theta {one.get('rope_theta')} (only 10000.0)"
        yield from (
            f"{key} of rope_type {how!r} is missing" for key in _TURNED[how] & {"factor"} if one.get(key) is None
        )
        for key, value in one.items():
            if key in _TURNED[how] | _ALWAYS or (key in _USUAL and value in _USUAL[key]):
                continue
            if how in ("default", "linear") and key in _TURNED["yarn"] | _TURNED["llama3"]:
                continue  # which transformers does not read either
            yield f"{key} {value} of the rotary positions"
