"""Whether a save that does not say it is the whole model: by the shapes that the config beside it gives.

For `layouts.read`, and only where nothing in the files says what the whole is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt.base.errors import IncompleteError
from zckpt.base.patterns import compile_late
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog
from zckpt.core.evidence import LEFT_OUT, Evidence
from zckpt.layouts.save.companions import config_near, other_class
from zckpt.layouts.save.known_shapes import known_shapes
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.model_shapes import own_name
from zckpt.layouts.save.tied import EMBEDDINGS, HEADS, LANGUAGE_HEADS, OTHER_HEADS

_BY_CONFIG = "the config.json beside it"
_AS_PART = "Give the file or directory that holds the whole model; --as-part takes these weights as they are."
_OTHER_RANKS = "Copy the files of the other ranks here (--also DIR lays further directories over this one)."
_END = compile_late(rf"(?:^|\.)(?:{'|'.join((*LANGUAGE_HEADS, *OTHER_HEADS))}|cls|pooler)\.")
"""The pattern of a model's last modules, which only some classes of one kind of model have."""

_NORM = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_OLD_NORM = compile_late(r"LayerNorm\.(?:gamma|beta)$")
"""The pattern of a norm's weight and bias as the first models of BERT's kind name them. Source: transformers 4.57,
modeling_utils.py.
"""


def prove_by_config(catalog: Catalog, listing: Listing, *, as_part: bool = False) -> Catalog:
    """The catalog with the evidence of a config.json in the save or beside it; the same catalog where it proves nothing.

    A config of another model, or of names that are not the save's, proves nothing. Where nothing is proved, the catalog gets a
    note that says so; so it does where files that an index counts lack tensors of the config's model.

    Args:
        catalog: of the save.
        listing: its files.
        as_part: go on though tensors are missing.

    Raises:
        IncompleteError: tensors are missing that the config's model has, or rows of them, and nothing counts the files.
    """
    evidence = catalog.evidence
    if evidence.lacks and not evidence.left_out:  # as its zckpt.json says
        return _with_note(catalog, evidence)
    found = _compare_with_config(catalog, listing)
    if isinstance(found, str):
        if evidence.level != "unknown":
            return catalog
        why = f"{found}, so the config.json beside it does not tell" if found and not evidence.left_out else ""
        return _with_note(catalog, evidence._replace(by=why, missing="") if why else evidence)
    shapes, short, lacking = found
    if evidence.left_out and not short and (left_out := sorted({*lacking, *evidence.lacks})):
        return _with_note(catalog, evidence._replace(lacks=tuple(left_out)))
    if not short and not lacking:
        return catalog if evidence.complete else replace(catalog, evidence=Evidence("shapes", _BY_CONFIG))
    if as_part or evidence.level == "metadata":  # all that was saved is here: the model was saved without it
        return _with_note(catalog, Evidence("unknown", _BY_CONFIG, lacks=(*short, *lacking)))
    remedy = _AS_PART if catalog.source.layout == "plain" else _OTHER_RANKS
    raise missing_elements(listing, short[0] if short else "", shapes, lacking, _BY_CONFIG, remedy)


def find_left_out(catalog: Catalog, listing: Listing) -> Catalog:
    """The catalog of a save of DeepSpeed that has no list of frozen parameters, with what the config's model has beside it.

    Below stage 2, a save without frozen parameters looks like one of a model that has none: only the config tells. The doubt
    stays where there is no config, or where it is of another model.
    """
    surely = replace(catalog, evidence=catalog.evidence._replace(doubt=""))
    if any(entry.role == "frozen" for entry in catalog.tensors.values()):
        return surely
    shapes = {own_name(name): catalog[name].shape for name in (*catalog.tensors, *catalog.aliases)}
    known = _shapes_of_config(listing, shapes)
    found = known.keys() & shapes.keys()
    if 2 * len(found) < len(shapes) or any(shapes[name] != known[name] for name in found):
        return catalog
    if lacking := tuple(sorted(known.keys() - shapes.keys())):
        return _with_note(catalog, Evidence("unknown", LEFT_OUT, "the model that the run began with", lacking))
    return surely


