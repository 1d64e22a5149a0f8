"""Smaller saves of torch.distributed.checkpoint: without the items of the optimizer, all others as they are.

For `slim`. What is left is loaded by `torch.distributed.checkpoint.load`, on any number of ranks, by a state dict without the
optimizer. accelerate keeps the optimizer in a directory beside the model's; that one is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zckpt.base.errors import UnsupportedError
from zckpt.jobs.open import Opened
from zckpt.jobs.options import SlimOptions
from zckpt.layouts import dcp, family_of
from zckpt.layouts.dcp.metadata import read_metadata
from zckpt.layouts.dcp.smaller import Files, Pairs, nbytes_of, of_optimizers, without
from zckpt.layouts.save.listing import list_files

_ACCELERATE = re.compile(r"pytorch_model_fsdp(_\d+)")


@dataclass(frozen=True, slots=True)
class FewerItems:
    """The files of a smaller save.

    Attributes:
        files: of it.
        pairs: what is moved into them.
        dropped: what is left out -> bytes.
        nbytes: of the save that it is made from, the optimizer beside it included.
    """

    files: Files
    pairs: Pairs
    dropped: Mapping[str, int]
    nbytes: int


def fewer_items(opened: Opened, options: SlimOptions) -> FewerItems | None:
    """The files without what `options` leave out; None for a save of another kind.

    Raises:
        UnsupportedError: something else than the optimizer is to be left out, or the save is of several `.metadata` files.
    """
    listing = opened.place.listing
    if family_of(listing) is not dcp.FAMILY:
        return None
    if {*options.drop} - {"optimizer"} or ".metadata" not in listing.files:
        raise UnsupportedError(
            "slim leaves the optimizer out of such saves, and nothing else", file=listing.directory,
            found=f"--drop {' '.join(options.drop)}" if ".metadata" in listing.files else "no .metadata",
            expected="--drop optimizer, of a save with one .metadata: there are no module weights beside masters, and no "
            "record of what is frozen", remedy="Write the weights alone: zckpt to-dcp, with --exclude-frozen or --exclude.",
        )  # fmt: skip
    metadata = read_metadata(listing)
    nbytes = sum(file.size() for file in listing.files.values())
    owned = of_optimizers(metadata) if "optimizer" in options.drop else frozenset[str]()
    dropped = nbytes_of(metadata, owned)
    home, part = "", _ACCELERATE.fullmatch(listing.directory.name)
    if part is not None and opened.place.home != listing.directory:
        home = f"{listing.directory.name}/"
        beside = listing.directory.absolute().parent / f"optimizer{part[1]}"
        if "optimizer" in options.drop and beside.is_dir():
            dropped += (more := sum(file.size() for file in list_files(beside, "").files.values()))
            nbytes += more
    files, pairs = without(listing, metadata, owned, home)
    return FewerItems(files, pairs, {"optimizer": dropped} if dropped else {}, nbytes)
