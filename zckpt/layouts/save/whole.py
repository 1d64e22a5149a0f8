"""Whether a save that does not say it is the whole model: by the shapes that the config beside it gives.

For `layouts.read`, and only where nothing in the files says what the whole is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt.base.errors import IncompleteError
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog
from zckpt.core.evidence import LEFT_OUT, Evidence
from zckpt.layouts.save.companions import config_near
from zckpt.layouts.save.known_shapes import known_shapes
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.model_shapes import own_name


def prove_by_config(catalog: Catalog, listing: Listing) -> Catalog:
    """The catalog with the evidence of a config.json in the save or beside it; the same catalog where it proves nothing.

    A config of another model, or of names that are not the save's, proves nothing. Where nothing is proved, the catalog gets a
    note that says so.

    Raises:
        IncompleteError: tensors are missing that the config's model has, or rows of them.
    """
    left_out = catalog.evidence.left_out
    known = known_shapes(config_near(listing.directory))
    shapes = {own_name(name): entry.shape for name, entry in catalog.tensors.items()}
    shapes |= {own_name(dropped): catalog.tensors[kept].shape for dropped, kept in catalog.aliases.items()}
    found = known.shapes.keys() & shapes.keys() if known is not None else set()
    if known is None or 2 * len(found) < len(known.shapes):
        note = _note_on(catalog.evidence)
        return replace(catalog, source=replace(catalog.source, notes=(*catalog.source.notes, note)))
    short = [name for name in sorted(found) if is_short(shapes[name], known.shapes[name])]
    lacking = sorted(known.shapes.keys() - shapes.keys())
    if left_out and not short and (lacking := sorted({*lacking, *catalog.evidence.lacks})):
        evidence = catalog.evidence._replace(lacks=tuple(lacking))
        notes = (*catalog.source.notes, _note_on(evidence))
        return replace(catalog, evidence=evidence, source=replace(catalog.source, notes=notes))
    if short or lacking:
        raise missing_elements(listing, short[0] if short else "", known.shapes, lacking, "the config.json beside it")
    if any(shapes[name] != known.shapes[name] for name in found):  # of another size: the config is not this model's
        return catalog
    return replace(catalog, evidence=Evidence("shapes", "the config.json beside it"))


def find_left_out(catalog: Catalog, listing: Listing) -> Catalog:
    """The catalog of a save of DeepSpeed that has no list of frozen parameters, with what the config's model has beside it.

    Below stage 2, a save without frozen parameters looks like one of a model that has none: only the config tells. The same
    catalog where there is no config, where it is of another model, or where nothing is missing.
    """
    if any(entry.role == "frozen" for entry in catalog.tensors.values()):
        return catalog
    known = known_shapes(config_near(listing.directory))
    shapes = {own_name(name): catalog[name].shape for name in (*catalog.tensors, *catalog.aliases)}
    found = known.shapes.keys() & shapes.keys() if known is not None else set()
    if known is None or 2 * len(found) < len(shapes) or any(shapes[name] != known.shapes[name] for name in found):
        return catalog
    if not (lacking := tuple(sorted(known.shapes.keys() - shapes.keys()))):
        return catalog
    evidence = Evidence("unknown", LEFT_OUT, "the model that the run began with", lacking)
    notes = (*catalog.source.notes, _note_on(evidence))
    return replace(catalog, evidence=evidence, source=replace(catalog.source, notes=notes))


def _note_on(evidence: Evidence) -> str:
    if not evidence.left_out:
        return f"I{str(evidence)[1:]}."
    known = (
        f": {count(len(evidence.lacks), 'tensor')}, {examples(evidence.lacks)}" if evidence.lacks else ", if it has any"
    )
    return (
        f"The run saved without its model's frozen parameters (exclude_frozen_parameters){known}. They are in the model that the "
        "run began with; to-fp32, to-fp16 and to-bf16 add them with --base MODEL."
    )


def missing_elements(
    listing: Listing, short: str, shapes: Mapping[str, tuple[int, ...]], lacking: Sequence[str], by: str
) -> IncompleteError:
    """The error for tensors, or rows of one, that are missing by the shapes that something else gives.

    Args:
        listing: the save.
        short: a tensor that lacks rows; empty for none.
        shapes: of whole tensors, by name.
        lacking: tensors that are not there.
        by: what gives the shapes.
    """
    remedy = "Copy the files of the other ranks here (--also DIR lays further directories over this one)."
    if short:
        what, expected = f"elements of tensor {short!r} are missing", f"shape {list(shapes[short])}, as {by} says"
        return IncompleteError(what, file=listing.directory, found="a smaller one", expected=expected, remedy=remedy)
    what = f"{count(len(lacking), 'tensor is', 'tensors are')} missing"
    found = f"no {examples(lacking)}"
    return IncompleteError(what, file=listing.directory, found=found, expected=f"the tensors of {by}", remedy=remedy)


def is_short(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape is a part of a tensor of the whole shape."""
    return len(shape) == len(whole) and shape != whole and all(a <= b for a, b in zip(shape, whole, strict=True))
