"""Where the elements of tensors lie, in few numbers: what the page of a map draws.

[Note: a piece] A list of numbers: file, byte offset, start, count, rows, pitch, store_pitch, step, then how many such pieces
follow each other, and how much file, byte offset and start grow from one to the next. Numbers at the end that are usual
(1, 0, 0, 1, 1, 0, 0, 0) are left out. So a parameter that a thousand ranks share evenly is one list. The first eight are those
of `fragments.Fragment`; file -1 is elements that are computed when they are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import DType
from zckpt.core.fragments import ComputedStore, Fragment
from zckpt.core.stores import FileStore
from zckpt.pictures.rows import FileGrid

Piece = list[int]
"""See [Note: a piece]."""
Purpose = Literal["weight", "module", "copy", "state"]

USUAL = (0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0)
_NOWHERE = -1
_REPEATS, _FILE, _BYTE, _START = 8, 0, 1, 2


@dataclass(frozen=True, slots=True)
class PieceLayer:
    """The pieces of tensors for one purpose: the weights themselves, copies of them, or a state of the optimizer.

    Attributes:
        name: as it is shown.
        purpose: one of `Purpose`.
        pieces: number of a tensor -> its dtype and pieces.
    """

    name: str
    purpose: Purpose
    pieces: Mapping[int, tuple[DType, list[Piece]]]


def fold_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces of eight numbers as lists, with evenly spaced pieces as one list."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and last[3:_REPEATS] == piece[3:]:
            n = last[_REPEATS]
            apart = [piece[at] - last[at] - last[9 + at] * (n - 1) for at in (_FILE, _BYTE, _START)]
            if n == 1 or apart == last[9:]:
                last[_REPEATS:] = [n + 1, *apart]
                continue
        found.append([*piece, 1, 0, 0, 0])
    return [_short(piece) for piece in found]


def unfold_pieces(pieces: Iterable[Piece]) -> Iterator[tuple[int, ...]]:
    """The single pieces, each as its first eight numbers."""
    for piece in pieces:
        whole = [*piece, *USUAL[len(piece) :]]
        file, byte, start, *rest = whole[:_REPEATS]
        times, *apart = whole[_REPEATS:]
        for n in range(times):
            yield (file + n * apart[0], byte + n * apart[1], start + n * apart[2], *rest)


def _short(piece: Piece) -> Piece:
    while len(piece) > 4 and piece[-1] == USUAL[len(piece) - 1]:
        piece = piece[:-1]
    return piece


def pieces_of(fragments: Iterable[Fragment], itemsize: int, grid: FileGrid, name: str) -> list[Piece]:
    """The pieces of some fragments; adds what lies in each file to its `contents` under `name`."""
    made: list[Piece] = []
    for f in fragments:
        if not f.numel:
            continue
        number = grid.numbers.get(f.store.path, _NOWHERE) if isinstance(f.store, FileStore) else _NOWHERE
        made.append([number, f.byte_offset, f.start, f.count, f.rows, f.pitch, f.store_pitch, f.step])
        if number != _NOWHERE:
            contents = grid.files[number].contents
            contents[name] = contents.get(name, 0) + f.numel * itemsize
    return fold_pieces(made)


def layer_of(
    name: str, purpose: Purpose, tensors: Iterable[tuple[int, DType, Sequence[Fragment]]], grid: FileGrid
) -> PieceLayer:
    """A layer of (number of the tensor, dtype, fragments); those of a tensor have one dtype."""
    held: dict[int, tuple[DType, list[Fragment]]] = {}
    for number, dtype, fragments in tensors:
        held.setdefault(number, (dtype, []))[1].extend(fragments)
    return PieceLayer(name, purpose, {n: (d, pieces_of(own, d.itemsize, grid, name)) for n, (d, own) in held.items()})


OTHER = "other"
"""The contents of files that are no elements of tensors: headers, indexes, counters, padding, states that zckpt does
not read.
"""
WEIGHTS, MODULE, COPIES = "weights", "weights as the model uses them", "copies of weights"


def weight_layers(catalog: Catalog, grid: FileGrid) -> list[PieceLayer]:
    """The weights of a catalog, and its copies of them; tensors are numbered in the catalog's order."""
    entries = list(enumerate(catalog.tensors.values()))
    own = [(n, entry.own_copy) for n, entry in entries]
    copies: dict[DType, list[tuple[int, DType, Sequence[Fragment]]]] = {}
    for n, entry in entries:
        for dtype, fragments in _copies(entry):
            copies.setdefault(dtype, []).append((n, dtype, fragments))
    layers = [
        layer_of(WEIGHTS, "weight", ((n, entry.dtype, entry.fragments) for n, entry in entries), grid),
        layer_of(MODULE, "module", ((n, copy.dtype, copy.fragments) for n, copy in own if copy is not None), grid),
    ]
    for dtype, held in copies.items():
        name = COPIES if len(copies) == 1 else f"{COPIES}, {dtype.name}"
        layers.append(layer_of(name, "copy", held, grid))
    return [layer for layer in layers if layer.pieces or layer.purpose == "weight"]


def _copies(entry: TensorEntry) -> Iterable[tuple[DType, Sequence[Fragment]]]:
    """The places that must hold a tensor's numbers too: other ranks' copies, and the inputs of computed elements."""
    for replica in entry.replicas:
        if replica is not entry.own_copy:
            yield replica.dtype, replica.fragments
    for fragment in entry.fragments:
        if isinstance(fragment.store, ComputedStore):
            yield from ((entry.dtype, fragments) for fragments, _ in fragment.store.sources)


def state_layers(states: Mapping[str, Mapping[int, TensorEntry]], grid: FileGrid) -> list[PieceLayer]:
    """The optimizer's states: state -> number of the tensor -> its entry."""
    return [
        layer_of(f"optimizer: {state}", "state", ((n, entry.dtype, entry.fragments) for n, entry in own.items()), grid)
        for state, own in states.items()
    ]


def contents_of(grid: FileGrid, layers: Sequence[PieceLayer]) -> dict[str, int]:
    """Kind of contents -> bytes, in the order of the layers, with `OTHER` at the end; missing files count as other."""
    found, rest = Counter({layer.name: 0 for layer in layers}), 0
    for file in grid.files:
        held = {} if file.gone else file.contents
        found.update(held)
        rest += max(0, file.nbytes - sum(held.values()))
    return {**found, OTHER: rest}
