"""Finds the elements of each trained parameter in a ZeRO save a second time, without the code that reads saves.

For `verify`; `reread_named` does the same for files that name their tensors. This module uses no layout and no partition
arithmetic, only the keys of the files and the method of DeepSpeed's own `zero_to_fp32.py`. In stages 1 and 2, the vectors of
all ranks end to end are the group, in which parameters follow each other. In stage 3, each rank's vectors end to end hold its
piece of every parameter. The comparison finds a reader that confuses ranks, or neighbours of one shape.

Experts have other names on every rank. Those of stage 3 are stacks: each rank's model file says which experts it has, and each
sub-group which ranks share it. Those of stages 1 and 2 have half-precision weights in files of their own, which prove them.
Source: DeepSpeed 0.19.8, utils/zero_to_fp32.py.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zckpt.checks.reread_named import misplaced_named_states, misplaced_tensors
from zckpt.checks.reread_swapped import FILE, Line, mapping, optimizer_of, without_ends
from zckpt.containers import TensorRef
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.fragments import ComputedStore, Fragment
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.listing import Listing

_EXPERTS = re.compile(r"expp_rank_(?P<mp>\d+)_mp_rank_(?P<dp>\d+)_(?P<kind>optim)_states\.pt")
_FLAT = ("single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups_flat", "fp32_groups")


class Part(NamedTuple):
    """Elements of a vector of one rank that are a parameter's next ones."""

    vector: TensorRef
    state: Mapping[str, TensorRef]
    first: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed


Parts = dict[str, list[Part]]
"""Parameter -> its elements on one model-parallel rank, in order."""


def found_again(listing: Listing) -> dict[int, Parts]:
    """Model-parallel rank -> its parameters; nothing for a save that is not ZeRO's, or has experts that are no stacks."""
    models: dict[int, str] = {}
    ranks: dict[int, dict[int, str]] = {}
    is_stage_3 = False
    for name in listing.files:
        if match := FILE.fullmatch(name):
            if match["kind"] == "optim":
                ranks.setdefault(int(match["mp"]), {})[int(match["dp"] or 0)] = name
            else:
                models.setdefault(int(match["mp"]), name)
                is_stage_3 = is_stage_3 or match["dp"] is not None
    found: dict[int, Parts] = {}
    for mp, names in sorted(ranks.items()):
        root = mapping(listing.open(models[mp]).root) if mp in models else {}
        shapes = root.get("param_shapes")
        if not shapes or (root.get("num_experts") and not (is_stage_3 and len(ranks) == 1)):
            return {}
        groups = shapes if isinstance(shapes, list | tuple) else [shapes]
        numels = [{str(n): _numel(s) for n, s in mapping(group).items()} for group in groups]
        states = [optimizer_of(listing, names[d]) for d in sorted(names)]
        if root.get("num_experts"):
            roots = [mapping(listing.open(name).root) for name in _models_of(listing)]
            return {mp: _stacks([dict(mapping(group)) for group in groups], states, roots)}
        config = mapping(mapping(root.get("ds_config")).get("zero_optimization"))
        found[mp] = _stage_3(numels, states, config) if is_stage_3 else _stage_12(numels, states)
    return found


def _stage_12(groups: Sequence[Mapping[str, int]], ranks: Sequence[Mapping[str, object]]) -> Parts:
    found: Parts = {}
    paddings = ranks[0].get("param_alignment_paddings")
    vectors = [_vectors(rank) for rank in ranks]
    for number, numels in enumerate(groups):
        line = [own[number] for own in vectors]
        between = paddings[number] if isinstance(paddings, list | tuple) else itertools.repeat(0)
        at = 0
        for (name, numel), padding in zip(numels.items(), between):
            found[name] = list(_cut(line, at, at + numel))
            at += numel + padding
    return found


