"""Finds the tensors of a FairScale save a second time, as FairScale's and metaseq's own scripts put them together.

Of each stored parameter, `consolidate_shard_weights` takes the padding off every rank's vector, puts the vectors end to end, and
splits them by `numels`. A module with `no_broadcast_optim_state` is each rank's own: `MOELayer` sends tokens to expert
`rank * experts of a rank + number`. metaseq's `reshard_mp.py` joins the parts of tensor-parallel ranks: fc1, q, k, v and the
embedding in rows, fc2 and out_proj in columns, `qkv_proj` as three. An optimizer counts the stored parameters of a rank's file.
Source: fairscale 0.4.13, nn/data_parallel/fully_sharded_data_parallel.py `consolidate_shard_weights`, `_gather_optim_state`,
nn/moe/moe_layer.py; metaseq 0.0.1, scripts/reshard_mp.py; fairseq, branch moe, moe_checkpoint_utils.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zckpt.base.errors import UnsupportedError
from zckpt.containers import TensorRef
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import (
    NO_PROOF,
    HeldRun,
    SecondLook,
    Shape,
    Slice,
    VectorPart,
    as_number,
    as_sequence,
    cut_evenly,
    fields_of,
    hold_slice,
    tensors_in,
    vectors_in,
)

_FILE = re.compile(
    r"(?:.+?[-_.])??(?:model_part-(?P<part>\d+))?[-_.]?(?:rank-(?P<rank>\d+)|(?P<shared>shared))?[-_.]?"
    r"(?:shard[-_]?(?P<shard>\d+))?\.(?:pt|pth|bin|ckpt)"
)
_EXPERT = re.compile(r"((?:.*\.)?experts\.)(\d+)(\..*)")


class _Stored(NamedTuple):
    """A stored parameter of a rank: shapes by names, its vector and the states beside it, and what is behind the padding.

    Attributes:
        shapes: of what lies in the vector, in order.
        vector: of the weights.
        states: name -> vector beside it.
        numel: elements without padding.
        alone: whether it is the rank's own.
        rank: which.
    """

    shapes: Mapping[str, Shape]
    vector: TensorRef
    states: Mapping[str, TensorRef]
    numel: int
    alone: bool
    rank: int


Tensors = dict[str, tuple[Shape, list[VectorPart]]]


def find_again(listing: Listing) -> SecondLook:
    """The model's tensors and the optimizer's states."""
    if listing.options.tp_rules:
        raise UnsupportedError("joins its slices by --tp-rules", file=listing.directory, remedy=NO_PROOF)
    files: dict[int, list[tuple[int, Mapping[str, object]]]] = {}  # rank of a part of the model -> rank in it, content
    for match in map(_FILE.fullmatch, listing.files):
        if match and (match["part"] or match["rank"] or match["shared"] or match["shard"]):
            rank = int(match["shard"] or match["rank"] or 0)
            files.setdefault(int(match["part"] or 0), []).append((rank, fields_of(listing.open(match[0]).root)))
    parts = 1 + max(files)
    names: dict[str, Shape | None] = {}
    runs: list[HeldRun] = []
    for part in range(parts):
        own = sorted(files.get(part, ()), key=lambda file: file[0])
        for name, (shape, held) in _of_part(own).items():
            names[name] = None if parts > 1 else shape
            cut = _slice(name, shape, part, parts)
            for vector, states, first, count, start in held:
                for state, ref in {"": vector, **states}.items():
                    runs += hold_slice(name, state, ref, first, count, start, cut)
    return SecondLook(names, runs)


def _of_part(files: Sequence[tuple[int, Mapping[str, object]]]) -> Tensors:
    """The tensors of one part of the model, from the files of its ranks."""
    found: Tensors = {}
    stored: dict[str, list[_Stored]] = {}
    for rank, root in files:
        metadata = next((fields_of(v) for v in root.values() if "param_metadata" in fields_of(v)), None)
        tensors = _tensors(root)
        if metadata is not None:
            for key, own in _stored_in(rank, root, metadata, tensors).items():
                stored.setdefault(key, []).append(own)
            tensors = {
                name: tensors[name] for name in map(str, as_sequence(metadata.get("buffer_names"))) if name in tensors
            }
        experts = _experts_in(tensors)
        for name, ref in tensors.items():
            renamed = _renumber_expert(name, rank, experts)
            found.setdefault(renamed, (ref.shape, []))[1].append(VectorPart(ref, {}, 0, ref.numel, 0))
    for ranks in stored.values():
        experts = _experts_in(name for own in stored.values() for name in own[0].shapes)
        for group in [[own] for own in ranks] if ranks[0].alone else [ranks]:
            _split_vectors(group, experts if ranks[0].alone else {}, found)
    return found


def _stored_in(
    rank: int, root: Mapping[str, object], metadata: Mapping[str, object], tensors: Mapping[str, TensorRef]
) -> dict[str, _Stored]:
    """The stored parameters of a rank's file, by their keys."""
    found: dict[str, _Stored] = {}
    modules = [fields_of(module) for module in as_sequence(metadata["param_metadata"])]
    said = {
        f"{module['fsdp_path']}.{key}" if module["fsdp_path"] else key: (module, fields_of(own))
        for module in modules
        for key, own in fields_of(module["params"]).items()
    }
    states = _states_of(root, {key: ref for key, ref in tensors.items() if key in said})
    for key, (module, own) in said.items():
        if key in tensors:
            home = f"{module['fsdp_path']}." if module["fsdp_path"] else ""
            pairs = zip(as_sequence(own["names"]), as_sequence(own["shapes"]), strict=True)
            shapes = {f"{home}{name}": _shape(shape) for name, shape in pairs}
            numel = tensors[key].numel - as_number(own["padding"])
            alone = bool(module["no_broadcast_optim_state"])
            found[key] = _Stored(shapes, tensors[key], states.get(key, {}), numel, alone, rank)
    return found


