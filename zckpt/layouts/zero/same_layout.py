"""A save with the files that a run would write now: read without a catalog, and without the other ranks' pickles.

For the trainer, which mostly loads what the same run has saved. `read` and `read_training` read every save, and describe all of
it; here a rank finds the elements that it holds itself, if the files are those of `write` in everything but numbers.
[Note: a save of the same layout] The names of the files, the parameters with their order and shapes, the cut into flat groups,
their lengths and every padding have to be what `write` computes for this run. Anything else is left to `read`, damage too: there
is the word on what is wrong. Of other ranks' optimizer files, which hold some of this rank's elements, nothing is read but the
zip directory and the pickle's checksum: their records have the same keys, and the rank that reads such a file says by `text` that
it is so. Ranks that say different texts do not have the files of one save, or not these.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from zckpt.base.dataclass import dataclass
from zckpt.containers import TensorRef, list_at, mapping_at
from zckpt.containers.torch_zip import find_storages
from zckpt.core.catalog import TensorEntry, TensorPart
from zckpt.core.fragments import Fragment
from zckpt.core.stores import FileStore
from zckpt.layouts.run.training import ParameterGroup, Training
from zckpt.layouts.run.values import SCALER, number_in
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import OF_WEIGHTS, Shape, root_of, whole
from zckpt.layouts.zero.optimizer_states import per_element
from zckpt.layouts.zero.partition import flat_pieces, in_order, partition_numel, partition_of, round_robin, sub_groups
from zckpt.layouts.zero.write import ZeroTarget, flat_group

Held = TensorEntry | TensorPart
"""A tensor, or the elements of it that a rank holds."""


@dataclass(frozen=True, slots=True)
class SameLayout:
    """What a run would write.

    Attributes:
        target: the save.
        rank: that reads it.
        groups: by parameter group, its parameters' shapes.
        frozen: shapes of all other parameters.
        buffers: shapes of the buffers, in the model's order.
        aliases: further names of tied parameters.
        held: parameter -> elements that this rank holds.
        spans: whether any rank holds elements of another one's optimizer file.
        full: whether every rank wants all elements of the parameters, too; not at stage 3.
    """

    target: ZeroTarget
    rank: int
    groups: Sequence[Mapping[str, Shape]]
    frozen: Mapping[str, Shape]
    buffers: Mapping[str, Shape]
    aliases: Mapping[str, str]
    held: Mapping[str, range]
    spans: bool
    full: bool


class SameSave(NamedTuple):
    """What a rank needs of such a save: what is beside the elements; weights and buffers, parameter -> state, and whole
    parameters, with the places of their elements; the text that all ranks must say alike; and the name of its model file.
    """

    training: Training
    weights: dict[str, Held]
    states: dict[str, dict[str, Held]]
    full: dict[str, Held]
    text: str
    file: str


class _Flat(NamedTuple):
    """A flat group: its parameters, each with the element at which it begins, the elements of it, or of the group, that a rank
    has, and how many are before these on each rank; the masters' lengths by rank, and the states'.
    """

    places: list[tuple[str, int, int, int]]
    lean: list[int]
    length: int


Files = Mapping[int, tuple[FileStore, Mapping[str, tuple[int, int]], str]]


def read(listing: Listing, layout: SameLayout) -> SameSave | None:
    """What a rank needs of a save that has the files which `write.lay_out` would make of the same run, at stages 1 to 3; None if
    anything is otherwise.

    Raises:
        ZckptError, LookupError, TypeError, ValueError, AttributeError: something is not as `write` writes it.
    """
    target, rank, groups = layout.target, layout.rank, layout.groups
    is_3, ranks = target.stage == 3, range(target.world_size)
    optims, models = ([os.path.basename(target.file_of(one, kind)) for one in ranks] for kind in ("optim", "model"))
    models = models if is_3 else ["mp_rank_00_model_states.pt"]
    if listing.files.keys() != {*optims, *models}:
        return None
    own = models[rank if is_3 else 0]
    model, beside = root_of(listing, own), root_of(listing, optims[rank])
    if listing.find_misnamed(of_parts=True):
        return None
    root = mapping_at(beside, "optimizer_state_dict")
    flats, numbers, paddings = _flats(groups, target)
    inner = root["optimizer_state_dict" if is_3 else "base_optimizer_state"]
    if not _is_as_written(layout, flats, numbers, paddings, model, root, inner):
        return None
    vectors = root["fp32_flat_groups" if is_3 else "single_partition_of_fp32_groups"]
    kinds = [{"": vectors[number], **per_element(inner["state"][number])} for number in range(len(flats))]
    keys = [ref.storage_key for refs in kinds for ref in refs.values()]
    files = {one: find_storages(listing.files[optims[one]], keys) for one in (ranks if layout.spans else [rank])}
    if not all(_are_in_place(flat, refs, rank, files) for flat, refs in zip(flats, kinds, strict=True)):
        return None
    weights: dict[str, Held] = dict(_whole_tensors(layout, model))
    full: dict[str, Held] = {name: weights[name] for name in layout.frozen} if layout.full else {}
    states: dict[str, dict[str, Held]] = {name: {} for group in groups for name in group}
    shapes = {name: shape for group in groups for name, shape in group.items()}
    for flat, refs in zip(flats, kinds, strict=True):
        for name, part in _parts(flat, refs[""], files, shapes, layout.held):
            weights[name] = part
        for kind, ref in list(refs.items())[1:]:
            for name, part in _parts(flat, ref, files, shapes, layout.held):
                states[name][kind] = part
        if layout.full:
            full |= _parts(
                flat, refs[""], files, shapes, {name: range(math.prod(shapes[name])) for name, *_ in flat.places}
            )
    made = list(_groups(groups, numbers, kinds, inner))
    common: list[object] = [[*model], [model.get(key) for key in _COMMON], made, layout.full]
    common += [keys, *(text for *_, text in files.values())] if layout.spans else []
    common += [] if is_3 else [find_storages(listing.files[own], ())[2]]
    rest = {key: value for key, value in model.items() if key not in OF_WEIGHTS}
    scaler = {key: root[key] for key in SCALER if key in root}
    training = Training(tuple(made), {}, scaler, rest, target.precision, target.form, beside=beside)
    text = hashlib.blake2b(repr(common).encode(), digest_size=16).hexdigest()
    return SameSave(training, weights, states, full, text, own)


_COMMON = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler", "zckpt")
_WRITTEN = frozenset((
    *("zero_stage", "partition_count", "param_alignment_paddings", "group_paddings", "ds_version", "base_optimizer_state"),
    *("optimizer_state_dict", "single_partition_of_fp32_groups", "fp32_flat_groups", *SCALER),
))  # fmt: skip


def _flats(
    groups: Sequence[Mapping[str, Shape]], target: ZeroTarget
) -> tuple[list[_Flat], list[list[int]], list[list[int]]]:
    """The flat groups, the numbers of those of each parameter group, and by parameter group the padding behind parameters."""
    flats: list[_Flat] = []
    numbers: list[list[int]] = []
    paddings: list[list[int]] = []
    count = target.world_size
    for group in groups:
        names, first = list(group), len(flats)
        if target.stage == 3:
            numels = [partition_numel(math.prod(shape), count) for shape in group.values()]
            for cut in sub_groups(numels, target.sub_group_size):
                ends = list(accumulate((numels[one] for one in cut), initial=0))
                places = [(names[one], 0, numels[one], at) for one, at in zip(cut, ends)]
                flats.append(_Flat(places, [ends[-1]] * count, ends[-1]))
        else:
            names = in_order(round_robin(len(names), count), names) if target.round_robin else names
            between, offsets, total, size = flat_group([math.prod(group[name]) for name in names], target)
            lean = [size if target.form == "bf16" else max(0, min(size, total - rank * size)) for rank in range(count)]
            flats.append(_Flat([(name, at, size, 0) for name, at in zip(names, offsets, strict=True)], lean, size))
            paddings.append(between)
        numbers.append([*range(first, len(flats))])
    return flats, numbers, paddings


def _is_as_written(
    layout: SameLayout,
    flats: Sequence[_Flat],
    numbers: Sequence[Sequence[int]],
    paddings: Sequence[Sequence[int]],
    model: Mapping[str, Any],
    root: Mapping[str, Any],
    inner: Mapping[str, Any],
) -> bool:
    """Whether all that follows from the layout is in the files as `write` puts it there."""
    target, is_3 = layout.target, layout.target.stage == 3
    shapes = {name: shape for group in layout.groups for name, shape in group.items()}
    module = model["module"]
    expected = {
        "param_shapes": [[(name, shapes[name]) for name, *_ in flat.places] for flat in flats],
        "buffer_names": [*layout.buffers],
        "shared_params": {} if is_3 and layout.rank else layout.aliases,
        "frozen_param_shapes": None if target.stage == 1 else layout.frozen,
        "dp_world_size": target.world_size,
        "module": {*shapes, *layout.frozen, *layout.buffers, *layout.aliases},
        "zero_stage": target.stage if target.form == "zero" else None,
        "partition_count": target.world_size if is_3 else [target.world_size] * len(numbers),
        "param_alignment_paddings": None if is_3 or target.form == "bf16" else paddings,
        "params": numbers,
        "precision": target.precision,
    }
    found = {
        **{key: model.get(key) for key in ("buffer_names", "shared_params", "frozen_param_shapes", "dp_world_size")},
        **{key: root.get(key) for key in ("zero_stage", "partition_count", "param_alignment_paddings")},
        "param_shapes": [[*one.items()] for one in list_at(model, "param_shapes")],
        "module": {*module},
        "params": [group["params"] for group in inner["param_groups"]],
        "precision": module[next(iter(shapes))].dtype,
    }
    return found == expected and root.keys() <= _WRITTEN


def _are_in_place(flat: _Flat, refs: Mapping[str, TensorRef], rank: int, files: Files) -> bool:
    """Whether the vectors of a flat group are as long as they must be, in every file, and alone in their records."""
    for kind, ref in refs.items():
        lengths = [flat.length] * len(flat.lean) if kind else flat.lean
        if ref.shape != (lengths[rank],) or ref.stride != (1,) or ref.storage_offset:
            return False
        if any(
            places[ref.storage_key][1] != lengths[one] * ref.dtype.itemsize for one, (_, places, _) in files.items()
        ):
            return False
        if ref.numel and files[rank][1][ref.storage_key][0] != ref.byte_offset:
            return False
    return len({ref.storage_key for ref in refs.values()}) == len(refs)


def _parts(
    flat: _Flat, ref: TensorRef, files: Files, shapes: Mapping[str, Shape], held: Mapping[str, range]
) -> Iterator[tuple[str, TensorPart]]:
    """The places of elements of a flat group's parameters, in the masters or in a state."""
    itemsize, key = ref.dtype.itemsize, ref.storage_key
    for name, at, size, shift in flat.places:
        first = held[name].start
        fragments: list[Fragment] = []
        for index, offset, start, count in flat_pieces(at + first, len(held[name]), size):
            store, places, _ = files[index]
            fragments.append(Fragment(store, places[key][0] + (offset + shift) * itemsize, first + start, count))
        yield name, TensorPart(name, shapes[name], ref.dtype, tuple(fragments))


