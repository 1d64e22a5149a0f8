"""Whether an output under another program's names has the states that its checkpoint has: optimizer states, steps, settings.

For `verify`, of what `to-mcore --optimizer` writes. Elements are returned in pairs, as those of `resumable`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from zckpt import layouts
from zckpt.base.errors import ZckptError
from zckpt.base.words import count, examples
from zckpt.checks.examined import Examined
from zckpt.checks.resumable import Comparison
from zckpt.core.catalog import Catalog


def has_renamed_states(form: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a manifest's form says that states were written under another program's names."""
    return isinstance(form, Mapping) and "optimizer" in form and "names" in form


def own_weights(catalog: Catalog) -> Catalog:
    """The tensors, with the model's own weights in place of the optimizer's fp32 ones where there are both."""
    tensors = {
        name: entry if (own := entry.own_copy) is None else entry.as_in(own) for name, entry in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors)


def compare_renamed(source: Examined, output: Examined, form: Mapping[str, Any]) -> Comparison:
    """Compares the states of an output with those of its checkpoint.

    Args:
        source: the checkpoint; it has a catalog.
        output: what was written; it has a catalog.
        form: the facts of the manifest.
    """
    from zckpt.jobs.megatron_states import megatron_states
    from zckpt.naming.writers import name_for_writer, naming_of

    chosen = source.catalog
    assert chosen is not None and output.catalog is not None
    found = Comparison()
    naming = naming_of(form)
    try:
        model = name_for_writer(chosen, source.place, naming)
        known = {own: theirs for theirs, own in source.names.items()}
        wanted, _ = megatron_states(source.place, chosen, known, model, naming, experts_apart=False)
        there = layouts.read_training(output.place.listing)
    except ZckptError as error:
        found.problems.append(str(error))
        return found
    missing: list[str] = []
    for state, entry in wanted.states:
        held = (
            output.catalog.tensors.get(entry.name)
            if state == "param"
            else there.states.get(entry.name, {}).get(state)
        )  # fmt: skip
        if held is None or held.shape != entry.shape:
            missing.append(f"{state} of {entry.name!r}")
        else:
            found.pairs.append((f"{state} of {entry.name!r}", entry, replace(held, replicas=())))
    if missing:
        found.problems.append(
            f"it lacks {count(len(missing), 'optimizer state')} of the checkpoint: {examples(missing)}"
        )
    for group in there.groups:
        found.same({"step": float(wanted.step)}, {"step": float(str(group.scalars.get("step")))}, "a parameter group")
        kept = {key: group.settings.get(key) for key in ("lr", "betas", "eps")}
        found.same({key: wanted.settings[key] for key in kept}, kept, "a parameter group")
    found.held = ["the fp32 weights", "the optimizer states (exp_avg, exp_avg_sq)", "step counts"]
    found.only = ["schedules", "counters", "client state"]
    return found
