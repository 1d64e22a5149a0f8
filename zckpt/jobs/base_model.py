"""A save without frozen parameters, completed from the model that the run began with.

For `convert`, and for `verify`, which must expect the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError, InconsistentError, UsageError
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog
from zckpt.core.evidence import Evidence
from zckpt.jobs.merged import open_base
from zckpt.jobs.open import Opened, strip_wrappers
from zckpt.naming.adapter_names import adapters_in

RECORDED = "base"
"""The entry of a manifest's options that names what was taken from a base model."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A checkpoint with what it lacks from a base model."""

    catalog: Catalog
    base: Opened
    notes: tuple[str, ...]
    recorded: Mapping[str, object]


def complete(catalog: Catalog, base: str | os.PathLike[str]) -> Completion:
    """The checkpoint, with the tensors of a base model that it lacks.

    Args:
        catalog: the checkpoint's tensors, under the model's own names.
        base: a directory of weights in any layout, or a model in the local cache of the hub.

    Raises:
        UsageError: the checkpoint holds adapters.
        InconsistentError: the base is another model.
        IncompleteError: the base lacks a tensor that the checkpoint is known to lack.
    """
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
    return Completion(completed, opened, (note,), {RECORDED: facts})


def refuse_no_base(path: object) -> UsageError:
    """The error for an output that was completed from a base model, if that model is not given."""
    return UsageError(
        "the output was made from more than the checkpoint", file=str(path), found="no --base",
        expected="the same base model as when it was made", remedy="Pass --base as to the command that made it.",
    )  # fmt: skip
