"""Weights of a state dict under names that say nothing: which parameters they are follows from their numbers.

For `zero.read` and `universal.read`, after `save.state_names` has compared the names. A weight in no list of DeepSpeed's, of the
shape of a listed parameter that the state dict lacks and with that parameter's numbers, is the module's own copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zckpt.base.words import count, examples
from zckpt.containers import TensorRef
from zckpt.core.catalog import TensorEntry
from zckpt.engine.elements import ElementReader
from zckpt.engine.replicas import is_copy
from zckpt.layouts.save.module_states import ModelStates


def has_unknown_weights(model: ModelStates) -> bool:
    """Whether the state dict has names that are in no list, and lacks a trained parameter or a frozen one that the file
    has.
    """
    if model.root.get("num_experts") or model.root.get("ds_autoep_layers"):
        return False  # experts are in other files, under names that `moe` knows
    listed = (*model.param_shapes, model.frozen_fragments)
    return bool(_unknown(model)) and any(name not in model.module for names in listed for name in names)


def match_by_values(model: ModelStates, masters: Mapping[str, TensorEntry]) -> ModelStates:
    """The model file with the parameters' names for weights that are copies of masters which the state dict seems to lack.

    Placeholders (ZeRO-3) have no numbers. They are left out if there are no more of them than parameters that are lacking.
    """
    unknown = _unknown(model)
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


def _unknown(model: ModelStates) -> dict[str, TensorRef]:
    listed = {name for group in (*model.param_shapes, model.frozen_shapes) for name in group}
    listed |= {*model.shared, *model.shared.values(), *model.buffer_names}
    return {name: ref for name, ref in model.module.items() if name not in listed}
