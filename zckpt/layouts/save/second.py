"""What a family's second reader says of a save: where each tensor's elements are, found without the family's own reader.

For `checks.second`, which compares it with the catalog. A second reader is written from the source of the framework, or from
the framework's own script that joins its files, and shares no arithmetic with the first reader: a mistake that both make would
not be noticed. So it imports values, containers and this module, and nothing else of `layouts`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import NamedTuple

from zckpt.base.dataclass import dataclass
from zckpt.containers import Placeholder, TensorRef
from zckpt.layouts.save.listing import Listing

Shape = tuple[int, ...]
Path = tuple[str | int, ...]
"""Keys from the top of a nested state dict to a value."""


NO_PROOF = "Compare the output with the model that was trained, or pass --trust-reader."
"""The remedy where a second reader cannot find the tensors: `verify` says why, and goes on without the proof."""


class StoredRows(NamedTuple):
    """Rows of elements in a file, and where they belong in the whole tensor.

    Attributes:
        path: of the file.
        offset: the byte of the file at which the first element is.
        start: the number of the first element in the whole tensor, row-major.
        count: elements of a row.
        rows: how many rows there are.
        pitch: elements of the tensor from one row to the next.
        store_pitch: elements of the file from one row to the next.
        step: elements of the file from one element of a row to the next.
    """

    path: str
    offset: int
    start: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed
    rows: int = 1
    pitch: int = 0
    store_pitch: int = 0
    step: int = 1


class HeldRun(NamedTuple):
    """Elements of a tensor, or of an optimizer's state of it.

    Attributes:
        tensor: as the catalog calls it.
        state: of the optimizer; empty for the weight.
        run: where they are. Several runs may say the same elements, which ranks hold alike: the catalog reads one of them.
    """

    tensor: str
    state: str
    run: StoredRows


class BesideMaster(NamedTuple):
    """A vector of fp32 weights in files that name no parameter, and a vector of states that lies beside it, cut alike."""

    master: TensorRef
    state: str
    held: TensorRef


class VectorPart(NamedTuple):
    """Elements of a vector, and of the states beside it, that are elements from `start` on of a tensor."""

    vector: TensorRef
    state: Mapping[str, TensorRef]
    first: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed
    start: int


@dataclass(frozen=True, slots=True)
class SecondLook:
    """What a second reader found.

    Attributes:
        names: every tensor of the model that the save says it has, read or not, and its shape where the save says it.
        runs: where elements are. They are asked for once, and may be made while they are.
        states: further runs, of states alone: they are asked for where an optimizer's states are compared.
        beside: pairs of vectors, for states of parameters that the files do not name.
        by_copy: whether masters have no names in the files, so that the comparison with the module's own weights, which have,
            proves their places.
        unproved: why some tensors have no runs; empty where all have.
        loose: those of `names` that are in a state dict and in no list of parameters, while the state dict lacks names of these
            lists: a loose one may be a copy of a listed one.
    """

    names: Mapping[str, Shape | None]
    runs: Iterable[HeldRun]
    states: Iterable[HeldRun] = ()
    beside: Iterable[BesideMaster] = ()
    by_copy: bool = False
    unproved: str = ""
    loose: Mapping[str, TensorRef] = field(default_factory=dict[str, TensorRef])


SecondReader = Callable[[Listing], SecondLook]
"""Finds the tensors of a save that the family's `read` accepts. What it does not understand it may raise as any error."""


class UnprovedFamily(NamedTuple):
    """A family without a second reader, and why it has none."""

    why: str


def hold_whole(name: str, state: str, ref: TensorRef) -> Iterator[HeldRun]:
    """The elements of a tensor that one file holds whole."""
    return hold_box(name, state, ref, (0,) * len(ref.shape), ref.shape)


def hold_box(name: str, state: str, ref: TensorRef, offsets: Sequence[int], shape: Sequence[int]) -> Iterator[HeldRun]:
    """The elements of a part: `ref` holds the indexes from `offsets` on, in every dimension, of a tensor of this shape.
    Raises ValueError if the part does not fit the shape.
    """
    dims = list(zip(offsets, ref.shape, shape, strict=True))
    if any(at < 0 or at + own > extent for at, own, extent in dims):
        raise ValueError(f"part {list(ref.shape)} at {list(offsets)} does not fit shape {list(shape)}")
    if not ref.numel:
        return
    start, pitch = 0, 1
    axes: list[tuple[int, int, int]] = []  # extent, elements of the tensor and of the file from one index to the next
    for (at, own, extent), step in zip(reversed(dims), reversed(ref.stride), strict=True):
        start += at * pitch
        if axes and own > 1 and pitch == axes[-1][0] * axes[-1][1] and step == axes[-1][0] * axes[-1][2]:
            axes[-1] = (axes[-1][0] * own, *axes[-1][1:])
        elif own > 1:
            axes.append((own, pitch, step))
        pitch *= extent
    if not axes or axes[0][1] != 1:
        axes.insert(0, (1, 1, 1))
    (count, _, step), (rows, apart, stored), *outer = (*axes, (1, 0, 0)) if len(axes) == 1 else axes
    size = ref.dtype.itemsize
    for indexes in itertools.product(*(range(extent) for extent, _, _ in reversed(outer))):
        moved = [(n * of, n * further) for n, (_, of, further) in zip(indexes, reversed(outer), strict=True)]
        offset = ref.byte_offset + sum(at for _, at in moved) * size
        first = start + sum(at for at, _ in moved)
        yield HeldRun(name, state, StoredRows(ref.store.path, offset, first, count, rows, apart, stored, step))


