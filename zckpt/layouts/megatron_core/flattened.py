"""Tensors with parts that were flattened before they were saved (`fully_sharded_model_space`), put back into their shapes.

For `megatron_core`. A tensor-parallel rank's part of a tensor is a box; each data-parallel rank has some elements of the box,
which is laid out flat. Such a tensor is saved in another shape: how many boxes there are along each axis, and the elements of a
box. A (2, 48, 16) tensor with rows cut in four is (2, 4, 1, 192): box (1, 2, 0) has its rows 24 to 35 of the second
layer.
Source: megatron-core 0.12.3, dist_checkpointing/strategies/resharding.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zckpt.base.errors import COPY_AGAIN, CorruptError, UnsupportedError
from zckpt.base.words import count
from zckpt.containers.tensor_ref import MAX_FRAGMENTS
from zckpt.core.catalog import TensorEntry
from zckpt.core.fragments import Block, Fragment, fragment_of
from zckpt.core.overlaps import embed_box, shift


def unflatten(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """The tensor of this shape with the boxes that an entry has, one after the other. Raises CorruptError if the shapes
    do not fit each other, UnsupportedError if it is in too many pieces.
    """
    *boxes, numel = entry.shape
    fits = len(boxes) == len(shape) and all(n and extent % n == 0 for n, extent in zip(boxes, shape, strict=True))
    extents = [extent // n for n, extent in zip(boxes, shape, strict=True)] if fits else []
    if not fits or math.prod(extents) != numel:
        raise CorruptError(
            f"the shape of {entry.name!r} does not fit its parts", found=f"parts {list(entry.shape)} of {list(shape)}",
            expected="equal parts along each axis", remedy=COPY_AGAIN,
        )  # fmt: skip
    itemsize = entry.dtype.itemsize
    held: dict[int, list[Fragment]] = {}
    for fragment in entry.fragments:
        for piece in _by_box(fragment, numel, itemsize):
            held.setdefault(piece.start // numel, []).append(piece)
    fragments: list[Fragment] = []
    for number, own in held.items():
        fragments += _place_boxes(own, number, boxes, extents, shape, itemsize)
        if len(fragments) > MAX_FRAGMENTS:
            raise UnsupportedError(
                f"{entry.name!r} is scattered over too many pieces", found=count(len(fragments), "piece"),
                expected=f"at most {MAX_FRAGMENTS:,}", remedy="Convert the weights alone: zckpt to-bf16.",
            )  # fmt: skip
    return TensorEntry(entry.name, shape, entry.dtype, entry.role, tuple(fragments))


def _by_box(fragment: Fragment, numel: int, itemsize: int) -> list[Fragment]:
    """The parts of a fragment in each box."""
    if fragment.rows == 1 and fragment.start // numel == (fragment.stop - 1) // numel:
        return [fragment]
    pieces: list[Fragment] = []
    for run in fragment.runs(itemsize):
        start, left, at = run.start, run.count, run.byte_offset
        while left:
            taken = min(left, numel - start % numel)
            pieces.append(fragment_of(run.store, at, Block(start, taken, 1, 0, 0, run.store_step)))
            start, left, at = start + taken, left - taken, at + taken * run.store_step * itemsize
    return pieces


def _place_boxes(
    own: Sequence[Fragment],
    number: int,
    boxes: Sequence[int],
    extents: Sequence[int],
    shape: Sequence[int],
    itemsize: int,
) -> Sequence[Fragment]:
    """The elements of one box as fragments of the whole tensor."""
    numel = math.prod(extents)
    local: Sequence[Fragment] = shift(own, -number * numel)
    offsets: list[int] = []
    for n, extent in zip(reversed(boxes), reversed(extents), strict=True):
        number, index = divmod(number, n)
        offsets.insert(0, index * extent)
    return embed_box(local, extents, offsets, shape, itemsize)
