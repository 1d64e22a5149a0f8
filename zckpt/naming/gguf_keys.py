"""Which keys of a model's config a GGUF file says, or llama.cpp has as they are; every other one is an error that names it.

For `gguf_metadata`; the tables of `config_keys` say which keys there are and what a class takes for those that are left out.
Source: llama.cpp of 2026, src/llama-model.cpp `load_hparams` and the graphs of LLM_ARCH_LLAMA, QWEN2, QWEN2MOE, QWEN3, QWEN3MOE,
GEMMA2, GEMMA3; ggml.c `rope_yarn`, llama-context.cpp (`yarn_attn_factor`); gguf 0.19.0, constants.py `Keys`.

What transformers takes where a model's config.json leaves something out, for the models that `to-gguf` writes.
The class's own defaults are in its family's file (`config_keys`).
Source: transformers 5.23, modeling_rope_utils.py (`standardize_rope_params`) and
models/gemma3/configuration_gemma3.py (`convert_rope_params_to_dict`); tests/interop/test_gguf.py compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from zckpt.base.errors import UnsupportedError
from zckpt.naming.config_keys import ROTARY, Keys, check_keys, whole_config
from zckpt.naming.rotary import THETA
from zckpt.naming.schemes import family_of

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
    """Checks that a GGUF file and llama.cpp express what a model's config says; `filled` is the same as `filled_in` makes
    it. Raises UnsupportedError if they do not; names each key.
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


_FLOATS = frozenset({"rms_norm_eps", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"})
_NUMBERS = _FLOATS | {
    "vocab_size", "hidden_size", "head_dim", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "sliding_window", "use_sliding_window", "num_experts", "norm_topk_prob",
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
}  # fmt: skip
"""Keys that are written; each must be of the kind that the class's default is of."""
_MOST = 1 << 31
"""A number above any count in a model."""
_SCALED = ("llama3", "yarn", "longrope")


def filled_in(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A config of a model that `to-gguf` writes, with transformers' defaults for what it leaves out, and the text model's
    values at its top. Raises UnsupportedError if it says something that transformers does not take.
    """
    text = config.get("text_config")
    if config["model_type"] == "gemma3":
        text = {**(text if isinstance(text, Mapping) else {}), "model_type": "gemma3_text"}
    if isinstance(text, Mapping) and text.get("model_type") in KEYS:
        return {**config, **filled_in(text, path)}
    kind = str(config["model_type"])
    found = whole_config({key: value for key, value in config.items() if key != "text_config"})
    for key, usual in whole_config({"model_type": kind}).items():
        if key in _NUMBERS:
            _check(key, found[key], usual, path)
    for key in ("rope_parameters", "rope_scaling"):
        _check_rotary(key, config.get(key), path)
    heads = found["num_attention_heads"]
    if found["num_key_value_heads"] is None:
        found["num_key_value_heads"] = heads
    if kind in ("llama", "mistral") and found["head_dim"] is None:
        found["head_dim"] = found["hidden_size"] // heads
    if not found.get("use_sliding_window", True):
        found["sliding_window"] = 0 if kind == "qwen2_moe" else None
    found["rope_parameters"] = _both_rotary(found) if kind == "gemma3_text" else _rotary(found)
    return found


def _check(key: str, value: object, usual: object, path: str) -> None:
    """Checks that a value is of the kind that it has to be; counts are greater than 0."""
    can_lack = usual is None or key in ("sliding_window", "num_key_value_heads")
    if value is None and can_lack:
        return
    if isinstance(usual, bool):
        is_fit = isinstance(value, bool)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        is_fit = False
    else:
        is_fit = key in _FLOATS or (
            isinstance(value, int) and (0 < value < _MOST or (value == 0 and key == "sliding_window"))
        )
    if not is_fit:
        raise UnsupportedError(
            f"the model's config has no usable {key}", file=path, found=f"{key}: {str(value)[:100]!r}",
            expected="true or false" if isinstance(usual, bool) else "a number" if key in _FLOATS else "a whole number from 1",
            remedy="Mend config.json, or pass the model's own config.json with --config.",
        )  # fmt: skip


def _check_rotary(key: str, value: object, path: str) -> None:
    """Checks that parameters of rotary embeddings are a JSON object with numbers greater than 0."""
    numbers = [value] if isinstance(value, int | float) else value.values() if isinstance(value, Mapping) else ()
    for one in numbers:
        if isinstance(one, Mapping):
            _check_rotary(key, one, path)
    is_fit = value is None or isinstance(value, Mapping)
    if not is_fit or any(isinstance(n, int | float) and not (n is False or 0 < n < math.inf) for n in numbers):
        raise UnsupportedError(
            f"the model's config has no usable {key}", file=path, found=f"{str(value)[:100]!r}",
            expected="an object of numbers greater than 0", remedy="Mend config.json, or pass the model's own with --config.",
        )  # fmt: skip


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of rotary embeddings, from any of the keys that a config may have for them."""
    found = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    family = family_of(config["model_type"])
    theta = family.rotary.get("theta", THETA) if family is not None else THETA
    found.setdefault("rope_theta", config.get("rope_theta", theta))
    found.setdefault("rope_type", found.get("type", "default"))
    if found["rope_type"] in _SCALED:
        found.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return found


def _both_rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters for Gemma 3, which has one set for layers with a window and one for the others."""
    given = dict(config.get("rope_parameters") or {})
    whole = {"rope_type": "default", **(given.get("full_attention") or {})}
    whole |= config.get("rope_scaling") or {}
    near = {"rope_type": "default", **(given.get("sliding_attention") or {})}
    whole.setdefault("rope_theta", config.get("rope_theta", 1e6))
    near.setdefault("rope_theta", config.get("rope_local_base_freq", 1e4))
    for one in (whole, near):
        if one["rope_type"] in _SCALED:
            one.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return {**given, "full_attention": whole, "sliding_attention": near}
