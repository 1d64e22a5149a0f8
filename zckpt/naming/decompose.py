"""A writer's tensors, taken apart into the parts of the model by its scheme.

[Note: arrays of Flax] A line of a scheme (`schemes`) for an array of Flax says how a part lies in it by these keys:
- "inputs": how many of its first dimensions, but for those of a stack, are a matrix's inputs; the part is the matrix with the
  others as rows. 0 is a vector, in as many dimensions as it has.
- "axis": the axis that numbers blocks, where it is not a leading one. An axis counts only where the name has no such number.
- "root": a fact: the elements of the part are its root times those of the tensor; "over": they are those of the tensor over its
  root, which is one of bf16 with "rounded".
- "every": N, where numbers of blocks count N blocks in a row as one; `{r}` in the name, or "first", is the place in the row.
- "first": the first block; or the beginning of other tensors' names, which have the blocks before it.

The groups of rows in which Megatron and GPT-NeoX write queries, keys and values, and the halves of a gated MLP.
[Note: the order of queries, keys and values] A fused weight is `groups` groups of rows, in each some rows of queries, then
of keys, then of values. The number of groups determines the order. GPT-NeoX has one per query head; with fewer
key heads than query heads, since November 2024, one per tensor-parallel rank. Megatron since checkpoint version 2 has one
per key head; version 1 one per element of a head (h, n, 3); version 0 one per tensor-parallel rank. Groups by ranks are
only known if the rules that joined the slices put them end to end, as the built-in ones do.
Source: GPT-NeoX, tools/ckpts/convert_neox_to_hf.py; Megatron-DeepSpeed, tools/hf2megads_weight_converter.py and
megatron/model/transformer.py; transformers 4, models/megatron_gpt2 `fix_query_key_value_ordering`.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError, InconsistentError, UnsupportedError
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, Replica, TensorEntry, replace_name
from zckpt.naming.facts import Facts
from zckpt.naming.local_names import local_names
from zckpt.naming.parts import KINDS, fill_template
from zckpt.naming.rows import move_rows, rows_of, shifted_by, split_rows, swap_head_halves, transpose, with_rows
from zckpt.naming.schemes import Fit, NamingRule, Scheme
from zckpt.naming.vocabulary import with_vocabulary


def with_groups(facts: Facts, local: Iterable[str]) -> Facts:
    """The facts, which have heads and the checkpoint's version, ranks and rules, with attention_groups and gated_groups;
    see [Note: the order of queries, keys and values]. `local`: local names of all tensors. Raises UnsupportedError if these
    do not tell them.
    """
    local = [re.sub(r"^layers\.\d+\.", "", name) for name in local]
    version, ranks = facts.get("version"), facts.whole("ranks") or 1
    query, key = facts.number("query_heads"), facts.number("key_heads")
    gated = any(name.startswith("mlp.linear1.") for name in local)
    by_rank = False
    if isinstance(version, float):
        if version >= 2:
            attention = key
        elif version >= 1:
            attention = query * facts.number("head_size")
        else:
            attention, by_rank = ranks, True
    elif any(name.startswith("self_attention.") for name in local):
        raise UnsupportedError(
            "the order of the fused attention weights is unknown", file=facts.path, found="no checkpoint_version",
            remedy="Convert the checkpoint that Megatron itself wrote.",
            expected="a checkpoint_version, as Megatron writes",
        )  # fmt: skip
    elif key < query and gated:  # the newer names came with the newer order
        attention, by_rank = ranks, True
    else:
        attention = query
    rules = facts.get("rules")
    if ranks > 1 and (by_rank or gated) and rules not in ("neox", "megatron"):
        raise UnsupportedError(
            "stacked rows of several ranks were joined by other rules", file=facts.path,
            found=f"rules {rules}" if rules else "the checkpoint's own rules",
            remedy="Pass --tp-rules neox, or megatron for Megatron's checkpoints.",
        )  # fmt: skip
    return facts.having(attention_groups=attention, gated_groups=ranks)


_MOST_STACKED = 1_000_000
"""The most blocks x experts in one tensor; the largest models have some ten thousand."""

_BEFORE = "blocks of "
"""The beginning of a fact with the number of blocks of tensors; the rest of it is the beginning of their names."""

_GATES = tuple(f"{where}.gate.{kind}" for where in ("mlp", "{e}", "shared") for kind in KINDS)
_SHARES = {"query": "query_heads", "key": "key_heads", "value": "key_heads"}


@dataclass(frozen=True, slots=True)
class Decomposed:
    """A model in parts.

    Attributes:
        parts: by their names; `aliases` says if the head is the embedding.
        facts: those that were given, and what taking the tensors apart has shown.
        origins: name of a part -> the tensor that it is from.
        notes: sentences about what was left out.
        left_out: tensors that are not among the parts though they may be of use: those with a rule that has a note.
        dropped: all tensors that are not among the parts -> the note of the rule; empty for what a model computes itself.
    """

    parts: Catalog
    facts: Facts
    origins: Mapping[str, str]
    notes: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def rules(self) -> dict[str, str]:
        """Tensors that are not among the parts -> the rule of `core.ledger` that left them out."""
        return {name: "form" if note else "buffer" for name, note in self.dropped.items()}


def decompose_with_origins(
    catalog: Catalog, scheme: Scheme, facts: Facts, fits: Mapping[str, Fit | None] | None = None
) -> Decomposed:
    """Takes the tensors of a writer's scheme apart into the parts of the model; says where each comes from and what was
    left out. `fits`: the rules that take each tensor, where they are known. Raises UnsupportedError if no rule takes some
    tensors; InconsistentError if a tensor's rows do not fit the facts, or two tensors that are one part have different shapes;
    UsageError if a fact that is needed is not known.
    """
    fits = _all_fit(catalog, scheme, fits or scheme.fits(catalog.tensors))
    facts = _complete_facts(catalog, scheme, fits, facts)
    facts, notes = _with_vocabulary(catalog, scheme, fits, facts)
    tensors: dict[str, TensorEntry] = {}
    origins: dict[str, str] = {}
    left_out: dict[str, list[str]] = {}
    padding = 0
    for name, entry in catalog.tensors.items():
        rule = _rule_of(name, fits[name], facts)
        if rule.parts is None:
            if rule.refused:
                raise _refusal_of(name, rule, facts)
            left_out.setdefault(rule.note, []).append(name)
            continue
        if rule.vocabulary and entry.shape:
            padding = max(padding, entry.shape[0] - (facts.whole("vocabulary") or entry.shape[0]))
        for part in _parts_of(entry, rule, fits[name], facts):
            first = tensors.get(part.name)
            tensors[part.name] = part if first is None else same(first, part)
            origins.setdefault(part.name, name)
    aliases = _aliases(catalog, scheme, facts)
    aliases = {d: k for d, k in aliases.items() if d not in tensors and k in tensors}
    notes += tuple(f"{note} ({count(len(names), 'tensor')})." for note, names in left_out.items() if note)
    if padding:
        words, said = facts.number("vocabulary"), facts.get("vocabulary_from")
        cut = f"{count(padding, 'row')} of padding behind the {words:,} rows of the vocabulary were left out"
        notes += (f"{cut}, since {said} says {words:,}." if said else f"{cut}.",)
    names = tuple(name for note, left in left_out.items() if note for name in left)
    dropped = {name: note for note, left in left_out.items() for name in left}
    return Decomposed(replace(catalog, tensors=tensors, aliases=aliases), facts, origins, notes, names, dropped)


def _with_vocabulary(
    catalog: Catalog, scheme: Scheme, fits: Mapping[str, Fit], facts: Facts
) -> tuple[Facts, tuple[str, ...]]:
    """The facts with the number of words, by the rows of the embedding; errors as in `vocabulary.with_vocabulary`."""
    for name, fit in fits.items():
        rule = fit.rules[0]
        if rule.vocabulary and rule.parts == ("embedding.weight",) and catalog.tensors[name].shape:
            return with_vocabulary(facts, catalog.tensors[name].shape[0], padded=not scheme.is_of_transformers)
    return facts, ()


def _refusal_of(name: str, rule: NamingRule, facts: Facts) -> UnsupportedError:
    return UnsupportedError(
        "its weights are in a form that cannot be taken apart", file=facts.path, found=f"{name!r}, which is {rule.refused}",
        expected="weights that are as transformers has them" if rule.note else "weights of bf16, fp16 or fp32",
        remedy=rule.note
        or "Load the model with transformers, with dequantize=True in its quantization config, save it, and convert that.",
    )  # fmt: skip


def same(first: TensorEntry, other: TensorEntry) -> TensorEntry:
    """One entry for a tensor that the checkpoint holds twice, as pipelines do with tied embeddings; checks compare the
    two.

    Of two floating dtypes, as of an fp32 weight of the optimizer and a model's own, the wider one is kept.
    """
    if first.dtype != other.dtype and first.dtype.kind == other.dtype.kind == "float" and first.shape == other.shape:
        if other.dtype.itemsize > first.dtype.itemsize:
            first, other = replace(other, name=first.name), first
        return replace(first, replicas=(*first.replicas, Replica(other.dtype, other.fragments, "another layer", True)))
    if (first.shape, first.dtype) != (other.shape, other.dtype):
        raise InconsistentError(
            f"two tensors would both be called {first.name!r}",
            found=f"{first.dtype} {list(first.shape)} and {other.dtype} {list(other.shape)}",
            expected="the same dtype and shape",
        )
    copy = Replica(other.dtype, other.fragments, "another layer", True)
    return replace(first, replicas=(*first.replicas, copy))


def _all_fit(catalog: Catalog, scheme: Scheme, fits: Mapping[str, Fit | None]) -> dict[str, Fit]:
    """The rules that take each tensor. Raises UnsupportedError if no rule takes some tensors."""
    found = {name: fit for name, fit in fits.items() if fit is not None}
    left = [name for name in fits if name not in found]
    if left:
        raise UnsupportedError(
            f"some tensors have no place in the scheme {scheme.name}", file=catalog.source.path, found=examples(left),
            remedy="Leave them out with --exclude, or leave out --to.",
        )  # fmt: skip
    return found


def _rule_of(name: str, fit: Fit, facts: Facts) -> NamingRule:
    """The first rule that takes a tensor and fits the facts."""
    for rule in fit.rules:
        if facts.meet(rule.when):
            return rule
    if len(fit.rules) == 1 and not facts.contradict(fit.rules[0].when):
        return fit.rules[0]
    wanted = fit.rules[0].when
    raise UnsupportedError(
        f"no rule takes tensor {name!r} of such a model", file=facts.path,
        found=", ".join(f"{fact} {facts.get(fact)}" for fact in wanted),
        expected=", ".join(f"{fact} {' or '.join(map(str, values))}" for fact, values in wanted.items()),
        remedy="Pass the model's config.json with --config.",
    )  # fmt: skip


def _aliases(catalog: Catalog, scheme: Scheme, facts: Facts) -> dict[str, str]:
    """The aliases of tensors that are each one part."""
    if not catalog.aliases:
        return {}
    fits = scheme.fits([*catalog.aliases, *catalog.aliases.values()])

    def part(name: str) -> str | None:
        fit = fits[name]
        rule = None if fit is None else next((rule for rule in fit.rules if facts.meet(rule.when)), None)
        if fit is None or rule is None or rule.parts is None or len(rule.parts) != 1 or rule.stack:
            return None
        return fill_template(rule.parts[0], fit.block, fit.expert)

    found = {part(dropped): part(kept) for dropped, kept in catalog.aliases.items()}
    return {dropped: kept for dropped, kept in found.items() if dropped and kept and dropped != kept}


def _parts_of(entry: TensorEntry, rule: NamingRule, fit: Fit, facts: Facts) -> list[TensorEntry]:
    """The parts in one tensor."""
    templates = rule.parts or ()
    if rule.is_of_many:
        return [replace_name(entry, rule.part_of_many(entry.name))]
    if rule.is_plain:
        return [replace_name(entry, fill_template(templates[0], fit.block, fit.expert))]
    if rule.inputs >= 0:
        held = [_of_flax(item, rule, place, facts) for place, item in _unstack(entry, rule, fit, facts)]
        return [_rescale(part, rule, facts) for part in held]
    entry = _in_shape(entry, rule, facts)
    lead = entry.shape[: len(rule.stack)]
    shape = entry.shape[len(rule.stack) :]
    if len(lead) < len(rule.stack):
        raise InconsistentError(
            f"tensor {entry.name!r} has too few dimensions", file=facts.path, found=f"shape {list(entry.shape)}",
            expected=f"{count(len(rule.stack), 'leading axis', 'leading axes')} and a parameter",
        )  # fmt: skip
    if math.prod(lead) > _MOST_STACKED:
        raise CorruptError(
            f"tensor {entry.name!r} has more blocks or experts than any model", file=facts.path,
            found=f"shape {list(entry.shape)}", expected=f"at most {_MOST_STACKED:,} of them", remedy=COPY_AGAIN,
        )  # fmt: skip
    places = [_numbers(rule.stack, index, fit) for index in itertools.product(*map(range, lead))]
    names = [[fill_template(template, *place) for template in templates] for place in places]
    if rule.rows == "joined" and not rule.transpose:
        shapes = [(rows, *shape[1:]) for rows in _widths(entry, rule, shape, facts)] if len(templates) > 1 else [shape]
        held = split_rows(entry, [piece for own in names for piece in zip(own, shapes)])
    else:
        items = split_rows(entry, [(own[0], shape) for own in names]) if rule.stack else [entry]
        held = [part for item, own in zip(items, names) for part in _split_fused(item, rule, own, facts)]
    if rule.pairs:
        held = [in_pairs(part, rule, facts, number % len(templates), apart=True) for number, part in enumerate(held)]
    held = [_rescale(part, rule, facts) for part in held]
    vocabulary = facts.whole("vocabulary") if rule.vocabulary else None
    if vocabulary is not None:
        held = [with_rows(part, min(vocabulary, part.shape[0])) for part in held]
    return held


def _unstack(
    entry: TensorEntry, rule: NamingRule, fit: Fit, facts: Facts
) -> Iterator[tuple[tuple[int, int], TensorEntry]]:
    """The arrays of single blocks and experts in an array of Flax, with the numbers of these.

    Raises:
        InconsistentError: it has too few dimensions.
    """
    stack, at = _axes(rule, fit)
    lead = entry.shape[at : at + 1] if at else entry.shape[: len(stack)]
    rest = (*entry.shape[:at], *entry.shape[at + 1 :]) if at else entry.shape[len(stack) :]
    least = max(1, rule.inputs + bool(rule.inputs))
    if len(lead) < max(1, len(stack)) * bool(at or stack) or len(rest) < least:
        raise _unfit(entry, f"shape {list(entry.shape)}", facts)
    if math.prod(lead) > _MOST_STACKED:
        raise _unfit(entry, f"{math.prod(lead):,} blocks and experts", facts)
    if not at:
        numbers = [_numbers(stack, index, fit) for index in itertools.product(*map(range, lead))]
        places = [(_block_of(block, rule, fit, facts), expert) for block, expert in numbers]
        yield from zip(places, split_rows(entry, [(entry.name, rest)] * len(places)), strict=True)
        return
    rows = math.prod(entry.shape[:at])
    flat = move_rows(
        entry, entry.name, (rows * lead[0], math.prod(entry.shape[at + 1 :])), lambda fragments, _: fragments
    )
    for block in range(lead[0]):
        own = rows_of(flat, entry.name, rows, [1] * lead[0], block)
        item = move_rows(own, own.name, rest, lambda fragments, _: fragments)
        yield (_block_of(block, rule, fit, facts), fit.expert), item


def _axes(rule: NamingRule, fit: Fit) -> tuple[tuple[str, ...], int]:
    """The axes of an array of Flax that number blocks and experts, where the name does not."""
    named = {"b": fit.block >= 0, "e": fit.expert >= 0}
    stack = tuple(axis for axis in rule.stack if not named[axis])
    return stack, rule.axis if "b" in stack else 0


def _block_of(number: int, rule: NamingRule, fit: Fit, facts: Facts) -> int:
    """The block that a number in a name, or along an axis, means."""
    first = rule.first
    before = first if isinstance(first, int) else facts.whole(_BEFORE + first) or 0
    return number if number < 0 else before + fit.place + rule.every * number


def _of_flax(item: TensorEntry, rule: NamingRule, place: tuple[int, int], facts: Facts) -> TensorEntry:
    """The part that an array of Flax is: its inputs are columns."""
    inputs = math.prod(item.shape[: rule.inputs])
    shape = (inputs, item.numel // max(1, inputs)) if rule.inputs else (item.numel,)
    part = transpose(
        move_rows(item, fill_template((rule.parts or ("",))[0], *place), shape, lambda fragments, _: fragments)
    )
    return in_pairs(part, rule, facts, 0, apart=True) if rule.pairs else part


def _rescale(part: TensorEntry, rule: NamingRule, facts: Facts) -> TensorEntry:
    """The part, with what a writer adds to its elements, or multiplies them by, taken back."""
    times, over = (math.sqrt(facts.number(fact)) if fact else 1 for fact in (rule.root, rule.over))
    if rule.rounded:
        bits = int.from_bytes(struct.pack("<f", over), "little")
        over = struct.unpack("<f", (bits + 0x7FFF + (bits >> 16 & 1) & ~0xFFFF).to_bytes(4, "little"))[0]
    return part if (rule.plus, times, over) == (0, 1, 1) else shifted_by(part, -rule.plus, times, over)


def _with_flax(catalog: Catalog, fits: Mapping[str, Fit], facts: Facts) -> Facts:
    """The facts, with those that the shapes of Flax's arrays show: heads, which are a dimension of kernels of queries and keys
    (but for MLA), hidden values, and the blocks before others.

    Raises:
        InconsistentError: a config says others.
    """
    blocks: dict[str, set[int]] = {}
    beginnings = {rule.first for fit in fits.values() for rule in fit.rules if isinstance(rule.first, str)}
    latent = _is_latent(fits)
    for name, fit in fits.items():
        rule, shape = fit.rules[0], catalog.tensors[name].shape
        if rule.parts == ("embedding.weight",) and rule.over and shape:
            facts = facts.having(hidden=shape[-1])
        if rule.inputs < 0:
            continue
        _, at = _axes(rule, fit)
        for first in beginnings if at < len(shape) and (at or fit.block >= 0) else ():
            if any(own.startswith(first) for own in rule.names):
                numbers = range(shape[at]) if at else (fit.block,)
                blocks.setdefault(first, set()).update(_block_of(number, rule, fit, facts) for number in numbers)
        fact = {"query": "query_heads", "key": "key_heads"}.get((rule.parts or ("",))[0].split(".")[-2])
        if fact is not None and rule.inputs == 1 and len(shape) == 3 + bool(at) and not latent:
            for said, value in ((fact, shape[-2]), ("head_size", shape[-1])):
                if facts.whole(said) not in (None, value):
                    raise _unfit(catalog.tensors[name], f"{said.replace('_', ' ')} {value:,}", facts)
                facts = facts.having(**{said: value})
    return facts.having(**{_BEFORE + first: len(own) for first, own in blocks.items()})


def _in_shape(entry: TensorEntry, rule: NamingRule, facts: Facts) -> TensorEntry:
    """The same elements in the shape that the rule says. Raises InconsistentError if they do not fit it."""
    if not rule.shape:
        return entry
    known = math.prod(facts.number(fact) for fact in rule.shape if fact)
    if entry.numel % known or not entry.numel:
        raise _unfit(entry, f"shape {list(entry.shape)}", facts)
    shape = tuple(facts.number(fact) if fact else entry.numel // known for fact in rule.shape)
    return move_rows(entry, entry.name, shape, lambda fragments, _: fragments)


def in_pairs(part: TensorEntry, rule: NamingRule, facts: Facts, number: int, *, apart: bool) -> TensorEntry:
    """A part with its rotary pairs in halves (`apart`) or side by side, if the rule has pairs; `number` is the part's
    place in the rule.
    """
    kind = rule.pairs if rule.pairs != "both" else (rule.parts or ())[number].split(".")[-2]
    return part if kind == "value" else swap_head_halves(part, facts.number(_SHARES[kind]), apart=apart)


def _numbers(stack: Sequence[str], index: Sequence[int], fit: Fit) -> tuple[int, int]:
    """The block and expert at one place in a stack."""
    own = dict(zip(stack, index))
    return own.get("b", fit.block), own.get("e", fit.expert)


def _split_fused(item: TensorEntry, rule: NamingRule, names: Sequence[str], facts: Facts) -> Iterator[TensorEntry]:
    """The parts in a tensor that is not stacked."""
    if rule.transpose:
        item = transpose(item)
    if len(names) == 1:
        yield replace_name(item, names[0])
        return
    widths = _widths(item, rule, item.shape, facts)
    groups = widths[0] if rule.rows == "alternating" else 1 if rule.rows == "joined" else facts.number(rule.rows)
    if any(width % groups for width in widths):
        raise _unfit(item, f"{count(item.shape[0], 'row')} in {count(groups, 'group')}", facts)
    inside = [width // groups for width in widths]
    for number, name in enumerate(names):
        yield rows_of(item, name, groups, inside, number)


def _widths(entry: TensorEntry, rule: NamingRule, shape: Sequence[int], facts: Facts) -> list[int]:
    """The rows of each part in a tensor of this shape; parts other than queries, keys and values have equal numbers."""
    words = [template.split(".")[-2] for template in rule.parts or ()]
    if rule.widths:
        shares = [math.prod(map(facts.number, product.split("*"))) for product in rule.widths]
    elif set(words) == set(_SHARES):
        shares = [facts.number(_SHARES[word]) for word in words]
    elif set(words) == {"query_down", "key_value_down"}:
        sizes = {"query_down": facts.number("query_rank")}
        sizes["key_value_down"] = facts.number("key_value_rank") + facts.number("rotary_size")
        shares = [sizes[word] for word in words]
    else:
        shares = [1] * len(words)
    rows = shape[0] if shape else 0
    if rows % sum(shares):
        raise _unfit(entry, f"{rows:,} rows", facts)
    return [share * (rows // sum(shares)) for share in shares]


def _unfit(entry: TensorEntry, found: str, facts: Facts) -> InconsistentError:
    heads = f"{facts.get('query_heads')} query heads and {facts.get('key_heads')} key heads"
    return InconsistentError(
        f"the rows of tensor {entry.name!r} do not fit its parts", file=facts.path, found=found,
        expected=f"rows for {heads}" if facts.get("query_heads") else "rows for each part",
        remedy="Pass the model's config.json with --config.",
    )  # fmt: skip


def _complete_facts(catalog: Catalog, scheme: Scheme, fits: Mapping[str, Fit], facts: Facts) -> Facts:
    """The facts, with those that names and shapes of fused tensors show: key_heads, head_size, gated, latent (MLA)."""
    for name, fit in fits.items():
        rule = fit.rules[0]
        if rule.parts == ("blocks.{b}.router.weight",) and rule.inputs < 0 and len(catalog.tensors[name].shape) > 1:
            facts = facts.having(experts=catalog.tensors[name].shape[-2], hidden=catalog.tensors[name].shape[-1])
            break
    facts = _with_flax(catalog, fits, facts)
    fused: tuple[TensorEntry, int, int] | None = None
    has_gate = False
    up: dict[str, int] = {}
    down: dict[str, int] = {}
    for name, fit in fits.items():
        rule = fit.rules[0]
        has_gate = has_gate or all(any(part.endswith(_GATES) for part in each.parts or ()) for each in fit.rules)
        if rule.parts is None or not rule.parts[0].endswith(".weight"):
            continue
        shape = _in_shape(catalog.tensors[name], rule, facts).shape[len(rule.stack) :]
        if len(shape) != 2:
            continue
        rows, columns = reversed(shape) if rule.transpose else shape
        words = [template.split(".") for template in rule.parts]
        is_attention = {word[-2] for word in words} == set(_SHARES) and words[0][
            -3
        ] != "linear"  # which has heads of its own
        if fused is None and is_attention and not facts.contradict(rule.when):
            fused = catalog.tensors[name], rows, columns
        if words[-1][-2] == "up" or words[0][-2] == "up":
            up.setdefault(words[0][-3], rows)
        elif words[0][-2] == "down":
            down.setdefault(words[0][-3], columns)
        if fused and up.keys() & down.keys():
            break
    if _is_latent(fits):
        facts = facts.having(latent=True)
    if any(".mamba." in part for fit in fits.values() for part in fit.rules[0].parts or ()):
        facts = facts.having(hybrid=True)
    where = next((where for where in up if where in down), None)
    if has_gate or where is not None:
        facts = facts.having(gated=has_gate or up[where or ""] == 2 * down[where or ""])
    if fused is not None:
        facts = _with_heads(facts, *fused)
    if scheme.has_local_names and fused is not None:
        facts = with_groups(facts, local_names(catalog.tensors).values())
    return facts


def _is_latent(fits: Mapping[str, Fit]) -> bool:
    """Whether attention goes through low ranks (MLA), by names."""
    return any(".key_value_down." in part for fit in fits.values() for part in fit.rules[0].parts or ())


def _with_heads(facts: Facts, entry: TensorEntry, rows: int, columns: int) -> Facts:
    """The facts of attention heads, from the number of query heads and the shape of a fused weight. Raises
    InconsistentError if they do not fit each other.
    """
    query = facts.number("query_heads")
    known = facts.whole("key_heads")
    size = facts.whole("head_size") or (rows // (query + 2 * known) if known else columns // query)
    key, rest = divmod(rows - query * size, 2 * size) if size else (0, 1)
    if rest or not 0 < key <= query or query % key:
        raise InconsistentError(
            f"the heads do not fit {entry.name!r}", file=facts.path,
            found=f"{rows:,} rows",
            remedy="Pass the model's config.json with --config.",
            expected=f"rows for {query} query heads of {size} rows, and for keys and values",
        )  # fmt: skip
    return facts.having(key_heads=key, head_size=size)
