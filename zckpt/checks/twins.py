"""Files that hold different parts of a model, and the same bytes: one is a copy under the other's name.

For `soundness`. A catalog reads every element once, so two files from which it reads are never two copies of one part. Parts of
trained weights are never alike; equal are only constant ones (biases of zeros, norms of ones), tiny ones, and experts or layers
that a run began with and has not trained yet.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from zckpt.base.errors import ZckptError
from zckpt.base.words import count
from zckpt.checks.integrity import CheckedFile
from zckpt.containers.container import open_input
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.fragments import Fragment
from zckpt.core.stores import FileStore

_LEAST = 64
"""The least bytes that two files must have in common, constant tensors aside: fewer, such as step counts, may agree by
chance.
"""
_HEAD = 4 << 10
"""The bytes of one tensor's part that are read first in each file; more is read only if these are equal."""
_MOST = 64 << 10
"""The most bytes that are then compared of each part."""
_TRIES = 8
"""The most tensors that are compared for a set of files, if the parts of the first ones are constant."""

Spans = Sequence[tuple[int, int]]
"""First byte and bytes of a tensor's fragments in a file."""
Cut = Mapping[str, Spans]
"""Path of a file -> where a tensor's part is in it."""


def find_twins(
    catalog: Catalog, states: Sequence[TensorEntry], files: Sequence[CheckedFile], names: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """The files from which different parts of a model or its optimizer are read, with parts that are the same bytes.

    Args:
        catalog: of the save.
        states: of its optimizer.
        files: of the save, with their checksums.
        names: path -> what the file is called.

    Returns:
        Problems: parts that cannot be alike; and notes: parts that may be.
    """
    problems: list[str] = []
    notes: list[str] = []
    told: set[tuple[str, str]] = set()
    entries = [*catalog.tensors.values(), *states]
    with suppress(ZckptError):  # a file that cannot be read: other checks say so
        for a, b, number in _alike(entries):
            told.add((a, b))
            problems.append(
                f"{names.get(a, a)!r} and {names.get(b, b)!r} hold the same bytes of {count(number, 'tensor')}, and each "
                "should hold another part: one is a copy under the other's name"
            )
        for a, b, is_constant in _equal_files(entries, files) if catalog.source.layout != "plain" else ():
            both = f"{names.get(a, a)!r} and {names.get(b, b)!r} hold the same bytes"
            if (a, b) in told:
                continue
            if is_constant or catalog.source.global_steps == 0:
                notes.append(f"{both}: one may be a copy under the other's name.")
            else:
                problems.append(f"{both}, where each should hold other tensors: one is a copy under the other's name")
    return problems, notes


def _alike(entries: Sequence[TensorEntry]) -> Iterator[tuple[str, str, int]]:
    """Two files, and the number of tensors that they share: the parts of all of these are alike, and not all constant."""
    cuts = [cut for entry in entries if len(cut := _cut_of(entry)) > 1]
    cuts.sort(key=lambda cut: -min(_nbytes(spans) for spans in cut.values()))
    tries: dict[frozenset[str], int] = {}
    done: list[frozenset[str]] = []
    found: set[tuple[str, str]] = set()
    for cut in cuts:
        paths = frozenset(cut)
        if tries.get(paths, 0) >= _TRIES or any(paths <= one for one in done):
            continue
        tries[paths] = tries.get(paths, 0) + 1
        most = min(_HEAD, min(_nbytes(spans) for spans in cut.values()))
        heads: dict[bytes, list[str]] = {}
        for path in sorted(cut):
            heads.setdefault(_read(path, cut[path], most), []).append(path)
        if not any(map(_is_constant, heads)):
            done.append(paths)
        for head, (first, *others) in heads.items():
            for other in others if not _is_constant(head) else ():
                shared = [(one[first], one[other]) for one in cuts if first in one and other in one]
                if (first, other) not in found and sum(_alike_bytes(first, a, other, b) for a, b in shared) >= _LEAST:
                    found.add((first, other))
                    yield first, other, len(shared)


def _cut_of(entry: TensorEntry) -> Cut:
    """The parts of a tensor in each of the files that share it."""
    parts: dict[str, list[tuple[int, int]]] = {}
    for fragment in entry.fragments if len(entry.fragments) > 1 else ():
        if isinstance(fragment.store, FileStore) and fragment.numel:
            parts.setdefault(fragment.store.path, []).append(_span_of(fragment, entry.dtype.itemsize))
    return parts


def _span_of(fragment: Fragment, itemsize: int) -> tuple[int, int]:
    return fragment.byte_offset, fragment.nbytes_end(itemsize) - fragment.byte_offset


def _nbytes(spans: Spans) -> int:
    return sum(nbytes for _, nbytes in spans)


def _alike_bytes(path: str, spans: Spans, other: str, others: Spans) -> float:
    """The bytes that two parts have in common: 0 if they are constant, negative if they differ."""
    most = min(_nbytes(spans), _nbytes(others), _MOST)
    if (data := _read(path, spans, most)) != _read(other, others, most):
        return -math.inf
    return 0 if _is_constant(data) else most


def _read(path: str, spans: Spans, most: int) -> bytes:
    """The first bytes of a tensor's part."""
    data = b""
    with open_input(path) as file:
        for offset, nbytes in spans:
            data += file.read(offset, min(nbytes, most - len(data)), "a tensor")
            if len(data) >= most:
                break
    return data


def _is_constant(data: bytes) -> bool:
    """Whether all numbers of up to 8 bytes are equal."""
    return data[8:] == data[:-8]


def _equal_files(entries: Sequence[TensorEntry], files: Sequence[CheckedFile]) -> Iterator[tuple[str, str, bool]]:
    """Two files, and one of them has all records with trained numbers of the other, by their checksums; whether all
    are constant.
    """
    records = {file.store.path: sorted(file.records, key=lambda record: record[1]) for file in files}
    held: dict[str, set[int]] = {}
    for entry in entries:
        for fragment in entry.fragments if entry.role == "parameter" else ():
            if isinstance(fragment.store, FileStore) and (own := records.get(fragment.store.path)) is not None:
                if not own:  # a file without checksums is one record
                    size = fragment.store.size
                    own.append(("", 0, size, zlib.crc32(_read(fragment.store.path, [(0, size)], min(size, _MOST)))))
                at = bisect_right(own, fragment.byte_offset, key=lambda record: record[1]) - 1
                held.setdefault(fragment.store.path, set()).add(at)
    known: dict[tuple[int, int], list[str]] = {}
    sums: dict[str, set[tuple[int, int]]] = {}
    for path, numbers in held.items():
        large = [records[path][number] for number in sorted(numbers)]
        own_sums = sums[path] = {(nbytes, crc) for _, _, nbytes, crc in large}
        for other in dict.fromkeys(other for one in own_sums for other in known.get(one, ())):
            if own_sums <= sums[other] or sums[other] <= own_sums:
                same = [(at, size) for _, at, size, crc in large if (size, crc) in sums[other]]
                if sum(size for _, size in same) >= _LEAST:
                    told = sum(
                        size for at, size in same if not _is_constant(_read(path, [(at, size)], min(size, _MOST)))
                    )
                    yield other, path, told < _LEAST
                    break
        for one in own_sums:
            known.setdefault(one, []).append(path)
