"""Which files are plain weights: the usual names, an index and the shards that it names, or files "1 of 3" to "3 of 3"."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping

from zckpt.base.errors import (
    COPY_AGAIN,
    CorruptError,
    IncompleteError,
    InconsistentError,
    UnsafeError,
    UnsupportedError,
)
from zckpt.base.patterns import compile_late
from zckpt.base.words import examples
from zckpt.layouts.plain import OPTIMIZER, PATTERNS
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.weight_files import INDEX, files_counted_with, is_weights

_TOTAL = compile_late(r'"total_size"\s*:\s*(\d{1,20})\b')
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not."""
    return (
        None
        if next(_candidates(listing), None)
        else "no model.safetensors or pytorch_model.bin, nor an index of shards"
    )


def _candidates(listing: Listing) -> Iterator[str]:
    """Names of files that may be a model, one of its shards, or an index; the first that exists counts."""
    if len(listing.files) == 1 or listing.is_one_model:
        yield next((name for name in listing.files if INDEX.fullmatch(name)), next(iter(listing.files)))
    for pattern in PATTERNS.values():
        for suffix in ("", ".index.json"):
            name = pattern.format(suffix="") + suffix
            if name in listing.files:
                yield name
    states = (f"{OPTIMIZER}.safetensors", f"{OPTIMIZER}.safetensors.index.json")
    yield from (name for name in (*_ADAPTERS, *states) if name in listing.files)
    yield from listing.matching(INDEX)
    yield from (name for name in listing.files if is_weights(name) and files_counted_with(name, ()))


def weight_files(listing: Listing) -> list[str]:
    """The files that hold the weights of a save that `match` accepted.

    Raises:
        IncompleteError: some are missing, and are not known to be. InconsistentError: the index names only some of those that are
            there. CorruptError, UnsafeError: the index is wrong.
    """
    name = next(_candidates(listing))
    _refuse_two(listing, name)
    if name.endswith(".index.json"):
        named = list(read_index(listing, name))
        counted = files_counted_with(named[0], listing.directory.names()) if named and not listing.part else None
        if counted and (others := [file for file in counted.files if file not in named]):
            raise InconsistentError(
                "the index leaves out shards that lie beside it", file=listing.files[name], found=f"no {examples(others)}",
                expected="as many files as their names say",
                remedy="Copy the index of this save here; without one, the files are read by their names.",
            )  # fmt: skip
        return _shards(listing, named, "all shards that the index names")
    shards = None if listing.part else files_counted_with(name, listing.files)
    if shards is None:
        return list(listing.files) if listing.is_one_model else [name]
    return _shards(listing, [*shards.files, *shards.missing], "as many files as their names say")


def _refuse_two(listing: Listing, name: str) -> None:
    """Raises InconsistentError where a directory has one file of weights, and shards under the same name: transformers loads the
    file, and vLLM the shards. An index alone is what transformers leaves of an older save.
    """
    index = f"{name}.index.json"
    if len(listing.files) == 1 or index not in listing.files:
        return
    shards = [shard for shard in read_index(listing, index) if shard != name and shard in listing.files]
    if shards:
        raise InconsistentError(
            "two saves lie in one directory", file=listing.directory, found=f"{name!r}, and {examples([index, *shards])}",
            expected="one of the two: transformers would load the file, and vLLM the shards",
            remedy=f"Give the one that you mean, {name!r} or {index!r}, or move the other away.",
        )  # fmt: skip


def chosen_index(listing: Listing) -> str:
    """The index that names the weights of a save that `match` accepted; empty where none does."""
    name = next(_candidates(listing))
    return name if name.endswith(".index.json") else ""


def size_in_index(listing: Listing, index_name: str) -> int:
    """The bytes of weights that an index says its shards have; 0 where it does not say. The map may be long: it is not parsed."""
    said = _TOTAL.search(listing.files[index_name].read().decode(errors="replace"))
    return int(said[1]) if said else 0


def _shards(listing: Listing, shards: list[str], expected: str) -> list[str]:
    missing = [shard for shard in shards if shard not in listing.files and shard not in listing.absent]
    if missing:
        raise IncompleteError(
            "shards are missing", file=listing.directory, found=examples(missing),
            remedy="Copy them to this directory.", expected=expected,
        )  # fmt: skip
    return [shard for shard in shards if shard in listing.files]


def named_data(listing: Listing) -> dict[str, list[str]]:
    """The shards that an index names, each with the tensors that it says are in it; errors as in `read_index`."""
    name = next(_candidates(listing), "")
    if name.endswith(".index.json"):
        return read_index(listing, name)
    shards = files_counted_with(name, listing.files)
    return {shard: [] for shard in (*shards.files, *shards.missing)} if shards and not listing.part else {}


def read_index(listing: Listing, index_name: str) -> dict[str, list[str]]:
    """Shard -> names of its tensors, as an index says.

    Raises:
        CorruptError: it cannot be read. UnsafeError: it names files outside its directory. UnsupportedError: it is a delta's.
    """
    path = listing.files[index_name]
    try:
        index = json.loads(path.read())
        shards: dict[str, list[str]] = {shard: [] for shard in sorted(set(index["weight_map"].values()))}
        for tensor, shard in index["weight_map"].items():
            shards[shard].append(tensor)
        said = index.get("metadata")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            "the index cannot be read", file=path, found=f"{type(error).__name__}: {error}", remedy=COPY_AGAIN
        ) from error
    if isinstance(said, Mapping) and "delta_encoding" in said:
        raise UnsupportedError(
            "is a delta: what changed in weights that are elsewhere", file=listing.directory,
            found=f"differences from version {said.get('base_version')!r:.20}", expected="consolidated weights",
            remedy="Run zckpt apply OLD DELTA OUT, where OLD is that version of the weights.",
        )  # fmt: skip
    for shard in shards:
        if not isinstance(shard, str) or os.path.basename(shard) != shard or shard in ("", ".", ".."):
            raise UnsafeError(
                "the index names a file outside its directory", file=path, found=f"{shard!r:.80}",
                remedy="Do not use these weights unless you know who made them.",
            )  # fmt: skip
    return shards
