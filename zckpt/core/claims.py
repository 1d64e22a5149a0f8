"""Which bytes tensors read: checks that no two tensors read the same ones, and finds those that no tensor reads.

For `catalog` and `layouts`. A reader with a wrong offset can give each parameter the same bytes, and each is then complete. So
every fragment is a claim on bytes of its store. Claims of two tensors must not meet, nor may two claims of one tensor; a tensor
and its replicas may (they share bytes in part). Bytes that a file's own index gives to several tensors, views of one storage, are
named beforehand and left out.

[Note: the cost] One pass collects (start, stop) for each store, as plain numbers. Nearly always they follow each other, at least
when they are sorted; then that is all. Only for the other stores the fragments themselves are compared, with their rows and
pitches: interleaved slices share no byte, although the ranges from their first to their last byte meet.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from operator import le
from typing import NamedTuple

from zckpt.base.errors import COPY_AGAIN, InconsistentError, UnsupportedError
from zckpt.core.fragments import Block, ComputedStore, Fragment
from zckpt.core.overlaps import are_other_cells, overlaps
from zckpt.core.stores import FileStore, MemoryStore, Store

_MOST_COMPARED = 2_000_000
"""The most rows of claims that are compared one by one, in one store. Real files need none."""

_FAR = 1 << 64


class ByteSpan(NamedTuple):
    """Bytes [start, stop) of a store."""

    store: Store
    start: int
    stop: int


class Claim(NamedTuple):
    """The elements that one tensor reads.

    Attributes:
        owner: name of the tensor, for errors.
        copy: 0 for its elements; further numbers for its replicas, which may be the same bytes.
        itemsize: bytes of one element.
        fragments: of its elements.
    """

    owner: str
    copy: int
    itemsize: int
    fragments: Sequence[Fragment]


class _Claim(NamedTuple):
    """The bytes that one fragment reads: those of `block`, from `start` to `stop`."""

    start: int
    stop: int
    held: Claim
    block: Block


class Claims:
    """The bytes that tensors read.

    Args:
        held: the elements of all tensors.
        views: bytes that files' own indexes give to several tensors.

    Raises:
        InconsistentError: two tensors read the same bytes, or one reads bytes twice.
        UnsupportedError: they are too scattered to compare.
    """

    def __init__(self, held: Iterable[Claim] = (), views: Sequence[ByteSpan] = ()) -> None:
        self._owners: list[str] = []
        self._copies, self._sizes = array("q"), array("q")
        self._kept: list[Sequence[Fragment]] = []  # kept alive, so that their `id` stays theirs
        for one in held:
            self._owners.append(one.owner)
            self._copies.append(one.copy)
            self._sizes.append(one.itemsize)
            self._kept.append(one.fragments)
        self._views: dict[Hashable, list[ByteSpan]] = {}
        for view in views:
            self._views.setdefault(_key(view.store), []).append(view)
        spans, self._holed = _spans(self._held())
        self._sorted: dict[Hashable, tuple[Sequence[int], Sequence[int]]] = {}
        for key in list(spans):
            own = spans.pop(key)
            starts, stops = own[::2], own[1::2]
            if not _follow(starts, stops):
                order = sorted(range(len(starts)), key=starts.__getitem__)
                starts, stops = array("q", [starts[n] for n in order]), array("q", [stops[n] for n in order])
            self._sorted[key] = starts, stops
        crossed = {key for key, (starts, stops) in self._sorted.items() if not _follow(starts, stops)} | self._holed
        if crossed:
            for key, claims in self._claims_in(crossed).items():
                _check(claims, self._views.get(key, ()))

    def _held(self) -> Iterator[Claim]:
        return _with_sources(map(Claim, self._owners, self._copies, self._sizes, self._kept))

    def _claims_in(self, keys: set[Hashable]) -> dict[Hashable, list[_Claim]]:
        """The claims on some stores, sorted by their first byte."""
        found: dict[Hashable, list[_Claim]] = {key: [] for key in keys}
        for own in self._held():
            for fragment in own.fragments:
                if fragment.numel and (claims := found.get(_key(fragment.store))) is not None:
                    claims += _claims(fragment, own)
        for claims in found.values():
            claims.sort(key=lambda claim: claim.start)
        return found

    def include(self, held: Iterable[Claim]) -> bool:
        """Whether all of these were checked: the same fragments, under any names.

        A tensor of a checked catalog may get several names later, for an output that cannot tie them.
        """
        known: set[int] | None = None
        for at, own in enumerate(held):
            if at < len(self._kept) and own.fragments is self._kept[at] and own.itemsize == self._sizes[at]:
                continue  # nearly always: a catalog with the tensors of another one has them in its order
            if known is None:
                known = {id(fragments) * 1024 + size for fragments, size in zip(self._kept, self._sizes)}
            if id(own.fragments) * 1024 + own.itemsize not in known:  # a tuple takes three times the memory
                return False
        return True

    def forget(self) -> None:
        """Frees the memory that only `unused` needs."""
        self._sorted.clear()

    def unused(self, spans: Iterable[ByteSpan]) -> Iterator[ByteSpan]:
        """Of each span, the first range of bytes that no tensor reads, if there is one."""
        holed: dict[Hashable, tuple[Sequence[int], Sequence[int]]] = {}
        for span in spans:
            key = _key(span.store)
            if key in self._holed and key not in holed:
                rows = sorted(row for claim in self._claims_in({key})[key] for row in _rows(claim.block))
                holed[key] = [start for start, _ in rows], [stop for _, stop in rows]
            starts, stops = holed.get(key) or self._sorted.get(key, ((), ()))
            base = _base(span.store)
            gap = _first_gap(starts, stops, span.start + base, span.stop + base)
            if gap is not None:
                yield ByteSpan(span.store, gap[0] - base, gap[1] - base)


def _with_sources(held: Iterable[Claim]) -> Iterator[Claim]:
    """The same claims, with the sources of computed elements in place of these."""
    for own in held:
        store = own.fragments[0].store if len(own.fragments) == 1 else None
        if isinstance(store, ComputedStore):
            yield from (Claim(own.owner, own.copy, itemsize, fragments) for fragments, itemsize in store.sources)
        else:
            yield own


def _key(store: Store) -> Hashable:
    """A key that is equal for all stores of one file, and for all memory."""
    if isinstance(store, MemoryStore):
        return MemoryStore
    return store.path if type(store) is FileStore else id(store)


def _base(store: Store) -> int:
    return store.address if isinstance(store, MemoryStore) else 0


def _spans(held: Iterable[Claim]) -> tuple[dict[Hashable, array[int]], set[Hashable]]:
    """(start, stop, start, stop, ..) for each store, and the stores in which claims have holes or overlap themselves."""
    by_store: dict[Store, array[int]] = {}
    holed: set[Store] = set()
    for own in held:
        itemsize = own.itemsize
        for fragment in own.fragments:
            store, start, count = fragment.store, fragment.byte_offset, fragment.count
            if count:
                spans = by_store.get(store)
                if spans is None:
                    spans = by_store[store] = array("q")
                spans.append(start)
                if fragment.rows == 1:
                    spans.append(start + count * itemsize)
                    continue
                spans.append(fragment.nbytes_end(itemsize))
                if len(_extents(fragment, itemsize)[1]):
                    holed.add(store)
    merged: dict[Hashable, array[int]] = {}
    for store, spans in by_store.items():
        if base := _base(store):
            spans = array("q", (at + base for at in spans))
        key = _key(store)
        if key in merged:
            merged[key] += spans
        else:
            merged[key] = spans
    return merged, set(map(_key, holed))


def _follow(starts: Sequence[int], stops: Sequence[int]) -> bool:
    """Whether each range begins at the end of the one before it, or later."""
    return all(map(le, stops, islice(starts, 1, None)))


def _extents(fragment: Fragment, itemsize: int) -> tuple[int, list[tuple[int, int]]]:
    """The bytes of a dense run of a fragment in its store, and (distance in bytes, number) of such runs, the nearest first."""
    axes = [(fragment.step, fragment.count), (fragment.store_pitch, fragment.rows)]
    run, left = itemsize, sorted((apart * itemsize, extent) for apart, extent in axes if extent > 1)
    while left and left[0][0] == run:
        run *= left.pop(0)[1]
    if len(left) == 2 and left[1][0] == left[0][0] * left[0][1]:
        left = [(left[0][0], left[0][1] * left[1][1])]
    return run, left


def _claims(fragment: Fragment, held: Claim) -> Iterator[_Claim]:
    """The bytes that a fragment reads, as rows; if they are in two dimensions, one claim for each row of the outer one."""
    run, left = _extents(fragment, held.itemsize)
    first = fragment.byte_offset + _base(fragment.store)
    outer, times = left[1] if len(left) == 2 else (0, 1)
    pitch, rows = left[0] if left else (0, 1)
    for start in range(first, first + outer * times, outer) if outer else (first,):
        yield _Claim(start, start + (rows - 1) * pitch + run, held, Block(start, run, rows, pitch, pitch, 1))


def _rows(block: Block) -> Iterator[tuple[int, int]]:
    for row in range(block.rows):
        yield block.start + row * block.pitch, block.start + row * block.pitch + block.count


def _check(claims: Iterable[_Claim], views: Sequence[ByteSpan]) -> None:
    """Raises if claims on one store, sorted by their first byte, meet; compares those with ranges that meet."""
    shared = sorted((view.start + _base(view.store), view.stop + _base(view.store)) for view in views)
    group: list[_Claim] = []
    end = 0
    for claim in claims:
        at = bisect_right(shared, (claim.start, _FAR)) - 1
        if at >= 0 and claim.stop <= shared[at][1]:
            continue
        if claim.block.rows > 1 and claim.block.pitch < claim.block.count:
            raise _both(claim, claim, claim.start, claim.start + claim.block.count)
        if claim.start >= end:
            _check_group(group)
            group = []
        group.append(claim)
        end = max(end, claim.stop)
    _check_group(group)


def _check_group(group: Sequence[_Claim]) -> None:
    """Raises if claims with ranges that meet share bytes, unless they are of one tensor and a replica of it."""
    if len(group) < 2:
        return
    first = group[0].start
    blocks = [claim.block._replace(start=claim.start - first) for claim in group]
    if any(block.rows > 1 for block in blocks) and are_other_cells(blocks):
        return
    left = _MOST_COMPARED
    for number, claim in enumerate(group):
        for other in islice(group, number + 1, None):
            if other.start >= claim.stop:
                break
            if claim.held.owner == other.held.owner and claim.held.copy != other.held.copy:
                continue
            left -= min(claim.block.rows, other.block.rows)
            if left < 0:
                raise UnsupportedError(
                    "its tensors are too scattered to check that they share no bytes", file=_file(claim),
                    found=f"{claim.held.owner!r} and {other.held.owner!r}, {len(group):,} pieces",
                    remedy="Call .contiguous() on them before saving.",
                )  # fmt: skip
            meeting = next(overlaps(claim.block, other.block), None)
            if meeting is not None:
                raise _both(claim, other, meeting.start, meeting.start + meeting.count)


def _file(claim: _Claim) -> str:
    at = ((f.byte_offset + _base(f.store), f) for f in claim.held.fragments)
    return str(next(f.store for first, f in at if first <= claim.start < first + f.nbytes_end(claim.held.itemsize)))


def _both(claim: _Claim, other: _Claim, start: int, stop: int) -> InconsistentError:
    a, b = claim.held.owner, other.held.owner
    return InconsistentError(
        "two tensors would read the same bytes" if a != b else "one tensor would read the same bytes twice",
        file=_file(claim), found=f"bytes {start:,}-{stop - 1:,} for {f'{a!r} and {b!r}' if a != b else repr(a)}",
        expected="bytes of its own for each tensor that is not tied",
        remedy=f"{COPY_AGAIN} If it is sound, report that zckpt does not understand it. Nothing was written.",
    )  # fmt: skip


def _first_gap(starts: Sequence[int], stops: Sequence[int], start: int, stop: int) -> tuple[int, int] | None:
    """The first bytes of [start, stop) that are in none of these ranges, which are sorted and do not meet."""
    first, last = bisect_left(starts, start), bisect_left(starts, stop)
    if first and stops[first - 1] > start:
        first -= 1
    own = stops[first:last]
    is_inside = bool(own) and starts[first] <= start and own[-1] >= stop
    if is_inside and sum(own) - sum(starts[first:last]) == own[-1] - starts[first]:
        return None
    for at in range(first, last):
        if starts[at] > start:
            return start, starts[at]
        start = max(start, stops[at])
    return (start, stop) if start < stop else None
