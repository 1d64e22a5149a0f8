"""Models of text and pictures have other names in memory than on the hub: rules that find an adapter's names in its base.

For `jobs.merged`. The hub keeps the names of older versions of transformers; since 4.52 a run has others, which PEFT saves.
Source: transformers 4.57.6, `_checkpoint_conversion_mapping` in models/*/modeling_*.py; 5.23, conversion_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from zckpt.base.patterns import compile_late
from zckpt.core.catalog import Catalog, replace_name

_Rules = tuple[tuple[str, str], ...]

_FROM_HUB: tuple[_Rules, ...] = (
    (
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^language_model\.model\.", "model.language_model."),
        (r"^(vision_tower|vision_model|multi_modal_projector|mlp1|image_newline|vision_embed_tokens)(?=\.|$)", r"model.\1"),
    ),
    ((r"^visual\.", "model.visual."), (r"^model\.(?!language_model\.|visual\.)", "model.language_model.")),
)  # fmt: skip
"""Names on the hub -> names in memory: of LLaVA and its kin, of Qwen2-VL and its kin."""

_TO_HUB: tuple[_Rules, ...] = (
    (
        (r"^lm_head\.", "language_model.lm_head."),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^model\.(vision_tower|vision_model|multi_modal_projector|mlp1|image_newline|vision_embed_tokens)(?=\.|$)", r"\1"),
    ),
    ((r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model.")),
)  # fmt: skip
"""The way back, for adapters of older versions on a base that a newer one saved under the names in memory."""

_LAYER = compile_late(r"\.\d+\.")


def find_names(base: Iterable[str], wanted: Iterable[str]) -> Mapping[str, str]:
    """The base's name of each tensor -> the adapter's, by the rules that make all wanted names the base's.

    Returns:
        Empty where the names are the same, and where no rules make them so.

    Args:
        base: names of the base model's tensors.
        wanted: names of the weights that an adapter changes.
    """
    there, sought = list(base), {name for name in wanted if _LAYER.search(name)}
    if not sought or sought & set(there):
        return {}
    for rules in (*_FROM_HUB, *_TO_HUB):
        names = {name: _rename(name, rules) for name in there}
        if len({*names.values()}) == len(names) and sought <= {*names.values()}:
            return names
    return {}


def _rename(name: str, rules: _Rules) -> str:
    for pattern, other in rules:
        renamed, count = re.subn(pattern, other, name)
        if count:
            return renamed
    return name


def rename_tensors(catalog: Catalog, names: Mapping[str, str]) -> Catalog:
    """The catalog under other names; what has none keeps its own."""
    tensors = {
        names.get(name, name): replace_name(entry, names.get(name, name)) for name, entry in catalog.tensors.items()
    }
    aliases = {names.get(dropped, dropped): names.get(kept, kept) for dropped, kept in catalog.aliases.items()}
    return replace(catalog, tensors=tensors, aliases=aliases)
