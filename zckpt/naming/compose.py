"""Parts of a model, put together into the tensors of a writer by its scheme."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from zckpt.base.errors import IncompleteError, InconsistentError, UnsupportedError
from zckpt.base.words import examples
from zckpt.core.catalog import Catalog, TensorEntry, replace_name
from zckpt.naming.decompose import in_pairs, same
from zckpt.naming.facts import Facts, with_parts
from zckpt.naming.parts import fill_template, is_in_block, parse_part_name
from zckpt.naming.rows import group_rows, shifted_by, stack_rows, transpose, with_rows
from zckpt.naming.schemes import NamingRule, Scheme

_Numbers = tuple[int, int]
_Held = dict[str, dict[_Numbers, TensorEntry]]
"""Template of a part -> its block and expert -> the part. Parts are removed when they are used."""


class _Made(NamedTuple):
    """A tensor that was put together by a rule. `place` sorts tensors as a model has them; `block` is -1 outside of blocks."""

    place: tuple[int, ...]
    rule: NamingRule
    block: int
    entry: TensorEntry


def compose(
    parts: Catalog,
    scheme: Scheme,
    facts: Facts,
    origins: Mapping[str, str] | None = None,
    whole: Mapping[str, TensorEntry] | None = None,
) -> Catalog:
    """The model's tensors as a writer names, fuses, stacks and orders them.

    Args:
        parts: as `decompose` returns them.
        scheme: the writer's.
        facts: as they were for `decompose`; what the parts show is added here.
        origins: name of a part -> the tensor that it is from.
        whole: the tensors that were taken apart, if they have the names of this scheme. Those that would be put together again
            as they were are taken as they are: rows that alternate, turned once more, would be a fragment for each row.

    Raises:
        UnsupportedError: some parts have no place in the scheme.
        IncompleteError: parts are missing, without which the model is not one of the scheme.
        InconsistentError: blocks do not hold the same tensors, or parts do not fit each other.
        UsageError: a fact that is needed is not known.
    """
    if any(rule.inputs >= 0 for rule in scheme.rules):
        raise UnsupportedError(
            f"tensors are not written as the scheme {scheme.name} has them", file=facts.path,
            expected="another program's names", remedy="Choose another program: this one's names are only read.",
        )  # fmt: skip
    facts = _as_written(with_parts(facts, parts), scheme)
    held: _Held = {}
    for name, entry in parts.tensors.items():
        part, block, expert = parse_part_name(name)
        held.setdefault(part, {})[block, expert] = entry
    _tie(held, facts)
    routed = frozenset(block for block, _ in held.get("blocks.{b}.router.weight", {}))
    first = next((rule.number for rule in scheme.rules if any("{b}" in p for p in rule.parts or ())), 0)
    made: list[_Made] = []
    for rule in scheme.rules:
        if rule.parts is not None and facts.meet(rule.when):
            made += _made_by(rule, rule.parts, held, facts, first, whole or {}, origins or {})
    _check_used(held, scheme, parts, facts, origins or {})
    made.sort(key=lambda one: one.place)
    if scheme.is_of_transformers:
        _check_complete(made, scheme, facts, routed)
    _check_blocks(made, scheme, facts, routed)
    tensors = {one.entry.name: one.entry for one in made}
    return replace(parts, tensors=tensors, aliases={})


def _as_written(facts: Facts, scheme: Scheme) -> Facts:
    """The facts, with the values that the scheme sets for writing."""
    return facts.having(
        **{
            fact: facts.number(value) if isinstance(value, str) else value
            for fact, value in scheme.written.items()
            if not isinstance(value, str) or facts.whole(value)
        }
    )


def _tie(held: _Held, facts: Facts) -> None:
    """Makes a head that the model ties a replica of the embedding, which checks compare."""
    head, embedding = held.get("head.weight"), held.get("embedding.weight")
    if facts.get("tied") is True and head and embedding:
        whole, again = embedding[-1, -1], head.pop((-1, -1))
        embedding[-1, -1] = same(whole, replace(again, name=whole.name))


def _made_by(
    rule: NamingRule,
    templates: Sequence[str],
    held: _Held,
    facts: Facts,
    first: int,
    whole: Mapping[str, TensorEntry],
    origins: Mapping[str, str],
) -> Iterator[_Made]:
    """The tensors that a rule makes from the parts in `held`, which it removes; those in `whole` that it took apart stay."""
    if rule.is_of_many:
        for part, name in [(part, name) for part in held if (name := rule.name_of_many(part)) is not None]:
            yield _Made((2, -1, rule.number, -1), rule, -1, replace_name(held.pop(part)[-1, -1], name))
        return
    own = [held.get(template) for template in templates]
    there = [parts for parts in own if parts]
    if len(there) < len(templates):
        return
    numbers = [at for at in there[0] if all(at in parts for parts in there[1:])]
    phase = 1 if "{b}" in templates[0] else 0 if rule.number < first else 2

    def intact(name: str, inner: Sequence[_Numbers]) -> TensorEntry | None:
        """The tensor that the same rule has taken all these parts from, and nothing else."""
        entry = whole.get(name)
        if entry is None or rule.vocabulary or rule.pairs or rule.plus or rule.rows not in ("joined", "alternating"):
            return None
        if any(origins.get(fill_template(template, *at)) != name for template in templates for at in inner):
            return None
        own = [held_[at] for held_ in there for at in inner]
        if sum(part.numel for part in own) != entry.numel or any(len(p.replicas) != len(entry.replicas) for p in own):
            return None
        for held_, at in itertools.product(there, inner):
            del held_[at]
        return entry

    def fused(at: _Numbers) -> TensorEntry:
        name = fill_template(rule.names[0], *at)
        if not rule.is_plain and not rule.stack and (entry := intact(name, [at])) is not None:
            return entry
        parts = [held_.pop(at) for held_ in there]
        if rule.is_plain:
            return replace_name(parts[0], name)
        return _fuse_parts(name, parts, rule, facts)

    if not rule.stack:
        for at in numbers:
            place = (phase, at[0], rule.number, at[1])
            yield _Made(place, rule, at[0], fused(at))
        return
    stacks: dict[_Numbers, list[_Numbers]] = {}
    for block, expert in sorted(numbers):
        stacks.setdefault((-1 if "b" in rule.stack else block, -1 if "e" in rule.stack else expert), []).append(
            (block, expert)
        )
    for at, inner in stacks.items():
        lead = _lead(rule, inner, facts)
        name = fill_template(rule.names[0], *at)
        entry = intact(name, inner) or stack_rows(name, [fused(one) for one in inner], lead)
        yield _Made((phase, at[0], rule.number, at[1]), rule, at[0], entry)


def _lead(rule: NamingRule, numbers: Sequence[_Numbers], facts: Facts) -> tuple[int, ...]:
    """The extents of a stack's leading axes. Raises InconsistentError if a block or expert in it is missing."""
    axes = [sorted({at["be".index(axis)] for at in numbers}) for axis in rule.stack]
    lead = tuple(len(axis) for axis in axes)
    full = 1
    for extent in lead:
        full *= extent
    if full != len(numbers) or any(axis != list(range(len(axis))) for axis in axes):
        raise InconsistentError(
            f"blocks or experts are missing in {rule.names[0]!r}", file=facts.path,
            found=" x ".join(f"{axis[0]}-{axis[-1]}" for axis in axes) + f", {len(numbers):,} in all",
            expected="all of them, numbered from 0",
        )  # fmt: skip
    return lead


