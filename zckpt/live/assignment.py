"""Decides together, from the offers of all ranks, which rank contributes which elements, and where they go.

For `export` and `delta`.
[Note: who checks] Each tensor is checked by one rank; the ranks take turns. That rank gets all offers of the tensor, and making
its `TensorEntry` is the check that the ranks together hold each element. It says to each rank what to contribute, and to rank 0
that the tensor is whole. So a rank gets about as many offers as it makes, however many ranks there are; where there are more
ranks than tensors, those of one tensor. Rank 0 learns the names, shapes and dtypes of all tensors, but not who has what.
[Note: pieces] A contribution is a fragment of a rank's memory of one tensor. It is sent in pieces of at most `PIECE_BYTES`, each
a run of that memory. The pieces follow from the contribution, so they are sent without headers.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError, InconsistentError
from zckpt.core.catalog import Role, TensorEntry, TensorPart
from zckpt.core.dtypes import BY_TORCH_NAME, DType
from zckpt.core.fragments import Fragment
from zckpt.core.stores import MemoryStore
from zckpt.live.parts import LocalModel, Offer
from zckpt.live.ranks import Ranks
from zckpt.team.meeting import attempt, first_error

PIECE_BYTES = 8 << 20
"""A rank has two buffers of this size; measured: larger ones are no faster."""


@dataclass(frozen=True, slots=True)
class ElementPlace:
    """Where a tensor goes: the number of a file or of a tensor in memory, its first byte there, and its dtype."""

    place: int
    byte_offset: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class Contribution:
    """Elements that a rank contributes: a fragment of its memory of tensor `name`, in dtype `source`."""

    name: str
    source: DType
    fragment: Fragment
    target: ElementPlace


@dataclass(frozen=True, slots=True)
class ContributionPart:
    """`count` elements of a contribution, from element `first` of the rank's memory on. `runs`: (byte offset, bytes)
    that they fill at their target.
    """

    of: Contribution
    first: int
    count: int
    runs: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the target's dtype."""
        return self.count * self.of.target.dtype.itemsize


def digest_of_names(held: LocalModel | Exception) -> str | None:
    """A digest of the names that a rank offers, by which ranks with the same names are known; None if it offers none."""
    if isinstance(held, Exception):
        return None
    return sha256("\n".join(offer.part.name for offer in held.offers).encode()).hexdigest()


def assign(
    world: Ranks, offered: Sequence[Offer] | Exception
) -> tuple[dict[str, TensorPart], dict[str, TensorEntry] | Exception]:
    """Chooses for all elements of each tensor the rank that contributes them; see [Note: who checks]. Call it on every rank, with
    its offers, or why it has none. The ranks of `world` are `alike` if all offer the same names in the same order.

    Returns:
        By name, this rank's part of each tensor, with the fragments that it contributes. And on rank 0 all tensors, in the order
        of the first rank that has each, as if one memory held them whole, or the error of the first rank that has one; nothing
        on other ranks.
    """
    sent: list[list[tuple[int, Offer]]] = [[] for _ in range(world.size)]
    if isinstance(offered, Exception):
        came = world.swap([offered] * world.size)
    else:
        for number, offer in enumerate(offered):
            sent[_checker(world, number, offer.part.name)].append((number, offer))
        came = world.swap([[_pack_offer(*one) for one in some] or None for some in sent])
    answers = world.swap(_answers(came, () if isinstance(offered, Exception) else offered))
    mine: dict[str, TensorPart] = {}
    found: list[list[_Checked] | Exception] = []
    for some, answer in zip(sent, answers, strict=True):
        chosen, checked = answer or ((), [])
        found.append(checked)
        for (_, offer), numbers in zip(some, chosen):
            fragments = tuple(offer.part.fragments[number] for number in numbers)
            mine[offer.part.name] = replace(offer.part, fragments=fragments)
    return mine, attempt(lambda: _in_order(first_error(found)))


def contributions(mine: Mapping[str, TensorPart], targets: Mapping[str, ElementPlace]) -> list[Contribution]:
    """The contributions of this rank, in the order of the targets."""
    parts = ((mine[name], target) for name, target in targets.items() if name in mine)
    return [Contribution(part.name, part.dtype, one, target) for part, target in parts for one in part.fragments]


_Packed = tuple[int, str, tuple[int, ...], str, Role, bool, list[tuple[int, ...]]]
"""An offer as plain values, which take a tenth of the time of objects: number, name, shape, dtype, role, `equal`,
fragments.
"""

_Named = tuple[str, tuple[int, ...], DType, Role]
"""A tensor: name, shape, dtype, role."""

_Checked = tuple[tuple[int, int], _Named | Exception]
"""The first rank that has a tensor and its number there; and the tensor, if all of its elements are there."""


def _checker(world: Ranks, number: int, name: str) -> int:
    turn = number if world.alike else zlib.crc32(name.encode())
    return world.size - 1 - turn % world.size  # rank 0, which has most to do, comes last


def _pack_offer(number: int, offer: Offer) -> _Packed:
    part = offer.part
    fragments: list[tuple[int, ...]] = [
        (one.store.size, one.byte_offset, one.start, one.count, one.rows, one.pitch, one.store_pitch, one.step)
        for one in part.fragments
    ]
    return number, part.name, part.shape, part.dtype.torch_name, offer.role, offer.equal, fragments


def _answers(came: Sequence[Sequence[_Packed] | Exception | None], own: Sequence[Offer]) -> list[Any]:
    """The answers to each rank: for each of its offers, the fragments that it contributes; to rank 0 also the checked
    tensors.
    """
    chosen = [[list[int]() for _ in one] if isinstance(one, list) else [] for one in came]
    checked = attempt(lambda: _check(first_error([one or [] for one in came]), chosen, _turns(own)))
    return [(mine, [] if rank else checked) if mine or not rank else None for rank, mine in enumerate(chosen)]


