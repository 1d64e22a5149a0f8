"""Whether two places hold the same numbers: `cast(master) == weight`, read at both ends of every fragment.

For layouts that must prove a guess, and for conversions before anything is published. A layout that is shifted by even
one element cannot pass: some fragment's end then holds a neighbour's number. A few elements per fragment are read, so a
checkpoint of any size is checked in a moment. Nothing here imports numpy, which takes longer than the check.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from zckpt.base.errors import InconsistentError
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, Replica, TensorEntry
from zckpt.core.dtypes import DType
from zckpt.core.fragments import Fragment
from zckpt.engine.elements import ElementReader, Wanted

WIDTH = 8
"""Elements compared at each end of a fragment. One would do; a few make a chance agreement of shifted data unlikely."""

_AHEAD = 64
"""The most tensors with numbers that are fetched at once from another machine."""


def ends(fragments: Sequence[Fragment]) -> Iterator[tuple[int, int]]:
    """The element ranges at both ends of every fragment; of one of many rows, those of its first and last row."""
    for fragment in fragments:
        if not fragment.numel:
            continue
        block = fragment.block()
        first, last = block.start, block.start + (block.rows - 1) * block.pitch
        if first == last and block.count <= 2 * WIDTH:
            yield first, first + block.count
        else:
            yield first, first + min(WIDTH, block.count)
            yield last + block.count - min(WIDTH, block.count), last + block.count


_PART = 1 << 16


def _ranges_to_compare(entry: TensorEntry, replica: Replica) -> Iterator[tuple[int, int]]:
    """Element ranges at which a replica is compared."""
    if not replica.whole:
        return ends(entry.fragments)
    first = 0
    if replica.dtype != entry.dtype and entry.numel > _PART:  # the C++ finds where to begin
        from zckpt.engine.independent import differences

        found = differences([(replace(entry, replicas=()), entry.as_in(replica))])
        first = found[0].first if found else entry.numel
    return ((start, min(start + _PART, entry.numel)) for start in range(first, entry.numel, _PART))


def first_difference(
    reader: ElementReader,
    master: tuple[Sequence[Fragment], DType],
    copy: tuple[Sequence[Fragment], DType],
    ranges: Iterable[tuple[int, int]] | None = None,
) -> tuple[int, float, float] | None:
    """The first element with a rounded master that is not its copy, as (element, master, copy); None when all agree.

    `ranges` are the elements that are compared; by default both ends of every fragment.
    """
    (fragments, dtype), (others, narrow) = master, copy
    from zckpt.engine.rounding import MANTISSA, is_rounded, number

    if dtype not in MANTISSA or narrow not in MANTISSA:
        return None
    for start, stop in ends(fragments) if ranges is None else ranges:
        data = reader.read(Wanted(fragments, dtype, start, stop))
        copied = reader.read(Wanted(others, narrow, start, stop))
        if dtype == narrow and data == copied:
            continue
        masters, copies = _bits(data, dtype), _bits(copied, narrow)
        for index, (bits, found) in enumerate(zip(masters, copies, strict=True)):
            if not is_rounded(bits, dtype, found, narrow):
                return start + index, number(bits, dtype), number(found, narrow)
    return None


def is_copy(
    reader: ElementReader, master: tuple[Sequence[Fragment], DType], copy: tuple[Sequence[Fragment], DType]
) -> bool:
    """Whether the second place holds the first, rounded, at both ends of every fragment."""
    from zckpt.engine.rounding import MANTISSA

    return master[1] in MANTISSA and copy[1] in MANTISSA and first_difference(reader, master, copy) is None


def _bits(data: bytes, dtype: DType) -> Sequence[int]:
    return array.array({8: "Q", 4: "I", 2: "H"}[dtype.itemsize], data)


def disagreements(catalog: Catalog) -> Iterator[tuple[TensorEntry, Replica, tuple[int, float, float]]]:
    """Tensors with replicas that do not hold the same numbers, with the first such replica and difference found."""
    entries = [entry for entry in catalog.tensors.values() if entry.replicas]
    if not entries:
        return
    with ElementReader() as reader:
        for index, entry in enumerate(entries):
            if index % _AHEAD == 0:
                reader.fetch_ahead(_ranges_to_read(entries[index : index + _AHEAD]))
            for replica in entry.replicas:
                difference = first_difference(
                    reader,
                    (entry.fragments, entry.dtype),
                    (replica.fragments, replica.dtype),
                    _ranges_to_compare(entry, replica),
                )
                if difference is not None:
                    yield entry, replica, difference
                    break


def _ranges_to_read(entries: Iterable[TensorEntry]) -> Iterator[Wanted]:
    """What comparing these entries reads, but for large tensors that are compared whole."""
    for entry in entries:
        for replica in entry.replicas:
            if not replica.whole or entry.numel <= _PART:
                for start, stop in _ranges_to_compare(entry, replica):
                    yield Wanted(entry.fragments, entry.dtype, start, stop)
                    yield Wanted(replica.fragments, replica.dtype, start, stop)


def check(catalog: Catalog) -> None:
    """Makes sure that every replica agrees. Raises InconsistentError if some do not."""
    bad = list(disagreements(catalog))
    if bad:
        raise _disagreement(catalog.source.path, [e.name for e, *_ in bad], *bad[0])


def _disagreement(
    path: str, names: list[str], entry: TensorEntry, replica: Replica, difference: tuple[int, float, float]
) -> InconsistentError:
    element, value, found = difference
    here = f"element {element:,} of {entry.name!r} is {value!r}"
    if replica.rank:
        return InconsistentError(
            f"{replica.rank} holds other numbers than the first in {count(len(names), 'tensor')}: {examples(names)}",
            file=path,
            found=f"{here} in one copy and {found!r} in the other",
            expected="equal copies",
            remedy="Copy all files of one save again. If the copies drifted apart in training, average them with a rule "
            "(--tp-rules). Nothing was written.",
        )
    return InconsistentError(
        f"the optimizer's fp32 weights are not the model's in {count(len(names), 'tensor')}: {examples(names)}",
        file=path,
        found=f"{here} for the optimizer and {found!r} in the model",
        expected="the optimizer's number, rounded to the model's dtype, in the model",
        remedy="Copy all files of one save again. If they are of one save, zckpt does not know this layout: "
        "--allow-unknown-layout converts it unchecked. Nothing was written.",
    )
