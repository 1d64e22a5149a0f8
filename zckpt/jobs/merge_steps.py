"""The steps of a conversion that take a base model or adapters: imported only where these are asked for.

For `steps`. `merged` says what adapters give.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from zckpt.base.errors import IncompleteError, InconsistentError, UsageError
from zckpt.base.words import count, examples
from zckpt.core.evidence import Evidence
from zckpt.jobs.groups import LoraMerge
from zckpt.jobs.merged import lora_again, merge, open_base
from zckpt.jobs.open import strip_wrappers
from zckpt.jobs.opened import WorkingModel
from zckpt.naming.adapter_names import adapters_in, found_in

RECORDED = "base"
"""The entry of a manifest's options that names what was taken from a base model."""


def complete(model: WorkingModel, base: str | os.PathLike[str] | None) -> WorkingModel:
    """The checkpoint, with the tensors of a base model that it lacks.

    Args:
        model: with the checkpoint's tensors, under the model's own names.
        base: a directory of weights in any layout, or a model in the local cache of the hub; None if it is not given to a check
            of what was completed by it.

    Raises:
        UsageError: there is no base, or the checkpoint holds adapters.
        InconsistentError: the base is another model.
        IncompleteError: the base lacks a tensor that the checkpoint is known to lack.
    """
    if base is None:
        raise UsageError(
            "the output was made from more than the checkpoint", file=model.place.listing.directory, found="no --base",
            expected="the same base model as when it was made", remedy="Pass --base as to the command that made it.",
        )  # fmt: skip
    catalog = model.catalog
    path = catalog.source.path
    if adapters_in(catalog):
        raise UsageError(
            "--base completes a model, and the checkpoint holds adapters", file=path, found="--base without --merge-lora",
            remedy="Add --merge-lora, or leave out --base.",
        )  # fmt: skip
    opened = open_base(base)
    whole, _ = strip_wrappers(opened.catalog)
    place = opened.place.listing.directory
    shared = [name for name in catalog.tensors if name in whole]
    odd = next((name for name in shared if catalog[name].shape != whole[name].shape), None)
    if odd is not None or 2 * len(shared) < len(catalog.tensors):
        raise InconsistentError(
            "the base is another model than the checkpoint's", file=place,
            found=f"{odd!r} of shape {list(whole[odd].shape)}" if odd else f"names such as {examples(whole)}",
            expected=f"shape {list(catalog[odd].shape)}" if odd else f"the checkpoint's, such as {examples(catalog)}",
            remedy="Pass with --base the model that the run began with.",
        )  # fmt: skip
    has = {*catalog, *catalog.aliases}
    aliases = {dropped: kept for dropped, kept in whole.aliases.items() if dropped not in has}
    added = {
        name: replace(entry, role="frozen" if entry.role == "parameter" else entry.role)
        for name, entry in whole.tensors.items()
        if name not in has
    }
    if absent := sorted({*catalog.evidence.lacks} - has - added.keys() - aliases.keys()):
        raise IncompleteError(
            f"the base does not have {count(len(absent), 'tensor')} that the checkpoint lacks", file=place,
            found=f"no {examples(absent)}", remedy="Pass with --base the model that the run began with.",
        )  # fmt: skip
    evidence = catalog.evidence if catalog.evidence.complete else Evidence("shapes", "the base model")
    completed = replace(
        catalog, tensors={**catalog.tensors, **added}, aliases={**catalog.aliases, **aliases},
        evidence=evidence, views=(*catalog.views, *whole.views),
    )  # fmt: skip
    note = (
        f"{count(len(added), 'tensor')} that the save leaves out: taken from the base model, such as {examples(added)}."
        if added
        else "The base model has nothing that the save lacks."
    )
    facts = {**opened.catalog.source_facts(), "tensors": sorted(added)}
    recorded = {**model.recorded, RECORDED: facts}
    return replace(model, catalog=completed, notes=(*model.notes, note), recorded=recorded, made_from=(opened,))


def merge_given(
    model: WorkingModel, lora: LoraMerge | None, recorded: Mapping[str, object] | None = None
) -> WorkingModel:
    """Merges adapters into the weights. `recorded`: the facts in the manifest of an output that was made so; None for one
    that a job will make.
    """
    opened, bare = model.opened, model.catalog
    merged = merge(model, (lora or LoraMerge()) if recorded is None else lora_again(opened, recorded, lora))
    given_up = {name: "original" for name in bare if ".original_module." in name}
    if opened.packed is not None:
        given_up |= dict.fromkeys(bare.tensors.keys() - opened.without_packed(bare).tensors.keys(), "packed")
    left_out = (*model.left_out, *(name for name in bare if found_in(name)))
    return replace(merged, given_up={**merged.given_up, **given_up}, left_out=left_out)
