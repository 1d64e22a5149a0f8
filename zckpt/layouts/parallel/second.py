"""Finds the slices of a model that is split over ranks a second time, and where each belongs in the whole.

Each model-parallel rank's files hold slices (`zero.second`). Ranks count stages first, tensor ranks within a stage. How the
slices of a stage are joined, `universal_checkpoint_info` in the model files says: this is the method of DeepSpeed's own
`ds_to_universal.py`. In a pipeline, the layers' weights are in files of their own, under local names.
Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py `merge_tp_slices`, checkpoint/affine.py, runtime/pipe/module.py.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zckpt.containers import TensorRef
from zckpt.layouts.joining.patterns import Patterns
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import (
    HeldRun,
    SecondLook,
    Shape,
    Slice,
    StoredRows,
    as_number,
    as_sequence,
    cut_evenly,
    fields_of,
    hold_elements,
    hold_slice,
    tensors_in,
)
from zckpt.layouts.zero.second import FILE, RankTensors, tensors_of

_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")

Blocks = list[tuple[int, int, int]]
"""The runs of a slice, in its order: (first element in the slice, elements, first element in the whole)."""


def find_again(listing: Listing) -> SecondLook:
    """The model's tensors and the optimizer's states."""
    ranks = {mp: tensors_of(listing, mp) for mp in ranks_of(listing)}
    tp = tensor_ranks(listing, len(ranks))
    layers = layers_in(listing)
    for mp, found in ranks.items() if layers else ():
        add_layers(found, {layer: tensors for (layer, rank), tensors in layers.items() if rank == mp % tp})
    return join_ranks(listing, list(ranks.values()), tp)


def ranks_of(listing: Listing) -> list[int]:
    """The model-parallel ranks that have model files."""
    matches = (match for match in map(FILE.fullmatch, listing.files) if match and match["kind"] == "model")
    return sorted({int(match["mp"]) for match in matches})


def tensor_ranks(listing: Listing, total: int) -> int:
    """The number of tensor-parallel ranks of a stage: by options, files, or the names of layer files; otherwise all
    ranks.
    """
    given = listing.options
    first = next(match[0] for match in map(FILE.fullmatch, listing.files) if match and match["kind"] == "model")
    said = fields_of(listing.entry(first, "checkpoint_parallel_dimensions"))
    tp, pp = (n if type(n) is int and n > 0 else 1 for n in (said.get("tp_degree"), said.get("pp_degree")))
    if given.tp or given.pp:
        return given.tp or total // (given.pp or 1)
    layers = {match[2] for match in map(_LAYER.fullmatch, listing.files) if match}
    return tp if tp * pp > 1 else len(layers) or total


def join_ranks(listing: Listing, ranks: Sequence[RankTensors], tp: int) -> SecondLook:
    """The whole tensors of ranks' slices."""
    given = _given_rules(listing.options.tp_rules) if listing.options.tp_rules else None
    patterns = Patterns(listing.directory.path)
    names: dict[str, Shape | None] = {}
    runs: list[Iterator[HeldRun]] = []
    for stage in range(0, len(ranks), tp):
        own = ranks[stage : stage + tp]
        rules = fields_of(own[0].root.get("universal_checkpoint_info"))
        buffers = own[0].root.get("buffer_names")
        for name in dict.fromkeys(name for rank in own for name in rank.shapes):
            names[name] = None
            shapes = [rank.shapes.get(name) for rank in own]
            is_buffer = isinstance(buffers, list | tuple | set) and name in buffers
            known = [shape or () for shape in shapes]
            if given is not None and not (is_buffer and len(set(known)) == 1):
                cuts = _cuts_by(given, name, known)
            else:
                cuts = cuts_of(name, known, rules, patterns, is_buffer=is_buffer)
            runs += [_hold(name, rank, cut) for rank, cut in zip(own, cuts, strict=True)]
    beside = [pair for rank in ranks for pair in rank.beside]
    by_copy = not any(rank.is_zero for rank in ranks)
    return SecondLook(names, itertools.chain.from_iterable(runs), beside=beside, by_copy=by_copy)


def _hold(name: str, rank: RankTensors, cut: Slice | Blocks) -> Iterator[HeldRun]:
    for vector, states, first, count, start in rank.held.get(name, ()):
        for state, ref in (("", vector), *states.items()):
            yield from hold_cut(name, state, ref, first, count, start, cut)
    for ref in rank.whole.get(name, ()):
        yield from hold_cut(name, "", ref, 0, ref.numel, 0, cut)