def _compare_with_config(
    catalog: Catalog, listing: Listing
) -> tuple[Mapping[str, tuple[int, ...]], list[str], list[str]] | str:
    """The comparison of a save with the config beside it: the shapes of the model's parameters, the tensors that lack rows,
    and those that are not there.

    Why the config proves nothing, as a clause, where it does not; an empty one if there is no config, or its model is unknown
    or another one.
    """
    entries = {own_name(name): entry for name, entry in catalog.tensors.items()}
    entries |= {own_name(dropped): catalog.tensors[kept] for dropped, kept in catalog.aliases.items()}
    entries = {_OLD_NORM.sub(lambda old: _NORM[old[0]], name): entry for name, entry in entries.items()}
    known = _shapes_of_config(listing, entries, plain=catalog.source.layout == "plain")
    found = sorted(known.keys() & entries.keys())
    is_plain = catalog.source.layout == "plain"
    if not found or 2 * len(found) < min(len(known), len(entries) if is_plain else len(known)):
        return ""
    if odd := next((name for name in found if entries[name].dtype.kind not in ("float", "complex")), ""):
        return f"{odd!r} is packed"
    differ = [name for name in found if entries[name].shape != known[name]]
    lacking = sorted(known.keys() - entries.keys())
    short = [name for name in differ if is_short(entries[name].shape, known[name])]
    if lacking and all(map(_END.search, lacking)) and (entries.keys() - known.keys() or "pooler" in lacking[0]):
        return f"the weights have no {lacking[0]!r}, and may be of another class"
    if is_plain and differ and all(name.endswith((*EMBEDDINGS, *HEADS)) for name in differ):
        return f"{differ[0]!r} has another number of rows"
    if len(differ) > len(short):  # of another size: the config is not this model's
        return f"{next(name for name in differ if name not in short)!r} has another shape"
    return known, short, lacking


def _shapes_of_config(
    listing: Listing, names: Mapping[str, object], *, plain: bool = False
) -> Mapping[str, tuple[int, ...]]:
    """The parameters of the config's model; empty if they are not known."""
    config = config_near(listing.directory, plain=plain)
    if other := other_class(config, names):
        config = {**config, "architectures": [other]}
    known = known_shapes(config)
    return {} if known is None else known.shapes


def _with_note(catalog: Catalog, evidence: Evidence) -> Catalog:
    notes = (*catalog.source.notes, _note_on(evidence))
    return replace(catalog, evidence=evidence, source=replace(catalog.source, notes=notes))


def _note_on(evidence: Evidence) -> str:
    if not evidence.left_out:
        said = str(evidence)
        return f"{said[0].upper()}{said[1:]}."
    known = (
        f": {count(len(evidence.lacks), 'tensor')}, {examples(evidence.lacks)}" if evidence.lacks else ", if it has any"
    )
    return (
        f"The run saved without its model's frozen parameters (exclude_frozen_parameters){known}. They are in the model that the "
        "run began with; to-fp32, to-fp16 and to-bf16 add them with --base MODEL."
    )


def missing_elements(
    listing: Listing,
    short: str,
    shapes: Mapping[str, tuple[int, ...]],
    lacking: Sequence[str],
    by: str,
    remedy: str = _OTHER_RANKS,
) -> IncompleteError:
    """The error for tensors, or rows of one, that are missing by the shapes that something else gives.

    Args:
        listing: the save.
        short: a tensor that lacks rows; empty for none.
        shapes: of whole tensors, by name.
        lacking: tensors that are not there.
        by: what gives the shapes.
        remedy: what to do about it.
    """
    if short:
        what, expected = f"elements of tensor {short!r} are missing", f"shape {list(shapes[short])}, as {by} says"
        return IncompleteError(what, file=listing.directory, found="a smaller one", expected=expected, remedy=remedy)
    what = f"{count(len(lacking), 'tensor is', 'tensors are')} missing"
    found = f"no {examples(lacking)}"
    return IncompleteError(what, file=listing.directory, found=found, expected=f"the tensors of {by}", remedy=remedy)


def is_short(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape is a part of a tensor of the whole shape."""
    return len(shape) == len(whole) and shape != whole and all(a <= b for a, b in zip(shape, whole, strict=True))
