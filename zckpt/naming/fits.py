"""Which tensors a family's model lacks, and which it has no place for, by its scheme and a config alone.

For `checks.like`, where transformers is not there to say it, and for jobs that write weights with a config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zckpt.base.errors import ZckptError
from zckpt.base.words import examples, join_words
from zckpt.core.catalog import Catalog
from zckpt.layouts.save.known_shapes import known_shapes
from zckpt.layouts.save.tied import LANGUAGE_HEADS
from zckpt.naming.decompose import decompose_with_origins
from zckpt.naming.facts import Facts, facts_of, flat_config, with_parts
from zckpt.naming.families import architecture_of, by_config
from zckpt.naming.parts import OF_EXPERTS, fill_template, is_in_block, template_of
from zckpt.naming.schemes import Fit, Scheme, scheme

Shape = tuple[int, ...]

_SHAPES: dict[str, tuple[str, ...]] = {
    "embedding.weight": ("vocabulary", "hidden"),
    "head.weight": ("vocabulary", "hidden"),
    "final_norm.weight": ("hidden",),
    "blocks.{b}.attention_norm.weight": ("hidden",),
    "blocks.{b}.attention_output_norm.weight": ("hidden",),
    "blocks.{b}.mlp_norm.weight": ("hidden",),
    "blocks.{b}.mlp_output_norm.weight": ("hidden",),
    "blocks.{b}.attention.query.weight": ("query_heads*head_size", "hidden"),
    "blocks.{b}.attention.key.weight": ("key_heads*head_size", "hidden"),
    "blocks.{b}.attention.value.weight": ("key_heads*head_size", "hidden"),
    "blocks.{b}.attention.output.weight": ("hidden", "query_heads*head_size"),
    "blocks.{b}.mlp.gate.weight": ("intermediate", "hidden"),
    "blocks.{b}.mlp.up.weight": ("intermediate", "hidden"),
    "blocks.{b}.mlp.down.weight": ("hidden", "intermediate"),
    "blocks.{b}.router.weight": ("experts", "hidden"),
    "blocks.{b}.experts.{e}.gate.weight": ("expert_intermediate", "expert_hidden"),
    "blocks.{b}.experts.{e}.up.weight": ("expert_intermediate", "expert_hidden"),
    "blocks.{b}.experts.{e}.down.weight": ("expert_hidden", "expert_intermediate"),
}
"""Part -> its extents, as facts of a config; extents with unknown facts are not compared."""


class Misfits(NamedTuple):
    """What does not fit: of a family's model, of a transformers class, or of names and shapes.

    Attributes:
        by: the family or class, and by what it is known.
        missing: tensors that are not there; a class would initialise them at random.
        ignored: tensors that have no place in it.
        shapes: name of a tensor -> (shape here, or of a part of it; shape of the model).
        error: why nothing can be said, or a loader would stop; empty if something can.
        kinds: names of tensors that are numbers of another kind than the model's: integers for floats.
        in_memory: names that a model has in memory, where the hub has others.
    """

    by: str
    missing: list[str]
    ignored: list[str]
    shapes: dict[str, tuple[Shape, Shape]]
    error: str = ""
    kinds: Sequence[str] = ()
    in_memory: Sequence[str] = ()

    @property
    def note(self) -> str:
        """A sentence on what a loader would do with such weights; empty if they fit."""
        found = [f"lacks {examples(sorted(self.missing))}"] if self.missing else []
        found += [f"does not read {examples(self.ignored)}"] if self.ignored else []
        found += [f"has other shapes for {examples(self.shapes)}"] if self.shapes else []
        return f"A loader of {self.by} {join_words(found)}." if found else ""


def find_misfits(catalog: Catalog, config: Mapping[str, Any]) -> Misfits | None:
    """Compares a model's tensors, under the hub's names and without aliases, with its config; None if zckpt does not know
    its class.
    """
    catalog = replace(catalog, aliases={})
    known = known_shapes(config)
    if known is None:
        return _misfits_of_family(catalog, config)
    shapes = {name: entry.shape for name, entry in catalog.tensors.items()}
    return compare_shapes(
        shapes, known.shapes, f"{config['architectures'][0]}, by shapes that zckpt knows", tied=known.tied
    )


def compare_shapes(here: Mapping[str, Shape], wanted: Mapping[str, Shape], by: str, *, tied: bool) -> Misfits:
    """Compares tensors with those that a loader expects; a head that the model ties may be missing."""
    neither = (*(f"{head}.weight" for head in (*LANGUAGE_HEADS, "decoder") if tied), *_BUFFERS)
    missing = [name for name in wanted if name not in here and not name.endswith(neither)]
    ignored = [name for name in here if name not in wanted and not name.endswith(neither)]
    shapes = {name: (own, wanted[name]) for name, own in here.items() if name in wanted and own != wanted[name]}
    return Misfits(by, missing, ignored, shapes)


_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Ends of names of tensors that a model computes itself, and that older versions of transformers saved."""