def hold_cut(
    name: str, state: str, ref: TensorRef, first: int, count: int, start: int, cut: Slice | Blocks
) -> Iterator[HeldRun]:
    """Elements [first, first + count) of a vector, which are elements from `start` on of a slice."""
    if isinstance(cut, Slice):
        yield from hold_slice(name, state, ref, first, count, start, cut)
        return
    whole = hold_elements(name, state, ref, first, count, start).run
    for at, own, to in cut:
        low, high = max(start, at), min(start + count, at + own)
        if low < high:
            offset = whole.offset + (low - start) * ref.dtype.itemsize
            yield HeldRun(name, state, StoredRows(whole.path, offset, to + low - at, high - low))


def cuts_of(
    name: str, shapes: Sequence[Shape], rules: Mapping[str, object], patterns: Patterns, *, is_buffer: bool
) -> Sequence[Slice | Blocks]:
    """The place of each tensor-parallel rank's slice in the whole."""
    whole = [cut_evenly(shape or (1,), 0, 0, 1) for shape in shapes]
    if len(shapes) == 1 or (is_buffer and len(set(shapes)) == 1):
        return whole
    if (entry := _affine(name, rules, patterns)) is not None:
        ranks = {int(rank): fields_of(own) for rank, own in fields_of(entry["ranks"]).items()}
        return [_blocks(ranks[rank]) for rank in range(len(shapes))]
    if _says(rules, "tp_replicated_parameter_patterns", name, patterns) or _says(
        rules, "parameter_to_average_patterns", name, patterns
    ):
        return whole
    if _says(rules, "parameter_with_2_sub_params_cat_dim_0", name, patterns):
        halves = [-(-shape[0] // 2) for shape in shapes]
        return _stack_slices(shapes, 0, [halves, [shape[0] - half for shape, half in zip(shapes, halves, strict=True)]])
    for own in map(fields_of, as_sequence(rules.get("parameter_with_sub_params"))):
        for pattern in map(str, as_sequence(own["patterns"])):
            if patterns.match(pattern, name):
                return _sub_params(pattern, own, shapes, rules)
    dim = 1 if _says(rules, "parameter_with_row_parallelism_patterns", name, patterns) else 0
    return _stack_slices(shapes, dim, [[shape[dim] for shape in shapes]])


_RULE_FILES = Path(__file__).parents[1] / "joining" / "rule_files"


def _given_rules(given: str) -> list[Mapping[str, object]]:
    """The rules of a file, or of one that comes with zckpt, as the user chose them."""
    built_in = _RULE_FILES / f"{given}.json"
    path = built_in if built_in.is_file() else Path(given)
    return [fields_of(rule) for rule in as_sequence(fields_of(json.loads(path.read_bytes()))["rules"])]


def _cuts_by(given: Sequence[Mapping[str, object]], name: str, shapes: Sequence[Shape]) -> Sequence[Slice | Blocks]:
    """The cuts by the first rule that matches a name."""
    rule = next((rule for rule in given if re.match(str(rule["match"]), name)), {"join": "replicated"})
    if len(shapes) == 1 or rule["join"] in ("replicated", "mean", "sum"):
        return [cut_evenly(shape or (1,), 0, 0, 1) for shape in shapes]
    dim, said, number = as_number(rule["join"]), as_sequence(rule.get("widths")), rule.get("parts", 1)
    extent = sum(shape[dim] for shape in shapes)
    sizes = [as_number(own) for own in as_sequence(number)] or [extent // as_number(number)] * as_number(number)
    if said:
        return _stack_slices(shapes, dim, [[as_number(own) for own in as_sequence(row)] for row in said])
    if sizes == [extent]:
        return _stack_slices(shapes, dim, [[shape[dim] for shape in shapes]])
    return _stack_slices(shapes, dim, [[size // len(shapes)] * len(shapes) for size in sizes])


def _says(rules: Mapping[str, object], key: str, name: str, patterns: Patterns) -> bool:
    return any(patterns.match(pattern, name) for pattern in as_sequence(rules.get(key)))


def _stack_slices(shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]]) -> list[Slice]:
    """Slices of tensors that lie one after the other in a dimension; `widths`: of each tensor, what each rank has."""
    extent = sum(map(sum, widths))
    cuts: list[Slice] = []
    for rank, shape in enumerate(shapes):
        at, before, pieces = 0, 0, list[tuple[int, int, int]]()
        for own in widths:
            pieces.append((at, own[rank], before + sum(own[:rank])))
            at += own[rank]
            before += sum(own)
        if at != shape[dim]:
            raise ValueError(f"pieces of {at} indexes in a slice of {shape[dim]}")
        cuts.append(Slice(shape, dim, pieces, extent))
    return cuts


def _sub_params(
    pattern: str, own: Mapping[str, object], shapes: Sequence[Shape], rules: Mapping[str, object]
) -> list[Slice]:
    """Sub-parameters of unlike width, each cut for itself, in a view of the slices."""
    dim, view = as_number(own["partition_dim"]), as_sequence(own["shape"])
    sizes = [as_number(size) for size in as_sequence(view[dim])]
    if not sizes:  # before version 0.4: how many equal ones there are
        number = as_number(view[dim])
        sizes = [sum(shape[dim] for shape in shapes) // number] * number
    said = fields_of(rules.get("sub_param_shard_widths")).get(pattern)
    widths = [[as_number(width) for width in as_sequence(row)] for row in as_sequence(said)]
    widths = widths or [[size // len(shapes)] * len(shapes) for size in sizes]
    viewed: list[Shape] = []
    for rank, shape in enumerate(shapes):
        dims = [sum(map(as_number, as_sequence(extent))) if as_sequence(extent) else extent for extent in view]
        dims[dim] = sum(row[rank] for row in widths)
        known = math.prod(extent for extent in dims if isinstance(extent, int) and extent >= 0)
        rest = math.prod(shape) // known if known else 0
        viewed.append(tuple(extent if isinstance(extent, int) and extent >= 0 else rest for extent in dims))
    return _stack_slices(viewed, dim, widths)


def _affine(name: str, rules: Mapping[str, object], patterns: Patterns) -> Mapping[str, object] | None:
    params = fields_of(fields_of(rules.get("affine_map")).get("params"))
    return next((fields_of(entry) for pattern, entry in params.items() if patterns.match(pattern, name)), None)


def _blocks(rank: Mapping[str, object]) -> Blocks:
    """The runs of a rank's pieces: `source` is (first element, strides) in the whole, `dest` in the slice."""
    found: Blocks = []
    for piece in map(fields_of, as_sequence(rank["pieces"])):
        (to, to_steps), (at, steps) = as_sequence(piece["source"]), as_sequence(piece["dest"])
        dims = [
            *zip(map(as_number, as_sequence(piece["shape"])), as_sequence(to_steps), as_sequence(steps), strict=True)
        ]
        count = 1
        while dims and (dims[-1][0] == 1 or dims[-1][1:] == (count, count)):
            count *= dims.pop()[0]
        for indexes in itertools.product(*(range(extent) for extent, _, _ in dims)):
            moved = [
                (index * as_number(there), index * as_number(here))
                for index, (_, there, here) in zip(indexes, dims, strict=True)
            ]
            before = as_number(at) + sum(here for _, here in moved)
            found.append((before, count, as_number(to) + sum(there for there, _ in moved)))
    return sorted(found)


def layers_in(listing: Listing) -> dict[tuple[int, int], dict[str, TensorRef]]:
    """(layer, tensor rank) -> its tensors under local names."""
    matches = (match for match in map(_LAYER.fullmatch, listing.files) if match)
    return {(int(match[1]), int(match[2])): tensors_in(listing.open(match[0]).root) for match in matches}


def add_layers(found: RankTensors, layers: Mapping[int, Mapping[str, TensorRef]]) -> None:
    """Adds the layers of a rank's stage, under the names that its model file has for them."""
    buffers = found.root.get("buffer_names")
    listed = {*found.shapes, *(map(str, buffers) if isinstance(buffers, list | tuple | set) else ())}
    owned = {name.partition(".")[0] for name in listed}
    for layer, tensors in layers.items():
        for local, ref in tensors.items():
            own = f"{layer}.{local}"
            tied = [name for name in listed if name.startswith("tied_modules.") and name.endswith(f".{local}")]
            if not found.is_zero or str(layer) in owned:
                names = [own]
            else:
                names = [name for name in tied if found.shapes.get(name) in (None, ref.shape)]
            for name in names:
                found.shapes.setdefault(name, ref.shape)
                found.whole.setdefault(name, []).append(ref)
