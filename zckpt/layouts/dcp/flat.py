"""Flat parameters of torch's first FSDP: the parameters of a unit, end to end; the user says their names and shapes (`--shapes`).

For `dcp.read`, and so for rank files too, which are read as such a save. LOCAL_STATE_DICT has a tensor `layers.0._flat_param`
for each unit, cut over the ranks; `named_parameters()` has the same as plain vectors. In it are the parameters of the module
`layers.0`, in the model's order, without those of units inside it, and each tied one once.

[Note: where parameters begin] With `use_orig_params`, a parameter begins at a multiple of 16 bytes (of the dtype that forward
uses), and the end is filled up to a multiple of the number of ranks; without it there is nothing between parameters. The number
of elements says which. If it fits two ways that differ, the shapes do not tell, and nothing is read. Every rank has an equal
part: a plain vector ends with padding.
Source: torch 2.2 and 2.13, distributed/fsdp/_flat_param.py (`_init_flat_param_and_metadata`, `_get_shard`),
_state_dict_utils.py (`_local_post_state_dict_hook`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from zckpt.base.errors import COPY_AGAIN, InconsistentError, UnsupportedError
from zckpt.base.words import count, examples
from zckpt.containers import TensorRef
from zckpt.layouts.dcp.chunks import DcpChunk, ItemPlace, Shape
from zckpt.layouts.dcp.items import Items
from zckpt.layouts.dcp.metadata import BytesItem, InertValue, Path, TensorItem
from zckpt.layouts.dcp.state import DcpModel, DcpOptimizer
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.model_shapes import MAKE, own_name, read_shapes

FLAT = re.compile(r"(?:^|\.)_?flat_param(?:_\d+)?$")
_ALIGNMENT_BYTES = 16
_HALF_BYTES = 2
"""Bytes of an element where the forward pass is in half precision and the parameters are not."""


_Unit = Mapping[str, tuple[int, Shape]]
"""The contents of a flat parameter: name -> the first element and the shape."""


def units(model: DcpModel, listing: Listing, padded: AbstractSet[Path] = frozenset()) -> dict[str, _Unit]:
    """The contents of each flat parameter, by its name; empty where the model has none.

    Args:
        model: with the flat parameters.
        listing: of the files, with what the user said.
        padded: paths of those that were plain vectors.

    Raises:
        UnsupportedError: nothing says the shapes; or those that are said fit in two ways.
        InconsistentError: they do not fit.
    """
    flats = {name: item for name, item in model.items.items() if FLAT.search(name)}
    if not flats:
        return {}
    if not listing.options.shapes:
        raise UnsupportedError(
            "holds flat parameters of FSDP, and only the model knows their shapes", file=listing.directory,
            found=examples(flats), expected="--shapes",
            remedy=f"Pass --shapes with a torch file of the model's weights, or with a JSON file of its names and shapes. {MAKE}",
        )  # fmt: skip
    if odd := [name for name, item in flats.items() if len(item.size) != 1]:
        raise InconsistentError(
            f"flat parameter {odd[0]!r} is not a vector", file=listing.directory, found=str(list(flats[odd[0]].size)),
            expected="1 dimension", remedy=COPY_AGAIN,
        )  # fmt: skip
    shapes, _ = read_shapes(listing.options.shapes)
    beside = {own_name(name) for name in model.items if name not in flats}
    homes = {name: FLAT.sub("", own_name(name)) for name in flats}
    return {
        name: _unit(name, item, item.path in padded, homes, beside, shapes, listing) for name, item in flats.items()
    }


def _unit(
    name: str,
    item: TensorItem,
    padded: bool,
    homes: Mapping[str, str],
    beside: set[str],
    shapes: Mapping[str, Shape],
    listing: Listing,
) -> _Unit:
    def owner(parameter: str) -> str:
        return max((h for h in homes.values() if not h or parameter.startswith(f"{h}.")), key=len, default="\0")

    own = {n: shape for n, shape in shapes.items() if owner(n) == homes[name] and n not in beside}
    numel = math.prod(item.size)
    ranks = max(len(item.chunks), 1)
    fits: set[tuple[int, ...]] = set()
    sizes = {item.dtype.itemsize, _HALF_BYTES}
    for step in (1,) if padded else (1, *(_ALIGNMENT_BYTES // size for size in sizes)):
        starts, end = _starts([math.prod(shape) for shape in own.values()], step)
        if numel == (-(-end // ranks) * ranks if padded or step > 1 else end):
            fits.add(starts)
    if len(fits) == 1 and own:
        starts = next(iter(fits))
        return {n: (at, shape) for (n, shape), at in zip(own.items(), starts, strict=True)}
    if fits and own:
        raise UnsupportedError(
            f"the shapes do not say where the parameters in {name!r} begin", file=listing.directory,
            found=f"{count(len(fits), 'way', 'ways')} that fit {numel:,} elements", expected="one",
            remedy="Load it with the model that saved it, and save again with StateDictType.SHARDED_STATE_DICT.",
        )  # fmt: skip
    raise InconsistentError(
        f"the shapes that --shapes says do not fit {name!r}", file=listing.options.shapes,
        found=f"{sum(map(math.prod, own.values())):,} elements in {count(len(own), 'parameter')}" + (
            f" such as {examples(own)}" if own else f" below {homes[name]!r}"
        ),
        expected=f"{numel:,} elements", remedy=f"Give the shapes of the model that was trained. {MAKE}",
    )  # fmt: skip


def _starts(numels: Sequence[int], step: int) -> tuple[tuple[int, ...], int]:
    """The element at which each parameter begins when it is aligned to `step` elements, and the end of the last one."""
    starts: list[int] = []
    end = 0
    for numel in numels:
        end = -(-end // step) * step
        starts.append(end)
        end += numel
    return tuple(starts), end


def split_model(model: DcpModel, inside: Mapping[str, _Unit], items: Items, listing: Listing) -> DcpModel:
    """The model with its own parameters in place of the flat ones, and their further names."""
    if not inside:
        return model
    _, tied = read_shapes(listing.options.shapes)
    found: dict[str, TensorItem] = {}
    for name, item in model.items.items():
        if name in inside:
            path = item.path[:-1]
            found |= dict(_split_flat(item, inside[name], items, lambda n, path=path: (*path, n)))
        else:
            found[own_name(name)] = item
    for dropped, kept in tied.items():
        if kept in found and dropped not in found:
            found[dropped] = replace(found[kept], name=dropped, path=(*found[kept].path[:-1], dropped))
    return replace(model, items=found)


def split_optimizer(optimizer: DcpOptimizer, inside: Mapping[str, _Unit], items: Items) -> DcpOptimizer:
    """The optimizer's states with those of the model's own parameters in place of the flat ones'."""
    if not inside:
        return optimizer
    found: list[tuple[Path, TensorItem | BytesItem]] = []
    for path, item in optimizer.states:
        unit = inside.get(str(path[0])) if path else None
        if unit is None:
            found.append((path, item))
        elif isinstance(item, TensorItem) and len(item.size) == 1:
            found += ((one.path, one) for _, one in _split_flat(item, unit, items, lambda n, rest=path[1:]: (n, *rest)))
        else:
            found += (((n, *path[1:]), item) for n in unit)
    settings = [(path, _names_in(path, item, inside)) for path, item in optimizer.settings]
    return DcpOptimizer(optimizer.key, found, settings)


