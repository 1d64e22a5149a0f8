"""The arguments of a Megatron run (`args` in a checkpoint) for a Hugging Face model: the way back from `families`.

For `to_mcore`. Megatron compares some with those of a run that loads (`check_checkpoint_args`), and with `--use-checkpoint-args`
takes all that describe the model; zckpt makes a config.json of them.

[Note: Megatron-Core in schemes] Keys of a family's "megatron":
- "keys": those of its config that become arguments, with @ before a group of `GROUPS`.
- "only": key -> the values that Megatron-Core has; null where the family reads the key itself.
- "scheme": the writer's scheme for the family, where that is not `megatron-core`.
- "arguments": argument -> its value, or ["key", key] of the config, ["rope", key] of its rotary positions, ["fact", fact] of the
  model, or ["flip", key, other key]: for each layer 1 where the key has 0, or for every so many layers as the other key says.
- "window": in which layers attention looks back to the beginning, if the config does not list them: {"every": N}, or a key for
  the first layer with a window ("behind"), or for that before which every other one has one ("even_before"); "pattern": N's keys.
- "sigmoid": true for a router that chooses by sigmoid; "best_of_group": how many experts judge a group.
- "beyond": [what it computes and Megatron-LM's own GPT model does not, arguments with which that is so].
- "cannot": why Megatron-Core computes no such model.
Source: Megatron-LM (core 0.14 - 0.20), megatron/training/{arguments,checkpointing}.py, tools/checkpoint/loader_mixtral_hf.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zckpt.base.errors import UnsupportedError
from zckpt.base.words import join_words
from zckpt.core.catalog import Catalog
from zckpt.naming.config_keys import ROTARY, WINDOW, Keys, check_keys, fields_of, whole_config
from zckpt.naming.facts import Facts
from zckpt.naming.families import model_types
from zckpt.naming.parts import parse_part_name, template_of
from zckpt.naming.rotary import rotary_arguments, rotary_of, unsaid_rotary
from zckpt.naming.schemes import families, family_of, scheme
from zckpt.storage.json_files import read_table

_TABLES = read_table(__file__)

_SAME: Mapping[str, Sequence[str]] = _TABLES["same"]
"""Argument -> keys of a config with the same value; the first that exists counts."""

_ALWAYS: dict[str, object] = _TABLES["always"]

_QUERY_KEY_NORMS = {"blocks.{b}.attention.query_norm.weight", "blocks.{b}.attention.key_value_down_norm.weight"}

_FUNCTIONS = ("activation_function", "activation", "hidden_act")
_ACTIVATIONS: Mapping[str, dict[str, object]] = _TABLES["activations"]
"""Activation function of an MLP without a gate -> arguments: Megatron-Core has the exact GELU, and fused with its bias the one by
tanh; `activation` is not an argument of Megatron's, and says to zckpt by which formula that one is rounded."""

_BASIC = Keys(
    frozenset({"max_position_embeddings", "seq_length", "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"}),
    {"hidden_act": ("silu", "swish"), "is_encoder_decoder": (False,)},
)
GROUPS = {
    "@rotary": ROTARY - {"rope_local_base_freq", "rotary_emb_base", "rotary_pct"},
    "@window": WINDOW,
    "@routed": frozenset({"num_experts_per_tok", "num_experts_per_token", "norm_topk_prob"}),
    "@grouped": frozenset({"n_group", "topk_group", "routed_scaling_factor"}),
}


def known_keys() -> dict[str, Keys]:
    """Model type -> the keys of its config that become arguments, and the values of others that Megatron-Core has."""
    every = [scheme(f"hf-{name}") for name in families()]
    said = [(family, family.megatron or {}) for family in every if family.megatron]
    return {kind: _keys_of(own) for family, own in said if "cannot" not in own for kind in model_types(family)}


def _keys_of(own: Mapping[str, Any]) -> Keys:
    said = (GROUPS.get(key, (key,)) for key in own.get("keys", ()))
    only = {**_BASIC.only, **{key: values and tuple(values) for key, values in own.get("only", {}).items()}}
    return Keys(_BASIC.said.union(*said), {key: values for key, values in only.items() if values})


_WRITER = "Megatron-Core's arguments cannot say"
_REMEDY = (
    "Write the tensors alone, without arguments: zckpt to-dcp CKPT OUT --names megatron-core --under ''. If the key does not "
    "change what the model computes, pass a config.json without it with --config."
)

_NOT_TAKEN: Mapping[str, object] = _TABLES["not taken"]
"""Arguments that describe the model, and that Megatron-LM does not take from a checkpoint -> their defaults.
Source: Megatron-LM (core 0.20), megatron/training/checkpointing.py `load_args_from_checkpoint`."""


