"""Hugging Face families: which one a model is of, and the `config.json` that it gets.

For `transform`. The values of a config come from the parts' shapes, from the arguments that the run kept in its checkpoint,
or from a config that the user gives.

[Note: configs in schemes] Keys of "config": "fixed" entries are copied; "facts" is key -> a fact, or [a fact, the value where it
is not known], or a part, for its presence; "args" is key -> [names of arguments of the run that have the value, the
training program's default]; "activation" is the key of the activation function; "also" is a list of {"if": argument -> values,
"set": key -> value, or a mapping of keys}; "refused" is argument or fact -> [values that it must not have, why]; "required" is
argument or fact -> values that it must have if it is recorded; "needed" is fact -> what it says, of facts without which no config
is made; "rope" lists the ways in which rotary positions may be scaled (`rotary`). What of `OFF` a family says nothing of must be
off. Where a value ["arg", name or names, default] stands in "facts" or "set", it is that argument of the run; "layers" is key ->
an argument that says of each layer, or of every so many, what the key says of the others.
"recognised": "model_type" lists those of configs; "rank" orders families that fit equally (the lowest is taken); "classes" are
regular expressions for the class in a run's config (`_target_`), from its beginning; "when" gives facts and arguments that
the run must have, if nothing else says the family.
Source: Megatron-DeepSpeed, megatron/arguments.py; transformers 4, models/megatron_gpt2 (activation functions).

Which family a model is of is told by its config, or by its parts and the arguments of its run, when a user asks for `--to hf` and
names no family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from zckpt.base.errors import IncompleteError, InconsistentError, UnsupportedError, UsageError
from zckpt.base.words import examples, join_words
from zckpt.core.catalog import Catalog
from zckpt.naming.facts import SHAPES, Facts, flat_config
from zckpt.naming.parts import template_of
from zckpt.naming.rotary import argument_of, rope_conflicts, rope_scaling_of
from zckpt.naming.schemes import Scheme, families, family_of, scheme
from zckpt.storage.json_files import read_table

_ACTIVATIONS = ("gelu_new", "relu", "silu", "gelu_pytorch_tanh")

_TABLES = read_table(__file__)

OFF: Mapping[str, Sequence[object]] = _TABLES["off"]
"""Arguments of a run that change what the model computes, and the values with which they change nothing; None is one always.
Those of Megatron-LM and -Core, of NVIDIA's Bridge (caps of logits), and of GPT-NeoX (`sliding_window_width`, `use_mup`)."""

OFF_WITH_EXPERTS: Mapping[str, Sequence[object]] = _TABLES["off with experts"]
"""As `OFF`, for arguments that count only in a model with experts."""

_ALL_ATTENTION = ("flash", "global")
"""Values in GPT-NeoX's `attention_config` that look at all tokens before."""


def architecture_of(family: Scheme) -> str:
    """The name of the class in transformers."""
    return str(family.config["fixed"]["architectures"][0])


def refusals(family: Scheme, facts: Facts) -> list[str]:
    """The features of the run or the model that the family lacks, in words."""
    arguments = {**facts.values, **facts.arguments}
    refused = [
        f"{name} {arguments[name]} ({why})"
        for name, (values, why) in family.config.get("refused", {}).items()
        if name in arguments and arguments[name] in values
    ]
    refused += [
        f"{name} {arguments[name]} (not {' or '.join(map(str, values)) or 'in this family'})"
        for name, values in family.config.get("required", {}).items()
        if arguments.get(name) not in (None, *values)
    ]
    if facts.get("whole_norms") is True and not family.config.get("whole_norms"):
        refused.append("norms of all queries and of all keys of a token at once (not in this family)")
    return refused + _find_unmapped(family, facts) + _scaled_attention(family, facts)


def mapped_arguments(family: Scheme) -> set[str]:
    """The arguments of a run that a family's config uses, or that the family refuses."""
    data = family.config
    found = {*data.get("refused", ()), *data.get("required", ()), *family.recognised.get("when", ())}
    found |= {name for names, _ in data.get("args", {}).values() for name in names} | {*data.get("layers", {}).values()}
    shown = (family.megatron or {}).get("arguments", {})
    found |= {name for name, value in shown.items() if isinstance(value, list) and value[0] == "fact"}
    for also in data.get("also", ()):
        found |= {*also["if"], *_arguments_in(also["set"])}
    if "sliding_window" in data["facts"]:
        found.add("window_size")
    return found