def _stage_3(
    groups: Sequence[Mapping[str, int]], ranks: Sequence[Mapping[str, object]], config: Mapping[str, object]
) -> Parts:
    numels = {name: numel for group in groups for name, numel in group.items()}
    world = len(ranks)
    lines = [without_ends(_vectors(rank), groups, world) for rank in ranks]
    held = sum(vector.numel for vector, _ in lines[0])
    several = config.get("mics_shard_size")
    if isinstance(several, int) and 0 < several < world and held != sum(-(-n // world) for n in numels.values()):
        world = several
    found: Parts = {}
    at = 0
    for name, numel in numels.items():
        piece = -(-numel // world)
        real = (min(piece, max(0, numel - rank * piece)) for rank in range(world))
        found[name] = [part for rank, own in enumerate(real) for part in _cut(lines[rank], at, at + own)]
        at += piece
    return found


def _models_of(listing: Listing) -> list[str]:
    """Each data-parallel rank's model file."""
    matches = [
        match for match in map(FILE.fullmatch, listing.files) if match and match["kind"] == "model" and match["dp"]
    ]
    return [match[0] for match in sorted(matches, key=lambda match: int(match["dp"]))]


def _stacks(
    groups: Sequence[Mapping[str, object]],
    ranks: Sequence[Mapping[str, object]],
    models: Sequence[Mapping[str, object]],
) -> Parts:
    """Of a save with experts of stage 3: each team of ranks shares a sub-group; of stacks, it has some of the experts."""
    found: Parts = {}
    for number, shapes in enumerate(groups):
        teams: dict[tuple[int, ...], None] = {}
        for rank in ranks:
            listed = rank.get("ds_zero_partition_groups")
            entries = [mapping(e) for e in listed] if isinstance(listed, list | tuple) else []
            own = next((e.get("partition_ranks") for e in entries if e.get("sub_group") == number), None)
            teams[tuple(own) if isinstance(own, list | tuple) else tuple(range(len(ranks)))] = None
        at: dict[tuple[int, ...], int] = dict.fromkeys(teams, 0)
        for name, shape in shapes.items():
            numel = _numel(shape)
            found[name] = []
            for team in sorted(teams, key=lambda team: _first_expert(models[team[0]], name)):
                piece = -(-numel // len(team))
                for place, member in enumerate(team):
                    real = min(piece, max(0, numel - place * piece))
                    found[name] += _cut([_vectors(ranks[member])[number]], at[team], at[team] + real)
                at[team] += piece
    return found


def _first_expert(model: Mapping[str, object], name: str) -> int:
    """The first expert that a rank has of the layer that a stack is of."""
    listed = model.get("ds_autoep_layers")
    layers = [mapping(layer) for layer in listed] if isinstance(listed, list | tuple) else []
    firsts = (
        layer.get("global_expert_start") for layer in layers if name.startswith(f"{layer.get('expert_key_prefix')}.")
    )
    return next((first for first in firsts if isinstance(first, int)), 0)


def _cut(line: Line, start: int, stop: int) -> Iterator[Part]:
    """Elements [start, stop) of vectors laid end to end."""
    before = 0
    for vector, state in line:
        low, high = max(start, before), min(stop, before + vector.numel)
        if low < high:
            yield Part(vector, state, low - before, high - low)
        before += vector.numel
        if before >= stop:
            return


def _vectors(rank: Mapping[str, object]) -> Line:
    """A rank's masters, each with its states."""
    vectors = next((rank[key] for key in _FLAT if key in rank), None)
    base = rank.get("base_optimizer_state", rank.get("optimizer_state_dict"))
    states: list[object] = list(base) if isinstance(base, list | tuple) else []
    if isinstance(base, Mapping):
        held, groups = mapping(base.get("state")), base.get("param_groups")
        numbers = [n for g in (groups if isinstance(groups, list) else ()) for n in mapping(g).get("params") or ()]  # type: ignore[attr-defined]
        states = [held.get(n) for n in numbers] or list(held.values())
    listed = list(vectors) if isinstance(vectors, list | tuple) else []
    refs = [
        v for held in listed for v in (held if isinstance(held, list | tuple) else [held]) if isinstance(v, TensorRef)
    ]
    return [
        (ref, {str(n): v for n, v in mapping(state).items() if isinstance(v, TensorRef) and v.shape})
        for ref, state in itertools.zip_longest(refs, states[: len(refs)])
    ]


def _numel(shape: object) -> int:
    return math.prod(dim for dim in shape if isinstance(dim, int)) if isinstance(shape, Iterable) else 0


Run = tuple[str, int, int]
"""Path, first byte, one past the last."""


def misplaced(listing: Listing, catalog: Catalog) -> tuple[int, list[str]]:
    """How many tensors were looked for, and those that the catalog reads elsewhere; it has the names that the files have."""
    entries = {name: {"": entry} for name, entry in catalog.tensors.items() if entry.role == "parameter"}
    entries |= {dropped: entries[kept] for dropped, kept in catalog.aliases.items() if kept in entries}
    count, bad = _misplaced(found_again(listing), entries)
    named, elsewhere = misplaced_tensors(listing, catalog)
    return count + named, [*bad, *elsewhere]


def misplaced_states(listing: Listing, training: Training, masters: Mapping[str, TensorEntry]) -> tuple[int, list[str]]:
    """The same of the optimizer's states; `masters` are the catalog's tensors, beside which each state has to be."""
    count, bad = _misplaced(found_again(listing), training.states)
    named, elsewhere = misplaced_named_states(listing, training)
    beside, odd = _beside(listing, training, masters)
    return count + named + beside, list(dict.fromkeys((*bad, *elsewhere, *odd)))


def _beside(listing: Listing, training: Training, masters: Mapping[str, TensorEntry]) -> tuple[int, list[str]]:
    """States that are not beside their masters, whose place other numbers prove, or beside a rank's copy of these.

    The states of a vector of masters are vectors beside it, cut alike. Where an fp32 run without ZeRO keeps no masters, they are
    beside the weights, if all parameters are of one group: it has the model's order.
    """
    lines: _Lines = {}
    for name in listing.files:
        match = FILE.fullmatch(name) or _EXPERTS.fullmatch(name)
        root = mapping(listing.open(name).root) if match and (match["kind"] == "optim" or not match["dp"]) else {}
        optimizer = optimizer_of(listing, name) if root else {}
        for ref, beside in _vectors(optimizer) or _weights(root, optimizer):
            lines.setdefault(ref.store.path, []).append((ref.byte_offset, ref, beside))
    for line in lines.values():
        line.sort(key=lambda vector: vector[0])
    count, bad = 0, list[str]()
    for name, states in training.states.items():
        if (entry := masters.get(name)) is None:
            continue
        copies = (copy.fragments for copy in entry.replicas if copy.rank and copy.dtype == entry.dtype)
        options = [parts for held in (entry.fragments, *copies) if (parts := list(_parts_in(lines, held)))]
        for state, own in states.items():
            wanted = [[run for part in parts if (run := _run(part.state.get(state), part))] for parts in options]
            count += bool(wanted)
            if wanted and not any(_is_at(own, runs, {path for path, *_ in runs}, alone=True) for runs in wanted):
                bad.append(f"{state} of {name!r} is not read beside its master")
    return count, bad


_Lines = dict[str, list[tuple[int, TensorRef, Mapping[str, TensorRef]]]]
"""Path -> (first byte, vector, its states), in order."""


def _parts_in(lines: _Lines, fragments: Sequence[Fragment]) -> Iterator[Part]:
    """What fragments are of vectors that have states."""
    for fragment in fragments:
        line = lines.get(str(fragment.store), [])
        at = bisect_right(line, fragment.byte_offset, key=lambda vector: vector[0]) - 1
        if at >= 0 and fragment.numel and fragment.byte_offset < line[at][1].byte_stop:
            start, ref, state = line[at]
            yield Part(ref, state, (fragment.byte_offset - start) // ref.dtype.itemsize, fragment.numel)


def _weights(root: Mapping[str, object], optimizer: Mapping[str, object]) -> Line:
    """The weights of an fp32 run without ZeRO, each with its states, where all are of one group."""
    states, groups = mapping(optimizer.get("state")), optimizer.get("param_groups")
    buffers, seen = root.get("buffer_names"), dict[object, TensorRef]()
    for name, ref in mapping(root.get("module")).items():
        is_buffer = isinstance(buffers, list | tuple | set) and name in buffers
        if isinstance(ref, TensorRef) and ref.dtype.kind == "float" and ref.numel and not is_buffer:
            seen.setdefault(ref.place, ref)
    if not isinstance(groups, list) or len(groups) != 1 or len(states) != len(seen):
        return []
    return [
        (ref, {str(n): v for n, v in mapping(state).items() if isinstance(v, TensorRef) and v.shape})
        for ref, state in zip(seen.values(), states.values(), strict=True)
    ]


def _misplaced(found: Mapping[int, Parts], entries: Mapping[str, Mapping[str, TensorEntry]]) -> tuple[int, list[str]]:
    count, bad = 0, list[str]()
    first: dict[tuple[str, str], int] = {}
    for mp, parts in found.items():
        for name, own in parts.items():
            if name not in entries:
                bad.append(f"{name!r} is in the optimizer files, and is not read from them")
            for state, entry in entries.get(name, {}).items():
                what = f"{state} of {name!r}" if state else repr(name)
                wanted = [run for part in own if (run := _run(part.state.get(state) if state else part.vector, part))]
                files = {path for path, *_ in wanted}
                start = min((f.start for f in entry.fragments if str(f.store) in files and f.numel), default=None)
                if state and start is None and (name, state) in first:
                    continue  # a tied parameter: the states of a further stage are not read
                count += 1
                if not _is_at(entry, wanted, files, alone=len(found) == 1):
                    bad.append(f"{what} is not read where the files of mp_rank_{mp:02d} have it")
                if start is not None:
                    if start < first.setdefault((name, state), start):
                        bad.append(f"{what}: the slice of mp_rank_{mp:02d} is put before that of an earlier rank")
                    first[name, state] = start
    return count, bad


def _run(vector: TensorRef | None, part: Part) -> Run | None:
    if vector is None:
        return None
    start = vector.byte_offset + part.first * vector.dtype.itemsize
    return vector.store.path, start, start + part.count * vector.dtype.itemsize


def _is_at(entry: TensorEntry, wanted: Sequence[Run], files: set[str], *, alone: bool) -> bool:
    """Whether the entry, or a copy of it, is read there: in this order, where its rows do not interleave; all of it, if alone."""
    expected, size = _merged(wanted), entry.dtype.itemsize
    for fragments in (*_sources(entry), *(copy.fragments for copy in entry.replicas if copy.dtype == entry.dtype)):
        held = [f for f in fragments if f.numel and (alone or str(f.store) in files)]
        runs = [(str(f.store), f.byte_offset, f.nbytes_end(size)) for f in held]
        if any(f.rows > 1 for f in held):
            if _merged(sorted(runs)) == _merged(sorted(wanted)):
                return True
            continue
        runs = _merged(runs)
        if runs == expected or (not alone and runs and _is_start(runs, expected)):
            return True
    return not expected


def _is_start(runs: Sequence[Run], expected: Sequence[Run]) -> bool:
    """Whether `expected` begins with `runs`: a vocabulary's last rows are cut off."""
    *before, (path, start, stop) = runs
    last = expected[len(before)] if len(before) < len(expected) else ("", 0, 0)
    return list(expected[: len(before)]) == before and last[:2] == (path, start) and stop <= last[2]


def _sources(entry: TensorEntry) -> Iterator[Sequence[Fragment]]:
    store = entry.fragments[0].store if entry.fragments else None
    if isinstance(store, ComputedStore):
        yield from (fragments for fragments, _ in store.sources)
    else:
        yield entry.fragments


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Runs in the same order, those that follow each other as one."""
    merged: list[Run] = []
    for path, start, stop in runs:
        if merged and merged[-1][0] == path and merged[-1][2] == start:
            merged[-1] = path, merged[-1][1], stop
        else:
            merged.append((path, start, stop))
    return merged