def _misfits_of_family(catalog: Catalog, config: Mapping[str, Any]) -> Misfits | None:
    """As `find_misfits`, by a family's scheme."""
    name, _ = by_config(config, "")
    family = scheme(f"hf-{name}") if name else None
    said = config.get("architectures")
    if family is None or (isinstance(said, list) and said[:1] != [architecture_of(family)]):
        return None
    by = f"{architecture_of(family)}, by zckpt's own scheme of its names"
    fits = family.fits(catalog.tensors)
    known = catalog.select(lambda entry: fits[entry.name] is not None)
    facts = facts_of(known, config)
    if facts.get("tied") is None and config.get("tie_word_embeddings") is False:
        facts = facts.having(tied=False)
    try:
        found = decompose_with_origins(known, family, facts, fits if known is catalog else None)
        facts = with_parts(found.facts, found.parts)
    except ZckptError as error:
        return Misfits(by, [], [name for name in fits if fits[name] is None], {}, str(error))
    wanted = _read_facts(family, flat_config(config))
    counts = {head: _count_at(config, key) for head, key in family.stacks.items()}
    expected = _list_expected(family, facts, fits, wanted, counts)
    missing = [names[0] for names, _ in expected if not any(one in fits for one in names)]
    places = {one for names, good in expected for one in names[:good]} | found.dropped.keys()
    places |= {name for name, fit in fits.items() if fit is not None and any(rule.is_of_many for rule in fit.rules)}
    ignored = [name for name in fits if name not in places]
    vary = {part for rule in family.rules if rule.varies for part in rule.parts or ()}
    shapes = _find_shapes(found.parts, found.origins, wanted, vary)
    for part in ("embedding.weight", "head.weight"):  # of which parts have the rows that the config says
        entry, rows = catalog.tensors.get(found.origins.get(part, "")), wanted.get("vocabulary")
        if entry is not None and rows is not None and entry.shape and entry.shape[0] != rows:
            shapes[entry.name] = (entry.shape, (rows, *entry.shape[1:]))
    return Misfits(by, missing, ignored, shapes)


