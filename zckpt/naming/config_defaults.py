"""What transformers takes where a model's config.json leaves something out, for the models that `to-gguf` writes.

For `gguf_metadata`. The class's own defaults are in its family's file (`config_keys`).
Source: transformers 5.23, modeling_rope_utils.py (`standardize_rope_params`) and
models/gemma3/configuration_gemma3.py (`convert_rope_params_to_dict`); tests/interop/test_gguf.py compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zckpt.base.errors import UnsupportedError
from zckpt.naming.config_keys import whole_config
from zckpt.naming.gguf_keys import KEYS
from zckpt.naming.rotary import THETA
from zckpt.naming.schemes import family_of

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