def _arguments_in(value: Any) -> set[str]:
    """The arguments that occur in a value of a config."""
    if isinstance(value, dict):
        return {name for inner in value.values() for name in _arguments_in(inner)}
    if isinstance(value, list) and value[:1] == ["arg"]:
        return set(value[1] if isinstance(value[1], list) else [value[1]])
    return set()


def _find_unmapped(family: Scheme, facts: Facts) -> list[str]:
    """Arguments of the run that change what it computes, and that the family has no place for."""
    arguments, known = facts.arguments, mapped_arguments(family)
    latent = arguments.get("multi_latent_attention") is True
    if facts.get("query_rank") is not None or facts.get("key_value_rank") is not None:
        known = known | {"multi_latent_attention"}
    if arguments.get("moe_router_score_function") == "sigmoid":
        known = known | {"moe_router_pre_softmax"}
    wrong = [
        f"{name} {arguments[name]} (not in this family)"
        for name, values in {**OFF, **(OFF_WITH_EXPERTS if facts.get("experts") else {})}.items()
        if name not in known and not _is_off(arguments.get(name), values)
    ]
    wrong += rope_conflicts(arguments, latent, family.config.get("rope", ())) if "rope" in family.config else []
    attention = arguments.get("attention_config")
    if isinstance(attention, list | tuple) and any(
        isinstance(one, str) and one not in _ALL_ATTENTION for one in attention
    ):
        wrong.append(f"attention_config {attention} (attention that does not look at all tokens)")
    return wrong


def _is_off(value: object, values: Sequence[object]) -> bool:
    """Whether an argument changes nothing; a list of things that change nothing does not either."""
    return value is None or value in values or (isinstance(value, list | tuple) and all(one in values for one in value))


def _scaled_attention(family: Scheme, facts: Facts) -> list[str]:
    """The scale of attention's scores, in words, if it differs from the family's."""
    scale = facts.arguments.get("softmax_scale")
    if not isinstance(scale, int | float) or "softmax_scale" in mapped_arguments(family):
        return []
    _, usual = family.config.get("args", {}).get("query_pre_attn_scalar", ((), facts.get("head_size")))
    own = facts.arguments.get("query_pre_attn_scalar") or usual
    if isinstance(own, int | float) and own > 0 and math.isclose(scale, own**-0.5, rel_tol=1e-6):
        return []
    return [f"softmax_scale {scale} (another scale than the family's)"]


def make_config(family: Scheme, parts: Catalog, facts: Facts) -> dict[str, object]:
    """The config of a model in parts, of a Hugging Face family.

    Raises:
        UnsupportedError: the run used something that the family does not have.
        IncompleteError: parts are missing, and their sizes are needed.
        UsageError: a fact that is needed is not known.
    """
    data, arguments = family.config, facts.arguments
    refused = refusals(family, facts)
    if refused:
        raise UnsupportedError(
            f"the model is not a {architecture_of(family)}", file=facts.path,
            found=", ".join(refused), remedy="If it is one all the same, pass its config.json with --config.",
        )  # fmt: skip
    unknown = [said for name, said in data.get("needed", {}).items() if facts.get(name) is None]
    if unknown:
        raise UsageError(
            f"the config of a {architecture_of(family)} cannot be made", file=facts.path,
            found=f"neither a config nor arguments of the run that say {join_words(unknown)}",
            remedy="Pass the model's config.json with --config.",
        )  # fmt: skip
    config: dict[str, object] = {**data["fixed"], **_from_facts(family, parts, facts)}
    config["tie_word_embeddings"] = facts.get("tied") is True
    if arguments.get("norm") == "rmsnorm":  # GPT-NeoX has an epsilon for each kind of norm
        arguments = {name: value for name, value in arguments.items() if name != "layernorm_epsilon"}
    for key, (names, default) in data.get("args", {}).items():
        config[key] = argument_of(arguments, default, *names)
    for key, name in data.get("layers", {}).items():
        config[key] = _each_layer(arguments.get(name), facts.number("blocks"))
    if "activation" in data and arguments:
        config[data["activation"]] = _activation(arguments, facts.path)
    for also in data.get("also", ()):
        if all(arguments.get(name) in values for name, values in also["if"].items()):
            config.update({key: _value(value, arguments) for key, value in also["set"].items()})
    latent = arguments.get("multi_latent_attention") is True
    if "rope" in data and (scaling := rope_scaling_of(arguments, latent)) is not None:
        config["rope_scaling"] = scaling
    return config