def _read_facts(family: Scheme, config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of a config, as facts."""
    found = {
        said if isinstance(said, str) else said[0]: config[key]
        for key, said in family.config["facts"].items()
        if type(config.get(key)) is int
    }
    experts = (config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if "experts" in _facts_of(family) and (number := next((n for n in experts if type(n) is int), None)) is not None:
        found["experts"] = number
    heads, hidden = found.get("query_heads"), found.get("hidden")
    if type(inner := found.get("latent_size") or hidden) is int:
        found["expert_hidden"] = inner
    if heads and hidden and "head_size" not in found and config.get("head_dim") is None and hidden % heads == 0:
        found["head_size"] = hidden // heads
    if "num_key_value_heads" in family.config["facts"] and config.get("num_key_value_heads") is None and heads:
        found.setdefault("key_heads", heads)
    return found


def _count_at(config: Mapping[str, Any], key: str) -> int | None:
    """How many blocks a key of a config says, which may be in an inner one (`vision_config.depth`); of a list, its length."""
    found: Any = config
    key, _, less = key.partition("-")
    for word in key.split("."):
        found = found.get(word) if isinstance(found, Mapping) else None
    return len(found) if isinstance(found, list) else found - int(less or 0) if type(found) is int else None


def _facts_of(family: Scheme) -> set[str]:
    return {said if isinstance(said, str) else said[0] for said in family.config["facts"].values()}


def _list_expected(
    family: Scheme,
    facts: Facts,
    fits: Mapping[str, Fit | None],
    wanted: Mapping[str, int],
    counts: Mapping[str, int | None],
) -> list[tuple[tuple[str, ...], int]]:
    """The tensors of a model, each as the spellings of its name, the hub's first, and how many are the hub's."""
    there: dict[int, set[str]] = {}
    for fit in filter(None, fits.values()):
        for rule in fit.rules:
            if facts.meet(rule.when):
                there.setdefault(fit.block, set()).update(rule.parts or ())
    anywhere = set().union(*there.values()) if there else set()
    blocks = wanted.get("blocks") or max(there, default=-1) + 1
    experts = wanted.get("experts") or facts.whole("experts") or 0
    some_routed = any("router.weight" in part for part in anywhere)
    found: list[tuple[tuple[str, ...], int]] = []
    used: set[tuple[str, int]] = set()
    for rule in family.rules:
        if rule.parts is None or not facts.meet(rule.when) or (rule.optional and not anywhere.issuperset(rule.parts)):
            continue
        if rule.is_of_many:
            continue
        part = rule.parts[0]
        if part == "head.weight" and facts.get("tied") is True and part not in there.get(-1, ()):
            continue
        stack = next((number for head, number in counts.items() if rule.names[0].startswith(head)), None)
        for block in range(blocks if stack is None else stack) if "{b}" in part else (-1,):
            own = there.get(block, set())
            routed = any(p.startswith(OF_EXPERTS) for p in own) or (
                some_routed and not any(p.startswith("blocks.{b}.mlp.") for p in own)
            )
            if ("{b}" in part and not is_in_block(part, routed=routed)) or any((p, block) in used for p in rule.parts):
                continue
            kinds = {kind for kind in family.kinds if any(p.startswith(kind) for p in own)}
            if (rule.some and part not in own) or (kinds and any(part.startswith(k) for k in {*family.kinds} - kinds)):
                continue
            used |= {(p, block) for p in rule.parts}
            numbers = range(experts) if "{e}" in rule.names[0] else (-1,)
            found += [(tuple(fill_template(name, block, e) for name in rule.names), rule.on_the_hub) for e in numbers]
    return found


def _find_shapes(
    parts: Catalog, origins: Mapping[str, str], wanted: Mapping[str, int], vary: Collection[str]
) -> dict[str, tuple[Shape, Shape]]:
    """Tensors with a part with other extents than the config gives, or than it has in most blocks if it does not vary."""
    found: dict[str, tuple[Shape, Shape]] = {}
    kinds: dict[str, Counter[Shape]] = {}
    for name, entry in parts.tensors.items():
        kinds.setdefault(template_of(name), Counter())[entry.shape] += 1
    for name, entry in parts.tensors.items():
        part = template_of(name)
        usual, _ = kinds[part].most_common(1)[0]
        said = _SHAPES.get(part, ())
        if part in vary:
            usual, said = entry.shape, tuple(text if text == "hidden" else "" for text in said)
        same = len(said) == len(usual)
        own = tuple(_extent(text, wanted, here) for text, here in zip(said, usual, strict=True)) if same else usual
        if own != entry.shape:
            found[origins.get(name, name)] = (entry.shape, own)
    return found


def _extent(text: str, wanted: Mapping[str, int], here: int) -> int:
    """The value of an extent by the facts; `here` if they do not give it."""
    product = 1
    for fact in text.split("*"):
        value = wanted.get(fact)
        if value is None:
            return here
        product *= value
    return product
