"""Megatron's and GPT-NeoX's tensors with the names and the order of rows of an architecture of transformers.

For `--to hf:NAME`. The names, and which tensors are cut, reordered or transposed, are data: one file for each architecture in
`architecture_files`. Nothing is copied: a reordered tensor is the same fragments at other places (`overlaps.rearranged`).

[Note: architecture files] The first entry of "tensors" whose "match" fits a tensor's local name (without the layer it is in)
applies. "to" is its new name, or a list of names for its parts, or null if it is left out; {block} is the number of its
transformer block and {1}, {2}, .. the match's groups. "cut" says that it is stacked: "qkv", or "halves". "order" is the new
order of a stack that stays one tensor: "heads" (for each head its query, key and value) or "stacked". "transpose" transposes
matrices. "vocabulary" cuts off rows that a given config does not have. "config" is explained in `model_config`.

[Note: local names] In a pipeline, and in GPT-NeoX's sequential form, names begin with the layer's number; blocks are
the layers that hold attention, counted from 0. Otherwise the name itself has the block's number.

[Note: the order of queries, keys and values] A fused weight is `groups` groups of rows, in each some rows of queries, then
of keys, then of values. The number of groups determines the order. GPT-NeoX has one per query head; with fewer
key heads than query heads, since November 2024, one per tensor-parallel rank. Megatron since checkpoint version 2 has one
per key head; version 1 one per element of a head (h, n, 3); version 0 one per tensor-parallel rank. Groups by ranks are
only known if the rules that joined the slices put them end to end, as the built-in ones do.
Source: GPT-NeoX, tools/ckpts/convert_neox_to_hf.py; Megatron-DeepSpeed, tools/hf2megads_weight_converter.py and
megatron/model/transformer.py; transformers 4, models/megatron_gpt2 `fix_query_key_value_ordering`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zckpt.base.errors import InconsistentError, UnsupportedError
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, Replica, TensorEntry
from zckpt.core.dtypes import DType
from zckpt.core.fragments import Block, Fragment
from zckpt.core.overlaps import Pass, clip, rearranged, transposed

FILES = os.path.join(os.path.dirname(__file__), "architecture_files")

_PREFIXES = [
    re.compile(pattern)
    for pattern in (
        r"(?:.*\.)?layers\.(?P<block>\d+)\.(?P<local>.+)",
        r"(?:sequential\.)?(?P<layer>\d+)\.(?P<local>.+)",
        r"tied_modules\.[^.]+\.(?P<local>.+)",
        r"(?:language_model\.)?(?:embedding\.|encoder\.|transformer\.)?(?P<local>.+)",
    )
]
_ATTENTION = re.compile(r"(?:self_)?attention\.")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Heads:
    """How attention is divided.

    Attributes:
        query: heads of queries.
        key: heads of keys, and of values.
        size: rows of one head.
    """

    query: int
    key: int
    size: int


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a checkpoint that its tensors do not show.

    Attributes:
        version: Megatron's checkpoint version; None if it is not recorded.
        tp: tensor-parallel ranks that it was joined from.
        rules: the rules that joined it; empty for the checkpoint's own.
    """

    version: float | None
    tp: int
    rules: str = ""


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor's place in the model: its block, if it is in one, and its local name."""

    block: int | None
    local: str


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture file; see [Note: architecture files]."""

    name: str
    tensors: tuple[tuple[re.Pattern[str], Mapping[str, Any]], ...]
    config: Mapping[str, Any]


def names() -> list[str]:
    """The architectures that have a file."""
    return sorted(name.removesuffix(".json") for name in os.listdir(FILES) if name.endswith(".json"))


def architecture(name: str) -> Architecture:
    """Reads an architecture, one of `names`."""
    with open(os.path.join(FILES, f"{name}.json"), "rb") as file:
        data = json.load(file)
    return Architecture(name, tuple((re.compile(rule["match"]), rule) for rule in data["tensors"]), data["config"])


def located(catalog: Catalog) -> dict[str, Located]:
    """The place of every tensor in the model; see [Note: local names]."""
    found: dict[str, tuple[re.Match[str], str]] = {}
    for name in catalog.tensors:
        match = next(match for prefix in _PREFIXES if (match := prefix.fullmatch(name)))
        found[name] = match, match["local"]
    layers = {int(m["layer"]) for m, local in found.values() if "layer" in m.re.groupindex and _ATTENTION.match(local)}
    blocks = {layer: block for block, layer in enumerate(sorted(layers))}
    places: dict[str, Located] = {}
    for name, (match, local) in found.items():
        numbers = match.groupdict()
        block = numbers.get("block")
        layer = numbers.get("layer")
        places[name] = Located(int(block) if block else blocks.get(int(layer)) if layer else None, local)
    return places


def heads_of(catalog: Catalog, query: int, size: int | None) -> Heads:
    """How attention is divided, from the number of query heads and the tensors' shapes.

    Raises:
        InconsistentError: they do not fit each other.
        UnsupportedError: there are no fused attention weights.
    """
    for name, place_ in located(catalog).items():
        if re.fullmatch(r"(?:self_)?attention\.query_key_value\.weight", place_.local):
            rows, *rest_of_shape = catalog.tensors[name].shape or (0,)
            size = size or math.prod(rest_of_shape) // query
            key, rest = divmod(rows - query * size, 2 * size) if size else (0, 1)
            if not rest and 0 < key <= query and query % key == 0:
                return Heads(query, key, size)
            raise InconsistentError(
                f"the heads do not fit {name!r}", file=catalog.source.path,
                found=f"{rows:,} rows",
                remedy="Pass the model's config.json with --config.",
                expected=f"rows for {query} query heads of {size} rows, and for keys and values",
            )  # fmt: skip
    raise UnsupportedError(
        "the model has no fused attention weights", file=catalog.source.path, found=f"tensors {examples(catalog)}",
        expected="tensors of Megatron or GPT-NeoX", remedy="Leave out --to.",
    )  # fmt: skip


def as_architecture(
    catalog: Catalog, wanted: Architecture, heads: Heads, origin: RunFacts, vocabulary: int | None
) -> Catalog:
    """The tensors with the architecture's names and order of rows.

    Args:
        catalog: Megatron's or GPT-NeoX's tensors, joined.
        wanted: the architecture.
        heads: how attention is divided.
        origin: facts of the checkpoint.
        vocabulary: rows of the embeddings to keep; None for all.

    Raises:
        UnsupportedError: a tensor has no place in the architecture.
        InconsistentError: two tensors that should be the same have different shapes, or blocks differ.
    """
    tensors: dict[str, TensorEntry] = {}
    places = located(catalog)
    groups = _groups(places, heads, origin, catalog.source.path)
    for entry, rule, to in _matched(catalog, places, wanted):
        for moved in _carried(entry, rule, to, heads, groups):
            if rule.get("vocabulary"):
                moved = _cut_rows(moved, vocabulary)
            if rule.get("transpose") and len(moved.shape) == 2:
                moved = _turned(moved)
            first = tensors.get(moved.name)
            tensors[moved.name] = moved if first is None else _same(first, moved)
    _check_blocks(tensors, catalog)
    return replace(catalog, tensors=tensors, aliases={})


def _matched(
    catalog: Catalog, places: Mapping[str, Located], wanted: Architecture
) -> Iterator[tuple[TensorEntry, Mapping[str, Any], list[str]]]:
    """Each tensor with its rule and its new names."""
    homeless: list[str] = []
    for name, place_ in places.items():
        for pattern, rule in wanted.tensors:
            match, to = pattern.fullmatch(place_.local), rule["to"]
            if match and to is None:
                break
            templates = [to] if isinstance(to, str) else to or []
            if match and (place_.block is not None) == any("{block}" in text for text in templates):
                filled = [text.format(match[0], *match.groups(), block=place_.block) for text in templates]
                yield catalog.tensors[name], rule, filled
                break
        else:
            homeless.append(name)
    if homeless:
        raise UnsupportedError(
            f"some tensors have no place in {wanted.config['fixed']['architectures'][0]}", file=catalog.source.path,
            found=examples(homeless),
            remedy=f"Pass another --to ({', '.join(f'hf:{n}' for n in names())}), or leave them out with --exclude.",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Groups:
    """The number of groups of queries, keys and values, and of the two halves of a gated MLP."""

    attention: int
    gated: int


def _carried(
    entry: TensorEntry, rule: Mapping[str, Any], to: Sequence[str], heads: Heads, stacked: _Groups
) -> Iterator[TensorEntry]:
    """The tensors that one tensor becomes."""
    cut = rule.get("cut")
    if cut is None:
        yield replace(entry, name=to[0])
        return
    rows, rest = entry.shape[0], entry.shape[1:]
    if cut == "halves":
        groups = stacked.gated if rule.get("by") == "ranks" else 1
        if rows % (2 * groups):
            raise InconsistentError(
                f"tensor {entry.name!r} has no two halves", found=f"{rows:,} rows in {count(groups, 'group')}"
            )
        for number, name in enumerate(to):
            yield _rows_of(entry, name, groups, (rows // groups // 2,) * 2, number)
        return
    widths = (heads.query * heads.size, heads.key * heads.size, heads.key * heads.size)
    groups = stacked.attention
    if rows != sum(widths) or any(width % groups for width in widths):
        raise InconsistentError(
            f"queries, keys and values do not fit the heads, in tensor {entry.name!r}",
            found=f"{rows:,} rows in {groups:,} groups", expected=f"{sum(widths):,} rows for {heads}",
            remedy="Pass the model's config.json with --config.",
        )  # fmt: skip
    inside = tuple(width // groups for width in widths)
    if len(to) == 3:
        for number, name in enumerate(to):
            yield _rows_of(entry, name, groups, inside, number)
        return
    wanted = heads.query if rule.get("order") == "heads" else 1
    if wanted == groups:
        yield replace(entry, name=to[0])
        return
    # First the three tensors, one after another; then their rows in the new groups.
    width = math.prod(rest)
    apart, together = _stack(inside, groups, width), _interleave([w // wanted for w in widths], wanted, width)
    yield _moved(entry, to[0], entry.shape, apart, together)


def _stack(inside: Sequence[int], groups: int, width: int) -> Pass:
    """Groups of rows of several tensors -> these tensors, one after another."""
    pitch = sum(inside) * width
    starts = [sum(inside[:n]) * width for n in range(len(inside))]
    return [
        (Block(at, own * width, groups, pitch, pitch, 1), at * groups, own * width) for at, own in zip(starts, inside)
    ]


def _interleave(inside: Sequence[int], groups: int, width: int) -> Pass:
    """Several tensors, one after another -> groups of their rows."""
    pitch = sum(inside) * width
    starts = [sum(inside[:n]) * width for n in range(len(inside))]
    return [
        (Block(at * groups, own * width, groups, own * width, own * width, 1), at, pitch)
        for at, own in zip(starts, inside)
    ]


def _groups(places: Mapping[str, Located], heads: Heads, origin: RunFacts, path: str) -> _Groups:
    """The number of groups; see [Note: the order of queries, keys and values].

    Raises:
        UnsupportedError: the checkpoint does not tell them.
    """
    locals_ = {place_.local for place_ in places.values()}
    gated = any(local.startswith("mlp.linear1.") for local in locals_)
    by_rank = False
    if origin.version is not None:
        if origin.version >= 2:
            attention = heads.key
        elif origin.version >= 1:
            attention = heads.query * heads.size
        else:
            attention, by_rank = origin.tp, True
    elif any(local.startswith("self_attention.") for local in locals_):
        raise UnsupportedError(
            "the order of the fused attention weights is unknown", file=path, found="no checkpoint_version",
            remedy="Convert the checkpoint that Megatron itself wrote.",
            expected="a checkpoint_version, as Megatron writes",
        )  # fmt: skip
    elif heads.key < heads.query and gated:  # the newer names came with the newer order
        attention, by_rank = origin.tp, True
    else:
        attention = heads.query
    if origin.tp > 1 and (by_rank or gated) and origin.rules not in ("neox", "megatron"):
        raise UnsupportedError(
            "stacked rows of several ranks were joined by other rules", file=path,
            found=f"rules {origin.rules}" if origin.rules else "the checkpoint's own rules",
            remedy="Pass --tp-rules neox, or megatron for Megatron's checkpoints.",
        )  # fmt: skip
    return _Groups(attention, origin.tp)


def _rows_of(entry: TensorEntry, name: str, groups: int, widths: Sequence[int], number: int) -> TensorEntry:
    """One of several tensors that are stacked in groups."""
    width = math.prod(entry.shape[1:])
    block, _, pitch = _stack(widths, groups, width)[number]
    return _moved(entry, name, (widths[number] * groups, *entry.shape[1:]), [(block, 0, pitch)])


def _turned(entry: TensorEntry) -> TensorEntry:
    """The transposed matrix."""
    rows, columns = entry.shape

    def turned(fragments: tuple[Fragment, ...], dtype: DType) -> tuple[Fragment, ...]:
        return transposed(fragments, rows, columns, dtype.itemsize)

    replicas = tuple(replace(r, fragments=turned(r.fragments, r.dtype)) for r in entry.replicas)
    return replace(entry, shape=(columns, rows), fragments=turned(entry.fragments, entry.dtype), replicas=replicas)


def _moved(entry: TensorEntry, name: str, shape: Shape, *passes: Pass) -> TensorEntry:
    """A tensor of another one's rows, with its replicas; each pass rearranges the result of the one before."""

    def through(fragments: tuple[Fragment, ...], itemsize: int) -> tuple[Fragment, ...]:
        for rows in passes:
            fragments = rearranged(fragments, rows, itemsize)
        return fragments

    replicas = tuple(replace(r, fragments=through(r.fragments, r.dtype.itemsize)) for r in entry.replicas)
    return TensorEntry(name, shape, entry.dtype, entry.role, through(entry.fragments, entry.dtype.itemsize), replicas)


