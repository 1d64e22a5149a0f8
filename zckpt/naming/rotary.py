"""Rotary positions: as a config of transformers says them, and as arguments of a Megatron run do, in both directions.

For `megatron_arguments` and `families`.

[Note: rotary positions in schemes] Keys of a family's "rotary": "theta" and "part" are the class's defaults of the base and of
the part of a head that is turned, "keys" the config's two keys for them, "default" what the class takes where a config says
nothing; "turned" is another key, for how many elements of a head are turned; "partial" is true for a family that may turn a part
of a head only, "near" for one with others in layers with a window; "free" lists keys that change nothing of text.
Source: transformers 5.23, modeling_rope_utils.py (`convert_rope_params_to_dict`, `standardize_rope_params`, `_compute_*`);
Megatron-Core 0.14 - 0.20, models/common/embeddings/{rotary_pos_embedding,yarn_rotary_pos_embedding}.py, models/gpt/gpt_model.py;
Megatron-LM, megatron/training/{arguments,argument_utils}.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zckpt.naming.schemes import family_of

THETA, PARTIAL = 10000.0, 1.0
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of Llama 3, which Megatron-Core has no arguments for."""

_KNOWN = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", *_LLAMA3),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("attention_factor", "truncate"),
    ),
}
_FROM_YARN = {"rotary_scaling_factor": "factor", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
"""Arguments with one name for both kinds of attention; without low ranks, the other arguments begin with `yarn_`."""
_OWN_OF_YARN = ("beta_fast", "beta_slow", "original_max_position_embeddings")


def rotary_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of rotary positions in a config, with its class's defaults, under the names of transformers 5."""
    family = family_of(config.get("model_type"))
    usual: Mapping[str, Any] = {} if family is None else family.rotary
    base, part = usual.get("keys", ("rope_theta", "partial_rotary_factor"))
    given = config.get("rope_scaling") or config.get("rope_parameters")
    found = dict(given) if isinstance(given, Mapping) else dict(usual.get("default", {}))
    found.setdefault("rope_theta", _first(config.get(base), usual.get("theta", THETA)))
    turned, size = config.get(usual.get("turned", "")), config.get("head_dim")
    if isinstance(turned, int) and isinstance(size, int):
        found.setdefault("partial_rotary_factor", _first(config.get(part), turned / size))
    found.setdefault("partial_rotary_factor", _first(config.get(part), usual.get("part", PARTIAL)))
    found.setdefault("rope_type", found.get("type", "default"))
    if found["rope_type"] in ("llama3", "yarn", "longrope"):
        own, most = config.get("original_max_position_embeddings"), config.get("max_position_embeddings")
        if own is not None:
            found["original_max_position_embeddings"] = own
        found.setdefault("original_max_position_embeddings", most)
    return found


def _first(value: object, otherwise: object) -> object:
    return otherwise if value is None else value


def unsaid_rotary(rope: Mapping[str, Any], *, latent: bool, partial: bool, free: Sequence[str] = ()) -> list[str]:
    """The settings of rotary positions that Megatron-Core's arguments cannot express, as `key value (why)`.

    Args:
        rope: as `rotary_of` makes it.
        latent: whether attention goes through low ranks (MLA).
        partial: whether the family turns a part of a head only.
        free: keys that change nothing of text.
    """
    kind = rope["rope_type"]
    kinds = ("default", "yarn") if latent else tuple(_KNOWN)
    if kind not in kinds:
        return [f"rope_type {kind!r} (only {', '.join(kinds)})"]
    every = {key for keys in _KNOWN.values() for key in keys} | {
        "rope_theta",
        "rope_type",
        "type",
        "partial_rotary_factor",
    }
    wrong = [f"{key} {rope[key]} (a key that zckpt does not know)" for key in sorted(rope.keys() - every - {*free})]
    if not partial and rope["partial_rotary_factor"] != 1:
        wrong.append(f"partial_rotary_factor {rope['partial_rotary_factor']} (only 1.0)")
    if kind != "default" and not _is_number(rope.get("factor")):
        wrong.append(f"factor {rope.get('factor')} (only a number)")
    elif kind == "llama3":
        wrong += [f"{key} {rope.get(key)} (only {value})" for key, value in _LLAMA3.items() if rope.get(key) != value]
    elif kind == "yarn":
        wrong += _unsaid_yarn(rope, latent)
    return wrong


def _unsaid_yarn(rope: Mapping[str, Any], latent: bool) -> list[str]:
    wrong = []
    factor, attention, mscale, every = (
        rope.get(key) for key in ("factor", "attention_factor", "mscale", "mscale_all_dim")
    )
    natural = _mscale(factor, 1)
    if mscale and every:
        natural = _mscale(factor, mscale) / _mscale(factor, every)
    elif every:
        wrong.append(f"mscale_all_dim {every} (only with mscale)")
    if attention is not None and not math.isclose(attention, natural, rel_tol=1e-6):
        wrong.append(f"attention_factor {attention} (only {natural:.6g}, which follows from the others)")
    if latent and rope.get("truncate") is False:
        wrong.append("truncate false (only true)")
    return wrong


def _mscale(scale: Any, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def rotary_arguments(rope: Mapping[str, Any], *, latent: bool) -> dict[str, object]:
    """The arguments of a Megatron run with these rotary positions, if `unsaid_rotary` finds nothing."""
    kind, base = rope["rope_type"], rope["rope_theta"]
    found: dict[str, object] = {
        "rotary_base": int(base) if isinstance(base, float) and base.is_integer() else base,
        "rotary_percent": rope["partial_rotary_factor"],
        "multi_latent_attention": latent,
    }
    if latent:
        found["rope_type"] = "yarn" if kind == "yarn" else "rope"
    if kind == "yarn":
        scaled = {argument: rope.get(key) for argument, key in _FROM_YARN.items()}
        if not (rope.get("mscale") and rope.get("mscale_all_dim")):
            scaled |= {"mscale": None, "mscale_all_dim": None}
        found |= scaled
        own = {"beta_fast": rope.get("beta_fast") or 32.0, "beta_slow": rope.get("beta_slow") or 1.0,
               "original_max_position_embeddings": rope["original_max_position_embeddings"]}  # fmt: skip
        found |= own if latent else {f"yarn_{name}": own[name] for name in _OWN_OF_YARN}
        if not latent:
            rounded = rope.get("truncate")
            found |= {
                "position_embedding_type": "yarn",
                "yarn_correction_range_round_to_int": True if rounded is None else rounded,
            }
    elif kind == "llama3":
        found |= {"use_rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    elif kind == "linear":
        factor = rope["factor"]
        whole = isinstance(factor, float) and factor.is_integer()
        found["rotary_seq_len_interpolation_factor"] = int(factor) if whole else factor
    return found


def rope_scaling_of(arguments: Mapping[str, object], latent: bool) -> dict[str, object] | None:
    """The `rope_scaling` of a config for the arguments of a run; None if there is none, or `rope_conflicts` says why
    not.
    """
    kinds = _kinds(arguments, latent)
    if len(kinds) != 1:
        return None
    if kinds[0] == "linear":
        factor = arguments["rotary_seq_len_interpolation_factor"]
        return {"rope_type": "linear", "factor": float(factor) if isinstance(factor, int) else factor}
    if kinds[0] == "llama3":
        return {"rope_type": "llama3", "factor": argument_of(arguments, 8.0, "rope_scaling_factor"), **_LLAMA3}
    prefix = "" if latent else "yarn_"
    found = {
        "rope_type": "yarn",
        "factor": argument_of(
            arguments, 1.0, *(() if latent else ("yarn_rotary_scaling_factor",)), "rotary_scaling_factor"
        ),
        "original_max_position_embeddings": argument_of(arguments, 4096, f"{prefix}original_max_position_embeddings"),
        "beta_fast": argument_of(arguments, 32.0, f"{prefix}beta_fast"),
        "beta_slow": argument_of(arguments, 1.0, f"{prefix}beta_slow"),
    }
    mscale, every = argument_of(arguments, 1.0, "mscale"), argument_of(arguments, 0.0, "mscale_all_dim")
    if latent or (mscale and every):
        found |= {"mscale": mscale, "mscale_all_dim": every}
    if not latent:
        found["truncate"] = argument_of(arguments, True, "yarn_correction_range_round_to_int")
    return found


def rope_conflicts(arguments: Mapping[str, object], latent: bool, allowed: Sequence[str]) -> list[str]:
    """The scalings of a run's rotary positions that a Hugging Face family lacks, as `kind (why)`."""
    kinds = _kinds(arguments, latent)
    if len(kinds) > 1:
        return [f"{' and '.join(kinds)} (rotary positions that are scaled in two ways)"]
    found = [f"{kind} (rotary positions that are scaled so)" for kind in kinds if kind not in allowed]
    if kinds == ["yarn"] and not found:
        mscale, every = argument_of(arguments, 1.0, "mscale"), argument_of(arguments, 0.0, "mscale_all_dim")
        if not every and mscale != 1:
            found.append(f"mscale {mscale} (without mscale_all_dim)")
    return found


def _kinds(arguments: Mapping[str, object], latent: bool) -> list[str]:
    """The ways in which a run scales rotary positions."""
    found = []
    if arguments.get("rotary_seq_len_interpolation_factor") not in (None, 1):
        found.append("linear")
    if arguments.get("use_rope_scaling") is True or arguments.get("rope_scaling") is True:
        found.append("llama3")
    is_yarn = (
        arguments.get("rope_type") in (None, "yarn") if latent else arguments.get("position_embedding_type") == "yarn"
    )
    if is_yarn:
        found.append("yarn")
    return found


def argument_of(arguments: Mapping[str, object], otherwise: object, *names: str) -> Any:
    """The first of several arguments of a run that it gives."""
    return next((arguments[name] for name in names if arguments.get(name) is not None), otherwise)
