"""How the slices of tensor-parallel ranks make up a whole parameter: the geometry, and the elements that are computed of them.

For `rules`. A rule turns the shapes of the slices into a `Joint`: where the rows of each slice go in the whole
(see `overlaps.place`), which ranks hold only copies, and whether the copies are averaged or added up. The rules come
from the checkpoint itself (the universal-checkpoint information that Megatron-like trainers and AutoTP write), or from a
file.

[Note: joining] Example of `parts`: a fused QKV of 6 + 3 + 3 rows over two ranks, where the second rank holds 3 + 1 +
1 of them.
Each part is joined by itself, then the parts are stacked: rows 0-2 of slice 0, 0-2 of slice 1, 3-4 of slice 0, 3 of slice 1,
5-6 of slice 0, 4 of slice 1.

[Note: totals] The mean or the sum of several ranks' slices is computed in memory when its elements are used, for such tensors are
small (norms, biases, counters), in the order of additions of the tools they come from, so that the result is the same bit for
bit. So are whole numbers as floats, for `universal`.
Source: gpt-neox, tools/ckpts/convert_neox_to_hf.py, and DeepSpeed 0.19.8, checkpoint/ds_to_universal.py `merge_tp_slices`,
checkpoint/affine.py, checkpoint/constants.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Literal

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OTHER_SAVE, InconsistentError, UnsupportedError
from zckpt.core.catalog import Padding, Replica, TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.fragments import Block, ComputedStore, Fragment
from zckpt.core.overlaps import clip, place
from zckpt.engine.elements import ElementReader, elements
from zckpt.layouts.save.module_states import Shape

if TYPE_CHECKING:
    import numpy


def total_of(slices: Sequence[TensorEntry], total: Literal["mean", "sum"]) -> bytearray:
    """The elements of the mean or sum, in the slices' dtype. Raises UnsupportedError if numpy cannot add up the dtype."""
    import numpy

    first = slices[0]
    if not first.dtype.numpy or first.dtype.kind != "float":
        raise UnsupportedError(
            f"cannot compute the {total} of slices of {first.dtype}",
            found=f"tensor {first.name!r}",
            remedy="Pass another rule for it with --tp-rules, or leave it out with --exclude.",
        )
    summed = numpy.zeros(first.numel, first.dtype.numpy)
    for entry in slices:
        summed += _array_of(entry)
    if total == "mean":
        summed /= summed.dtype.type(len(slices))
    return bytearray(summed.tobytes())


def as_float(entry: TensorEntry) -> TensorEntry:
    """A tensor as fp32 numbers, as by torch's `.float()`: floats are cast by the engine, others in memory. Raises
    UnsupportedError if the numbers are complex.
    """
    if entry.dtype.kind == "float":
        return replace(entry, replicas=())
    if entry.dtype.kind == "complex":
        raise UnsupportedError(
            "cannot convert complex numbers to floats",
            found=f"tensor {entry.name!r}",
            remedy="Leave it out with --exclude.",
        )
    store = ComputedStore(
        entry.numel * 4, lambda: bytearray(_array_of(entry).astype("<f4").tobytes()), sources_of([entry])
    )
    fragments = (Fragment(store, 0, 0, entry.numel),) if entry.numel else ()
    return TensorEntry(entry.name, entry.shape, F32, entry.role, fragments)


def sources_of(entries: Sequence[TensorEntry]) -> list[tuple[Sequence[Fragment], int]]:
    """The sources from which elements are computed, for these tensors."""
    return [(entry.fragments, entry.dtype.itemsize) for entry in entries]


def _array_of(entry: TensorEntry) -> numpy.ndarray[Any, Any]:
    """The elements of a tensor, in memory."""
    import numpy

    with ElementReader() as reader:
        data = reader.read(elements(entry, 0, entry.numel))
        reader.check_sources()
    return numpy.frombuffer(data, entry.dtype.numpy)