def _fuse_parts(name: str, parts: Sequence[TensorEntry], rule: NamingRule, facts: Facts) -> TensorEntry:
    """A tensor of several parts, without its leading axes."""
    if rule.vocabulary and (rows := facts.whole("padded_vocabulary")):
        parts = [with_rows(part, max(rows, part.shape[0])) for part in parts]
    if rule.pairs:
        parts = [in_pairs(part, rule, facts, number, apart=False) for number, part in enumerate(parts)]
    groups = 1
    if len(parts) > 1 and rule.rows != "joined":
        groups = parts[0].shape[0] if rule.rows == "alternating" else facts.number(rule.rows)
    entry = group_rows(name, parts, groups)
    if rule.plus:
        entry = shifted_by(entry, rule.plus)
    return transpose(entry) if rule.transpose else entry


def _check_used(held: _Held, scheme: Scheme, parts: Catalog, facts: Facts, origins: Mapping[str, str]) -> None:
    """Checks that every part was used. Raises IncompleteError if a part was not, since another part of its tensor is
    missing; UnsupportedError if no rule takes it.
    """
    left = [fill_template(template, *at) for template, own in held.items() for at in own]
    if not left:
        return
    takers = {p: rule for rule in scheme.rules for p in rule.parts or () if facts.meet(rule.when)}
    for name in left:
        part, *at = parse_part_name(name)
        rule = takers.get(part)
        lacking = [fill_template(p, *at) for p in (rule.parts or ())] if rule else []
        lacking = [p for p in lacking if p not in parts.tensors]
        if lacking:
            raise IncompleteError(
                f"parts are missing beside {origins.get(name, name)!r}", file=facts.path, found=f"no {examples(lacking)}",
                remedy="Copy the files of the other layers or stages, which hold them, here too.",
            )  # fmt: skip
    what = scheme.config["fixed"]["architectures"][0] if scheme.config else f"the scheme {scheme.name}"
    raise UnsupportedError(
        f"some tensors have no place in {what}", file=facts.path,
        found=examples(dict.fromkeys(origins.get(name, name) for name in left)),
        remedy="Pass another --to, or leave them out with --exclude.",
    )  # fmt: skip


