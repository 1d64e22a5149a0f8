"""Finds the experts of DeepSpeed's mixtures a second time, and what all ranks have beside them.

An expert's half-precision weights are in a file of its own, under its number among all experts: DeepSpeed's own layers name it
(`deepspeed_experts.3.up.weight`), AutoEP's stacks have it at the end (`experts.w1.3`: row 3). Where the ranks of a stage have
files of one expert, each has a slice. The masters in optimizer files have no such numbers: `verify` compares them with the
weights. At stage 3 there are no files of experts: each sub-group says which ranks share it (`ds_zero_partition_groups`), and each
rank's model file which experts of a stack it has.
Source: DeepSpeed 0.19.8, runtime/engine.py `_save_moe_checkpoint`, moe/layer.py, checkpoint/autoep_affine.py,
runtime/zero/stage3.py.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from zckpt.base.errors import UnsupportedError
from zckpt.containers import TensorRef
from zckpt.layouts.joining.patterns import Patterns
from zckpt.layouts.parallel.second import add_layers, cuts_of, hold_cut, join_ranks, layers_in, ranks_of, tensor_ranks
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import (
    NO_PROOF,
    BesideMaster,
    HeldRun,
    SecondLook,
    Shape,
    VectorPart,
    as_sequence,
    fields_of,
    hold_box,
    mapping,
    shapes_of,
    tensors_in,
)
from zckpt.layouts.zero.second import (
    FILE,
    RankTensors,
    add_frozen,
    add_module,
    cut_line,
    files_of,
    hold_all,
    hold_states,
    optimizer_of,
    pairs_of,
    vectors_of,
)

_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OWN = re.compile(r".*\.deepspeed_experts\.\d+\..+")
_STACKED = re.compile(r"(.+)\.(\d+)")


def find_again(listing: Listing) -> SecondLook:
    """The model's tensors, and the states beside its masters."""
    ranks = ranks_of(listing)
    if not any(map(_EXPERT.fullmatch, listing.files)):
        if len(ranks) > 1:
            raise UnsupportedError(
                "shares experts over tensor ranks at stage 3", file=listing.directory, remedy=NO_PROOF
            )
        return _stage_3(listing)
    everywhere = sorted({int(match["mp"]) for match in map(FILE.fullmatch, listing.files) if match})
    tp = tensor_ranks(listing, len(everywhere))
    found = {mp: _weights_of(listing, mp) for mp in ranks}
    first = found[ranks[0]]
    for mp in everywhere:  # a rank that wrote no model file has what the first one has, and masters of its own
        found.setdefault(mp, replace(first, shapes=dict(first.shapes), held={}, whole={}, beside=[]))
        found[mp].held.update(_dense_masters(listing, mp, found[mp].root))
    layers = layers_in(listing)
    for mp, own in found.items() if layers else ():
        add_layers(own, {layer: tensors for (layer, rank), tensors in layers.items() if rank == mp % tp})
    look = join_ranks(listing, [found[mp] for mp in everywhere], tp)
    names: dict[str, Shape | None] = dict(look.names)
    experts: list[Iterator[HeldRun]] = []
    patterns = Patterns(listing.directory.path)
    rules = fields_of(first.root.get("universal_checkpoint_info"))
    for slices in _experts(listing, tp).values():
        for name in dict.fromkeys(name for own in slices for name in own):
            refs = [own[name] for own in slices]
            stacked = None if _OWN.fullmatch(name) else _STACKED.fullmatch(name)
            if stacked:
                names[stacked[1]] = None
                experts += (_row(stacked[1], int(stacked[2]), ref) for ref in refs)
            else:
                names[name] = None
                cuts = cuts_of(name, [ref.shape for ref in refs], rules, patterns, is_buffer=refs[0].shape == (1,))
                experts += (hold_cut(name, "", ref, 0, ref.numel, 0, cut) for ref, cut in zip(refs, cuts, strict=True))
    beside = [pair for mp in everywhere for pair in _beside(listing, mp)]
    runs = itertools.chain(look.runs, itertools.chain.from_iterable(experts))
    return SecondLook(names, runs, beside=[*look.beside, *beside], by_copy=True)


def _weights_of(listing: Listing, mp: int) -> RankTensors:
    """The weights in a model-parallel rank's model files."""
    models, optimizers = files_of(listing, mp)
    roots = [mapping(listing.open(name).root) for name in models]
    found = RankTensors(roots[0], {}, {}, {}, [], bool(optimizers))
    for group in shapes_of(roots[0]):
        found.shapes.update((name, shape) for name, shape in group.items() if "expert" not in name)
    add_module(found, roots, is_partitioned=False)
    add_frozen(found, roots, is_stage_3=False)
    return found


