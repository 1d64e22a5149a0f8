"""Lays out a save of torch.distributed.checkpoint that lacks some items of another one.

For `slim`. Every item is a torch file of its own in a data file, so those that stay are copied as they are, one after another,
into data files of the same names, and `.metadata` says where they are then. Nothing of them is interpreted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from zckpt.base.errors import UnsupportedError
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import U8
from zckpt.core.fragments import Fragment
from zckpt.core.plan import OutputFile, Pair, Plan, literal_file
from zckpt.core.stores import FileStore
from zckpt.layouts.dcp.chunks import DcpChunk, ItemPlace
from zckpt.layouts.dcp.metadata import BytesItem, Metadata, Path, TensorItem
from zckpt.layouts.dcp.state import optimizers_of
from zckpt.layouts.dcp.write import Described, metadata_file
from zckpt.layouts.save.listing import Listing


def of_optimizers(metadata: Metadata) -> frozenset[str]:
    """The names of all items that belong to optimizers."""
    optimizers = optimizers_of(metadata).values()
    return frozenset(item.name for one in optimizers for _, item in (*one.states, *one.settings))


def nbytes_of(metadata: Metadata, names: Collection[str]) -> int:
    """Bytes of these items' torch files."""
    return sum(place.length for place in {p for name in names for p in _places(metadata.items[name])})


def without(listing: Listing, metadata: Metadata, dropped: Collection[str], directory: str) -> Plan:
    """The files of a save without some of its items.

    Args:
        listing: of the save.
        metadata: of the save.
        dropped: names of the items that are left out.
        directory: of the output that the files are in; empty, or with a slash at its end.

    Raises:
        UnsupportedError: items are in files of another kind.
    """
    kept = {name: item for name, item in metadata.items.items() if name not in dropped}
    moved: dict[ItemPlace, ItemPlace] = {}
    files: list[tuple[OutputFile, FileStore]] = []
    pairs: list[Pair] = []
    by_file: dict[str, list[ItemPlace]] = {}
    for place in sorted({place for item in kept.values() for place in _places(item)}):
        by_file.setdefault(place.file, []).append(place)
    for name, places in by_file.items():
        at = 0
        source = listing.where(name).store()
        fragments: list[Fragment] = []
        for place in places:
            moved[place] = ItemPlace(name, at, place.length)
            fragments.append(Fragment(source, place.offset, at, place.length))
            at += place.length
        store = FileStore(directory + name, at)
        files.append((OutputFile(store.path, at), store))
        entry = TensorEntry(store.path, (at,), U8, "buffer", tuple(fragments))
        pairs.append((entry, replace(entry, fragments=(Fragment(store, 0, 0, at),))))
    paths: dict[str, Path] = {name: item.path for name, item in kept.items()} if metadata.nested else {}
    items = {name: _describe_item(item, moved) for name, item in kept.items()}
    beside: dict[object, object] = {name: value for name, value in metadata.beside.items() if name in kept}
    files.append(literal_file(f"{directory}.metadata", metadata_file(items, paths, beside)))
    return Plan(tuple(files), pairs)


def _places(item: TensorItem | BytesItem) -> Sequence[ItemPlace]:
    """The places of an item's torch files."""
    places = [item.place] if isinstance(item, BytesItem) else [chunk.place for chunk in item.chunks if chunk.numel]
    found = [place for place in places if isinstance(place, ItemPlace)]
    if len(found) != len(places) or (isinstance(item, TensorItem) and item.view is not None):
        raise UnsupportedError(
            f"item {item.name!r} is not in a file of torch.distributed.checkpoint's own", found="another kind of file",
            expected="data files *.distcp", remedy="Run zckpt to-dcp, which writes the weights alone.",
        )  # fmt: skip
    return found


def _describe_item(item: TensorItem | BytesItem, moved: dict[ItemPlace, ItemPlace]) -> Described:
    if isinstance(item, BytesItem):
        assert isinstance(item.place, ItemPlace)
        return moved[item.place]
    chunks: list[DcpChunk] = []
    for chunk in item.chunks:
        assert isinstance(chunk.place, ItemPlace)
        chunks.append(chunk._replace(place=moved.get(chunk.place, chunk.place)))
    return item.dtype, item.size, tuple(chunks)