def _check_complete(made: Sequence[_Made], scheme: Scheme, facts: Facts, routed: frozenset[int]) -> None:
    """Checks that a Hugging Face model has all tensors that every such model has. Raises IncompleteError if some are
    missing everywhere.
    """
    found = {part for one in made for part in one.rule.parts or ()}
    blocks = {one.block for one in made if one.block >= 0}
    kinds = {block in routed for block in blocks} or {False}
    missing = [
        rule.names[0].replace("{b}", "0").replace("{e}", "0")
        for rule in scheme.rules
        if rule.parts is not None
        and not rule.optional
        and facts.meet(rule.when)
        and not found.issuperset(rule.parts)
        and not (rule.parts == ("head.weight",) and facts.get("tied") is True)
        and any(is_in_block(rule.parts[0], routed=kind) for kind in kinds)
    ]
    for group in scheme.together:
        if 0 < len(found.intersection(group)) < len(group):
            missing += [
                rule.names[0].replace("{b}", "0")
                for rule in scheme.rules
                if set(rule.parts or ()) & set(group) and not found.issuperset(rule.parts or ())
            ]
    if missing:
        raise IncompleteError(
            f"tensors of {scheme.config['fixed']['architectures'][0]} are missing", file=facts.path,
            found=f"no {examples(missing)}", remedy="Copy the files of the other layers or stages, which hold them, here too.",
        )  # fmt: skip


def _check_blocks(made: Sequence[_Made], scheme: Scheme, facts: Facts, routed: frozenset[int]) -> None:
    """Checks that every block holds the same tensors as the others of its kind, and all experts. Raises
    InconsistentError if tensors are missing in some.
    """
    kinds: dict[int, set[tuple[str, ...]]] = {}
    for one in made:
        found = (kind for kind in scheme.kinds for part in one.rule.parts or () if part.startswith(kind))
        kinds.setdefault(one.block, set()).update(found)
    held: dict[tuple[str, int], dict[str, int]] = {}
    for one in made:
        if one.block >= 0 and not one.rule.some:
            name = one.rule.names[0].replace("{b}.", "")
            own = held.setdefault((one.rule.names[0].partition("{b}")[0], one.block), {})
            own[name] = own.get(name, 0) + 1
    alike: dict[tuple[object, ...], dict[int, dict[str, int]]] = {}
    for (stack, block), own in held.items():
        alike.setdefault((stack, block in routed, frozenset(kinds[block])), {})[block] = own
    lacking: dict[int, list[str]] = {}
    for blocks in alike.values():
        most: dict[str, int] = {}
        for own in blocks.values():
            for name, number in own.items():
                most[name] = max(most.get(name, 0), number)
        for block, own in blocks.items():
            if own != most:
                lacking[block] = sorted(name for name, number in most.items() if own.get(name, 0) < number)
    stacks = {stack: sorted(block for other, block in held if other == stack) for stack, _ in held}
    whole = all(blocks == list(range(len(blocks))) for blocks in stacks.values())
    if lacking or not whole:
        raise InconsistentError(
            "blocks do not hold the same tensors", file=facts.path,
            found="; ".join(f"block {b} lacks {examples(n)}" for b, n in sorted(lacking.items())[:3])
            or "; ".join(f"blocks {blocks}" for blocks in stacks.values()),
        )  # fmt: skip
