"""A model's tensors as a training program names, fuses and stacks them: from transformers' names, or another program's.

For `to_mcore` and `to_dcp`, and for `transform`, so that `verify` expects the same. The program that named the
tensors is
found by itself; they are taken apart by that scheme and put together by the one that is asked for.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.base.words import count
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.fragments import ComputedStore, Fragment
from zckpt.layouts.places import Place
from zckpt.layouts.save.companions import config_of, read_config
from zckpt.layouts.save.tied import as_untied, note_on, untied_heads
from zckpt.naming.compose import compose
from zckpt.naming.decompose import Decomposed, decompose_with_origins
from zckpt.naming.facts import Facts, facts_of, with_parts
from zckpt.naming.families import by_config, by_parts, make_config
from zckpt.naming.hub_form import in_hub_form
from zckpt.naming.parts import fill_template, is_own, parse_part_name
from zckpt.naming.schemes import Scheme, add_family, family_of, recorded_family, scheme, scheme_of, schemes
from zckpt.naming.vocabulary import check_vocabulary, recorded_vocabulary

_BUFFERS = ("blocks.{b}.router.correction",)
"""Parts that programs treat as buffers, which keep their dtype."""

MEGATRON = "megatron-core"

GGUF = "gguf"
"""The scheme of `to_gguf`."""

STACKED, NUMBERED = "stacked", "numbered"
"""The forms in which Megatron-Core names layers: all in one tensor, or each with its number."""


@dataclass(frozen=True, slots=True)
class SchemeNames:
    """Options: the names that tensors get.

    Attributes:
        writer: the scheme, one of `writers()`.
        config: the model's config or the path of its `config.json`; None for the one beside the checkpoint.
        layers: `STACKED` or `NUMBERED`; None for stacked where all blocks are alike. Schemes that do not know it do not use it.
        vocabulary_multiple: rows of zeros are added to the embedding and the head up to a multiple of this; 1 adds none.
        vocab_size: words of the vocabulary, behind which the embedding has padding; None for what config, run and tokenizer say.
        by_own_job: whether it is the job that alone writes such names that asks.
    """

    writer: str
    config: str | Mapping[str, Any] | None = None
    layers: str | None = None
    vocabulary_multiple: int = 1
    vocab_size: int | None = None
    by_own_job: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError for an unknown scheme or an impossible multiple, before a checkpoint is opened."""
        if self.writer not in writers() and not (self.writer == GGUF and self.by_own_job):
            raise UsageError(
                "the scheme of names is unknown", found=f"--names {self.writer}", expected=f"one of {', '.join(writers())}",
                remedy="Pass one of these with --names.",
            )  # fmt: skip
        check_vocabulary(self.vocab_size)
        if self.vocabulary_multiple < 1 or self.layers not in (None, STACKED, NUMBERED):
            raise UsageError(
                "the names are impossible", found=f"layers {self.layers}, vocabulary multiple {self.vocabulary_multiple}",
                expected="stacked or numbered layers, and a multiple of 1 or more", remedy="Change these options.",
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RenamedModel:
    """A model with a writer's names.

    Attributes:
        catalog: its tensors; `aliases` are further spellings of their names, where the writer has several.
        parts: the parts that they were made from.
        facts: what is known of the model.
        config: transformers' config of it.
        stacked: name of a tensor -> how many of its leading axes are layers or experts.
        notes: sentences for the user.
        recorded: facts for the manifest, from which `naming_of` makes the options.
        dropped: tensors that have no place in it -> the rule of `core.ledger` that left them out.
    """

    catalog: Catalog
    parts: Catalog
    facts: Facts
    config: Mapping[str, object]
    stacked: Mapping[str, int] = field(default_factory=dict[str, int])
    notes: tuple[str, ...] = ()
    recorded: Mapping[str, Mapping[str, object]] = field(default_factory=dict[str, "Mapping[str, object]"])
    dropped: Mapping[str, str] = field(default_factory=dict[str, str])


def writers() -> tuple[str, ...]:
    """The schemes with names that can be written: those of training programs that have whole names."""
    own = ((name, scheme(name)) for name in schemes() if not name.startswith("hf-"))
    return tuple(name for name, each in own if not each.has_local_names and not each.has_own_job)


def name_for_writer(catalog: Catalog, place: Place, naming: SchemeNames) -> RenamedModel:
    """The tensors, which have any names that a scheme takes, with a writer's names.

    Raises:
        UnsupportedError: tensors have no place in a scheme.
        InconsistentError, IncompleteError: tensors are missing, or do not fit the config.
        UsageError: a fact that is needed is not known.
    """
    found, facts, config, notes = _in_parts(catalog, place, naming)
    writer = _scheme_for(naming.writer, config)
    facts = facts.having(model_type=facts.get("model_type") or config.get("model_type"))
    facts = facts.having(
        layers=naming.layers or (STACKED if _are_alike(found.parts) and not facts.get("hybrid") else NUMBERED)
    )
    padded = None
    if naming.vocabulary_multiple > 1 and (words := facts.whole("vocabulary")):
        padded = math.ceil(words / naming.vocabulary_multiple) * naming.vocabulary_multiple
        facts = facts.having(padded_vocabulary=padded)
        if padded > words:
            notes += (
                f"The vocabulary was padded from {words:,} to {padded:,} rows, a multiple of {naming.vocabulary_multiple:,}; "
                f"{count(padded - words, 'row')} of the embedding and of the head are zero.",
            )
    tensors = compose(found.parts, writer, facts, found.origins)
    tensors, stacked, aliases = _spell_names(_add_missing(tensors, writer, found.parts, facts), writer, facts)
    aliases |= _tied_names(tensors, writer, facts)
    recorded = {
        "names": naming.writer,
        "layers": facts.get("layers"),
        "vocabulary_multiple": naming.vocabulary_multiple,
        **recorded_vocabulary(found.facts),
        **recorded_family(model_type=config.get("model_type")),
    }
    if naming.config is not None:
        recorded["config"] = dict(config)
    catalog = replace(tensors, aliases=aliases)
    said = (*notes, *found.notes)
    return RenamedModel(catalog, found.parts, facts, config, stacked, said, {"form": recorded}, found.rules)


def _scheme_for(writer: str, config: Mapping[str, object]) -> Scheme:
    """The writer's scheme for a model; models of Megatron-Core that see have one of their own."""
    family = family_of(config.get("model_type")) if writer == MEGATRON else None
    return scheme(((family and family.megatron) or {}).get("scheme", writer))


def naming_of(recorded: Mapping[str, Any]) -> SchemeNames:
    """The options, by the facts in a manifest."""
    if "family" in recorded:
        add_family(recorded["family"])
    return SchemeNames(
        recorded["names"], recorded.get("config"), recorded.get("layers"), recorded.get("vocabulary_multiple", 1),
        recorded.get("vocab_size"), recorded["names"] == GGUF,
    )  # fmt: skip


def _in_parts(
    catalog: Catalog, place: Place, naming: SchemeNames
) -> tuple[Decomposed, Facts, Mapping[str, object], tuple[str, ...]]:
    """The model's parts, facts and config, and notes on it."""
    config = naming.config
    given = config_of(config) if isinstance(config, str) else config
    known = given if given is not None else read_config(place.home)
    notes: tuple[str, ...] = ()
    family = ""
    if known is not None:
        if heads := untied_heads(catalog, known):
            known, notes = as_untied(known), note_on(heads)
        catalog, more = in_hub_form(catalog, known)
        notes += more
        family, _ = by_config(known, "the config")
    source = scheme_of(catalog.tensors, catalog.source.path, prefer=f"hf-{family}")
    directory, rules = place.listing.directory.path, place.listing.options.tp_rules or ""
    facts = facts_of(catalog, known, directory, rules, home=place.home.path, vocab_size=naming.vocab_size)
    found = decompose_with_origins(catalog, source, facts)
    found = _without_own(found, source, catalog, towers=naming.writer == GGUF and bool(source.stacks))
    facts = with_parts(found.facts, found.parts)
    if known is None:
        family, more = by_parts(found.parts, facts)
        notes += more
        known = make_config(scheme(f"hf-{family}"), found.parts, facts)
    return found, facts, known, notes


def _without_own(found: Decomposed, source: Scheme, catalog: Catalog, *, towers: bool) -> Decomposed:
    """The model without what its family says that no other program has; with `towers`, without all that only the family has."""
    own = [part for part in found.parts.tensors if is_own(part)]
    if not own or not (towers or any(rule.note and rule.parts for rule in source.rules)):
        return found
    fits, gone = source.fits(catalog.tensors), dict[str, str]()
    for part in own:
        fit = fits[name := found.origins[part]]
        said = next((rule.note for rule in fit.rules if rule.note and rule.parts), "") if fit is not None else ""
        if said or towers:
            gone[name] = said or _TOWERS
    kept = {
        part: entry
        for part, entry in found.parts.tensors.items()
        if found.origins[part] not in gone or not is_own(part)
    }
    counts = Counter(gone.values())
    return replace(
        found, parts=replace(found.parts, tensors=kept), left_out=(*found.left_out, *gone), dropped={**found.dropped, **gone},
        notes=(*found.notes, *(f"{note} ({count(number, 'tensor')})." for note, number in counts.items())),
    )  # fmt: skip


_TOWERS = (
    "What the model sees and hears with is left out: to-gguf --mmproj writes a file of it, where llama.cpp has one"
)


def _are_alike(parts: Catalog) -> bool:
    """Whether all blocks have the same parts."""
    blocks: dict[int, set[str]] = {}
    for name in parts.tensors:
        part, block, expert = parse_part_name(name)
        if block >= 0 and expert <= 0 and not is_own(name):  # towers have their own numbers
            blocks.setdefault(block, set()).add(part)
    return len({frozenset(own) for own in blocks.values()}) < 2


def _add_missing(composed: Catalog, writer: Scheme, parts: Catalog, facts: Facts) -> Catalog:
    """The tensors, with those that the writer has beside the model's parts: zeros, as before training."""
    tensors = dict(composed.tensors)
    named = map(parse_part_name, parts.tensors)
    routed = [block for part, block, _ in named if part == "blocks.{b}.router.weight"]
    for rule in writer.rules:
        if rule.parts is not None or not rule.zeros or not routed:
            continue
        numel = with_parts(facts, parts).number(rule.zeros)
        for block in routed:
            name = fill_template(rule.names[0], block, -1)
            nbytes = numel * F32.itemsize
            store = ComputedStore(nbytes, functools.partial(bytearray, nbytes), ())
            zeros = TensorEntry(name, (numel,), F32, "buffer", (Fragment(store, 0, 0, numel),))
            tensors.setdefault(name, zeros)
    return replace(composed, tensors=tensors)


def _tied_names(composed: Catalog, writer: Scheme, facts: Facts) -> dict[str, str]:
    """Names of the head -> the embedding's, if the model ties the two and the writer names both."""
    named_by = {
        rule.parts[0]: rule
        for rule in writer.rules
        if (rule.parts and rule.tied) or rule.parts == ("embedding.weight",)
    }
    embedding, head = named_by.get("embedding.weight"), named_by.get("head.weight")
    if embedding is None or head is None or head.names[0] in composed.tensors or facts.get("tied") is not True:
        return {}
    return dict.fromkeys(head.names, embedding.names[0])


def _spell_names(composed: Catalog, writer: Scheme, facts: Facts) -> tuple[Catalog, dict[str, int], dict[str, str]]:
    """The tensors with their roles, the number of each one's leading axes, and further spellings -> names."""
    stacked: dict[str, int] = {}
    aliases: dict[str, str] = {}
    tensors = dict(composed.tensors)
    for name, fit in writer.fits(composed.tensors).items():
        if fit is None:
            continue
        rule = next((rule for rule in fit.rules if facts.meet(rule.when)), fit.rules[0])
        stacked[name] = len(rule.stack)
        if rule.parts == _BUFFERS:
            tensors[name] = replace(tensors[name], role="buffer")
        for spelling in rule.names[1:]:
            aliases[fill_template(spelling, fit.block, fit.expert)] = name
    return replace(composed, tensors=tensors), stacked, aliases
