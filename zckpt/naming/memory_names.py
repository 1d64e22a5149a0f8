"""Models of text and pictures have other names in memory than on the hub: rules that find an adapter's names in its base.

For `jobs.merged`. The hub keeps the names of older versions of transformers; since 4.52 a run has others, which PEFT saves.
Source: transformers 4.57.6, `_checkpoint_conversion_mapping` in models/*/modeling_*.py; 5.23, conversion_mapping.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from zckpt.base.patterns import compile_late
from zckpt.core.catalog import Catalog, replace_name

_Rules = tuple[tuple[str, str], ...]

_TOWERS = ("vision_tower", "vision_model", "multi_modal_projector", "mlp1", "image_newline", "vision_embed_tokens")
_KINS: tuple[_Rules, ...] = (
    (
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        *((tower, f"model.{tower}") for tower in _TOWERS),
    ),
    (("visual.", "model.visual."), ("model.", "model.language_model.")),
)  # fmt: skip
"""How names begin on the hub, and in memory: of LLaVA and its kin, of Qwen2-VL and its kin."""

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
    for rules in (*_KINS, *(tuple((own, other) for other, own in kin) for kin in _KINS)):
        names = {name: _rename(name, rules) for name in there}
        if len({*names.values()}) == len(names) and sought <= {*names.values()}:
            return names
    return {}


def _rename(name: str, rules: _Rules) -> str:
    """The name with another beginning, which ends with a part of the name; that which has such a beginning already keeps it."""
    if rules[-1][0] == "model." and name.startswith(tuple(new for _, new in rules)):
        return name
    for old, new in rules:
        if name.startswith(old) and (old.endswith(".") or name[len(old) :][:1] in (".", "")):
            return new + name[len(old) :]
    return name


def rename_tensors(catalog: Catalog, names: Mapping[str, str]) -> Catalog:
    """The catalog under other names; what has none keeps its own."""
    tensors = {
        names.get(name, name): replace_name(entry, names.get(name, name)) for name, entry in catalog.tensors.items()
    }
    aliases = {names.get(dropped, dropped): names.get(kept, kept) for dropped, kept in catalog.aliases.items()}
    return replace(catalog, tensors=tensors, aliases=aliases)
