"""Puts the tensors of a DeepSpeed save together: masters from the optimizer files, everything else from the model file.

For all of DeepSpeed's families, and no other: what wins, what is tied and in which order follows from DeepSpeed's model files.

A name of the model's state dict is, in this order: tied to another name (then it is an alias); a master; a frozen
parameter; a buffer; or a parameter that no optimizer owns (as it is in the model file). Names that only the state dict has:
`save.state_names`, `zero.read`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from zckpt.base.errors import IncompleteError
from zckpt.base.patterns import compile_late
from zckpt.base.words import examples
from zckpt.core.catalog import Catalog, Padding, Role, Source, TensorEntry, Topology
from zckpt.core.evidence import LEFT_OUT, NO_LIST_OF_FROZEN, Evidence
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import ModelStates, views_of, whole


def source_of(
    listing: Listing,
    model: ModelStates,
    stage: int,
    states: tuple[str, ...],
    notes: tuple[str, ...] = (),
    layout: str = "",
) -> Source:
    """The origin of a DeepSpeed save.

    Args:
        listing: the files.
        model: a model file.
        stage: ZeRO stage; 0 without ZeRO.
        states: names of the optimizer states of elements.
        notes: for a person.
        layout: name of the layout; empty for that of the stage.
    """
    return Source(
        layout=layout or (f"zero{stage}" if stage else "unsharded"),
        path=listing.directory.path,
        tag=listing.tag,
        framework=("DeepSpeed", model.version),
        zero_stage=stage,
        global_steps=model.number("global_steps"),
        optimizer_states=states,
        notes=notes,
    )


def evidence_of(model: ModelStates, tensors: Mapping[str, TensorEntry], stage: int | None) -> Evidence:
    """What proves that the files of one model-parallel rank hold all of its parameters.

    DeepSpeed lists the parameters in every model file of ZeRO, and the elements of each are counted over the ranks that the
    optimizer files name; without ZeRO, the model file is the model's whole state dict.

    A save without frozen parameters has no list of them at stages 2 and 3, where there is one otherwise; at any stage, tied names
    may say it: of those that are not trained, such a save leaves out the first. Where neither tells, the doubt stays. A save of
    PEFT is meant to be without: it holds adapters.
    """
    lacks = tuple(sorted({*model.frozen_shapes, *model.shared.values()} - tensors.keys() - model.shared.keys()))
    no_list = model.root.get("frozen_param_shapes", model) is None and stage in (2, 3)
    second_alone = any(name in model.module and kept not in model.module for name, kept in model.shared.items())
    is_peft = any(map(_PEFT.search, tensors))
    if (lacks or no_list or second_alone) and model.is_zero() and not is_peft:
        return Evidence("unknown", LEFT_OUT, "the model that the run began with", lacks)
    by = "param_shapes of the model file" if model.param_shapes else "the model file's state dict"
    return Evidence("metadata", by, doubt="" if is_peft or stage in (2, 3) else NO_LIST_OF_FROZEN)


_PEFT = compile_late(r"(?:^|\.)(?:base_model|prompt_encoder)\.")
"""The prefixes of names in a model of PEFT; every name has one of them."""


def assemble(
    model: ModelStates,
    masters: Mapping[str, TensorEntry],
    source: Source,
    topology: Topology,
    frozen: Mapping[str, TensorEntry] | None = None,
    padding: Iterable[Padding] = (),
) -> Catalog:
    """The catalog of one save.

    Args:
        model: the model file (any rank's, under ZeRO-3).
        masters: name -> trainable parameter, from the optimizer files.
        source: where it all comes from; notes are added.
        topology: ranks per axis.
        frozen: name -> frozen parameter, if the model file does not hold them whole.
        padding: elements of the optimizer files that belong to no parameter.

    Raises:
        IncompleteError: a parameter's recorded shape is not empty, but its elements are in no file.
    """
    owned = dict(frozen if frozen is not None else _whole_frozen(model))
    owned.update(masters)  # what was frozen during the run stands in both lists, and its masters are the more exact
    # zero-size tensors share a null address, so DeepSpeed calls them tied; they have entries of their own
    aliases = {dropped: kept for dropped, kept in model.shared.items() if kept != dropped and dropped not in owned}
    loose: Role = "frozen" if model.is_zero() else "parameter"
    for dropped, first in aliases.items():
        held = model.module.get(dropped)
        if held is not None and held.numel and not any(first in names for names in (owned, model.module, aliases)):
            owned[first] = whole(
                first, held, loose
            )  # a save without frozen parameters leaves out the first of tied names
    by_place: dict[object, str] = {}
    tensors: dict[str, TensorEntry] = {}
    for name, ref in model.module.items():
        if name in aliases:
            continue
        if name in owned:
            tensors[name] = owned.pop(name)
        elif ref.numel and (kept := by_place.get(ref.place)) is not None:
            aliases[name] = kept
            continue
        else:
            tensors[name] = whole(name, ref, "buffer" if name in model.buffer_names else loose)
        if ref.numel:
            by_place.setdefault(ref.place, name)
    tensors.update(owned)  # names that the state dict lacks: it was saved without frozen parameters, say
    aliases = _resolve(aliases, tensors)
    _check_frozen(model, tensors)
    return Catalog(
        tensors,
        replace(source, notes=source.notes + model.notes),
        evidence_of(model, tensors, source.zero_stage),
        aliases,
        topology,
        model.extras,
        tuple(padding),
        tuple(views_of((*model.module.values(), *model.frozen_fragments.values()))),
    )


def _whole_frozen(model: ModelStates) -> dict[str, TensorEntry]:
    """Frozen parameters of stages 0-2: whole tensors, in the fragments or in the state dict."""
    frozen: dict[str, TensorEntry] = {}
    for name in model.frozen_shapes:
        ref = model.frozen_fragments.get(name) or model.module.get(name)
        if ref is not None:
            frozen[name] = whole(name, ref, "frozen")
    return frozen


def _resolve(aliases: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """The aliases with a kept name that exists; chains of aliases are followed to their end."""
    resolved: dict[str, str] = {}
    for dropped in aliases:
        kept, seen = dropped, {dropped}
        while kept in aliases and aliases[kept] not in seen:
            kept = aliases[kept]
            seen.add(kept)
        if kept in tensors and dropped not in tensors:
            resolved[dropped] = kept
    return resolved


def _check_frozen(model: ModelStates, tensors: Mapping[str, TensorEntry]) -> None:
    """Checks that parameters with a recorded shape that is not empty have elements."""
    recorded = model.shapes
    empty = [n for n, s in recorded.items() if n in tensors and not tensors[n].numel and 0 not in s]
    if model.is_zero() and not empty:
        rest = tensors.keys() - recorded.keys() - model.buffer_names
        empty = [name for name, entry in tensors.items() if entry.shape == (0,) and name in rest]
    if empty:
        raise IncompleteError(
            "the weights of some parameters are empty", file=model.file, found=examples(empty),
            remedy="Convert the directory with the zero_pp_rank_* files of the same save: this file holds placeholders.",
        )  # fmt: skip
