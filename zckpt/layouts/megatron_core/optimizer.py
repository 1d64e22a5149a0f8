"""What a Megatron-Core save says of its optimizer: which parameters are in which group, settings, states, the step.

For `megatron_core`. The groups of the first rank are in the common state, without names of parameters. Megatron-Core makes them
by rule, and each parameter's group follows from it: experts have an optimizer of their own, embeddings and the head may have
their own learning rate, and biases and vectors have `wd_mult` 0. Layers and experts that are stacked add dimensions, which do
not count. Where the rule leaves a choice, as with groups that a script made, the states are not given.
Source: megatron-core 0.9 - 0.16.1, optimizer/__init__.py `_get_param_groups`; optimizer/optimizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from zckpt.base.errors import UnsupportedError
from zckpt.base.words import count
from zckpt.containers import list_at, mapping_at
from zckpt.layouts.dcp.items import Items
from zckpt.layouts.dcp.metadata import BytesItem, Metadata, TensorItem
from zckpt.layouts.megatron_core.contents import MegatronItems, plain_name
from zckpt.layouts.megatron_core.run_state import MegatronRun
from zckpt.layouts.run.training import ParameterGroup, kept_settings

_LAYERS = re.compile(r"\blayers\.(?!\d)")
_EXPERTS = re.compile(r"\bexperts\.experts\.(?!\d)")
_EXPERT = re.compile(r"\bexperts\b")
_SETTINGS = ("optimizer", "param_to_group_meta")
_ENDS_OF_MODEL = ("embedding.word_embeddings.weight", "output_layer.weight")


_Settings = Mapping[str, object]
"""What a group says of itself."""


def _takes(group: _Settings, name: str, is_vector: bool, experts_apart: bool) -> bool:
    """Whether a parameter is in the group, by Megatron-Core's rule; `experts_apart`: whether there are groups of experts."""
    of_experts = experts_apart and bool(_EXPERT.search(name))
    if "is_expert_parallel" in group and bool(group["is_expert_parallel"]) != of_experts:
        return False
    if group.get("is_decoupled_lr") and not name.endswith(_ENDS_OF_MODEL):
        return False
    decays = group.get("wd_mult")
    return not isinstance(decays, int | float) or (decays == 0) == is_vector


def parameter_groups(
    held: MegatronItems,
    states: Mapping[str, Mapping[str, object]],
    run: MegatronRun,
    file: str,
    beside: Iterable[Mapping[str, object]] = (),
) -> list[ParameterGroup]:
    """The groups that own a save's parameters, with their settings and the step; `beside`: settings of groups that are
    not in the common state. Raises UnsupportedError if they do not say which group a parameter is in.
    """
    groups = [*_groups(run), *beside]
    members: list[list[str]] = [[] for _ in groups]
    apart = any(group.get("is_expert_parallel") for group in groups)  # not where one rank has all experts
    for name in held.weights:
        if name not in states:
            continue
        is_vector = name.endswith(".bias") or len(held.weights[name].shape) - _count_stacked(name) <= 1
        taking = [number for number, group in enumerate(groups) if _takes(group, name, is_vector, apart)]
        decoupled = [number for number in taking if groups[number].get("is_decoupled_lr")]
        if len(taking := decoupled or taking) != 1:
            raise UnsupportedError(
                f"does not say which parameter group {name!r} is in", file=file,
                found=f"{count(len(groups), 'group')}, {len(taking)} of them may have it",
                expected="the groups that Megatron-Core makes by itself", remedy="Convert the weights alone (to-fp32).",
            )  # fmt: skip
        members[taking[0]].append(name)
    pairs = zip(groups, members, strict=True)
    return [_make_group(states, own, names, own.get("step", _common_step(run))) for own, names in pairs if names]


def named_groups(held: MegatronItems, metadata: Metadata, items: Items) -> list[ParameterGroup]:
    """The groups of `fsdp_dtensor`, which has settings for each parameter: those with equal settings form a group.
    Empty for others.
    """
    own: dict[str, dict[str, BytesItem | TensorItem]] = {}
    for item in metadata.items.values():
        if item.path[:2] == _SETTINGS and len(item.path) > 3:
            own.setdefault(plain_name(str(item.path[2])), {})[str(item.path[3])] = item
    items.open_all(item for settings in own.values() for item in settings.values())
    items.open_all(held.steps.values())
    groups: dict[str, tuple[_Settings, object, list[str]]] = {}
    for name, settings in own.items():
        if name in held.states:
            group = {key: items.value(item) for key, item in settings.items()}
            step = items.value(held.steps[name]) if name in held.steps else group.get("step", 0)
            groups.setdefault(repr(sorted(group.items())), (group, step, []))[2].append(name)
    return [_make_group(held.states, group, names, step) for group, step, names in groups.values()]


def _make_group(
    states: Mapping[str, Mapping[str, object]], group: _Settings, names: list[str], step: object
) -> ParameterGroup:
    kinds = dict.fromkeys(state for name in names for state in states[name] if state != "param")
    return ParameterGroup(tuple(names), kept_settings(group), {"step": step}, tuple(kinds))


def _groups(run: MegatronRun) -> Iterator[_Settings]:
    """The groups of all optimizers of the common state."""
    for own in run.optimizers():
        listed = list_at(own.get("optimizer", own), "param_groups")
        yield from (group for group in listed if isinstance(group, Mapping))


def _common_step(run: MegatronRun) -> object:
    """The step that all parameters share; the iteration where no optimizer says it."""
    for own in run.optimizers():
        state = mapping_at(own, "optimizer", "state")
        if "common_step" in state:
            return state["common_step"]
    return run.step or 0


def _count_stacked(name: str) -> int:
    """The number of dimensions of a tensor that count layers and experts."""
    return len(_LAYERS.findall(name)) + len(_EXPERTS.findall(name))
