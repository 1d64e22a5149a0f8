"""Decides on rank 0, from the offers of all ranks, which rank contributes which elements, and where they go.

For `export`. Making the `TensorEntry` of every tensor is the check that the ranks together hold each element.
[Note: pieces] A contribution is a fragment of a rank's memory of one tensor. It is sent in pieces of at most `PIECE_BYTES`, each
a run of that memory. The pieces follow from the contribution, so they are sent without headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt.base.errors import IncompleteError, InconsistentError
from zckpt.core.catalog import Role, TensorEntry
from zckpt.core.dtypes import DType
from zckpt.core.fragments import Fragment
from zckpt.live.parts import Offer

PIECE_BYTES = 8 << 20
"""A rank has two buffers of this size; measured: larger ones are no faster."""

Key = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor as all ranks together hold it.

    Attributes:
        entry: all its elements; stores stand for the ranks' memories.
        owners: (rank, fragment) of those that make up `entry`.
    """

    entry: TensorEntry
    owners: tuple[tuple[int, Fragment], ...]


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
    """`count` elements of a contribution, from element `first` of the rank's memory on.

    Attributes:
        runs: (byte offset, bytes) that they fill at their target.
    """

    of: Contribution
    first: int
    count: int
    runs: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the target's dtype."""
        return self.count * self.of.target.dtype.itemsize


def assign(offered: Sequence[Sequence[Offer]]) -> dict[str, SharedTensor]:
    """Chooses for all elements of each tensor the rank that contributes them.

    Args:
        offered: the offers of each rank.

    Returns:
        Tensors by name, in the order of the first rank that has the tensor.

    Raises:
        IncompleteError: no rank has some of the elements. InconsistentError: ranks have different models.
    """
    names: dict[str, None] = {}
    by_rank = [{offer.part.name: offer for offer in offers} for offers in offered]
    for offers in by_rank:
        names.update(dict.fromkeys(offers))
    busy = [0] * len(by_rank)
    return {
        name: _assigned({rank: offers[name] for rank, offers in enumerate(by_rank) if name in offers}, busy)
        for name in names
    }


def _assigned(offers: Mapping[int, Offer], busy: list[int]) -> SharedTensor:
    known = next(iter(offers.values()))
    holders = {rank: offer for rank, offer in offers.items() if offer.part.fragments}
    first = next(iter(holders.values()), known)
    name, shape, dtype, role = first.part.name, first.part.shape, first.part.dtype, known.role
    wrong = [r for r, o in offers.items() if o.part.shape != shape or (r in holders and o.part.dtype != dtype)]
    if wrong:
        other = offers[wrong[0]].part
        raise InconsistentError(
            f"the ranks have different models: tensor {name!r} differs",
            found=f"{other.dtype} {list(other.shape)} on rank {wrong[0]}",
            expected=f"{dtype} {list(shape)}, as on the other ranks",
            remedy="Build the model with the same configuration on every rank.",
        )
    candidates: dict[Key, list[int]] = {}
    where: dict[tuple[int, Key], Fragment] = {}
    for rank, offer in holders.items():
        for fragment in offer.part.fragments:
            key = (fragment.start, fragment.count, fragment.rows, fragment.pitch)
            candidates.setdefault(key, []).append(rank)
            where[rank, key] = fragment
    owners: list[tuple[int, Fragment]] = []
    for key, ranks in candidates.items():
        equal = all(holders[rank].equal for rank in ranks)
        chosen = min(ranks, key=lambda rank: busy[rank]) if equal else ranks[0]
        fragment = where[chosen, key]
        busy[chosen] += fragment.numel * dtype.itemsize
        owners.append((chosen, fragment))
    return SharedTensor(_entry(name, shape, dtype, role, [fragment for _, fragment in owners]), tuple(owners))


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


def contributions(
    tensors: Mapping[str, SharedTensor], targets: Mapping[str, ElementPlace], size: int
) -> list[list[Contribution]]:
    """The contributions of each of `size` ranks, in the order of the targets."""
    out: list[list[Contribution]] = [[] for _ in range(size)]
    for name, target in targets.items():
        for rank, fragment in tensors[name].owners:
            out[rank].append(Contribution(name, tensors[name].entry.dtype, fragment, target))
    return out


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
