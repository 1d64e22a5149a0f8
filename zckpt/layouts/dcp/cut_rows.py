"""Tensors that are cut by rows, as `fully_shard` cuts them, opened file by file in columns instead of chunk by chunk.

For `items`. A save of thousands of ranks has a million chunks. Where the torch files of a tensor's chunks are alike
(`containers.alike_items`) and lie in local files, their headers are compared by C++, and a chunk becomes nothing but a
`Fragment`. All other tensors are opened chunk by chunk.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping

from zckpt.containers.alike_items import AlikeItems, AlikeTensor
from zckpt.containers.container import Input, open_input
from zckpt.core.fragments import Fragment
from zckpt.core.stores import FileStore
from zckpt.layouts.dcp.chunks import Chunks
from zckpt.layouts.dcp.metadata import TensorItem
from zckpt.layouts.save.listing import Listing

_LEAST_CHUNKS = 8
"""Of a tensor: fewer are opened as quickly one by one."""


def fragments_of_rows(
    items: Mapping[str, TensorItem], listing: Listing, alike: AlikeItems
) -> dict[str, tuple[Fragment, ...]]:
    """The fragments of the tensors that can be opened in columns, by name; nothing is said of the others.

    Args:
        items: the tensors.
        listing: the files.
        alike: what is known of torch files; it learns more.
    """
    held = {
        name: item.chunks
        for name, item in items.items()
        if len(item.chunks) >= _LEAST_CHUNKS
        and item.view is None
        and isinstance(item.chunks, Chunks)
        and item.chunks.are_rows(item.size)
    }
    if listing.absent or not held:
        return {}
    opened = _Opened(listing, alike)
    opened.open(held.values())
    found: dict[str, tuple[Fragment, ...]] = {}
    first = 0
    for name, chunks in held.items():
        if (fragments := opened.fragments(items[name], chunks, first)) is not None:
            found[name] = fragments
        first += len(chunks)
    return found


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

    def open(self, held: Iterable[Chunks]) -> None:
        """Compares the headers of all chunks' torch files, file by file."""
        offsets, lengths = array("q"), array("q")
        for chunks in held:
            rows = chunks.rows()  # made again by `fragments`: of a million chunks, columns take 40 MB
            numbers = [self._files.setdefault(file, len(self._files)) for file in rows.files]
            self._file_of.extend(map(numbers.__getitem__, rows.numbers))
            offsets += rows.offsets
            lengths += rows.lengths
        self._which = array("i", [-1]) * len(offsets)
        names = list(self._files)
        order = sorted(range(len(offsets)), key=self._file_of.__getitem__)
        for number, here in itertools.groupby(order, key=self._file_of.__getitem__):
            location = self._listing.where(names[number])
            if location.is_remote or not location.is_file():
                continue
            found = sorted(here, key=offsets.__getitem__)
            with open_input(location.path) as source:
                self._stores[number] = source.store()
                for chunk, kind in zip(found, self._kinds_in(source, found, offsets, lengths), strict=True):
                    self._which[chunk] = kind

    def _kinds_in(self, source: Input, chunks: list[int], offsets: array[int], lengths: array[int]) -> Iterator[int]:
        """Of each chunk in a file, the number of what it is alike; what is new is read, and others are compared with it."""
        found: list[AlikeTensor | None] = []
        while len(found) < len(chunks):
            places = array("q", itertools.chain.from_iterable((offsets[n], lengths[n]) for n in chunks[len(found) :]))
            known = list(itertools.takewhile(lambda kind: kind is not None, self._alike.which(source, places)))
            found += known
            if len(found) == len(chunks):
                break
            number = chunks[len(found)]
            if offsets[number] + lengths[number] > source.size:
                found.append(None)  # the other way says what is wrong
                continue
            self._alike.root(source.part(offsets[number], lengths[number], "an item"))
            found += self._alike.which(source, array("q", (offsets[number], lengths[number])))
        for kind in found:
            if kind is None or kind.ref.store.byteorder != "little":
                yield -1
                continue
            if id(kind) not in self._numbers:
                self._numbers[id(kind)] = len(self._kinds)
                self._kinds.append(kind)
            yield self._numbers[id(kind)]

    def fragments(self, item: TensorItem, chunks: Chunks, first: int) -> tuple[Fragment, ...] | None:
        """The fragments of a tensor, with chunks that begin at number `first`; None if one is not what the metadata say, or is
        known to nobody.
        """
        rows = chunks.rows()
        which, files = (column[first : first + len(chunks)] for column in (self._which, self._file_of))
        for kind, count in set(zip(which, rows.counts, strict=True)):
            if kind < 0:
                return None
            ref = self._kinds[kind].ref
            if (ref.shape, ref.dtype) != ((count, *item.size[1:]), item.dtype) or not ref.is_contiguous:
                return None
        row = math.prod(item.size[1:])
        numels = {count: count * row for count in {*rows.counts}}
        distances = [kind.distance for kind in self._kinds]
        stores = self._stores
        columns = zip(files, rows.offsets, which, rows.starts, rows.counts, strict=True)
        # Ranks' files are alike, and so are tensors: most numbers are equal to one of an earlier chunk, and need no memory.
        shared = self._shared.setdefault
        return tuple(
            Fragment(
                stores[file], shared(at := offset + distances[kind], at), shared(at := start * row, at), numels[count]
            )
            for file, offset, kind, start, count in columns
        )