def _names_in(path: Path, item: TensorItem | BytesItem, inside: Mapping[str, _Unit]) -> TensorItem | BytesItem:
    """The list of a group's parameters, with the names of those in flat parameters in place of these."""
    value = item.place.value if isinstance(item, BytesItem) and isinstance(item.place, InertValue) else None
    if path[-1:] != ("params",) or not isinstance(value, list | tuple) or not isinstance(item, BytesItem):
        return item
    names = [n for name in value for n in inside.get(name, (name,))]
    return replace(item, place=InertValue(names))


def _split_flat(
    item: TensorItem, unit: _Unit, items: Items, path_of: Callable[..., Path]
) -> Iterator[tuple[str, TensorItem]]:
    """The parameters in a flat one. Raises UnsupportedError if a rank's vector is not dense."""
    parts = sorted((chunk.offsets[0], _ref(item, chunk, items)) for chunk in item.chunks if chunk.numel)
    at = 0
    for name, (start, shape) in sorted(unit.items(), key=lambda pair: pair[1][0]):
        numel = math.prod(shape)
        while at < len(parts) and parts[at][0] + parts[at][1].numel <= start:
            at += 1
        chunks: list[DcpChunk] = []
        for first, ref in parts[at:]:
            if first >= start + numel:
                break
            begin, end = max(first, start), min(first + ref.numel, start + numel)
            if begin < end:
                flat = replace(ref, shape=(ref.numel,), stride=(1,))
                chunks.append(DcpChunk((begin - start,), (end - begin,), flat.box((begin - first,), (end - begin,))))
        yield name, TensorItem(f"{item.name}: {name}", path_of(name), item.dtype, (numel,), tuple(chunks), shape)


def _ref(item: TensorItem, chunk: DcpChunk, items: Items) -> TensorRef:
    place = chunk.place
    ref = items.open([place])[place] if isinstance(place, ItemPlace) else place
    if not isinstance(ref, TensorRef) or not ref.is_contiguous or ref.numel != chunk.numel:
        raise UnsupportedError(
            f"a rank's part of {item.name!r} is not a dense vector", file=items.file, found=str(chunk.sizes),
            remedy="Save it again with StateDictType.SHARDED_STATE_DICT.",
        )  # fmt: skip
    return ref
