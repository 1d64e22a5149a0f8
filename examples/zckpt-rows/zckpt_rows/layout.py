"""Saves of rows: each rank's file has some rows of every tensor, and the shapes of the whole tensors in its metadata."""

import json
import math
import re

from zckpt.base.errors import CorruptError, InconsistentError
from zckpt.core.catalog import Catalog, Source, TensorEntry, Topology
from zckpt.core.evidence import Evidence
from zckpt.core.fragments import Fragment
from zckpt.layouts.run.values import missing_ranks
from zckpt.layouts.save.family import Family, FileKind
from zckpt.layouts.save.listing import Listing

PART = re.compile(r"rows-(?P<dp>\d+)-of-(?P<size>\d+)\.safetensors")


def match(listing: Listing) -> str | None:
    return None if listing.matching(PART) else "no rows-*-of-*.safetensors"


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    found = {(int(m["dp"]), int(m["size"])): name for name in listing.files if (m := PART.fullmatch(name))}
    sizes = {size for _, size in found}
    if len(sizes) > 1:
        raise InconsistentError(
            "has files of several saves", file=listing.directory, found=f"of {sorted(sizes)} ranks",
            expected="files of one save", remedy="Move those of the other save elsewhere.",
        )  # fmt: skip
    ranks, size = {rank: name for (rank, _), name in found.items()}, sizes.pop()
    if missing := sorted(set(range(size)) - ranks.keys()):
        raise missing_ranks(listing, "rows", sorted(ranks), missing, size)
    files = [listing.open(ranks[rank]) for rank in range(size)]
    entries: dict[str, TensorEntry] = {}
    for name, shape in _shapes(files[0].metadata, listing).items():
        fragments, start = [], 0
        for file in files:
            ref = file.root[name]
            fragments.append(Fragment(ref.store, ref.byte_offset, start, ref.numel))
            start += ref.numel
        # elements that are missing, or there twice, are an error here
        entries[name] = TensorEntry(
            name, shape, files[0].root[name].dtype, "parameter", tuple(f for f in fragments if f.count)
        )
    evidence = Evidence("metadata", "the shapes in the metadata of each file")
    source = Source("rows", listing.directory.path, listing.tag)
    return Catalog(entries, source, evidence, topology=Topology(dp=size))


def _shapes(metadata: object, listing: Listing) -> dict[str, tuple[int, ...]]:
    try:
        shapes = {name: tuple(map(int, shape)) for name, shape in json.loads(metadata["shapes"]).items()}
        if all(math.prod(shape) >= 0 for shape in shapes.values()):
            return shapes
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    raise CorruptError(
        "its metadata has no shapes", file=listing.directory, expected="name -> shape, as JSON under 'shapes'",
        remedy="Copy the files again.",
    )  # fmt: skip


def _find_again(listing: Listing) -> object:
    from zckpt_rows.second import find_again  # only `verify` needs it

    return find_again(listing)


FAMILY = Family(
    name="rows",
    files=(FileKind("rows", PART),),
    match=match,
    read=read,
    second=_find_again,
    holds_run=False,
)
