"""The optimizer of a legacy save: its moments by the names of parameters, where the masters could be named, and its groups.

For `megatron_legacy`. Moments lie as the masters do, in the same vectors or lists, so what proves where a master is proves where
its moments are. Which parameter is in which group follows from Megatron's rule: biases and vectors have `wd_mult` 0.
Source: Megatron-LM core_v0.12.3, megatron/core/optimizer/__init__.py `_get_param_groups`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from zckpt.base.errors import OTHER_SAVE, InconsistentError, UnsupportedError
from zckpt.base.words import count, examples
from zckpt.containers import list_at, mapping_at
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.layouts.megatron_legacy import MODEL, OPTIMIZER
from zckpt.layouts.megatron_legacy.masters import apart_in, group_facts, optimizers_in, takes
from zckpt.layouts.megatron_legacy.read import LegacySave
from zckpt.layouts.run.training import ParameterGroup, Training, kept_settings
from zckpt.layouts.save.listing import Listing

_EXPERT = re.compile(r".*\.(?:experts|local_experts)\..+")
_KEPT = ("args", "checkpoint_version", "iteration", "opt_param_scheduler", "num_floating_point_operations_so_far")


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """The moments, groups and counters of a run; errors as in `read.read`. Raises UnsupportedError if the moments
    cannot be named.
    """
    save = LegacySave(listing, allow_unknown=allow_unknown)
    catalog = save.catalog()
    if save.problems:
        raise InconsistentError(
            "has optimizer states that are not of its parameters", file=listing.directory, found="; ".join(save.problems[:3]),
            expected="states of the same shapes as the masters", remedy=OTHER_SAVE,
        )  # fmt: skip
    if reason := unnamed_states(catalog, save):
        raise UnsupportedError(
            "has optimizer states that cannot be named", file=listing.directory, found=reason,
            expected="moments in the order of this model's parameters", remedy="Convert the weights alone (to-fp32).",
        )  # fmt: skip
    trained = {name: entry for name, entry in catalog.tensors.items() if entry.role == "parameter"}
    states: dict[str, dict[str, TensorEntry]] = {name: {} for name in trained}
    for state in save.state_names():
        for _, entry in save.stage_tensors(state):
            name = save.kept_name(entry.name, trained)
            if name in states and state not in states[name]:
                moments = TensorEntry(name, entry.shape, entry.dtype, entry.role, entry.fragments)
                states[name][state] = moments
    groups = _groups(save, trained)
    precisions = Counter(copy.dtype for entry in trained.values() if (copy := entry.own_copy) is not None)
    kept = {key: save.root[key] for key in _KEPT if key in save.root}
    step = catalog.source.global_steps or 0
    model = {**kept, "global_steps": step, "global_samples": 0, "skipped_steps": 0, "lr_scheduler": None}
    return Training(tuple(groups), states, {}, model, precisions.most_common(1)[0][0])


def unnamed_states(catalog: Catalog, save: LegacySave) -> str:
    """Why the moments of a save are not named, in words; empty if they are."""
    names = save.state_names()
    if not names:
        return "no moments beside masters that have names"
    masters = {name for name, entry in catalog.tensors.items() if entry.own_copy is not None}
    without = [n for n, entry in catalog.tensors.items() if entry.role == "parameter" and n not in masters]
    return f"{count(len(without), 'parameter')} without masters, such as {examples(without, 1)}" if without else ""


def unread_states(listing: Listing) -> str:
    """Why optimizer states are not read, in words; empty where they are read, or there are none."""
    has_vectors = bool(listing.matching(OPTIMIZER))
    if not has_vectors and not listing.entry(listing.matching(MODEL)[0], "optimizer"):
        return ""
    save = LegacySave(listing)
    catalog = save.catalog()
    return "; ".join(save.problems[:3]) or unnamed_states(catalog, save)


def _groups(save: LegacySave, trained: Mapping[str, TensorEntry]) -> list[ParameterGroup]:
    """The groups with their parameters, in the order of the model. Raises UnsupportedError if a parameter is in none of
    them, or in several.
    """
    facts = [group for state in optimizers_in(save.root) for group in group_facts(state)]
    members: list[list[str]] = [[] for _ in facts]
    apart = apart_in(facts)
    for name, entry in trained.items():
        expert = _EXPERT.fullmatch(name) is not None
        taking = [n for n, group in enumerate(facts) if takes(group, apart, name, entry.shape, is_expert=expert)]
        if len(taking) != 1:
            raise UnsupportedError(
                f"does not say which parameter group {name!r} is in", file=save.listing.directory,
                found=f"{count(len(facts), 'group')}, {len(taking)} of them may have it",
                expected="the groups that Megatron-LM makes by itself", remedy="Convert the weights alone (to-fp32).",
            )  # fmt: skip
        members[taking[0]].append(name)
    return [
        ParameterGroup(tuple(names), kept_settings(group), {"step": _step(save, group)}, tuple(save.state_names()))
        for group, names in zip(facts, members, strict=True)
        if names
    ]


def _step(save: LegacySave, group: Mapping[str, object]) -> object:
    """The optimizer's step: the group's, its first parameter's, or the iteration."""
    if "step" in group:
        return group["step"]
    kept = save.root.get("optimizer")
    for own in kept if isinstance(kept, list) else [kept]:
        for each in mapping_at(own, "optimizer", "state").values():
            if "step" in mapping_at(each) and list_at(group, "params"):
                return each["step"]
    return save.root.get("iteration") or 0
