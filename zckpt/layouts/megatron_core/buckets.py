"""The buckets of Megatron-Core's distributed optimizer: vectors of fp32 weights and states that name no parameter.

For `placing`.

[Note: buckets] `optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_D.bucket_idx_N.STATE` is a vector for each group of ranks
with the same parameters, buffer and bucket (`dp_reshardable`); its chunks begin where parameters, padding and ranks do. Of
`dp_zero_gather_scatter`, `...dp_group_idx_G.param_state` holds whole vectors, bucket after bucket. Parameters begin at multiples
of 64 elements; fused ones, such as gate and up, are several parts, one after the other.
Source: megatron-core 0.12.3 - 0.16.1, optimizer/distrib_optimizer.py `sharded_param_state_dp_reshardable`, `..._dp_zero`;
distributed/param_and_grad_buffer.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zckpt.containers import TensorRef, list_at, mapping_at
from zckpt.core.catalog import Role
from zckpt.core.dtypes import F32
from zckpt.core.fragments import Fragment
from zckpt.layouts.dcp.items import Items
from zckpt.layouts.dcp.metadata import BytesItem, Metadata, TensorItem
from zckpt.layouts.megatron_core.contents import MASTERS

_GROUP = r"(?P<group>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\."
_BUCKET = re.compile(_GROUP + r"gbuf_idx_(?P<buffer>\d+)\.dtype_.+?\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)")
_OBJECT = re.compile(_GROUP + r"(?P<what>\w+)/shard_\d+_\d+")


class BucketVector(NamedTuple):
    """A vector of fp32 weights, and those of its states.

    Attributes:
        name: for errors.
        group: the ranks that share it.
        order: its place among those of the group: buffer, bucket.
        numel: elements.
        states: state -> where its elements are; the fp32 weights are `param`.
        starts: elements at which something begins, as far as chunks say it.
    """

    name: str
    group: str
    order: tuple[int, int]
    numel: int
    states: Mapping[str, Sequence[Fragment]]
    starts: Sequence[int]


def vectors_of(names: Sequence[str], metadata: Metadata, items: Items, problems: list[str]) -> list[BucketVector]:
    """The vectors of a save's buckets; `problems` gets what is wrong with them."""
    found: dict[tuple[str, int, int], dict[str, TensorItem]] = {}
    objects: dict[str, list[tuple[str, BytesItem]]] = {}
    for name in names:
        item = metadata.items[name]
        if isinstance(item, TensorItem) and (match := _BUCKET.fullmatch(name)):
            state = "param" if match["state"] in MASTERS else match["state"]
            found.setdefault((match["group"], int(match["buffer"]), int(match["bucket"])), {})[state] = item
        elif isinstance(item, BytesItem) and (match := _OBJECT.fullmatch(name)):
            objects.setdefault(match["what"], []).append((match["group"], item))
    made = list(_of_buckets(found, items, problems))
    for group, item in objects.get("param_state", ()):
        made += _gathered_vectors(group, _one(items.value(item)), problems)
    for group, item in objects.get("per_bucket_numel_unpadded", ()):
        sizes = {vector.order: vector.numel for vector in made if vector.group == group}
        for order, numel in _sizes_in(_one(items.value(item))):
            if sizes.get(order) != numel:
                held = f"{sizes[order]:,}" if order in sizes else "none"
                problems.append(
                    f"bucket {order[1]} of buffer {order[0]} of {group!r} has {numel:,} elements, held are {held}"
                )
    for beginning in {group.rpartition("_")[0] for group in (vector.group for vector in made)}:
        numbers = {int(v.group.rpartition("_")[2]) for v in made if v.group.rpartition("_")[0] == beginning}
        if missing := set(range(max(numbers))) - numbers:
            problems.append(f"{beginning}_{min(missing)} is missing")
    return sorted(made, key=lambda vector: (vector.group, vector.order))


def settings_of(names: Sequence[str], metadata: Metadata, items: Items) -> Iterator[Mapping[str, object]]:
    """The settings of the parameter groups that are beside buckets, each once."""
    seen: set[str] = set()
    for name in names:
        item, match = metadata.items[name], _OBJECT.fullmatch(name)
        if match is None or match["what"] != "optimizer" or not isinstance(item, BytesItem):
            continue
        for group in list_at(_one(items.value(item)), "param_groups"):
            if isinstance(group, Mapping) and (text := repr(sorted(group.items(), key=str))) not in seen:
                seen.add(text)
                yield {str(key): value for key, value in group.items()}


def _one(value: object) -> object:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _sizes_in(value: object) -> Iterator[tuple[tuple[int, int], int]]:
    """(buffer, bucket) and elements, as `per_bucket_numel_unpadded` says them."""
    for buffer, own in enumerate(list_at(value)):
        for sizes in mapping_at(own).values():
            for bucket, numel in enumerate(list_at(sizes)):
                if type(numel) is int:
                    yield (buffer, bucket), numel


def _of_buckets(
    found: Mapping[tuple[str, int, int], dict[str, TensorItem]], items: Items, problems: list[str]
) -> Iterator[BucketVector]:
    for (group, buffer, bucket), own in found.items():
        what = f"bucket {bucket} of buffer {buffer} of {group!r}"
        master = own.get("param")
        odd = [state for state, item in own.items() if master and (item.size, item.dtype) != (master.size, F32)]
        if master is None or odd or len(master.size) != 1:
            problems.append(f"{what} has {f'{odd[0]!r} of another size or dtype' if odd else 'no fp32 weights'}")
            continue
        roles: dict[str, Role] = dict.fromkeys(own, "parameter")
        states = {state: entry.fragments for state, entry in items.tensors(own, roles).items()}
        starts = sorted(chunk.offsets[0] for chunk in master.chunks if chunk.numel)
        yield BucketVector(what, group, (buffer, bucket), master.size[0], states, starts)


def _gathered_vectors(group: str, held: object, problems: list[str]) -> Iterator[BucketVector]:
    """The vectors of `dp_zero_gather_scatter`."""
    for buffer, own in mapping_at(held).items():
        for vectors in mapping_at(own).values() if type(buffer) is int else ():
            refs = {str(k): v for k, v in mapping_at(vectors).items() if isinstance(v, TensorRef) and v.shape}
            refs = {"param" if state in MASTERS else state: ref for state, ref in refs.items()}
            what = f"buffer {buffer} of {group!r}"
            if (
                "param" not in refs
                or len({(ref.shape, ref.dtype) for ref in refs.values()} | {(refs["param"].shape, F32)}) > 1
            ):
                problems.append(f"{what} has no fp32 weights, or states of another size or dtype")
                continue
            states = {state: ref.fragments() for state, ref in refs.items()}
            yield BucketVector(what, group, (buffer, 0), refs["param"].numel, states, (0,))