def _check(came: Sequence[Sequence[_Packed]], chosen: Sequence[Sequence[list[int]]], turns: _Turns) -> list[_Checked]:
    """Checks tensors that this rank has all offers of; fills in who contributes what."""
    by_name: dict[str, dict[int, tuple[_Packed, list[int]]]] = {}
    for rank, offers in enumerate(came):
        for offer, mine in zip(offers, chosen[rank], strict=True):
            by_name.setdefault(offer[1], {})[rank] = offer, mine
    found: list[_Checked] = []
    for held in by_name.values():
        first, (offer, _) = next(iter(held.items()))
        found.append(((first, offer[0]), attempt(lambda held=held: _whole(held, turns))))  # type: ignore[misc]
    return found


def _whole(held: Mapping[int, tuple[_Packed, list[int]]], turns: _Turns) -> _Named:
    """One tensor from all its offers; records who contributes what."""
    name, shape, dtype, role = _name_tensor({rank: offer for rank, (offer, _) in held.items()})
    holders: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for rank, (offer, _) in held.items():
        for number, (_, _, start, count, rows, pitch, *_) in enumerate(offer[6]):
            holders.setdefault((start, count, rows, pitch), []).append((rank, number))
    fragments: list[Fragment] = []
    for several in holders.values():
        equal = len(several) > 1 and all(held[rank][0][5] for rank, _ in several)
        rank, number = several[turns(name, len(several)) if equal else 0]
        offer, mine = held[rank]
        mine.append(number)
        size, *place = offer[6][number]
        fragments.append(Fragment(MemoryStore(0, size), *place))
    _entry(name, shape, dtype, role, fragments)
    return name, shape, dtype, role


def _name_tensor(offers: Mapping[int, _Packed]) -> _Named:
    """A tensor as all ranks describe it; ranks without elements need not know the dtype."""
    first = next(iter(offers.values()))
    known = next((offer for offer in offers.values() if offer[6]), first)
    for rank, other in offers.items():
        if other[2] != known[2] or (other[6] and other[3] != known[3]):
            raise InconsistentError(
                f"the ranks have different models: tensor {known[1]!r} differs",
                found=f"{BY_TORCH_NAME[other[3]]} {list(other[2])} on rank {rank}",
                expected=f"{BY_TORCH_NAME[known[3]]} {list(known[2])}, as on the other ranks",
                remedy="Build the model with the same configuration on every rank.",
            )
    return known[1], known[2], BY_TORCH_NAME[known[3]], first[4]


_Turns = Callable[[str, int], int]
"""By the name of a tensor that several ranks hold alike, and their number: the index of the one that contributes it."""


def _turns(own: Sequence[Offer]) -> _Turns:
    """Turns in which all contribute about as many bytes. Every checker comes to the same ones, from the tensors that it has."""

    @cache
    def spread(ways: int) -> dict[str, int]:  # each tensor to the rank that has least so far
        busy, found = [(0, way) for way in range(ways)], {}
        for offer in own:
            load, found[offer.part.name] = busy[0]
            heapq.heapreplace(busy, (load + offer.part.numel * offer.part.dtype.itemsize, busy[0][1]))
        return found

    return lambda name, ways: spread(ways).get(name, zlib.crc32(name.encode()) % ways)


def _in_order(several: Sequence[Sequence[_Checked]]) -> dict[str, TensorEntry]:
    """All tensors; or raises the error of the first one that has one."""
    checked = sorted((one for some in several for one in some), key=lambda one: one[0])
    found: dict[str, TensorEntry] = {}
    for name, shape, dtype, role in first_error([one for _, one in checked]):
        numel = math.prod(shape)
        fragments = (Fragment(MemoryStore(0, numel * dtype.itemsize), 0, 0, numel),) if numel else ()
        found[name] = TensorEntry(name, shape, dtype, role, fragments)
    return found


def _entry(name: str, shape: tuple[int, ...], dtype: DType, role: Role, fragments: list[Fragment]) -> TensorEntry:
    try:
        return TensorEntry(name, shape, dtype, role, tuple(fragments))
    except IncompleteError as error:
        raise IncompleteError(
            f"no rank has some of the elements of tensor {name!r}",
            found=error.found,
            expected=error.expected,
            remedy="Make the call on every rank, with the model that the rank trains.",
        ) from error


def pieces(contribution: Contribution) -> Iterator[ContributionPart]:
    """A contribution in pieces, in the order of the rank's memory; see [Note: pieces]."""
    fragment, source, target = contribution.fragment, contribution.source.itemsize, contribution.target
    most = max(1, PIECE_BYTES // max(source, target.dtype.itemsize))
    if fragment.rows > 1 and fragment.count == fragment.pitch == fragment.store_pitch:
        fragment = replace(fragment, count=fragment.numel, rows=1, pitch=0, store_pitch=0)
    together = max(1, most // max(1, fragment.count)) if fragment.store_pitch == fragment.count else 1
    for row in range(0, fragment.rows, together):
        rows = range(row, min(row + together, fragment.rows))
        for column in range(0, fragment.count, most):
            count = min(most, fragment.count - column)
            first = fragment.byte_offset // source + row * fragment.store_pitch + column
            size, at = target.dtype.itemsize, fragment.start + column
            runs = tuple((target.byte_offset + (at + r * fragment.pitch) * size, count * size) for r in rows)
            yield ContributionPart(contribution, first, count * len(rows), runs)