def rows_of(ref: TensorRef, dim: int, start: int, count: int) -> TensorRef:
    """The indexes [start, start + count) of a dimension of a tensor. Raises ValueError if it has fewer."""
    if not 0 <= start <= start + count <= ref.shape[dim]:
        raise ValueError(f"indexes {start:,}-{start + count:,} of dimension {dim} of {list(ref.shape)}")
    before = start * ref.stride[dim]
    return replace(
        ref,
        shape=(*ref.shape[:dim], count, *ref.shape[dim + 1 :]),
        byte_offset=ref.byte_offset + before * ref.dtype.itemsize,
        storage_offset=ref.storage_offset + before,
    )


def view_as(ref: TensorRef, shape: Sequence[int]) -> TensorRef:
    """A tensor without gaps in another shape of as many elements. Raises ValueError if it has gaps, or another number
    of elements.
    """
    if not ref.is_contiguous or ref.numel != math.prod(shape):
        raise ValueError(f"{list(ref.shape)} as {list(shape)}")
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return replace(ref, shape=tuple(shape), stride=tuple(stride))


def hold_elements(name: str, state: str, ref: TensorRef, first: int, count: int, start: int) -> HeldRun:
    """Elements [first, first + count) of a vector without gaps, which are elements from `start` on of a tensor. Raises
    ValueError if the vector has gaps, or fewer elements.
    """
    if not (ref.is_contiguous and 0 <= first <= first + count <= ref.numel):
        raise ValueError(f"elements {first:,}-{first + count:,} of a vector of {ref.numel:,}")
    return HeldRun(name, state, StoredRows(ref.store.path, ref.byte_offset + first * ref.dtype.itemsize, start, count))


def shapes_of(root: Mapping[str, object]) -> list[dict[str, Shape]]:
    """The shapes of trained parameters that a model file of DeepSpeed lists, group by group."""
    shapes = root.get("param_shapes")
    groups = shapes if isinstance(shapes, list | tuple) else [shapes] if shapes else []
    return [{str(name): shape_of(shape) for name, shape in mapping(group).items()} for group in groups]


def listed_in(root: Mapping[str, object]) -> dict[str, Shape | None]:
    """Parameters, buffers and dropped names of tied parameters in DeepSpeed's lists; empty where no parameters are listed."""
    found: dict[str, Shape | None] = {}
    for group in (*shapes_of(root), mapping(root.get("frozen_param_shapes"))):
        found.update((str(name), shape_of(shape)) for name, shape in group.items())
    buffers = root.get("buffer_names")
    if found:
        for dropped, kept in shared_in(root).items():
            found.setdefault(dropped, found.get(kept))
        for name in buffers if isinstance(buffers, list | tuple | set | frozenset) else ():
            found.setdefault(str(name), None)
    return found


def shared_in(root: Mapping[str, object]) -> dict[str, str]:
    """Dropped name -> kept name of tied parameters: a mapping, in older files a list of pairs."""
    shared = root.get("shared_params")
    pairs = shared.items() if isinstance(shared, Mapping) else shared if isinstance(shared, list | tuple) else ()
    return {str(dropped): str(kept) for dropped, kept in pairs}


def mapping(value: object) -> Mapping[str, object]:
    """The value if it is a mapping; otherwise an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def shape_of(value: object) -> Shape:
    """The shape that a file records: its whole numbers."""
    return tuple(dim for dim in value if isinstance(dim, int)) if isinstance(value, Iterable) else ()


def names_in_lists(loose: Mapping[str, Shape | None], lacking: Mapping[str, Shape | None]) -> dict[str, str]:
    """Pairs of a name in the state dict alone and a name in a model's lists alone, for the same tensor by name and
    shape.

    A pair is alone in that it ends with the same words; the longest such ends come first. A shape that is not known fits any.
    If all pairs begin differently in one and the same way, this holds for what is in no list too.
    """
    found: dict[str, str] = {}
    olds, news = dict(loose), dict(lacking)
    words = {name: [word for word in name.split(".") if word not in _WRAPPERS][-_WORDS:] for name in (*olds, *news)}
    for depth in range(max(map(len, words.values()), default=0), 0, -1):
        for by_shape in (True, False):
            ends: dict[tuple[object, ...], tuple[list[str], list[str]]] = {}
            for side, names in enumerate((olds, news)):
                for name, shape in names.items():
                    if len(words[name]) >= depth and not (by_shape and shape is None):
                        end = (*words[name][-depth:], shape if by_shape else None)
                        ends.setdefault(end, ([], []))[side].append(name)
            for old, new in ((a[0], b[0]) for a, b in ends.values() if len(a) == len(b) == 1):
                if by_shape or olds[old] is None or news[new] is None:
                    found[old] = new
                    del olds[old], news[new]
    begins = {_begins_of(old, new) for old, new in found.items()}
    for before, after in begins if len(begins) == 1 else ():
        for old in olds:
            name = after + old.removeprefix(before)
            if old.startswith(before) and name not in words:
                found[old] = name
    return found


_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Words that torch puts into names."""
_WORDS = 64
"""The most words at a name's end that are compared."""