def _whole_tensors(layout: SameLayout, model: Mapping[str, Any]) -> Iterator[tuple[str, Held]]:
    """Buffers and frozen parameters, which are in the model file. Raises ValueError if they are not what they must be."""
    target = layout.target
    for name, shape in {**layout.buffers, **layout.frozen}.items():
        is_cut = target.stage == 3 and name in layout.frozen
        ref = model["frozen_param_fragments" if is_cut else "module"][name]
        if not is_cut and ref.shape == shape:
            yield name, whole(name, ref, "buffer")
            continue
        held = partition_of(math.prod(shape), target.world_size, layout.rank)
        if not is_cut or held != layout.held[name] or not ref.is_contiguous or ref.numel < len(held):
            raise ValueError(f"{name!r} is cut in another way")
        yield name, TensorPart(name, shape, ref.dtype, (Fragment(ref.store, ref.byte_offset, held.start, len(held)),))


def _groups(
    groups: Sequence[Mapping[str, Shape]],
    numbers: Sequence[Sequence[int]],
    kinds: Sequence[Mapping[str, TensorRef]],
    inner: Mapping[str, Any],
) -> Iterator[ParameterGroup]:
    """The parameter groups, with states of one number. Raises ValueError if these differ within a group."""
    for group, own, settings in zip(groups, numbers, inner["param_groups"], strict=True):
        found = [_single(inner["state"][number], kinds[number]) for number in own]
        if any(one != found[0] for one in found[1:]) or len({(*kinds[number],) for number in own}) > 1:
            raise ValueError("flat groups of one parameter group differ")
        kept = {key: value for key, value in settings.items() if key != "params"}
        yield ParameterGroup(tuple(group), kept, found[0], tuple(kinds[own[0]])[1:])


def _single(state: Mapping[str, object], vectors: Iterable[str]) -> dict[str, object]:
    """The states of one number."""
    one = {name: value for name, value in state.items() if name not in vectors}
    return {name: number_in(value) if isinstance(value, TensorRef) else value for name, value in one.items()}
