"""Tensors that are cut by rows, as `fully_shard` cuts them, or not at all, opened file by file in columns, not chunk by chunk.

For `items`. A save of thousands of ranks has a million chunks. Where the torch files of a tensor's chunks are alike
(`containers.alike_items`) and lie in local files, their headers are compared by C++, and a chunk becomes nothing but a
`Fragment`. All other tensors are opened chunk by chunk.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from zckpt.base.errors import ZckptError
from zckpt.containers.alike_items import AlikeItems, AlikeTensor
from zckpt.containers.container import Input, open_input
from zckpt.core.catalog import TensorForm
from zckpt.core.fragments import Fragment
from zckpt.core.stores import FileStore
from zckpt.layouts.dcp.chunks import Chunks
from zckpt.layouts.dcp.metadata import TensorItem
from zckpt.layouts.save.listing import Listing

if TYPE_CHECKING:
    from zckpt._core import Described

_LEAST_CHUNKS = 8
"""Of a tensor that is cut: fewer are opened as quickly one by one."""


def fragments_of_rows(
    items: Mapping[str, TensorItem], listing: Listing, alike: AlikeItems
) -> dict[str, tuple[Fragment, ...]]:
    """The fragments of the tensors that can be opened in columns, by name; nothing is said of the others.

    Args:
        items: the tensors.
        listing: the files.
        alike: what is known of torch files; it learns more.
    """
    whole: list[str] = []
    held: dict[str, Chunks] = {}
    for name, item in items.items():
        chunks = item.chunks
        if item.view is None and isinstance(chunks, Chunks) and len(chunks) and 0 not in item.size:
            if chunks.are_one(item.size):
                whole.append(name)
            elif len(chunks) >= _LEAST_CHUNKS and chunks.are_rows(item.size):
                held[name] = chunks
    opened = _Opened(listing, alike)
    if listing.absent or not opened.open(items[name].chunks for name in itertools.chain(whole, held)):
        return {}
    found = dict(opened.whole(items, whole))
    first = len(whole)
    for name, chunks in held.items():
        if (fragments := opened.fragments(items[name], chunks, first)) is not None:
            found[name] = fragments
        first += len(chunks)
    return found


def places_of(
    described: Described, forms: Sequence[TensorForm], form: Sequence[int], listing: Listing, alike: AlikeItems
) -> tuple[tuple[list[FileStore], Sequence[int]], array[int]] | None:
    """The files of tensors that are one chunk each, and for each tensor the number of its file, and the byte at which it begins.

    None unless all files are here, all torch files are alike known ones and what the metadata say, and no two tensors share
    bytes: then they are opened one by one, and whoever does that says what is wrong.

    Args:
        described: the tensors.
        forms: their forms.
        form: for each tensor the number of its form.
        listing: the files.
        alike: what is known of torch files; it learns more.
    """
    where = [listing.where(name) for name in described.files()]
    if listing.absent or any(place.is_remote or not place.is_file() for place in where):
        return None
    opened = _Opened(listing, alike)
    offsets, lengths = opened.take(described)
    file = array("i", described.take("file"))
    rows = [array("i") for _ in where]
    for number, at in enumerate(file):
        if at >= 0:
            rows[at].append(number)
    numels = [math.prod(one.shape) for one in forms]
    nbytes = [numel * one.dtype.itemsize for numel, one in zip(numels, forms, strict=True)]
    stores: list[FileStore] = []
    for location, here in zip(where, rows, strict=True):
        found = array("q", sorted((n for n in here if numels[form[n]]), key=offsets.__getitem__))
        with open_input(location.path) as source:
            stores.append(source.store())
            end = 0
            for number, distance in zip(found, opened.distances(source, found, lengths, forms, form), strict=True):
                start = offsets[number] + distance
                if distance < 0 or start < end:
                    return None
                end = start + nbytes[form[number]]
                offsets[number] = start
            if end > source.size:
                return None
    return (stores, file), offsets


class _Opened:
    """The chunks of all tensors, one behind the other: of each, the number of what its torch file is alike, or -1."""

    def __init__(self, listing: Listing, alike: AlikeItems) -> None:
        self._listing = listing
        self._alike = alike
        self._files: dict[str, int] = {}
        self._stores: dict[int, FileStore] = {}
        self._kinds: list[AlikeTensor] = []
        self._numbers: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._file_of = array("i")
        self._which = array("i")
        self._offsets = array("q")

    def open(self, held: Iterable[Sequence[object]]) -> bool:
        """Compares the headers of all chunks' torch files, file by file; returns whether there are any, in files that exist."""
        offsets, lengths = self._offsets, array("q")
        files: Sequence[str] | None = None
        numbers: list[int] = []
        for chunks in held:
            if not isinstance(chunks, Chunks):
                continue
            if chunks.files is not files:
                files = chunks.files
                numbers = [self._files.setdefault(file, len(self._files)) for file in files]
            if len(chunks) == 1:
                file, offset, length = chunks.only_place()
                self._file_of.append(numbers[file])
                offsets.append(offset)
                lengths.append(length)
                continue
            places = chunks.place_columns()
            self._file_of.extend(map(numbers.__getitem__, places[0]))
            offsets += places[1]
            lengths += places[2]
        self._which = array("i", [-1]) * len(offsets)
        names = list(self._files)
        where = {name: self._listing.where(name) for name in names}
        if not all(place.is_remote or place.is_file() for place in where.values()):
            return False
        order = sorted(range(len(offsets)), key=self._file_of.__getitem__)
        for number, here in itertools.groupby(order, key=self._file_of.__getitem__):
            location = where[names[number]]
            if location.is_remote:
                continue
            found = array("q", sorted(here, key=offsets.__getitem__))
            with open_input(location.path) as source:
                self._stores[number] = source.store()
                for chunk, kind in zip(found, self._kinds_in(source, found, lengths), strict=True):
                    self._which[chunk] = kind
        return bool(offsets)

    def take(self, described: Described) -> tuple[array[int], array[int]]:
        """The places of tensors' torch files: offsets and lengths."""
        self._offsets = array("q", described.take("offset"))
        return self._offsets, array("q", described.take("length"))

    def distances(
        self, source: Input, chunks: array[int], lengths: array[int], forms: Sequence[TensorForm], form: Sequence[int]
    ) -> Iterator[int]:
        """Of each chunk in a file, how far its elements are behind the beginning of its torch file; below zero where that holds
        something else.
        """
        known: dict[tuple[int, int], int] = {}
        for chunk, kind in zip(chunks, self._kinds_in(source, chunks, lengths), strict=True):
            key = kind, form[chunk]
            if (distance := known.get(key)) is None:
                one = None if kind < 0 else self._kinds[kind]
                is_such = one and one.ref.is_contiguous and (one.ref.shape, one.ref.dtype) == forms[form[chunk]][:2]
                distance = known[key] = one.distance if one and is_such else -1
            yield distance

    def _kinds_in(self, source: Input, chunks: Sequence[int], lengths: array[int]) -> Iterator[int]:
        """Of each chunk in a file, the number of what it is alike; what is new is read, and others are compared with it.

        In each round, one file of each length is read that is like no known one; a length that taught nothing is left alone.
        """
        offsets = self._offsets
        found: list[AlikeTensor | None] = [None] * len(chunks)
        rest = list(range(len(chunks)))
        while rest:
            places = array("q")
            for at in rest:
                places.extend((offsets[chunks[at]], lengths[chunks[at]]))
            for at, kind in zip(rest, self._alike.which(source, places), strict=True):
                found[at] = kind
            rest = [at for at in rest if found[at] is None]
            firsts: dict[int, int] = {}
            for at in rest:
                firsts.setdefault(lengths[chunks[at]], at)
            learned = {length for length, at in firsts.items() if self._learn(source, offsets[chunks[at]], length)}
            rest = [at for at in rest if lengths[chunks[at]] in learned]
        for kind in found:
            if kind is None or kind.ref.store.byteorder != "little":
                yield -1
                continue
            if id(kind) not in self._numbers:
                self._numbers[id(kind)] = len(self._kinds)
                self._kinds.append(kind)
            yield self._numbers[id(kind)]

    def _learn(self, source: Input, offset: int, length: int) -> bool:
        """Reads a torch file; returns whether others can be compared with it. What is wrong, the other way says."""
        if offset + length > source.size:
            return False
        try:
            self._alike.root(source.part(offset, length, "an item"))
        except ZckptError:
            return False
        return self._alike.which(source, array("q", (offset, length))) != [None]

    def whole(
        self, items: Mapping[str, TensorItem], names: Iterable[str]
    ) -> Iterator[tuple[str, tuple[Fragment, ...]]]:
        """Name and only fragment of tensors in one chunk, which come first and in this order; without those that are not what
        the metadata say, or are known to nobody.
        """
        kinds = [(ref.shape, ref.dtype) if (ref := kind.ref).is_contiguous else None for kind in self._kinds]
        numels = [kind.ref.numel for kind in self._kinds]
        for name, file, offset, which in zip(names, self._file_of, self._offsets, self._which):
            item = items[name]
            if which >= 0 and (item.size, item.dtype) == kinds[which]:
                place = offset + self._kinds[which].distance
                yield name, (Fragment(self._stores[file], place, 0, numels[which]),)

    def fragments(self, item: TensorItem, chunks: Chunks, first: int) -> tuple[Fragment, ...] | None:
        """The fragments of a tensor, with chunks that begin at number `first`; None if one is not what the metadata say, or is
        known to nobody.
        """
        starts, counts = chunks.rows()
        which, files = (column[first : first + len(chunks)] for column in (self._which, self._file_of))
        for kind, count in set(zip(which, counts, strict=True)):
            if kind < 0:
                return None
            ref = self._kinds[kind].ref
            if (ref.shape, ref.dtype) != ((count, *item.size[1:]), item.dtype) or not ref.is_contiguous:
                return None
        row = math.prod(item.size[1:])
        numels = {count: count * row for count in {*counts}}
        distances = [kind.distance for kind in self._kinds]
        stores = self._stores
        columns = zip(files, chunks.place_columns()[1], which, starts, counts, strict=True)
        # Ranks' files are alike, and so are tensors: most numbers are equal to one of an earlier chunk, and need no memory.
        shared = self._shared.setdefault
        return tuple(
            Fragment(
                stores[file], shared(at := offset + distances[kind], at), shared(at := start * row, at), numels[count]
            )
            for file, offset, kind, start, count in columns
        )