Total = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True)
class SliceRows:
    """Rows of one rank's slice, with their first element's number in the whole, and their pitch there."""

    rank: int
    rows: Block
    start: int
    pitch: int


@dataclass(frozen=True, slots=True)
class Joint:
    """How slices make up a whole.

    Attributes:
        shape: of the whole.
        pieces: the rows and their places; they cover the whole exactly once.
        copies: rank -> pieces that also make up the whole, with that rank's copies of what others hold too; the copies must
            agree.
        total: "mean" or "sum" if the whole is that of all slices.
        keep: rows of the first dimension to keep; the others are padding.
        words: the entries for it in a universal checkpoint (`cat_dim`, ..).
    """

    shape: Shape
    pieces: tuple[SliceRows, ...]
    copies: Mapping[int, tuple[SliceRows, ...]] = field(default_factory=dict[int, tuple[SliceRows, ...]])
    total: Total | None = None
    keep: int | None = None
    words: Mapping[str, object] = field(default_factory=dict[str, object])


def whole_of(shape: Shape, rank: int = 0) -> SliceRows:
    """The rows of a slice that is the whole tensor."""
    return SliceRows(rank, Block(0, math.prod(shape), 1, 0, 0, 1), 0, 0)


def join_replicas(shapes: Sequence[Shape]) -> Joint:
    """Joins slices that are all the same."""
    shape = shapes[0]
    if any(other != shape for other in shapes):
        raise ValueError("copies of different shapes")
    return Joint(shape, (whole_of(shape),), {rank: (whole_of(shape, rank),) for rank in range(1, len(shapes))})


def join_sums(shapes: Sequence[Shape], total: Total) -> Joint:
    """Joins slices by their mean or sum."""
    return Joint(shapes[0], (), total=total)


def parts(shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]]) -> Joint:
    """Joins slices that hold parts of several stacked tensors; `widths[part][rank]` is their extent in dimension `dim`.
    Raises ValueError if the widths are not those of the slices.
    """
    shape = shapes[0]
    if not 0 <= dim < len(shape):
        raise ValueError(f"dimension {dim} of {len(shape)}")
    inner, outer = math.prod(shape[dim + 1 :]), math.prod(shape[:dim])
    for rank, own in enumerate(shapes):
        if len(own) != len(shape) or any(a != b for at, (a, b) in enumerate(zip(own, shape)) if at != dim):
            raise ValueError(f"slices of shapes {list(shape)} and {list(own)}")
        if sum(width[rank] for width in widths) != own[dim]:
            raise ValueError(f"{own[dim]} rows in slice {rank}, where {[width[rank] for width in widths]} are expected")
    extent = sum(own[dim] for own in shapes)
    pieces: list[SliceRows] = []
    offset = 0
    for part, width in enumerate(widths):
        for rank, own in enumerate(shapes):
            before = sum(w[rank] for w in widths[:part])
            pitch = own[dim] * inner
            rows = Block(before * inner, width[rank] * inner, outer, pitch, pitch, 1)
            pieces.append(SliceRows(rank, rows, offset * inner, extent * inner))
            offset += width[rank]
    return Joint((*shape[:dim], extent, *shape[dim + 1 :]), tuple(pieces))


def join_along(shapes: Sequence[Shape], dim: int) -> Joint:
    """Joins slices end to end in a dimension."""
    joint = parts(shapes, dim, [[shape[dim] if 0 <= dim < len(shape) else 0 for shape in shapes]])
    return Joint(joint.shape, joint.pieces, words={"cat_dim": dim})


