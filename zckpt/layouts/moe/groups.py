"""What each data-parallel group of a ZeRO save of experts holds, as a ZeRO save of its own.

For `moe`. All ranks share what is not experts'; the ranks that hold the same experts share these. Each of these groups of
ranks has parameter groups of the optimizer to itself, so that its files, less the other groups' vectors, are a save for
`zero12` or `zero3`, under the names that experts have among all.

[Note: groups of experts] Parameter groups are of experts or not, never mixed. Ranks may list those of experts in different
orders (DeepSpeed walks a set of strings), so each file's own `param_slice_mappings` tells. Under ZeRO-3 every sub-group
records the ranks that share it.
Source: DeepSpeed 0.19.8, moe/utils.py `split_params_into_different_moe_groups_for_optimizer`,
runtime/zero/stage_1_and_2.py `_configure_moe_settings`, runtime/zero/stage3.py `_zero3_partition_group_metadata`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from zckpt.base import words
from zckpt.base.errors import OTHER_SAVE, IncompleteError, InconsistentError, UnsupportedError
from zckpt.base.words import examples
from zckpt.containers import list_at, mapping_at, value_at
from zckpt.layouts.moe.experts import Layers, sharers
from zckpt.layouts.save.module_states import ModelStates, Shape
from zckpt.layouts.zero import zero3, zero12
from zckpt.layouts.zero.optimizer_states import OptimizerShard

if TYPE_CHECKING:
    from zckpt.layouts.zero.read import Save


GroupShare = tuple["Save", "tuple[int, ...]", "int | None"]
"""The part of a save that one data-parallel group of ranks shares: its files, with the names that experts have among all;
numbers of its parameter groups among all; and the expert-parallel rank, None for the part without experts.
"""


def parts_of(save: Save, model: ModelStates, layers: Layers, *, data_first: bool) -> Iterator[GroupShare]:
    """The parts of a save: first the one without experts, then one for each expert-parallel rank.

    Args:
        save: all files; `param_shapes` have the names that experts have on the first rank.
        model: the model file with the names that experts have among all.
        layers: of experts, spread over ranks.
        data_first: see [Note: expert-parallel ranks] in `experts`.

    Raises:
        InconsistentError: a group is not of one data-parallel group, or files are of different saves.
    """
    listed = save.model.param_shapes
    owners = [_owner(number, shapes, layers, save) for number, shapes in enumerate(listed)]
    orders = [_order(shard, listed) for shard in save.shards]
    for ep in sorted(set(owners), key=lambda ep: (ep is not None, ep)):
        numbers = [number for number, owner in enumerate(owners) if owner == ep]
        for rank in [None] if ep is None else range(ep):
            world = range(save.world_size)
            ranks = world if ep is None or rank is None else sharers(ep, rank, len(world), data_first=data_first)
            shards = [_pick(save.shards[r], [orders[r][number] for number in numbers]) for r in ranks]
            shapes = tuple(
                {layers.name_on(rank or 0, name): shape for name, shape in listed[n].items()} for n in numbers
            )
            own = replace(model, param_shapes=shapes)
            if isinstance(save, zero3.Zero3Save):
                _check_recorded(save, numbers, ranks)
                names = {at: save.names[r] for at, r in enumerate(ranks)}
                part = replace(
                    save, names=names, model=own, shards=shards, world_size=len(ranks), shard_size=len(ranks)
                )
                zero3.check_lengths(part)
                owned = zero3.owners(save.shards[0])
                yield part, tuple(sorted({owned[number] for number in numbers})), rank
            else:
                yield zero12.Zero12Save(own, shards, len(ranks)), tuple(numbers), rank


def split_by_experts(save: Save, layers: Layers) -> tuple[Save, Save]:
    """Splits a save into one without experts and one of experts alone; the experts' weights are in their own files."""
    listed = save.model.param_shapes
    orders = [_order(shard, listed) for shard in save.shards]

    def half(experts: bool) -> Save:
        own = partial(layers.owned, experts=experts)
        numbers = [number for number, shapes in enumerate(listed) if bool(own(shapes)) or not (shapes or experts)]
        model = replace(
            save.model,
            module={name: save.model.module[name] for name in own(save.model.module)},
            param_shapes=tuple(listed[number] for number in numbers),
            frozen_shapes={name: save.model.frozen_shapes[name] for name in own(save.model.frozen_shapes)},
            buffer_names=frozenset(own(save.model.buffer_names)),
            shared={name: save.model.shared[name] for name in own(save.model.shared)},
        )
        shards = [_pick(shard, [order[n] for n in numbers]) for shard, order in zip(save.shards, orders, strict=True)]
        return replace(save, model=model, shards=shards)

    return half(False), half(True)


def with_shapes(model: ModelStates, optimizers: Sequence[object], layers: Layers) -> ModelStates:
    """A model file with the shapes that DeepSpeed left out, in a run of its bf16 optimizer without ZeRO in the config.

    The optimizer files name the parameters of each rank's part of a group, in order, and the weights have the shapes. Groups
    are known by their names, since ranks may list them in different orders.

    Args:
        model: the model file.
        optimizers: the contents of each data-parallel rank's optimizer file.
        layers: of experts; their ranks need not be known.

    Raises:
        IncompleteError: a parameter has no weight.
    """
    groups: dict[tuple[str, int], dict[str, Shape]] = {}
    for root in optimizers:
        state = mapping_at(root, "optimizer_state_dict")
        settings, mappings = value_at(state, "base_optimizer_state", "param_groups"), state.get("param_slice_mappings")
        if not isinstance(settings, list) or not isinstance(mappings, list):
            return model  # and it will be said that there are no shapes
        counts: Counter[str] = Counter()
        for group, mapping in zip(settings, mappings):
            label = str(value_at(group, "name"))
            shapes = groups.setdefault((label, counts[label]), {})
            counts[label] += 1
            for name in mapping_at(mapping):
                shapes.setdefault(str(name), _shape(str(name), model, layers))
    places = {model.module[name].place: name for shapes in groups.values() for name in shapes if name in model.module}
    shared = {name: places[ref.place] for name, ref in model.module.items() if places.get(ref.place, name) != name}
    shapes_of_all = tuple(groups.values())
    return replace(model, param_shapes=shapes_of_all, shared=shared, root={**model.root, "param_shapes": shapes_of_all})