def _each_layer(said: object, blocks: int) -> list[int]:
    """For each layer, 0 where the argument applies: to layers that it lists with 1, or to every `said`-th one; else 1."""
    if isinstance(said, list | tuple):
        return [int(not one) for one in said]
    each = said if isinstance(said, int) and said > 0 else 0
    return [int(not each or (block + 1) % each != 0) for block in range(blocks)]


def _value(value: Any, arguments: Mapping[str, object]) -> Any:
    """The value of a config's key, with `["arg", name, default]` replaced by that argument of the run."""
    if isinstance(value, dict):
        return {key: _value(inner, arguments) for key, inner in value.items()}
    if isinstance(value, list) and value[:1] == ["arg"]:
        names = value[1] if isinstance(value[1], list) else [value[1]]
        return argument_of(arguments, value[2], *names)
    return value


def _from_facts(family: Scheme, parts: Catalog, facts: Facts) -> dict[str, object]:
    """The values of a config that follow from facts. Raises IncompleteError if a part is missing that shows one,
    UsageError if one is not known.
    """
    found: dict[str, object] = {}
    missing: list[str] = []
    there = {template_of(name) for name in parts.tensors}
    for key, said in family.config["facts"].items():
        name, default = said if isinstance(said, list) else (said, None)
        if "." in name:
            found[key] = name in there
        elif (value := facts.get(name)) is not None:
            found[key] = value
        elif isinstance(said, list):
            found[key] = _value(default, facts.arguments)
        elif name in SHAPES:
            missing += [rule.names[0] for rule in family.rules if SHAPES[name][0] in (rule.parts or ())][:1]
        else:
            found[key] = facts.number(name)
    if missing:
        raise IncompleteError(
            f"tensors of {architecture_of(family)} are missing", file=facts.path, found=f"no {examples(missing)}",
            remedy="Copy the files of the other layers or stages, which hold them, here too.",
        )  # fmt: skip
    return found


def _is_shown(said: Any, facts: Facts) -> bool:
    """Whether a value of a config is a known fact, and not a default."""
    return not isinstance(said, list) or facts.get(said[0]) is not None


def check_config(config: Mapping[str, object], family: Scheme, parts: Catalog, facts: Facts) -> None:
    """Checks that a config is the family's and has the tensors' sizes. Raises InconsistentError if it is of another
    model.
    """
    types = model_types(family)
    if config.get("model_type") not in types:
        raise InconsistentError(
            "the config is of another architecture", found=f"model_type {config.get('model_type')!r}",
            expected=f"model_type {' or '.join(map(repr, types))}", file=facts.path,
            remedy="Pass the config.json of this model with --config, or another --to.",
        )  # fmt: skip
    said = flat_config(config)
    wrong = [
        f"{key} {said[key]}, but {value:,} in the tensors"
        for key, value in _from_facts(family, parts, facts).items()
        if type(value) is int and said.get(key) not in (None, value) and _is_shown(family.config["facts"][key], facts)
    ]
    if wrong:
        raise InconsistentError(
            "the config does not fit the tensors", file=facts.path, found="; ".join(wrong),
            remedy="Pass the config.json of this model with --config.",
        )  # fmt: skip


def model_types(family: Scheme) -> list[str]:
    """The `model_type`s of configs of a family."""
    return [str(family.config["fixed"]["model_type"]), *family.recognised.get("model_type", ())]


def _activation(arguments: Mapping[str, object], path: str) -> str:
    """The activation function by transformers' name. Megatron's fused GELU uses tanh."""
    name = arguments.get("activation") or ("gelu_new" if arguments.get("openai_gelu") else "gelu")
    if name == "gelu":
        return "gelu_fast" if arguments.get("bias_gelu_fusion") else "gelu"
    if name not in _ACTIVATIONS:
        raise UnsupportedError(
            "the activation function has no name in transformers", file=path, found=str(name),
            remedy="Pass the model's config.json with --config.",
        )  # fmt: skip
    return str(name)


def by_config(config: Mapping[str, object], where: str) -> tuple[str, tuple[str, ...]]:
    """The family of a config's `model_type`, and a note with the evidence; ("", ()) for an unknown one. `where`: where it
    is from.
    """
    family = family_of(kind := config.get("model_type"))
    if family is None:
        return "", ()
    name = family.name.removeprefix("hf-")
    return name, (f"The model is written as hf:{name}, since {where} says model_type {kind}.",)


