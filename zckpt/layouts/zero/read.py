"""Saves of DeepSpeed of one model-parallel rank: which of `zero3`, `zero12` and `unsharded` reads the files.

A ZeRO-3 save has a model file of each data-parallel rank, ZeRO-1 and -2 have one model file, and optimizer files of each rank.
"""

from __future__ import annotations

from zckpt.core.catalog import Catalog
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.listing import MODEL_NAME, Listing
from zckpt.layouts.zero import unsharded, unsharded_training, zero3, zero12


def match(listing: Listing) -> str | None:
    """None when this family reads the files, otherwise why not; by their names alone."""
    found = listing.matching(MODEL_NAME) or listing.shards("model") or listing.shards("optim")
    return None if found else "no *_model_states.pt and no *_optim_states.pt"


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a save; arguments and errors as in `zero12.read`."""
    if listing.shards("model"):
        return zero3.read(listing, allow_unknown=allow_unknown)
    if listing.shards("optim"):
        return zero12.read(listing, allow_unknown=allow_unknown)
    return unsharded.read(listing)


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """What the run needs beside its weights; arguments and errors as in `zero12.read_training`."""
    if listing.shards("model"):
        return zero3.read_training(listing, allow_unknown=allow_unknown)
    if listing.shards("optim"):
        return zero12.read_training(listing, allow_unknown=allow_unknown)
    return unsharded_training.read_training(listing)
