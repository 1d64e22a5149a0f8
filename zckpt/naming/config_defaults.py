"""What transformers takes where a model's config.json leaves something out, for the models that `to-gguf` writes.

For `gguf_metadata`: importing transformers to ask it costs seconds and hundreds of megabytes.
Source: transformers 5.23, models/*/configuration_*.py, modeling_rope_utils.py (`standardize_rope_params`) and
models/gemma3/configuration_gemma3.py (`convert_rope_params_to_dict`); tests/interop/test_gguf.py compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zckpt.base.errors import UnsupportedError

_LLAMA: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
_MISTRAL = {
    **_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096
}  # fmt: skip
_QWEN2: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "use_sliding_window": False, "sliding_window": 4096,
}  # fmt: skip
_GEMMA: dict[str, Any] = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": {
        **_MISTRAL, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5
    },
    "qwen2": _QWEN2,
    "qwen2_moe": {
        **_QWEN2, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "norm_topk_prob": False,
    },
    "qwen3": {**_QWEN2, "head_dim": 128},
    "qwen3_moe": {
        **_QWEN2, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
    },
    "gemma2": _GEMMA,
    "gemma3_text": {
        **_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}  # fmt: skip
_THETA = {"mixtral": 1e6}
_OTHER_NAMES = {"mixtral": "num_local_experts", "qwen3_moe": "num_local_experts"}
"""`model_type` -> the key for `num_experts`."""
_FLOATS = frozenset({"rms_norm_eps", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"})
_MOST = 1 << 31
"""A number above any count in a model."""
_SCALED = ("llama3", "yarn", "longrope")


def filled_in(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A config with transformers' defaults for what it leaves out, and the text model's values at its top.

    Args:
        config: of one of the models that `to-gguf` writes.
        path: of the checkpoint, for errors.

    Raises:
        UnsupportedError: it says something that transformers does not take.
    """
    text = config.get("text_config")
    if config["model_type"] == "gemma3":
        text = {**(text if isinstance(text, Mapping) else {}), "model_type": "gemma3_text"}
    if isinstance(text, Mapping) and text.get("model_type") in _DEFAULTS:
        return {**config, **filled_in(text, path)}
    kind = str(config["model_type"])
    found = {**_DEFAULTS[kind], **config}
    if "num_experts" in config and (name := _OTHER_NAMES.get(kind)) is not None:
        found[name] = found.pop("num_experts")
    for key, usual in _DEFAULTS[kind].items():
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
    found["rope_parameters"] = _both_rotary(found) if kind == "gemma3_text" else _rotary(found, _THETA.get(kind, 1e4))
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


def _rotary(config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """The parameters of rotary embeddings, from any of the keys that a config may have for them."""
    found = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
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
