"""Saves of DeepSpeed of one model-parallel rank: which of `zero3`, `zero12` and `unsharded` reads the files, and how.

For `FAMILY`, and for `parallel` and `moe`, which put several such saves together. A ZeRO-3 save has a model file of each
data-parallel rank; ZeRO-1 and -2 have one model file; all have optimizer files of each rank.

[Note: renamed weights] After `save.state_names` has compared the names, a weight in no list of DeepSpeed's, of the shape of a
listed parameter that the state dict lacks and with that parameter's numbers, is the module's own copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, Source, TensorEntry, Topology
from zckpt.engine.elements import ElementReader
from zckpt.engine.replicas import is_copy
from zckpt.layouts.save.listing import MODEL_NAME, Listing
from zckpt.layouts.save.module_states import ModelStates
from zckpt.layouts.zero import zero3
from zckpt.layouts.zero.assembly import assemble, source_of
from zckpt.layouts.zero.zero3 import Zero3Save


def has_unknown_weights(model: ModelStates) -> bool:
    """Whether the state dict has names that are in no list, and lacks a trained parameter, or a frozen one of the file."""
    if not model.unlisted or model.has_experts:  # experts are in other files, under names that `moe` knows
        return False
    return any(name not in model.module for names in (*model.param_shapes, model.frozen_fragments) for name in names)


def match_by_values(model: ModelStates, masters: Mapping[str, TensorEntry]) -> ModelStates:
    """The model file with the parameters' names for weights that are copies of masters which the state dict seems to lack.

    Placeholders (ZeRO-3) have no numbers. They are left out if there are no more of them than parameters that are lacking.
    """
    unknown = model.unlisted
    lacking = {name: entry for name, entry in masters.items() if name not in model.module}
    found: dict[str, str] = {}
    by_shape: dict[tuple[int, ...], dict[str, TensorEntry]] = {}
    for name, entry in lacking.items():
        if entry.numel:
            by_shape.setdefault(entry.shape, {})[name] = entry
    fragments = {ref.place: name for name, ref in model.frozen_fragments.items() if name not in model.module}
    names_of_place: dict[object, str] = {}
    with ElementReader() as reader:
        for own, ref in unknown.items():
            if ref.numel and ref.place in fragments:
                found[own] = names_of_place[ref.place] = fragments.pop(ref.place)
                continue
            candidates = by_shape.get(ref.shape, {}) if ref.numel else {}
            for name, entry in candidates.items():
                if is_copy(reader, (entry.fragments, entry.dtype), (ref.fragments(), ref.dtype)):
                    found[own] = name
                    names_of_place[ref.place] = name
                    del candidates[name]
                    break
            else:
                kept = names_of_place.get(ref.place)
                tied = (dropped for dropped, of in model.shared.items() if of == kept and dropped not in found.values())
                if ref.numel and kept is not None and (dropped := next(tied, None)) is not None:
                    found[own] = dropped
    frozen = [name for name in model.frozen_shapes if name not in model.module]
    empty = [own for own, ref in unknown.items() if ref.shape == (0,)]
    left_out = empty if len(empty) <= len(lacking) + len(frozen) + len(model.shared) else []
    if not found and not left_out:
        return model
    names = [*found, *left_out]
    note = (
        f"DeepSpeed's lists have other names than the state dict for {count(len(names), 'tensor')}, such as {examples(names)}: "
        "the names of the lists are used."
    )
    return replace(
        model,
        module={found.get(own, own): ref for own, ref in model.module.items() if own not in left_out},
        state_names={**model.state_names, **{name: own for own, name in found.items()}},
        notes=(*model.notes, note),
    )


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
