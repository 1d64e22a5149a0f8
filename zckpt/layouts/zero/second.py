"""Finds the elements of each tensor in DeepSpeed's own files a second time, by the method of its `zero_to_fp32.py`.

In stages 1 and 2, the vectors of all ranks end to end are the group, in which parameters follow each other. In stage 3, each
rank's vectors end to end hold its piece of every parameter; frozen parameters are in pieces of their own. A vector with
a sub-group that was on NVMe is in the swap file that its attribute `ds_id` names. Runs without ZeRO name no masters:
`verify` compares
these with the weights, and states lie beside them. Names are those of DeepSpeed's lists; a class may give its state dict others.
Source: DeepSpeed 0.19.8, utils/zero_to_fp32.py, runtime/swap_tensor/optimizer_utils.py, runtime/{bf16,fp16}_optimizer.py.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from zckpt.base.dataclass import dataclass
from zckpt.containers import TensorRef
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import (
    BesideMaster,
    HeldRun,
    SecondLook,
    Shape,
    StoredRows,
    VectorPart,
    as_sequence,
    hold_elements,
    hold_whole,
    listed_in,
    mapping,
    names_in_lists,
    shape_of,
    shapes_of,
    shared_in,
    tensors_in,
    vectors_in,
)

FILE = re.compile(r"(?:bf16_|fp16_)?(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_(?P<kind>model|optim)_states\.pt")
_SWAPPED = re.compile(r"offloaded_tensors/rank(?P<rank>\d+)/(?P<label>.+)\.tensor\.swp")
_FLAT = ("single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups_flat", "fp32_groups")

Line = Sequence[tuple[TensorRef, Mapping[str, TensorRef]]]
"""Vectors, each with the states that belong to it."""


@dataclass(slots=True)
class RankTensors:
    """What one model-parallel rank's files say of its tensors.

    Attributes:
        root: of its first model file.
        shapes: name -> shape; None where the files do not say it.
        held: where elements are, that states lie beside.
        whole: tensors that a file names: weights as the model uses them, buffers, frozen parameters.
        beside: masters without names, and states beside them.
        is_zero: whether it has vectors of ZeRO.
        loose: weights in no list of DeepSpeed's, where the state dict lacks some that are.
    """

    root: Mapping[str, object]
    shapes: dict[str, Shape | None]
    held: dict[str, list[VectorPart]]
    whole: dict[str, list[TensorRef]]
    beside: list[BesideMaster]
    is_zero: bool
    loose: dict[str, TensorRef] = field(default_factory=dict[str, TensorRef])


def find_again(listing: Listing) -> SecondLook:
    """The model's tensors and the optimizer's states, of a run in which every rank has the whole model."""
    found = tensors_of(listing, 0)
    names: dict[str, Shape | None] = {**found.shapes}
    is_zero = found.is_zero
    return SecondLook(
        names,
        hold_all(found),
        hold_states(found),
        found.beside,
        by_copy=not is_zero,
        loose=found.loose if is_zero else {},
    )


def hold_all(found: RankTensors) -> Iterator[HeldRun]:
    """The runs of a rank's tensors, which are whole tensors."""
    begins: dict[int, tuple[str, int, int]] = {}
    for name, parts in found.held.items():
        for vector, _, first, count, start in parts:
            path, offset, size = begins.get(id(vector)) or begins.setdefault(id(vector), _begin(vector))
            yield HeldRun(name, "", StoredRows(path, offset + first * size, start, count))
    for name, refs in found.whole.items():
        for ref in refs:
            yield from hold_whole(name, "", ref)


def hold_states(found: RankTensors) -> Iterator[HeldRun]:
    """The runs of the states that lie beside a rank's tensors."""
    for name, parts in found.held.items():
        for _, states, first, count, start in parts:
            for key, ref in states.items():
                yield hold_elements(name, key, ref, first, count, start)


def _begin(vector: TensorRef) -> tuple[str, int, int]:
    """The file, the first byte, and the bytes of an element of a vector without gaps."""
    if not vector.is_contiguous:
        raise ValueError("a vector with gaps")
    return vector.store.path, vector.byte_offset, vector.dtype.itemsize


def files_of(listing: Listing, mp: int) -> tuple[list[str], list[str]]:
    """The model files of a model-parallel rank and its optimizer files, each by data-parallel ranks."""
    found: dict[str, list[tuple[int, str]]] = {"model": [], "optim": []}
    for match in map(FILE.fullmatch, listing.files):
        if match and int(match["mp"]) == mp:
            found[match["kind"]].append((int(match["dp"] or 0), match[0]))
    return [name for _, name in sorted(found["model"])], [name for _, name in sorted(found["optim"])]


