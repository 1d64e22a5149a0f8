"""Finds the tensors of a Megatron-Core distributed checkpoint a second time, in the chunks of torch.distributed.checkpoint.

Places and shapes in the metadata are those of the whole model. `optimizer.state.exp_avg.NAME` is a state of NAME, and so is the
fp32 weight. A tensor of `fully_sharded_model_space` is saved in another shape: how many boxes there are along each axis, and the
elements of a box, laid out flat; the planner keeps its own shape beside it (`nd_reformulated_orig_global_shape`). Vectors of
buckets name no parameter (`optimizer.distributed...`): their fp32 weights are proved by the model's own, and their moments lie
beside them, cut alike.
Source: megatron-core 0.12.3, dist_checkpointing/strategies/{torch,resharding}.py, dist_checkpointing/optimizer.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from zckpt.containers import TensorRef
from zckpt.layouts.dcp.second import SavedTensor, described_in
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import BesideMaster, HeldRun, SecondLook, Shape, StoredRows, hold_box, join_path

_SHAPE = "nd_reformulated_orig_global_shape"
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
_NO_WEIGHT = re.compile(
    r"(?:^|\.)_extra_state(?:$|[./])|^(?:rng_state|rerun_state_machine_state|common_state)(?:$|[./])"
)
_WRAPPERS = re.compile(r"^(?:model\d*\.)?(?:module\.)*")
_MASTERS = ("param", "fp32_param", "master_param")
_BUCKET = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")


def find_again(listing: Listing) -> SecondLook:
    """The model's tensors and the optimizer's states."""
    names: dict[str, Shape | None] = {}
    held: list[tuple[str, str, SavedTensor]] = []
    buckets: dict[str, dict[str, dict[tuple[int, ...], TensorRef]]] = {}
    tensors, others = described_in(listing)
    for tensor in tensors:
        name = join_path(tensor.path)
        if _NO_WEIGHT.search(name):
            continue
        if len(tensor.path) > 3 and tensor.path[:2] == ("optimizer", "state"):
            owner, state = str(tensor.path[2]), str(tensor.path[3])
        elif match := _STATE.match(name):
            owner, state = match[2], match[1]
        elif _BUCKET.match(name):
            vector, _, state = name.rpartition(".")
            parts = {tuple(at): ref for at, ref in tensor.parts}
            buckets.setdefault(vector, {})["" if state in _MASTERS else state] = parts
        elif _OPTIMIZER.match(name):
            continue
        else:
            owner, state = name, ""
            names[_WRAPPERS.sub("", name)] = _own_shape(tensor) or tensor.shape
        held.append((_WRAPPERS.sub("", owner), "" if state in _MASTERS else state, tensor))
    beside = [
        BesideMaster(own[""][at], state, ref)
        for own in buckets.values()
        for state, parts in own.items()
        for at, ref in (parts.items() if state and "" in own else ())
    ]
    gathered = [
        value() for path, value in others.items() if _BUCKET.match(name := join_path(path)) and ".param_state" in name
    ]
    beside += [BesideMaster(*own) for value in gathered for own in _beside_in(value)]
    runs = (run for name, state, tensor in held for run in _runs(name, state, tensor))
    return SecondLook(
        names, runs, beside=beside, by_copy=bool(buckets) or any(map(_BUCKET.match, map(join_path, others)))
    )


def _beside_in(value: object) -> Iterator[tuple[TensorRef, str, TensorRef]]:
    """The fp32 weights of an object of `dp_zero_gather_scatter`, each with a state that lies beside them."""
    for held in value if isinstance(value, list) else value.values() if isinstance(value, Mapping) else ():
        refs = {k: ref for k, ref in held.items() if isinstance(ref, TensorRef)} if isinstance(held, Mapping) else {}
        masters = [refs.pop(name) for name in _MASTERS if name in refs]
        yield from ((master, state, ref) for master in masters for state, ref in refs.items())
        yield from _beside_in(held)


def _own_shape(tensor: SavedTensor) -> Shape | None:
    """The shape that a tensor had before its boxes were laid out flat; None for one that was not."""
    shape = tensor.beside.get(_SHAPE)
    return tuple(extent for extent in shape if type(extent) is int) if isinstance(shape, tuple | list) else None


def _runs(name: str, state: str, tensor: SavedTensor) -> Iterator[HeldRun]:
    shape = _own_shape(tensor)
    for offsets, ref in tensor.parts:
        for run in hold_box(name, state, ref, offsets, tensor.shape):
            if shape is None:
                yield run
            else:
                moved = _unflatten(run.run, tensor.shape, shape, ref.dtype.itemsize)
                yield from (HeldRun(name, state, rows) for rows in moved)


def _unflatten(rows: StoredRows, saved: Shape, shape: Shape, size: int) -> Iterator[StoredRows]:
    """The elements of rows of boxes, as rows of the whole tensor."""
    *boxes, numel = saved
    extents = [extent // number for extent, number in zip(shape, boxes, strict=True)]
    if math.prod(extents) != numel or rows.step != 1:
        raise ValueError(f"boxes {list(saved)} of {list(shape)}")
    for row in range(rows.rows):
        start, end = rows.start + row * rows.pitch, rows.start + row * rows.pitch + rows.count
        at = rows.offset + row * rows.store_pitch * size
        while start < end:
            box, inside = divmod(start, numel)
            to, whole = _place(box, inside, boxes, extents, shape)
            count = min(end - start, whole)
            yield StoredRows(rows.path, at, to, count)
            start, at = start + count, at + count * size


def _place(box: int, inside: int, boxes: Sequence[int], extents: Sequence[int], shape: Shape) -> tuple[int, int]:
    """The place of an element of a box in the whole tensor, and how many elements follow it there as they do in the
    box.
    """
    number, pitch, left = 0, 1, 0
    length, is_whole = 1, True
    rest = inside
    for boxes_of, extent, of in zip(reversed(boxes), reversed(extents), reversed(shape), strict=True):
        box, which = divmod(box, boxes_of)
        rest, index = divmod(rest, extent)
        number += (which * extent + index) * pitch
        pitch *= of
        if is_whole:
            length *= extent
            is_whole = extent == of
    left = length - inside % length
    return number, left
