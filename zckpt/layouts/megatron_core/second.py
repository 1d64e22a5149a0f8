"""Finds the tensors of a Megatron-Core distributed checkpoint a second time, in the chunks of torch.distributed.checkpoint.

Places and shapes in the metadata are those of the whole model. `optimizer.state.exp_avg.NAME` is a state of NAME, and so is the
fp32 weight. A tensor of `fully_sharded_model_space` is saved in another shape: how many boxes there are along each axis, and the
elements of a box, laid out flat; the planner keeps its own shape beside it (`nd_reformulated_orig_global_shape`).
Source: megatron-core 0.12.3, dist_checkpointing/strategies/{torch,resharding}.py, dist_checkpointing/optimizer.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from zckpt.layouts.dcp.second import SavedTensor, described_in
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import HeldRun, SecondLook, Shape, StoredRows, hold_box, join_path

_SHAPE = "nd_reformulated_orig_global_shape"
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
_NO_WEIGHT = re.compile(
    r"(?:^|\.)_extra_state(?:$|[./])|^(?:rng_state|rerun_state_machine_state|common_state)(?:$|[./])"
)
_WRAPPERS = re.compile(r"^(?:model\d*\.)?(?:module\.)*")
_MASTERS = ("param", "fp32_param", "master_param")


def find_again(listing: Listing) -> SecondLook:
    """The model's tensors and the optimizer's states."""
    names: dict[str, Shape | None] = {}
    held: list[tuple[str, str, SavedTensor]] = []
    for tensor in described_in(listing)[0]:
        name = join_path(tensor.path)
        if _NO_WEIGHT.search(name):
            continue
        if len(tensor.path) > 3 and tensor.path[:2] == ("optimizer", "state"):
            owner, state = str(tensor.path[2]), str(tensor.path[3])
        elif match := _STATE.match(name):
            owner, state = match[2], match[1]
        elif _OPTIMIZER.match(name):
            continue
        else:
            owner, state = name, ""
            names[_WRAPPERS.sub("", name)] = _own_shape(tensor) or tensor.shape
        held.append((_WRAPPERS.sub("", owner), "" if state in _MASTERS else state, tensor))
    return SecondLook(names, (run for name, state, tensor in held for run in _runs(name, state, tensor)))


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
