"""Finds tensors that files name a second time: plain weights, layer files, universal files, chunks.

For `verify`, as `reread` is for the vectors of ZeRO, and without the code that reads saves. The names in a file, the file's
name, or the metadata of torch.distributed.checkpoint say where a tensor begins; the catalog must begin to read it there. Tensors
whose names in the files differ from the catalog's (experts by their numbers on a rank) are skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zckpt.base import limits
from zckpt.containers import Placeholder, TensorRef, load_pickle
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.fragments import Fragment
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.listing import UNIVERSAL, Listing
from zckpt.storage.location import locate

_CHUNKS = ".metadata"
_BY_RANK = "megatron-legacy"
"""The layout whose files number layers and experts by rank, so that a name is there another tensor's."""
_LAYER = re.compile(r"layer_(\d+)-model_")


def misplaced_tensors(listing: Listing, catalog: Catalog) -> tuple[int, list[str]]:
    """How many tensors were looked for, and those that the catalog reads elsewhere; it has the names that the files have."""
    own = {(name, ""): entry for name, entry in catalog.tensors.items()}
    if _CHUNKS in listing.files:
        return _in_chunks(listing, own)
    count, bad = _in_universal(listing, own)
    if catalog.source.layout == _BY_RANK:
        return 0, []
    universal = _files_of_parameters(listing)
    by_path = {place.path: name for name, place in listing.files.items()}
    named: dict[str, dict[str, TensorRef]] = {}
    for name, entry in catalog.tensors.items():
        if entry.own_copy is not None or (name, "") in universal:
            continue  # masters have no names in their file
        for path, fragments in _by_file(entry).items():
            file = by_path.get(path)
            if file is None or file.endswith(("_optim_states.pt", ".tensor.swp")):
                continue
            if file not in named:
                named[file] = dict(_tensors(listing.open(file).root))
            layer = match[1] if (match := _LAYER.match(file)) else None
            places = {ref.byte_offset for ref in _called(named[file], name, layer) if ref.numel}
            if places or layer:
                count += 1
                if min(f.byte_offset for f in fragments) not in places:
                    bad.append(f"{name!r} is not read where {file!r} has it")
    return count, bad


def misplaced_named_states(listing: Listing, training: Training) -> tuple[int, list[str]]:
    """The same of the optimizer's states, where files name them."""
    own = {(name, state): entry for name, states in training.states.items() for state, entry in states.items()}
    return _in_chunks(listing, own) if _CHUNKS in listing.files else _in_universal(listing, own)


Wanted = Mapping[tuple[str, str], TensorEntry]
"""(Parameter, state) -> what is read; no state for the weights."""


def _what(name: str, state: str) -> str:
    return f"{state} of {name!r}" if state else repr(name)


def _by_file(entry: TensorEntry) -> dict[str, list[Fragment]]:
    found: dict[str, list[Fragment]] = {}
    for fragment in entry.fragments:
        if fragment.numel:
            found.setdefault(str(fragment.store), []).append(fragment)
    return found


def _tensors(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, TensorRef]]:
    """The tensors in nested mappings, under dotted names."""
    for key, inner in value.items() if isinstance(value, Mapping) and depth < 64 else ():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(inner, TensorRef):
            yield name, inner
        else:
            yield from _tensors(inner, name, depth + 1)


def _called(tensors: Mapping[str, TensorRef], name: str, layer: str | None) -> list[TensorRef]:
    """What a file calls so, on top or within other mappings; in a layer file, after the layer's number or a tied module's."""
    if layer is not None:
        tied = name.startswith("tied_modules.")
        local = [own for own in tensors if name == f"{int(layer)}.{own}" or (tied and name.endswith(f".{own}"))]
        return [tensors[max(local, key=len)]] if local else []
    return [tensors[name]] if name in tensors else [ref for own, ref in tensors.items() if own.endswith(f".{name}")]


def _files_of_parameters(listing: Listing) -> Mapping[tuple[str, str], str]:
    """(Parameter, state) -> its file in a universal checkpoint."""
    found: dict[tuple[str, str], str] = {}
    for file in listing.files:
        home, _, last = file.rpartition("/")
        if home.startswith(f"{UNIVERSAL}/") and last.endswith(".pt"):
            state = last.removesuffix(".pt")
            found[home.removeprefix(f"{UNIVERSAL}/"), "" if state == "fp32" else state] = file
    return found


