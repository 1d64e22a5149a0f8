"""Which Hugging Face family a model is of: by its config, or by its parts and the arguments of its run.

For `transform`, when a user asks for `--to hf` and names no family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from zckpt.base.errors import UnsupportedError
from zckpt.base.words import examples, join_words
from zckpt.core.catalog import Catalog
from zckpt.naming.facts import Facts
from zckpt.naming.families import refusals
from zckpt.naming.parts import parse_part_name
from zckpt.naming.schemes import Scheme, families, family_of, scheme


def by_config(config: Mapping[str, object], where: str) -> tuple[str, tuple[str, ...]]:
    """The family of a config's `model_type`, and a note with the evidence; ("", ()) for an unknown one.

    Args:
        config: transformers' config of the model.
        where: where it is from, for the note.
    """
    family = family_of(kind := config.get("model_type"))
    if family is None:
        return "", ()
    name = family.name.removeprefix("hf-")
    return name, (f"The model is written as hf:{name}, since {where} says model_type {kind}.",)


def by_parts(parts: Catalog, facts: Facts, origins: Mapping[str, str] | None = None) -> tuple[str, tuple[str, ...]]:
    """The family that a model's parts and the arguments of its run fit, and a note with the evidence.

    Args:
        parts: of the model.
        facts: with what the parts show.
        origins: name of a part -> the tensor that it is from, for the error.

    Raises:
        UnsupportedError: they fit none; says what comes near.
    """
    there = {parse_part_name(name).part: name for name in parts.tensors}
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
