"""What a signed output says of its source: which files it was made from, and the SHA-256 of each one's index.

For `planned`, `delta` and `apply_delta`.

[Note: indexes] The index of a file is what says which tensors are in it and where: the header of a safetensors file, the pickle
of a torch file. Of any other file (`latest`, an index of shards, `.metadata`), and of small files, it is the whole file. Elements
are not hashed: what became of them is in the output, and its bytes are signed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from hashlib import sha256

from zckpt.base.errors import ZckptError
from zckpt.containers import is_torch_zip
from zckpt.containers.torch_zip import pickle_of
from zckpt.core.catalog import Catalog
from zckpt.layouts.save.listing import Listing
from zckpt.storage.location import Location

_WHOLE_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
"""The most bytes of files that are not weights and are hashed whole; of larger ones, only the size is recorded."""


def provenance(
    sources: Iterable[tuple[Listing, Catalog]], others: Iterable[tuple[str, Location]] = ()
) -> dict[str, object]:
    """The sources of an output for its signature: the facts of `zckpt.json` and the files of each.

    Args:
        sources: what weights were read from.
        others: name and place of further files that it was made from.

    Raises:
        ZckptError, OSError: a file cannot be read.
    """
    further = [_facts(name, file) for name, file in others]
    made_from = [
        {
            **catalog.source_facts(),
            "files": [_facts(name, file) for name, file in sorted(listing.files.items())],
        }
        for listing, catalog in sources
    ]
    return {"made_from": made_from, **({"deltas": further} if further else {})}


def _facts(name: str, file: Location) -> dict[str, object]:
    """The facts of one file: its name, its bytes, and its index's SHA-256; see [Note: indexes]."""
    nbytes = file.size()
    facts: dict[str, object] = {"name": name, "bytes": nbytes}
    kind, data = "", b""
    if nbytes <= _WHOLE_BYTES:
        kind, data = "whole", file.read()
    elif file.name.endswith(".safetensors"):
        kind, data = "header", file.read(8 + int.from_bytes(file.read(8), "little"))
    else:
        with contextlib.suppress(ZckptError):  # several torch files in one, as torch.distributed.checkpoint writes them
            if is_torch_zip(file):
                kind, data = "pickle", pickle_of(file)
            elif nbytes <= _MOST_BYTES:
                kind, data = "whole", file.read()
    return {**facts, "index": kind, "sha256": sha256(data).hexdigest()} if kind else facts