def check_computed(config: Mapping[str, object] | None, path: str) -> None:
    """Checks that Megatron-Core computes models of such a config, by the family's file. Raises UnsupportedError if not;
    says why.
    """
    for kind in () if config is None else (config.get("model_type"), whole_config(config).get("model_type")):
        family = family_of(kind)
        if family is not None and (why := (family.megatron or {}).get("cannot")):
            raise UnsupportedError(
                f"the model is one that {_WRITER}", file=path, found=f"model_type {kind!r}: {why}", remedy=_REMEDY
            )


def megatron_arguments(facts: Facts, parts: Catalog, config: Mapping[str, object], multiple: int) -> dict[str, object]:
    """The arguments of a model, by what its parts show and its config; the padded vocabulary is a multiple of `multiple`.
    Raises UnsupportedError if the config says something that changes what the model computes, and that no argument says.
    """
    outer = family_of(config.get("model_type"))
    config = whole_config(config)
    if outer is not None and outer.megatron and "scheme" in outer.megatron:  # of a model that sees
        config = whole_config({**config, "model_type": outer.config["fixed"]["model_type"]})
    family, kind = family_of(config.get("model_type")), str(config["model_type"])
    own, turned = ((family.megatron or {}), family.rotary) if family is not None else ({}, {})
    check_keys(config, known_keys(), _WRITER, facts.path, _REMEDY)
    there = {template_of(name) for name in parts.tensors}
    learned, latent = "positions.weight" in there, "blocks.{b}.attention.key_value_down.weight" in there
    rotary = "@rotary" in own.get("keys", ())
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
        "rotary_interleaved": False,
        "normalization": "LayerNorm" if "final_norm.bias" in there else "RMSNorm",
        "apply_layernorm_1p": False,
        "swiglu": gated,
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
    found |= _read_arguments(_SAME, config) | _window(kind, config, facts.whole("blocks") or 0, own.get("window", {}))
    wrong: list[str] = []
    if rotary:
        rope, unsaid = _rope_of(config, near=turned.get("near", False))
        wrong += unsaid or unsaid_rotary(
            rope, latent=latent, partial=turned.get("partial", False), free=turned.get("free", ())
        )
        found |= {} if wrong else rotary_arguments(rope, latent=latent)
    if not gated and (said := next((key for key in _FUNCTIONS if key in config), None)) is not None:
        found |= _ACTIVATIONS.get(str(config[said]), {})
        wrong += [] if config[said] in _ACTIVATIONS else [f"{said} {config[said]} (only {', '.join(_ACTIVATIONS)})"]
    found |= {name: _said_by(value, config, facts) for name, value in own.get("arguments", {}).items()}
    if "blocks.{b}.router.weight" in there:
        found |= _experts(facts, parts, config, there, own)
        wrong += _unsaid_routing(own, config)
    if wrong:
        raise UnsupportedError(
            f"the model's config says something that {_WRITER}", file=facts.path, found="; ".join(wrong), remedy=_REMEDY
        )
    return {name: value for name, value in found.items() if value is not None}


def megatron_notes(arguments: Mapping[str, object], model_type: object) -> tuple[str, ...]:
    """Sentences for a person on what a run of Megatron-LM does not set by itself for such arguments."""
    notes: tuple[str, ...] = ()
    family = family_of(model_type)
    beyond, when = ((family and family.megatron) or {}).get("beyond", ("", {}))
    if beyond and all(arguments.get(name) in values for name, values in when.items()):
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


def _said_by(value: Any, config: Mapping[str, Any], facts: Facts) -> object:
    """The value of an argument: a constant, a fact, or a key of the config."""
    if not isinstance(value, list):
        return value
    blocks = facts.whole("blocks") or 0
    said = rotary_of(config) if value[0] == "rope" else config
    found = facts.get(value[1]) if value[0] == "fact" else said.get(value[1])
    if value[0] != "flip":
        return found
    if not isinstance(found, list):  # every so many layers
        each = config.get(value[2])
        found = [int((block + 1) % each != 0) for block in range(blocks)] if isinstance(each, int) and each > 0 else []
    return [int(not one) for one in found] or None