def _shape(name: str, model: ModelStates, layers: Layers) -> Shape:
    """The shape of a parameter's weight on one rank."""
    ref, stack = model.module.get(name), tuple[int, ...]()
    if (owner := layers.owner(name)) is not None and owner[0].weights:
        ref, stack = owner[0].weights[0].get(owner[2]), (len(owner[0].held[0]),) if owner[0].stacked else ()
    if ref is None:
        raise IncompleteError(
            "the weight of a parameter is missing",
            file=model.file,
            found=f"master weights of {name!r} in the optimizer files, and no weight",
            remedy="Copy the model files of the same save again.",
        )
    return (*stack, *ref.shape)


def _owner(number: int, shapes: Mapping[str, Shape], layers: Layers, save: Save) -> int | None:
    """The number of expert-parallel ranks that a group's experts are spread over; None for a group without experts."""
    found = {name: layers.owner(name) for name in shapes}
    spread = {owner[0].ep if owner else None for owner in found.values()}
    if len(spread) > 1:
        raise InconsistentError(
            f"optimizer group {number} is not of one data-parallel group", file=save.model.file,
            found=examples(found), expected="groups of experts alone, by the ranks they are spread over",
        )  # fmt: skip
    ep = next(iter(spread), None)
    if ep is not None and save.world_size % ep:
        raise InconsistentError(
            f"experts over {ep} ranks do not fit the world size", file=save.model.file,
            found=f"world size {save.world_size}", remedy=OTHER_SAVE,
        )  # fmt: skip
    return ep


def _order(shard: OptimizerShard, listed: Sequence[Mapping[str, Shape]]) -> list[int]:
    """The number in a rank's file of each group that the model file lists; see [Note: groups of experts]. Raises
    InconsistentError if the file has fewer groups.
    """
    if len(shard.vectors) < len(listed):
        raise InconsistentError(
            "optimizer file and model file have other groups", file=shard.file,
            found=words.count(len(shard.vectors), "vector of masters", "vectors of masters"),
            expected=words.count(len(listed), "group, as the model file has", "groups, as the model file has"),
            remedy="Copy the files of all ranks again, each under its own name.",
        )  # fmt: skip
    order: dict[int, int] = {}
    for own, mapping in enumerate(list_at(shard.root, "param_slice_mappings")[: len(listed)]):
        name = next(iter(mapping_at(mapping)), None)
        number = next((n for n, shapes in enumerate(listed) if name in shapes), None)
        if number is not None:
            order[number] = own
    rest = iter(own for own in range(len(listed)) if own not in order.values())
    return [order[number] if number in order else next(rest) for number in range(len(listed))]


def _pick(shard: OptimizerShard, groups: Sequence[int]) -> OptimizerShard:
    """A rank's optimizer file with some of its groups (ZeRO-3: sub-groups, and the parameter groups that have any of
    them).
    """
    paddings, mappings = shard.alignment_paddings, shard.root.get("param_slice_mappings")
    recorded = shard.root.get("ds_zero_partition_groups")
    root = shard.root
    if isinstance(recorded, list):
        entries = {entry.get("sub_group"): entry for entry in recorded if isinstance(entry, Mapping)}
        own = [{**entries[old], "sub_group": new} for new, old in enumerate(groups) if old in entries]
        root = {**root, "ds_zero_partition_groups": own}
    if isinstance(mappings, list) and len(mappings) == len(shard.vectors):
        root = {**root, "param_slice_mappings": [mappings[number] for number in groups]}
    settings = [shard.settings[number] for number in groups if len(shard.settings) == len(shard.vectors)]
    if not settings:
        numbers = iter(range(len(shard.vectors)))
        for group in shard.settings:
            held = [number for number, _ in zip(numbers, list_at(group, "params"))]
            if kept := [number for number in held if number in groups]:
                settings.append({**group, "params": kept})
    return replace(
        shard,
        vectors=tuple(shard.vectors[number] for number in groups),
        alignment_paddings=None if paddings is None else tuple(paddings[n] for n in groups if n < len(paddings)),
        states=tuple(shard.states[number] for number in groups),
        settings=tuple(settings),
        root=root,
    )


def _check_recorded(save: zero3.Zero3Save, numbers: Sequence[int], ranks: range) -> None:
    """Checks that the files name the same ranks for a sub-group as those that share it. Raises UnsupportedError if they
    are other ranks.
    """
    for rank in ranks:
        for entry in list_at(save.shards[rank].root, "ds_zero_partition_groups"):
            named = value_at(entry, "partition_ranks")
            if value_at(entry, "sub_group") in numbers and named != list(ranks):
                raise UnsupportedError(
                    "experts are on other ranks than zckpt knows", file=save.shards[rank].file,
                    found=f"sub-group {entry.get('sub_group')} is shared by ranks {named}",
                    expected=words.ranks(list(ranks)),
                    remedy="Convert it with the DeepSpeed that wrote it (zero_to_fp32.py).",
                )  # fmt: skip