def _in_universal(listing: Listing, wanted: Wanted) -> tuple[int, list[str]]:
    """Each parameter and state is in a file of its name."""
    places = _files_of_parameters(listing)
    count, bad = 0, list[str]()
    for (name, state), entry in wanted.items():
        file = places.get((name, state))
        if file is not None and entry.numel and entry.role == "parameter":
            count += 1
            if set(_by_file(entry)) != {listing.files[file].path}:
                bad.append(f"{_what(name, state)} is not read from {file!r}")
    return count, bad


class _Chunk(NamedTuple):
    """A chunk by the metadata: the number of its first element in the tensor, and the bytes of a file that hold it."""

    element: int
    path: str
    start: int
    stop: int


def _in_chunks(listing: Listing, wanted: Wanted) -> tuple[int, list[str]]:
    """The first element of every chunk is where torch's metadata say."""
    chunks: dict[str, list[_Chunk]] = {}
    for name, chunk in _chunks(listing):
        chunks.setdefault(name, []).append(chunk)
    ends: dict[str, list[str]] = {}
    for name in chunks:
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    count, bad = 0, list[str]()
    for (name, state), entry in wanted.items():
        fulls = [f"{name}.{state}", f"{state}.{name}"] if state else [name]  # the second is Megatron-Core's
        called = [
            own
            for full in fulls
            for own in ends.get(full.rpartition(".")[2], ())
            if own == full or own.endswith(f".{full}")
        ]
        if called and entry.numel:
            count += 1
            starts = {f.start: (str(f.store), f.byte_offset) for f in entry.fragments if f.numel}
            if not any(all(_holds(starts.get(c.element), c) for c in chunks[own]) for own in called):
                bad.append(f"{_what(name, state)} is not read where the metadata have it")
    return count, bad


def _holds(place: tuple[str, int] | None, chunk: _Chunk) -> bool:
    return place is not None and place[0] == chunk.path and chunk.start <= place[1] < chunk.stop


def _chunks(listing: Listing) -> Iterator[tuple[str, _Chunk]]:
    """The chunks with elements that `.metadata` lists, by the item's name."""
    path = listing.files[_CHUNKS].path
    data = locate(path).read()
    root = load_pickle(data, file=path, most=max(limits.PICKLE_COST, limits.METADATA_COST_PER_BYTE * len(data)))
    state = _fields(root)
    described = state.get("state_dict_metadata")
    stored = state.get("storage_data")
    beside = state.get("mcore_data")
    items = {str(n): _fields(item) for n, item in described.items()} if isinstance(described, Mapping) else {}
    sizes = {
        (name, tuple(own["offsets"])): tuple(own["sizes"])
        for name, item in items.items()
        for own in map(_fields, item.get("chunks") or ())  # type: ignore[call-overload]
    }
    for index, info in stored.items() if isinstance(stored, Mapping) else ():
        key, at = _fields(index), _fields(info)
        name, offsets = str(key.get("fqn")), key.get("offset")
        size = items.get(name, {}).get("size")
        if not isinstance(offsets, tuple | list) or not isinstance(size, tuple | list):
            continue
        if math.prod(sizes.get((name, tuple(offsets)), (0,))):
            element = _number(offsets, size)
            if (shape := _fields_of(beside, name).get(_SHAPE)) is not None and isinstance(shape, tuple | list):
                element = _in_box(element, size, shape)
            file = str(at["relative_path"])
            where = listing.where(file).path
            start, length = (n if isinstance(n, int) else 0 for n in (at["offset"], at["length"]))
            yield name, _Chunk(element, where, start, start + length)


_SHAPE = "nd_reformulated_orig_global_shape"
"""Megatron-Core's: the shape of a tensor that was saved as boxes, each laid out flat; see `layouts.megatron_core`."""


def _number(indexes: Sequence[int], shape: Sequence[int]) -> int:
    number = 0
    for index, extent in zip(indexes, shape, strict=True):
        number = number * extent + index
    return number


def _in_box(element: int, size: Sequence[int], shape: Sequence[int]) -> int:
    """Where an element of the flat boxes is in the tensor."""
    box, inside = divmod(element, size[-1])
    indexes: list[int] = []
    for boxes, extent in zip(reversed(size[:-1]), reversed(shape), strict=True):
        box, which = divmod(box, boxes)
        inside, index = divmod(inside, extent // boxes)
        indexes.append(which * (extent // boxes) + index)
    return _number(indexes[::-1], shape)


def _fields_of(value: object, name: str) -> Mapping[str, object]:
    own = value.get(name) if isinstance(value, Mapping) else None
    return own if isinstance(own, Mapping) else {}


def _fields(value: object) -> Mapping[str, object]:
    return value.state if isinstance(value, Placeholder) and isinstance(value.state, Mapping) else {}