def _rope_of(config: Mapping[str, Any], *, near: bool) -> tuple[dict[str, Any], list[str]]:
    """The rotary positions of a model, and what Megatron cannot express of them. Gemma 3 has two kinds; one is always
    the same.
    """
    if not near:
        return rotary_of(config), []
    nested = config.get("rope_parameters")
    nested = nested if isinstance(nested, Mapping) else {}
    whole, local = (dict(nested.get(name) or {}) for name in ("full_attention", "sliding_attention"))
    whole |= config.get("rope_scaling") or {}
    whole.setdefault("rope_theta", config.get("rope_theta") or 1e6)
    local.setdefault("rope_theta", config.get("rope_local_base_freq") or 1e4)
    whole, local = rotary_of({"rope_parameters": whole}), rotary_of({"rope_parameters": local})
    wrong = [
        f"rope_type {rope['rope_type']!r} (only 'default')" for rope in (whole, local) if rope["rope_type"] != "default"
    ]
    if local["rope_theta"] != 1e4:
        wrong.append(f"rope_theta {local['rope_theta']} of sliding_attention (only 10000.0)")
    return whole, wrong


def _read_arguments(keys: Mapping[str, Sequence[str]], config: Mapping[str, object]) -> dict[str, object]:
    return {
        argument: next(value for key in names if (value := config.get(key)) is not None)
        for argument, names in keys.items()
        if any(config.get(key) is not None for key in names)
    }


def _window(kind: str, config: Mapping[str, Any], blocks: int, own: Mapping[str, Any]) -> dict[str, object]:
    """The window of attention, and the layers with full attention.

    Source: transformers 5.23, the classes' `__post_init__`.
    """
    tokens = config.get("sliding_window")
    if not isinstance(tokens, int) or tokens < 1 or config.get("use_sliding_window") is False:
        return {}
    usual = _windows(own, config, blocks)
    kinds = config.get("layer_types") if "layer_types" in fields_of(kind) else None
    near = [one != "full_attention" for one in kinds] if isinstance(kinds, list) else usual
    if not any(near) and "every" not in own:
        return {}
    found: dict[str, object] = {"window_size": [tokens - 1, 0]}
    if not all(near) or ("every" in own and near != usual):
        each = 1 + near.index(False) if not all(near) else 1
        regular = each > 1 and all(is_near is (number % each != 0) for number, is_near in enumerate(near, 1))
        found["window_attn_skip_freq"] = each if regular else [int(is_near) for is_near in near]
    return found


def _windows(own: Mapping[str, Any], config: Mapping[str, Any], blocks: int) -> list[bool]:
    """Whether each layer of a model has a window, if its config does not list the layers."""
    most = config.get(own.get("behind", own.get("even_before", "")))
    most = most if isinstance(most, int) else 0
    if "behind" in own:
        return [block >= most for block in range(blocks)]
    if "even_before" in own:
        return [block % 2 == 0 and block < most for block in range(blocks)]
    if "every" in own:
        each = next((config[key] for key in own.get("pattern", ()) if config.get(key)), None)
        each = each if isinstance(each, int) else own["every"]
        return [(block + 1) % each != 0 for block in range(blocks)]
    return [True] * blocks


def _unsaid_routing(own: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The settings of expert routing that Megatron-Core's router lacks."""
    chosen = config.get("num_experts_per_tok")
    sums = config.get("norm_topk_prob", True)  # classes without the key divide
    wrong = []
    if "sigmoid" in own and isinstance(chosen, int) and sums is not (chosen > 1):
        wrong.append(f"norm_topk_prob {sums} (only {chosen > 1}, with num_experts_per_tok {chosen} and sigmoid)")
    groups, some = config.get("n_group"), config.get("topk_group")
    if not _has_groups(own, config):
        return wrong
    if not (isinstance(chosen, int) and isinstance(some, int) and some > 0 and isinstance(groups, int)):
        wrong.append(f"n_group {groups}, topk_group {some}, num_experts_per_tok {chosen} (only whole numbers)")
    elif (best := chosen // some) != (wanted := own["best_of_group"]):
        wrong.append(
            f"topk_group {some} of n_group {groups} (Megatron-Core judges a group by its best {best}, not {wanted})"
        )
    return wrong


def _has_groups(own: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether groups of experts take part in the choice."""
    if "best_of_group" not in own or config.get("topk_method") == "greedy":
        return False
    return config.get("n_group") != config.get("topk_group")


def _experts(
    facts: Facts, parts: Catalog, config: Mapping[str, object], there: set[str], own: Mapping[str, Any]
) -> dict[str, object]:
    """The arguments of experts and their router."""
    routed = {block for part, block, _ in map(parse_part_name, parts.tensors) if part == "blocks.{b}.router.weight"}
    blocks = facts.whole("blocks") or 0
    sigmoid, grouped = "sigmoid" in own, _has_groups(own, config)
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