def _begins_of(old: str, new: str) -> tuple[str, str]:
    """The beginnings of two names, without the words with which both end."""
    one, other = old.split("."), new.split(".")
    while one and other and one[-1] == other[-1]:
        del one[-1], other[-1]
    return "".join(f"{word}." for word in one), "".join(f"{word}." for word in other)


class Slice(NamedTuple):
    """How a slice of a tensor is made up in one dimension; the others are whole.

    Attributes:
        shape: of the slice.
        dim: the dimension that is cut.
        pieces: (first index in the slice, indexes, first index in the whole) of what lies in it one after the other.
        extent: indexes of the whole in this dimension.
    """

    shape: Shape
    dim: int
    pieces: Sequence[tuple[int, int, int]]
    extent: int


def cut_evenly(shape: Shape, dim: int, rank: int, ranks: int, pieces: int = 1) -> Slice:
    """One of `ranks` equal slices of a tensor; if it is `pieces` equal ones in this dimension, each of them is cut for itself."""
    own = shape[dim] // pieces
    return Slice(shape, dim, [(n * own, own, (n * ranks + rank) * own) for n in range(pieces)], shape[dim] * ranks)


def hold_slice(
    name: str, state: str, ref: TensorRef, first: int, count: int, start: int, cut: Slice
) -> Iterator[HeldRun]:
    """Elements [first, first + count) of a vector without gaps, which are elements from `start` on of a slice. Raises
    ValueError if the vector has gaps, or fewer elements.
    """
    whole = hold_elements(name, state, ref, first, count, start).run
    inner = math.prod(cut.shape[cut.dim + 1 :])
    row, wide = cut.shape[cut.dim] * inner, cut.extent * inner
    for number in range(start // row, -(-(start + count) // row)) if count else ():
        for at, own, to in cut.pieces:
            low = max(start, number * row + at * inner)
            high = min(start + count, number * row + (at + own) * inner)
            if low < high:
                moved = number * wide + to * inner + low - number * row - at * inner
                offset = whole.offset + (low - start) * ref.dtype.itemsize
                yield HeldRun(name, state, StoredRows(whole.path, offset, moved, high - low))


def as_number(value: object) -> int:
    """A number of 0 or more. Raises ValueError for other values."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} instead of a number")
    return value


def as_sequence(value: object) -> Sequence[object]:
    """A list or a tuple; empty for other values."""
    return value if isinstance(value, list | tuple) else ()


def fields_of(value: object) -> Mapping[str, object]:
    """The entries of a mapping, or the attributes of a pickled object (its `__dict__` and its slots); empty for other
    values.
    """
    if isinstance(value, Mapping):
        return value
    state = value.state if isinstance(value, Placeholder) else None
    if isinstance(state, Mapping):
        return state
    found: dict[str, object] = {}
    for part in state if isinstance(state, tuple) else ():
        found.update(part if isinstance(part, Mapping) else {})
    return found


_DEEPEST = 16


def leaves_of(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """The values in nested mappings and lists of mappings, with their paths."""
    inner: Iterable[tuple[object, object]] | None = None
    if len(path) < _DEEPEST and isinstance(value, Mapping):
        inner = value.items()
    elif len(path) < _DEEPEST and isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        inner = enumerate(value)
    if inner is None:
        yield path, value
    else:
        for key, below in inner:
            yield from leaves_of(below, (*path, key if type(key) is int else str(key)))


def join_path(path: Iterable[str | int]) -> str:
    """A path with dots."""
    return ".".join(map(str, path))


def tensors_in(value: object) -> dict[str, TensorRef]:
    """The tensors in nested mappings and lists of mappings, by their paths."""
    return {join_path(path): ref for path, ref in leaves_of(value) if isinstance(ref, TensorRef)}


def vectors_in(state: object) -> dict[str, TensorRef]:
    """What lies beside a master, element by element: an optimizer's state of it without the numbers of steps."""
    return {str(name): ref for name, ref in fields_of(state).items() if isinstance(ref, TensorRef) and ref.shape}