def _states_of(root: Mapping[str, object], stored: Mapping[str, TensorRef]) -> dict[str, dict[str, TensorRef]]:
    """Stored parameter -> its states: the optimizer counts those of the file that are trained; their lengths tell which."""
    optimizer = next((fields_of(v) for v in root.values() if {"state", "param_groups"} <= fields_of(v).keys()), {})
    own = [
        vectors_in(value)
        for _, value in sorted(fields_of(optimizer.get("state")).items(), key=lambda item: int(item[0]))
    ]
    lengths = [next((ref.numel for ref in vectors.values()), -1) for vectors in own]
    keys = [*stored]
    first = _find_in_order(lengths, [stored[key].numel for key in keys])
    last = _find_in_order(lengths[::-1], [stored[key].numel for key in keys[::-1]])
    if first is None or last is None or first != [len(keys) - 1 - at for at in reversed(last)]:
        return {}
    return {keys[at]: vectors for at, vectors in zip(first, own, strict=True)}


def _find_in_order(wanted: Sequence[int], there: Sequence[int]) -> list[int] | None:
    """The first positions at which `wanted` occurs, in order, among other numbers; None where it does not occur."""
    found: list[int] = []
    for number in wanted:
        at = next((at for at in range(found[-1] + 1 if found else 0, len(there)) if there[at] == number), None)
        if at is None:
            return None
        found.append(at)
    return found


def _split_vectors(ranks: list[_Stored], experts: Mapping[str, int], found: Tensors) -> None:
    """Splits ranks' vectors, which are one end to end, into the tensors that lie in them."""
    end = sum(own.numel for own in ranks)
    at = 0
    for name, shape in ranks[0].shapes.items():
        numel = math.prod(shape)
        renamed = _renumber_expert(name, ranks[0].rank, experts)
        held = found.setdefault(renamed, (shape, []))[1]
        before = 0
        for own in ranks:
            low, high = max(at, before), min(at + numel, before + own.numel)
            if low < high:
                held.append(VectorPart(own.vector, own.states, low - before, high - low, low - at))
            before += own.numel
        at += numel
    if at != end:
        raise ValueError(f"{end:,} elements of {at:,}")


def _experts_in(names: Iterable[str]) -> dict[str, int]:
    """Prefix of experts' names -> how many of these experts a rank has."""
    pairs = {(match[1], match[2]) for match in map(_EXPERT.fullmatch, names) if match}
    return dict(Counter(head for head, _ in pairs))


def _renumber_expert(name: str, rank: int, experts: Mapping[str, int]) -> str:
    match = _EXPERT.fullmatch(name)
    if match is None or match[1] not in experts:
        return name
    return f"{match[1]}{rank * experts[match[1]] + int(match[2])}{match[3]}"


def _slice(name: str, shape: Shape, part: int, parts: int) -> Slice:
    """The part of a tensor that one tensor-parallel rank holds, by metaseq's names."""
    if not shape or parts == 1:
        return cut_evenly(shape or (1,), 0, 0, 1)
    if "layer_norm" not in name and "embed_positions" not in name:
        if "qkv_proj" in name:
            return cut_evenly(shape, 0, part, parts, 3)
        if re.search(r"fc1\.|[kqv]_proj\.|embed_tokens\.|output_projection\.", name):
            return cut_evenly(shape, 0, part, parts)
        if re.search(r"(?:fc2|out_proj)\.weight", name):
            return cut_evenly(shape, 1, part, parts)
    return cut_evenly(shape, 0, 0, 1)


def _tensors(root: Mapping[str, object]) -> dict[str, TensorRef]:
    """The model's tensors: under a key that names it, or on top."""
    inner = next((root[key] for key in ("model", "state_dict", "model_state_dict", "weights") if key in root), root)
    if inner is root:
        return {name: ref for name, ref in root.items() if isinstance(ref, TensorRef)}
    return tensors_in(inner)


def _shape(value: object) -> Shape:
    return tuple(map(as_number, as_sequence(value)))
