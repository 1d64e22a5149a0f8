"""How ZeRO cuts flat groups of parameters into partitions: once, for every reader and writer.

[Note: flat groups, partitions, padding]
ZeRO-1 and -2 lay the parameters of one optimizer group end to end: a *flat group*. `parameter_alignment` (since DeepSpeed
0.19.8) puts *alignment padding* between parameters, so that each starts on 16 bytes. The group's end is padded to a
multiple of 2 x world size, and the vector is cut into equal *partitions*, one per rank. On saving, the padding at the end
is cut off again, so the last ranks may hold less, or nothing; old versions left it on.
Example: 374 elements, world size 3: padded to 378, partitions of 126; rank 2 saves 122.
Hence the partition size is the length of rank 0's vector: either rank 0 is full, or it holds the whole group.

ZeRO-3 cuts each parameter by itself: p = ceil(numel / world size) elements per rank, rank D holding
[D*p, (D+1)*p), the last pieces short or empty and padded to p. A rank's pieces of all parameters lie end to end, cut into
*sub-groups* at parameter boundaries. Example: 10 elements, world size 4: 3, 3, 3, 1 + 2 padding.
Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (`groups_padding`, `round_robin_bit16_padding`),
runtime/zero/stage3.py, utils/zero_to_fp32.py (`zero3_partitioned_param_info`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from zckpt.layouts.run.vectors import VectorRun

Name = TypeVar("Name")


def flat_offsets(numels: Sequence[int], paddings: Sequence[int] | None = None) -> tuple[list[int], int]:
    """Where each parameter starts in its flat group, and the group's length without end padding.

    Args:
        numels: elements of each parameter, in flat order.
        paddings: elements of alignment padding that follow each parameter; None for none.
    """
    steps = numels if paddings is None else [n + padding for n, padding in zip(numels, paddings, strict=True)]
    ends = list(accumulate(steps, initial=0))
    return ends[:-1], ends[-1]


def flat_pieces(offset: int, numel: int, partition_size: int) -> Iterator[VectorRun]:
    """The pieces of a parameter that starts at element `offset` of a flat group; `index` is the rank."""
    done = 0
    while done < numel:
        rank, local = divmod(offset + done, partition_size)
        count = min(numel - done, partition_size - local)
        yield VectorRun(rank, local, done, count)
        done += count


def round_robin(count: int, world_size: int) -> list[int]:
    """The order of a group's parameters under `round_robin_gradients`: 0, world_size, .., 1, world_size + 1, ..

    Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py `_round_robin_reorder`.
    """
    return [number for first in range(world_size) for number in range(first, count, world_size)]


def in_order(order: Sequence[int], names: Sequence[Name]) -> list[Name]:
    """The names in an order that their numbers give."""
    return [names[number] for number in order]


def in_original_order(laid: Sequence[Name], world_size: int) -> list[Name]:
    """Parameters in the order of `round_robin`, put back into their own order."""
    placed = sorted(zip(round_robin(len(laid), world_size), laid, strict=True), key=lambda pair: pair[0])
    return [name for _, name in placed]


def alignment_paddings(numels: Sequence[int], itemsize: int) -> list[int]:
    """Elements that `parameter_alignment` puts after each parameter of a group, so that the next begins on 16 bytes.

    Args:
        numels: elements of each parameter, in flat order.
        itemsize: bytes of one element of the module's own weights.

    Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (`param_padding`).
    """
    unit = 16 // math.gcd(16, itemsize)
    paddings: list[int] = []
    at = 0
    for number, numel in enumerate(numels):
        paddings.append(0 if number == len(numels) - 1 else -(at + numel) % unit)
        at += numel + paddings[-1]
    return paddings


def sub_groups(numels: Sequence[int], size: int) -> list[range]:
    """Which parameters of a group share a sub-group: it is full when its parameters reach `size` elements of a rank.

    Args:
        numels: elements per rank of each parameter, in flat order.
        size: `sub_group_size`.

    Source: DeepSpeed 0.19.8, runtime/zero/stage3.py `_create_fp16_sub_groups`.
    """
    if size >= sum(numels):
        return [range(len(numels))]
    cuts: list[range] = []
    start = held = 0
    for number, numel in enumerate(numels):
        held += numel
        if held >= size or number == len(numels) - 1:
            cuts.append(range(start, number + 1))
            start, held = number + 1, 0
    return cuts


def partition_numel(numel: int, world_size: int) -> int:
    """Elements per rank of a parameter that ZeRO-3 cuts: ceil(numel / world_size), padding included."""
    return -(-numel // world_size)


def partition_of(numel: int, world_size: int, rank: int) -> range:
    """The elements of a parameter that one rank of ZeRO-3 holds; empty when it holds only padding. Raises ValueError if
    `rank` is not below `world_size`.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of world size {world_size}")
    size = partition_numel(numel, world_size)
    return range(min(rank * size, numel), min((rank + 1) * size, numel))


class SubGroups:
    """The places of elements in the vectors (sub-groups) of one rank, into which its run of pieces is cut."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self._starts = list(accumulate(lengths, initial=0))
        self.total = self._starts[-1]
        self._asked, self._found = (0, 0), tuple[VectorRun, ...]()

    def pieces(self, offset: int, count: int) -> tuple[VectorRun, ...]:
        """The places of elements [offset, offset + count) of the run, up to `total`; `index` is the sub-group."""
        if self._asked == (offset, count):  # the next rank mostly asks for the same
            return self._found
        found: list[VectorRun] = []
        done = 0
        while done < count and offset + done < self.total:
            index = bisect_right(self._starts, offset + done) - 1
            local = offset + done - self._starts[index]
            step = min(count - done, self.lengths[index] - local)
            found.append(VectorRun(index, local, done, step))
            done += step
        self._asked, self._found = (offset, count), tuple(found)
        return self._found