def _cut_rows(entry: TensorEntry, keep: int | None) -> TensorEntry:
    """The first `keep` rows of a tensor that has more."""
    if keep is None or keep >= entry.shape[0]:
        return entry
    shape = (keep, *entry.shape[1:])
    numel = math.prod(shape)
    fragments = clip(entry.fragments, 0, numel, entry.dtype.itemsize)
    replicas = tuple(replace(r, fragments=clip(r.fragments, 0, numel, r.dtype.itemsize)) for r in entry.replicas)
    return replace(entry, shape=shape, fragments=fragments, replicas=replicas)


def _same(first: TensorEntry, other: TensorEntry) -> TensorEntry:
    """One entry for a tensor that the checkpoint holds twice, as tied embeddings of a pipeline; checks compare the two."""
    if (first.shape, first.dtype) != (other.shape, other.dtype):
        raise InconsistentError(
            f"two tensors would both be called {first.name!r}",
            found=f"{first.dtype} {list(first.shape)} and {other.dtype} {list(other.shape)}",
            expected="the same dtype and shape",
        )
    copy = Replica(other.dtype, other.fragments, "another layer", True)
    return replace(first, replicas=(*first.replicas, copy))


def _check_blocks(tensors: Mapping[str, TensorEntry], catalog: Catalog) -> None:
    """Checks that every block holds the same tensors.

    Raises:
        InconsistentError: tensors are missing in some.
    """
    held: dict[int, set[str]] = {}
    for name in tensors:
        if match := re.search(r"\.(\d+)\.", name):
            held.setdefault(int(match[1]), set()).add(name[: match.start()] + name[match.end() - 1 :])
    every = set().union(*held.values())
    lacking = {block: sorted(every - found) for block, found in sorted(held.items()) if every - found}
    if lacking or sorted(held) != list(range(len(held))):
        raise InconsistentError(
            "blocks do not hold the same tensors", file=catalog.source.path,
            found="; ".join(f"block {b} lacks {examples(n)}" for b, n in list(lacking.items())[:3]) or f"blocks {sorted(held)}",
        )  # fmt: skip