def tensors_of(listing: Listing, mp: int) -> RankTensors:
    """What a model-parallel rank's files hold; its weights may be in further files."""
    models, optimizers = files_of(listing, mp)
    roots = [mapping(listing.open(name).root) for name in models]
    root = roots[0]
    is_stage_3 = any(match["dp"] for match in map(FILE.fullmatch, models) if match)
    shapes = shapes_of(root)
    found = RankTensors(root, {}, {}, {}, [], bool(optimizers))
    for group in shapes:
        found.shapes.update(group)
    states = [optimizer_of(listing, name) for name in optimizers]
    if states and shapes:
        config = mapping(mapping(root.get("ds_config")).get("zero_optimization"))
        numels = [{name: math.prod(shape) for name, shape in group.items()} for group in shapes]
        found.held = _stage_3(numels, states, config) if is_stage_3 else _stage_12(numels, states)
    add_module(
        found, roots[:1] if is_stage_3 else roots, is_partitioned=is_stage_3
    )  # the ranks' copies are compared with it
    add_frozen(found, roots, is_stage_3=is_stage_3)
    if not optimizers:
        optimizer = mapping(root.get("optimizer"))
        masters = vectors_of(optimizer)
        found.beside += pairs_of(masters or _weights(root, optimizer))
        found.held.update(
            _of_one_group(masters, _parameters(root)) or _of_shapes(optimizer, masters, _parameters(root))
        )
    return found


def add_module(found: RankTensors, roots: Iterable[Mapping[str, object]], *, is_partitioned: bool) -> None:
    """Adds what model files hold whole, under the names in DeepSpeed's lists, or else those of the state dict."""
    for root in roots:
        tensors = tensors_in(mapping(root.get("module")))
        listed, kept = listed_in(root), {*shared_in(root).values()}
        loose = {name: ref for name, ref in tensors.items() if listed and name not in listed and name not in kept}
        lacking = {name: shape for name, shape in listed.items() if name not in tensors}
        names = names_in_lists({name: ref.shape if ref.numel else None for name, ref in loose.items()}, lacking)
        unknown = {name: ref for name, ref in loose.items() if lacking and name not in names}
        empty = {name for name, ref in unknown.items() if is_partitioned and ref.shape == (0,)}
        found.loose.update((name, ref) for name, ref in unknown.items() if name not in empty)
        for own, ref in tensors.items():
            name = names.get(own, own)
            if own in empty and len(empty) <= len(lacking.keys() - {*names.values()}):
                continue  # of a parameter in the lists, whichever it is
            if is_partitioned and ref.shape == (0,):
                found.shapes.setdefault(name, None)
            elif found.shapes.get(name, ref.shape) == ref.shape:
                found.shapes[name] = ref.shape
                found.whole.setdefault(name, []).append(ref)


def add_frozen(found: RankTensors, roots: Sequence[Mapping[str, object]], *, is_stage_3: bool) -> None:
    """Adds frozen parameters: whole in the first file, or in pieces of all ranks' files. Tied names without a kept one
    are left out.
    """
    for name, shape in mapping(roots[0].get("frozen_param_shapes")).items():
        own = shape_of(shape)
        found.shapes[name] = own
        numel, at = math.prod(own), 0
        if not is_stage_3:
            ref = mapping(roots[0].get("frozen_param_fragments")).get(name)
            found.whole.setdefault(name, []).extend([ref] if isinstance(ref, TensorRef) and ref.shape == own else [])
            continue
        found.whole.pop(name, None)
        for root in roots:
            ref = mapping(root.get("frozen_param_fragments")).get(name)
            if not isinstance(ref, TensorRef):
                continue
            at = 0 if at >= numel else at
            count = min(ref.numel, numel - at)
            if count:
                found.held.setdefault(name, []).append(VectorPart(ref, {}, 0, count, at))
            at += ref.numel
    listed = {name for group in (*shapes_of(roots[0]), mapping(roots[0].get("frozen_param_shapes"))) for name in group}
    for dropped, kept in shared_in(roots[0]).items():
        held = found.whole.get(dropped, ())
        if kept not in found.shapes and any(ref.numel for ref in held):  # of the two, the file holds the second name
            found.shapes[kept] = found.shapes.get(dropped)
        elif dropped not in listed and kept not in found.shapes:  # zero_to_fp32 drops it too
            found.shapes.pop(dropped, None)
            found.whole.pop(dropped, None)