def by_parts(parts: Catalog, facts: Facts, origins: Mapping[str, str] | None = None) -> tuple[str, tuple[str, ...]]:
    """The family that a model's parts and the arguments of its run fit, and a note with the evidence; `origins`: name of a
    part -> the tensor that it is from, for the error. Raises UnsupportedError if they fit none; says what comes near.
    """
    there = {template_of(name): name for name in parts.tensors}
    every = [scheme(f"hf-{name}") for name in families()]
    alike = [each for each in every if not any(_unlike(each, there, facts))]
    fitting = [each for each in alike if not refusals(each, facts) and _is_meant(each, facts)]
    if not fitting:
        raise UnsupportedError(
            "the family of the model is not known", file=facts.path,
            found=_nearest(alike, every, there, facts, origins or {}), expected=f"one of {', '.join(families())}",
            remedy="Pass the family with --to hf:NAME, or the model's config.json with --config.",
        )  # fmt: skip
    if (said := facts.arguments.get("_target_")) is not None:
        kind = str(said).rpartition(".")[2]
        named = [each for each in fitting if any(re.match(p, kind) for p in each.recognised.get("classes", ()))]
        if named:
            name = named[0].name.removeprefix("hf-")
            return name, (f"The model is written as hf:{name}, since the run's config says {kind}.",)
    fitting.sort(key=lambda each: (each.recognised.get("rank", 9), each.name))
    names = [each.name.removeprefix("hf-") for each in fitting]
    evidence = "its tensors and the run's arguments fit" if facts.arguments else "its tensors fit"
    note = f"The model is written as hf:{names[0]}: {evidence}."
    if len(names) > 1:
        note += f" They fit {join_words([f'hf:{name}' for name in names[1:]])} too; pass --to if it is one of these."
    return names[0], (note,)


def _nearest(
    alike: Sequence[Scheme], every: Sequence[Scheme], there: Mapping[str, str], facts: Facts, origins: Mapping[str, str]
) -> str:
    """The reasons why a model is not of the families that come near, in words."""
    if alike:
        reasons = {each.name: ", ".join(refusals(each, facts)) for each in alike}
        return "; ".join(
            f"hf:{name.removeprefix('hf-')}: {why or 'tensors that fit, and nothing that says it'}"
            for name, why in reasons.items()
        )
    near = min(every, key=lambda each: sum(map(len, _unlike(each, there, facts))))
    alien, lacking = _unlike(near, there, facts)
    texts = [
        f"no place for {examples(dict.fromkeys(origins.get(there[part], there[part]) for part in sorted(alien)))}"
    ] * bool(alien)
    texts += [f"no {examples(_names_of(near, sorted(lacking)))}"] * bool(lacking)
    return f"hf:{near.name.removeprefix('hf-')}, the nearest: {' and '.join(texts)}"


def _names_of(family: Scheme, parts: Sequence[str]) -> list[str]:
    """The names of the tensors in which a family has some parts."""
    names = (r.names[0] for part in parts for r in family.rules if part in (r.parts or ()))
    return [name.replace("{b}", "0").replace("{e}", "0") for name in dict.fromkeys(names)]


def _unlike(family: Scheme, there: Mapping[str, str], facts: Facts) -> tuple[set[str], set[str]]:
    """The parts that a family has no place for, and the parts that it needs and that are missing."""
    rules = [rule for rule in family.rules if rule.parts is not None and facts.meet(rule.when)]
    taken = {part for rule in rules for part in rule.parts or ()}
    routed, dense = "blocks.{b}.router.weight" in there, "blocks.{b}.mlp.up.weight" in there
    needed = {
        part
        for rule in rules
        if not rule.optional
        for part in rule.parts or ()
        if part != "head.weight" and (dense or not routed or not part.startswith("blocks.{b}.mlp."))
    }
    lacking = needed - there.keys()
    for group in family.together:
        held = there.keys() & set(group)
        lacking |= set(group) - held if held else set()
    many = [rule for rule in rules if rule.is_of_many]
    alien = {part for part in there.keys() - taken if all(rule.name_of_many(part) is None for rule in many)}
    return alien, lacking


def _is_meant(family: Scheme, facts: Facts) -> bool:
    """Whether facts and arguments have the values that the family requires."""
    return all(
        (facts.get(name) if facts.get(name) is not None else facts.arguments.get(name)) in values
        for name, values in family.recognised.get("when", {}).items()
    )