def join(name: str, slices: Sequence[TensorEntry], joint: Joint) -> TensorEntry:
    """Joins slices to the whole tensor. Raises InconsistentError if the slices do not fit the rule."""
    first = slices[0]
    if len({entry.dtype for entry in slices}) > 1:
        raise InconsistentError(
            f"slices of tensor {name!r} have several dtypes",
            found=", ".join(sorted({e.dtype.name for e in slices})),
            remedy=OTHER_SAVE,
        )
    itemsize = first.dtype.itemsize
    if joint.total:
        shape = joint.shape
        numel = math.prod(shape)
        store = ComputedStore(numel * itemsize, lambda: total_of(slices, joint.total or "mean"), sources_of(slices))
        return TensorEntry(name, shape, first.dtype, first.role, (Fragment(store, 0, 0, numel),) if numel else ())
    held = [entry.fragments for entry in slices]
    fragments = _place_slices(held, joint.pieces, itemsize)
    replicas = [
        Replica(first.dtype, _place_slices(held, pieces, itemsize), _rank(rank), True)
        for rank, pieces in joint.copies.items()
    ]
    copies = [[copy for copy in entry.replicas if copy.rank and copy.dtype == entry.dtype] for entry in slices]
    for number in range(max(map(len, copies))):  # the slices' own: where one has fewer, it stands for itself
        several = [own[number] if number < len(own) else None for own in copies]
        other = [copy.fragments if copy else entry.fragments for entry, copy in zip(slices, several, strict=True)]
        rank = " and ".join(dict.fromkeys(copy.rank for copy in several if copy))
        is_whole = any(copy.whole for copy in several if copy)
        replicas += [
            Replica(first.dtype, _place_slices(other, pieces, itemsize), rank, is_whole)
            for pieces in (joint.pieces, *joint.copies.values())
        ]
    weights = [copy for entry in slices if (copy := entry.own_copy) is not None]
    if len(weights) == len(slices):
        narrow, own = weights[0].dtype, [weight.fragments for weight in weights]
        replicas.append(Replica(narrow, _place_slices(own, joint.pieces, narrow.itemsize)))
        replicas += [
            Replica(narrow, _place_slices(own, pieces, narrow.itemsize), _rank(rank))
            for rank, pieces in joint.copies.items()
        ]
    return first_rows(TensorEntry(name, joint.shape, first.dtype, first.role, fragments, tuple(replicas)), joint.keep)


def first_rows(entry: TensorEntry, keep: int | None) -> TensorEntry:
    """The first `keep` rows of the first dimension; all rows if it is None."""
    if keep is None or not entry.shape or keep >= entry.shape[0]:
        return entry
    shape = (keep, *entry.shape[1:])
    numel = math.prod(shape)
    fragments = clip(entry.fragments, 0, numel, entry.dtype.itemsize)
    replicas = (replace(r, fragments=clip(r.fragments, 0, numel, r.dtype.itemsize)) for r in entry.replicas)
    return replace(entry, shape=shape, fragments=fragments, replicas=tuple(replicas))


def cut_off(name: str, slices: Sequence[TensorEntry], joint: Joint) -> Iterator[Padding]:
    """The rows of slices that are cut off as padding, of the whole tensor and of copies of it."""
    if joint.keep is None or joint.total:
        return
    entry = join(name, slices, replace(joint, keep=None))
    kept = math.prod((min(joint.keep, entry.shape[0]), *entry.shape[1:]))
    seen: set[Fragment] = set()
    places: list[TensorEntry | Replica] = [entry, *(copy for copy in entry.replicas if copy.rank)]
    for held in places:
        beyond = clip(held.fragments, kept, entry.numel, held.dtype.itemsize)
        fragments = tuple(fragment for fragment in beyond if fragment not in seen)
        seen.update(fragments)
        if fragments:
            yield Padding(held.dtype, fragments, "rows of a vocabulary beyond the real ones", zero=False)


def _rank(rank: int) -> str:
    return f"tensor-parallel rank {rank}"


def _place_slices(
    slices: Sequence[tuple[Fragment, ...]], pieces: Sequence[SliceRows], itemsize: int
) -> tuple[Fragment, ...]:
    found: list[Fragment] = []
    for piece in pieces:
        found += place(slices[piece.rank], piece.rows, piece.start, piece.pitch, itemsize)
    return tuple(sorted(found, key=lambda fragment: fragment.start))