def _dense_masters(listing: Listing, mp: int, root: Mapping[str, object]) -> dict[str, list[VectorPart]]:
    """The masters of the groups without experts, which all data-parallel ranks of a model-parallel rank share."""
    lines = [vectors_of(optimizer_of(listing, name)) for name in files_of(listing, mp)[1]]
    found: dict[str, list[VectorPart]] = {}
    for number, shapes in enumerate(shapes_of(root)):
        if not lines or any("expert" in name or number >= len(line) for name in shapes for line in lines):
            continue
        at = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            found[name] = list(cut_line([line[number] for line in lines], at, at + numel))
            at += numel
    return found


def _experts(listing: Listing, tp: int) -> dict[tuple[int, int, int], list[Mapping[str, TensorRef]]]:
    """(stage, layer, expert) -> what each tensor rank that has a file of it holds."""
    found: dict[tuple[int, int, int], list[Mapping[str, TensorRef]]] = {}
    for match in sorted((m for m in map(_EXPERT.fullmatch, listing.files) if m), key=lambda m: int(m[3])):
        own = found.setdefault((int(match[3]) // tp, int(match[1]), int(match[2])), [])
        own.append(tensors_in(listing.open(match[0]).root))
    return found


def _row(name: str, number: int, ref: TensorRef) -> Iterator[HeldRun]:
    """The rows of an expert within a stack; the number of experts does not matter for its place."""
    shape = (number + 1, *ref.shape)
    stack = TensorRef(ref.store, ref.byte_offset, ref.dtype, (1, *ref.shape), (ref.numel, *ref.stride), ref.storage_key,
                      ref.storage_offset, ref.storage_nbytes, ref.storage_byte_offset)  # fmt: skip
    return hold_box(name, "", stack, (number, *(0 for _ in ref.shape)), shape)


def _beside(listing: Listing, mp: int) -> Iterator[BesideMaster]:
    for name in files_of(listing, mp)[1]:
        yield from pairs_of(vectors_of(optimizer_of(listing, name)))
    for match in map(_OPTIMIZER.fullmatch, listing.files):
        if match and int(match[2]) == mp:
            yield from pairs_of(vectors_of(optimizer_of(listing, match[0])))


def _stage_3(listing: Listing) -> SecondLook:
    """The tensors of a stage 3 save: each team of ranks shares a sub-group and has some experts of a stack."""
    models, optimizers = files_of(listing, 0)
    roots = [mapping(listing.open(name).root) for name in models]
    states = [optimizer_of(listing, name) for name in optimizers]
    found = RankTensors(roots[0], {}, {}, {}, [], is_zero=True)
    for number, shapes in enumerate(shapes_of(roots[0])):
        teams: dict[tuple[int, ...], None] = {}
        for rank in states:
            entries = map(mapping, as_sequence(rank.get("ds_zero_partition_groups")))
            own = next((e.get("partition_ranks") for e in entries if e.get("sub_group") == number), None)
            teams[tuple(own) if isinstance(own, list | tuple) else tuple(range(len(states)))] = None
        at: dict[tuple[int, ...], int] = dict.fromkeys(teams, 0)
        for name, shape in shapes.items():
            numel, held = math.prod(shape), list[VectorPart]()
            found.shapes[name] = None if len(teams) > 1 else shape
            for team in teams:
                piece = -(-numel // len(team))
                first = _first_expert(roots[team[0]], name) * (numel // shape[0] if shape else 1)
                for place, member in enumerate(team):
                    start = min(numel, place * piece)
                    line = [vectors_of(states[member])[number]]
                    held += cut_line(line, at[team], at[team] + min(piece, numel - start), first + start)
                at[team] += piece
            found.held[name] = held
    add_module(found, roots, is_partitioned=True)
    return SecondLook(found.shapes, hold_all(found), hold_states(found))


def _first_expert(model: Mapping[str, object], name: str) -> int:
    """The first expert that a rank has in the layer of a stack."""
    layers = map(mapping, as_sequence(model.get("ds_autoep_layers")))
    firsts = (
        layer.get("global_expert_start") for layer in layers if name.startswith(f"{layer.get('expert_key_prefix')}.")
    )
    return next((first for first in firsts if isinstance(first, int)), 0)
