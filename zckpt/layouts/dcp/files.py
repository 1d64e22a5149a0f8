"""The files of a torch.distributed.checkpoint save, by their names.

For `dcp`, and for families that stand on it.
Source: torch/distributed/checkpoint/{filesystem,hf_storage}.py (2.1 - 2.13).
"""

from __future__ import annotations

from zckpt.base.errors import IncompleteError
from zckpt.base.patterns import compile_late
from zckpt.base.words import count, examples, ranks
from zckpt.layouts.save.listing import Listing

METADATA = compile_late(r"\.metadata|__\d+\.metadata")
DATA = compile_late(r"__(?P<dp>\d+)_(?P<number>\d+)\.distcp")
SAFETENSORS = compile_late(r"shard-(?P<rank>\d{5})-model-(?P<file>\d{5})-of-(?P<files>\d{5})\.safetensors")


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not."""
    there = any(listing.matching(pattern) for pattern in (METADATA, DATA, SAFETENSORS))
    return None if there else "no .metadata and no *.distcp"


def missing_metadata(listing: Listing) -> IncompleteError:
    """The error for data files without metadata."""
    data = listing.matching(DATA)
    writers = sorted({int(name.split("_")[2]) for name in data})
    nbytes = sum(listing.files[name].size() for name in data)
    found = f"{count(len(data), 'data file')} of {ranks(writers)}, {nbytes:,} bytes, such as {examples(data, 1)}"
    begun = [name for name in listing.files if name.endswith(".metadata.tmp")]
    if begun:
        found += f", and {begun[0]!r}, which the save did not finish"
    return IncompleteError(
        "the file .metadata is missing",
        file=listing.directory,
        found=found,
        expected="a .metadata file, which rank 0 writes last",
        remedy="Use an older save if this one was interrupted. If the file was not copied, because its name begins with a dot "
        "(`cp DIR/* ..` leaves it out), copy it from where rank 0 saved, or pass that directory with --also.",
    )


_RANK = compile_late(r"__(\d+)_|shard-(\d{5})-")


def rank_of(name: str) -> int | None:
    """The rank that wrote a data file, by its name; None for other names."""
    match = _RANK.match(name)
    return None if match is None else int(match[1]) if match[1] else int(match[2]) - 1
