"""Saves of DeepSpeed of one model-parallel rank: which of `zero3`, `zero12` and `unsharded` reads the files, and how.

For `FAMILY`, and for `parallel` and `moe`, which put several such saves together. A ZeRO-3 save has a model file of each
data-parallel rank; ZeRO-1 and -2 have one model file; all have optimizer files of each rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from zckpt.core.catalog import Catalog, Source, Topology
from zckpt.layouts.save.listing import MODEL_NAME, Listing
from zckpt.layouts.save.module_states import ModelStates
from zckpt.layouts.zero import zero3
from zckpt.layouts.zero.assembly import assemble, source_of
from zckpt.layouts.zero.renamed_weights import has_unknown_weights, match_by_values
from zckpt.layouts.zero.zero3 import Zero3Save

if TYPE_CHECKING:
    from zckpt.layouts.run.training import Training
    from zckpt.layouts.zero.zero12 import Zero12Save

    Save = Zero12Save | Zero3Save


def match(listing: Listing) -> str | None:
    """None when this family reads the files, otherwise why not; by their names alone."""
    found = listing.matching(MODEL_NAME) or listing.shards("model") or listing.shards("optim")
    return None if found else "no *_model_states.pt and no *_optim_states.pt"


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a save; errors as in `zero12.load`."""
    save = load(listing, allow_unknown=allow_unknown)
    if save is None:
        from zckpt.layouts.zero import unsharded

        return unsharded.read(listing)
    source = source_of(listing, save.model, save.stage, save.shards[0].state_names)
    return catalog_of(save, source, save.model.topology(save.world_size))


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """What the run needs beside its weights; errors as in `zero12.load`."""
    save = load(listing, allow_unknown=allow_unknown)
    if save is None:
        from zckpt.layouts.zero import unsharded_training

        return unsharded_training.read_training(listing)
    from zckpt.layouts.joining.rules import rules_of_checkpoint

    rules = None if isinstance(save, Zero3Save) else rules_of_checkpoint(save.model)
    if rules is None:
        return save.training()
    shapes = {name: shape for group in save.model.param_shapes for name, shape in group.items()}
    return replace(save.training(), joined={name: rules.joint(name, [shape]) for name, shape in shapes.items()})


def load(
    listing: Listing, mp_rank: int = 0, *, allow_unknown: bool = False, model: ModelStates | None = None
) -> Save | None:
    """The files of one model-parallel rank of a ZeRO run; None without ZeRO. Arguments and errors as in `zero12.load`."""
    if model is not None:
        return _load(listing, mp_rank, allow_unknown=allow_unknown, model=model)
    what = f"ZeRO of rank {mp_rank}, allow_unknown {allow_unknown}"
    return listing.once(what, partial(_load, listing, mp_rank, allow_unknown=allow_unknown, model=None))


def _load(listing: Listing, mp_rank: int, *, allow_unknown: bool, model: ModelStates | None) -> Save | None:
    save: Save
    if listing.shards("model", mp_rank):
        save = zero3.load(listing, mp_rank, allow_unknown=allow_unknown)
    elif listing.shards("optim", mp_rank):
        from zckpt.layouts.zero import zero12

        save = zero12.load(listing, mp_rank, allow_unknown=allow_unknown, model=model)
    else:
        return None
    if has_unknown_weights(save.model):
        save = replace(save, model=match_by_values(save.model, save.masters()))
    return save


def catalog_of(save: Save, source: Source, topology: Topology) -> Catalog:
    """The catalog of one model-parallel rank's files."""
    return assemble(save.model, save.masters(), source, topology, save.frozen(), save.padding())