def pairs_of(line: Line) -> Iterator[BesideMaster]:
    """Pairs of each vector with each of its states."""
    return (BesideMaster(vector, name, ref) for vector, states in line for name, ref in states.items())


def _stage_12(
    groups: Sequence[Mapping[str, int]], ranks: Sequence[Mapping[str, object]]
) -> dict[str, list[VectorPart]]:
    found: dict[str, list[VectorPart]] = {}
    paddings = ranks[0].get("param_alignment_paddings")
    vectors = [vectors_of(rank) for rank in ranks]
    for number, numels in enumerate(groups):
        line = [own[number] for own in vectors]
        between = paddings[number] if isinstance(paddings, list | tuple) else itertools.repeat(0)
        at = 0
        for (name, numel), padding in zip(numels.items(), between):
            found[name] = list(cut_line(line, at, at + numel))
            at += numel + padding
    return found


def _stage_3(
    groups: Sequence[Mapping[str, int]], ranks: Sequence[Mapping[str, object]], config: Mapping[str, object]
) -> dict[str, list[VectorPart]]:
    numels = {name: numel for group in groups for name, numel in group.items()}
    world = len(ranks)
    lines = [_without_ends(vectors_of(rank), groups, world) for rank in ranks]
    held = sum(vector.numel for vector, _ in lines[0])
    several = config.get("mics_shard_size")
    if isinstance(several, int) and 0 < several < world and held != sum(-(-n // world) for n in numels.values()):
        world = several
    found: dict[str, list[VectorPart]] = {}
    at = 0
    for name, numel in numels.items():
        piece = -(-numel // world)
        found[name] = []
        for rank in range(world):
            start = min(numel, rank * piece)
            found[name] += cut_line(lines[rank], at, at + min(piece, numel - start), start)
        at += piece
    return found


def cut_line(line: Line, begin: int, end: int, start: int = 0) -> Iterator[VectorPart]:
    """Elements [begin, end) of vectors laid end to end, as elements from `start` on of a tensor."""
    before = 0
    for vector, state in line:
        low, high = max(begin, before), min(end, before + vector.numel)
        if low < high:
            yield VectorPart(vector, state, low - before, high - low, start + low - begin)
        before += vector.numel
        if before >= end:
            return


def vectors_of(rank: Mapping[str, object]) -> Line:
    """A rank's masters, each with its states."""
    vectors = next((rank[key] for key in _FLAT if key in rank), None)
    base = rank.get("base_optimizer_state", rank.get("optimizer_state_dict"))
    states = as_sequence(base)
    if isinstance(base, Mapping):
        held = mapping(base.get("state"))
        numbers = [n for g in as_sequence(base.get("param_groups")) for n in as_sequence(mapping(g).get("params"))]
        states = [held.get(n) for n in numbers] or list(held.values())  # type: ignore[call-overload]
    refs = [v for held in as_sequence(vectors) for v in as_sequence(held) or [held] if isinstance(v, TensorRef)]
    return [(ref, vectors_in(state)) for ref, state in itertools.zip_longest(refs, states[: len(refs)])]


def _weights(root: Mapping[str, object], optimizer: Mapping[str, object]) -> Line:
    """The weights of an fp32 run without ZeRO, each with its states, if all are in one group."""
    states, groups, seen = mapping(optimizer.get("state")), optimizer.get("param_groups"), _parameters(root)
    if not isinstance(groups, list) or len(groups) != 1 or len(states) != len(seen):
        return []
    return [(ref, vectors_in(state)) for ref, state in zip(seen.values(), states.values(), strict=True)]


def _parameters(root: Mapping[str, object]) -> dict[str, TensorRef]:
    """The weights of a model file in the model's order, tied ones once."""
    buffers, seen = root.get("buffer_names"), dict[object, tuple[str, TensorRef]]()
    for name, ref in mapping(root.get("module")).items():
        is_buffer = isinstance(buffers, list | tuple | set) and name in buffers
        if isinstance(ref, TensorRef) and ref.dtype.kind == "float" and ref.numel and not is_buffer:
            seen.setdefault(ref.place, (name, ref))
    return dict(seen.values())


def _of_one_group(masters: Line, weights: Mapping[str, TensorRef]) -> dict[str, list[VectorPart]]:
    """The masters of a run without ZeRO by names, if one group has all weights, in the model's order."""
    found: dict[str, list[VectorPart]] = {}
    at = 0
    if sum(vector.numel for vector, _ in masters) != sum(ref.numel for ref in weights.values()) or (
        len(masters) > 1 and [vector.numel for vector, _ in masters] != [ref.numel for ref in weights.values()]
    ):
        return found
    for name, ref in weights.items():
        found[name] = list(cut_line(masters, at, at + ref.numel))
        at += ref.numel
    return found


def _of_shapes(
    optimizer: Mapping[str, object], masters: Line, weights: Mapping[str, TensorRef]
) -> dict[str, list[VectorPart]]:
    """The masters by names, if each weight has a master of its own and one group has all of a shape, in the model's
    order.
    """
    held = next((optimizer[key] for key in _FLAT if key in optimizer), None)
    numbers = [number for number, group in enumerate(as_sequence(held)) for _ in as_sequence(group)]
    found: dict[str, list[VectorPart]] = {}
    for shape in {ref.shape for ref in weights.values()} if len(numbers) == len(masters) else ():
        names = [name for name, ref in weights.items() if ref.shape == shape]
        own = [at for at, (vector, _) in enumerate(masters) if vector.shape == shape]
        if len(own) == len(names) and len({numbers[at] for at in own}) == 1:
            found.update((name, list(cut_line([masters[at]], 0, masters[at][0].numel))) for name, at in zip(names, own))
    return found


def optimizer_of(listing: Listing, name: str) -> Mapping[str, object]:
    """The optimizer's state in a file; tensors without elements are replaced by those of the swap files that they name."""
    root = mapping(listing.open(name).root)
    held = mapping(root.get("optimizer_state_dict", root.get("optimizer")))
    match = FILE.fullmatch(name)
    swapped = {file: at for file in listing.files if (at := _SWAPPED.fullmatch(file))}
    if not swapped or match is None or match["dp"] is None:
        return held
    parts = {other["mp"] for other in map(FILE.fullmatch, listing.files) if other}
    rank = int(match["dp"]) * len(parts) + int(match["mp"])
    stores = {at["label"]: listing.files[file].store() for file, at in swapped.items() if int(at["rank"]) == rank}

    def stored(value: object) -> object:
        store = stores.get(_label(value))
        if store is None or not isinstance(value, TensorRef):
            return value
        return TensorRef(
            store, 0, value.dtype, (store.size // value.dtype.itemsize,), (1,), store.path, 0, store.size, 0
        )

    flat, base = held.get("fp32_flat_groups"), mapping(held.get("optimizer_state_dict"))
    vectors = list(as_sequence(flat))
    states: dict[object, object] = dict(mapping(base.get("state")).items())
    for number, vector in enumerate(vectors):
        own = mapping(states.get(number))
        is_empty = isinstance(vector, TensorRef) and vector.shape == (0,)
        if is_empty or any("-" in _label(value) for value in own.values()) or _is_large(vector, mapping(root)):
            vectors[number] = stored(vector)
            states[number] = {key: stored(value) if "-" in _label(value) else value for key, value in own.items()}
    return {**held, "fp32_flat_groups": vectors, "optimizer_state_dict": {**base, "state": states}}


def _label(value: object) -> str:
    """The name that DeepSpeed gives a tensor that it swaps: `0_65`, or `exp_avg-0_65`."""
    return str((value.attributes or {}).get("ds_id", "")) if isinstance(value, TensorRef) else ""


def _is_large(vector: object, root: Mapping[str, object]) -> bool:
    """Whether a run with its optimizer on NVMe, by the config in its file, swapped a vector, even if the file has
    elements.
    """
    config = mapping(root.get("ds_config"))
    offload = mapping(mapping(config.get("zero_optimization")).get("offload_optimizer"))
    block = mapping(config.get("aio")).get("block_size")
    least = max(1 << 20, block if isinstance(block, int) else 0)
    return offload.get("device") == "nvme" and isinstance(vector, TensorRef) and vector.nbytes >= least


def _without_ends(line: Line, groups: Sequence[Mapping[str, int]], world: int) -> Line:
    """A rank's vectors, without what follows their group's pieces in swap files."""
    if len(line) != len(groups):
        return line
    pieces = [sum(-(-numel // world) for numel in group.values()) for group in groups]
    return [
        (replace(ref, shape=(min(own, ref.numel),)) if _SWAPPED.search(ref.store.path) else ref, state)
        for (ref, state), own in zip(line, pieces, strict=True)
    ]
