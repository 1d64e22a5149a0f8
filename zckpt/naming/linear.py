"""Which tensors are the weights of linear layers, by the schemes of transformers' families: what can be quantised.

For `jobs.quantize`. Routers, gates of shared experts, embeddings, norms and the head are none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.naming.families import model_types
from zckpt.naming.schemes import NamingRule, families, scheme

_LINEAR = frozenset(
    f"blocks.{{b}}.{name}.weight"
    for name in (
        *("attention.query", "attention.key", "attention.value", "attention.output"),
        *("attention.query_down", "attention.query_up", "attention.key_value_down", "attention.key_value_up"),
        *("mlp.gate", "mlp.up", "mlp.down", "shared.gate", "shared.up", "shared.down"),
        *("experts.{e}.gate", "experts.{e}.up", "experts.{e}.down"),
    )
)
_OTHER_CLASSES = {"gpt2": "Conv1D", "falcon": "FalconLinear"}
"""Families with layers that are not torch.nn.Linear (transformers 5.23), which the loaders of quantised models look
for."""
_JOINED = (
    ("attention.query", "attention.key", "attention.value"),
    ("attention.query_down", "attention.key_value_down"),
    ("mlp.gate", "mlp.up"),
    ("shared.gate", "shared.up"),
    ("experts.{e}.gate", "experts.{e}.up"),
)
"""Parts that servers of models load as one matrix, in its order (vLLM 0.11, models/*.py `packed_modules_mapping`)."""
_CORRECTION = "blocks.{b}.router.correction"


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """A model's tensors, by what they are.

    Attributes:
        linear: weights of linear layers, and stacks of experts' weights, each a matrix with a row for each output.
        other: matrices in linear layers that are not to be quantised, as a router, or cannot be, as transposed ones.
        precise: tensors that stay as they are, since half precision changes which experts are chosen.
        head: the module of the head.
        joined: weights that servers of models load into one matrix, in its order.
    """

    linear: frozenset[str]
    other: frozenset[str]
    precise: frozenset[str]
    head: str
    joined: tuple[tuple[str, ...], ...]


def layers_of(names: Iterable[str], config: Mapping[str, Any]) -> LinearLayers | None:
    """The tensors of a model, by kind; None for a family that zckpt does not know, or with layers of another class."""
    kind = config.get("model_type")
    family = next((name for name in families() if kind in model_types(scheme(f"hf-{name}"))), None)
    if family is None or family in _OTHER_CLASSES:
        return None
    own = scheme(f"hf-{family}")
    if own.stacks:  # a tower, or an encoder: which of its layers loaders take quantised is not known
        return None
    linear: set[str] = set()
    other: set[str] = set()
    precise: set[str] = set()
    groups: dict[tuple[int, int, int], dict[int, str]] = defaultdict(dict)
    for name, fit in own.fits(list(names)).items():
        rules = [rule for rule in fit.rules if rule.parts and not rule.is_of_many] if fit is not None else []
        if any(_is_linear(rule) for rule in rules):
            linear.add(name)
            if fit is not None and (place := _joined_place(rules[0])) is not None:
                groups[place[0], fit.block, fit.expert][place[1]] = name
        elif any(rule.parts == (_CORRECTION,) for rule in rules):
            precise.add(name)
        elif not any(_is_no_layer(rule) for rule in rules):
            other.add(name)
    heads = (rule.names[0] for rule in own.rules if rule.parts == ("head.weight",))
    joined = tuple(tuple(group[n] for n in sorted(group)) for group in groups.values() if len(group) > 1)
    head = next(heads, "").removesuffix(".weight")
    return LinearLayers(frozenset(linear), frozenset(other), frozenset(precise), head, joined)


def _joined_place(rule: NamingRule) -> tuple[int, int] | None:
    """The number of the joined group that a tensor belongs to, and its place there; None if it is not in one."""
    if rule.parts is None or len(rule.parts) != 1:
        return None
    part = rule.parts[0].removeprefix("blocks.{b}.").removesuffix(".weight")
    return next(((n, group.index(part)) for n, group in enumerate(_JOINED) if part in group), None)


def _is_linear(rule: NamingRule) -> bool:
    return rule.parts is not None and not rule.transpose and all(part in _LINEAR for part in rule.parts)


def _is_no_layer(rule: NamingRule) -> bool:
    """Whether a rule is of embeddings, positions or norms."""
    return all("embedding" in part or "positions" in part or "_norm" in part for part in rule.parts or ())
