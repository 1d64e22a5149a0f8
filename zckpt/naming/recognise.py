"""Which family of transformers a model is of: by its config, or by its parts and the arguments of its run.

For `transform`, when a user asks for `--to hf` and names no family.
"""

from __future__ import annotations

from collections.abc import Mapping

from zckpt.base.errors import UnsupportedError
from zckpt.base.words import joined
from zckpt.core.catalog import Catalog
from zckpt.naming.facts import Facts
from zckpt.naming.families import model_types, refusals
from zckpt.naming.parts import numbered
from zckpt.naming.schemes import Scheme, families, scheme

_REMEDY = "Pass the family with --to hf:NAME, or the model's config.json with --config."


def by_config(config: Mapping[str, object], where: str) -> tuple[str, tuple[str, ...]]:
    """The family that a config's `model_type` says, and a note with the evidence; ("", ()) if it is none of those known.

    Args:
        config: transformers' config of the model.
        where: where it is from, for the note.
    """
    kind = config.get("model_type")
    for name in families():
        if kind in model_types(scheme(f"hf-{name}")):
            return name, (f"The model is written as hf:{name}, since {where} says model_type {kind}.",)
    return "", ()


def by_parts(parts: Catalog, facts: Facts) -> tuple[str, tuple[str, ...]]:
    """The family that a model's parts and the arguments of its run fit, and a note with the evidence.

    Raises:
        UnsupportedError: they fit none; says what comes near.
    """
    there = {numbered(name).part for name in parts.tensors}
    alike = [each for each in (scheme(f"hf-{name}") for name in families()) if _has_parts(each, there, facts)]
    fitting = [
        each for each in alike if not refusals(each, facts) and _is_meant(each, facts) and not each.config.get("given")
    ]
    if not fitting:
        reasons = [f"{each.name[3:]}: {', '.join(refusals(each, facts)) or 'not said'}" for each in alike]
        raise UnsupportedError(
            "the family of the model is not known", file=facts.path,
            found="; ".join(reasons) or f"parts that none of transformers' families in zckpt has, of {len(parts):,}",
            expected=f"one of {', '.join(families())}", remedy=_REMEDY,
        )  # fmt: skip
    fitting.sort(key=lambda each: (each.recognised.get("rank", 9), each.name))
    names = [each.name.removeprefix("hf-") for each in fitting]
    evidence = "its tensors and the run's arguments fit" if facts.arguments else "its tensors fit"
    note = f"The model is written as hf:{names[0]}: {evidence}."
    if len(names) > 1:
        note += f" They fit {joined([f'hf:{name}' for name in names[1:]])} too; pass --to if it is one of these."
    return names[0], (note,)


def _has_parts(family: Scheme, there: set[str], facts: Facts) -> bool:
    """Whether a family has a place for all parts, and needs none that is not there."""
    taken = {part for rule in family.rules for part in rule.parts or () if facts.meet(rule.when)}
    routed = "blocks.{b}.router.weight" in there
    needed = {
        part
        for rule in family.rules
        if not rule.optional and facts.meet(rule.when)
        for part in rule.parts or ()
        if not part.startswith(("blocks.{b}.mlp.", "head.")) or (part.startswith("blocks.{b}.mlp.") and not routed)
    }
    apart = any(0 < len(there.intersection(group)) < len(group) for group in family.together)
    return there <= taken and needed <= there and not apart


def _is_meant(family: Scheme, facts: Facts) -> bool:
    """Whether facts and arguments have the values that the family wants."""
    return all(
        (facts.get(name) if facts.get(name) is not None else facts.arguments.get(name)) in values
        for name, values in family.recognised.get("when", {}).items()
    )
