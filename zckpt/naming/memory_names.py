"""A base model in the form in which a run had it in memory, where its files have another: names, and how experts are cut.

For `jobs.merged`. The hub keeps the names of older versions of transformers; since 4.52 a run of a model of text and pictures has
others, which PEFT saves. Since version 5 transformers has all experts of a layer in `experts.gate_up_proj` (experts x 2*out x in,
the gate first) and `experts.down_proj`; before, and on the hub, each expert has Linear modules. Mixtral and its kin call their
home `block_sparse_moe` there, and the modules `w1` (gate), `w3` (up) and `w2` (down). Nothing is computed.
Source: transformers 4.57.6, `_checkpoint_conversion_mapping` in models/*/modeling_*.py, models/mixtral/modeling_mixtral.py; 5.23,
conversion_mapping.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import replace

from zckpt.base.patterns import compile_late
from zckpt.core.catalog import Catalog, TensorEntry, replace_name
from zckpt.core.dtypes import F32
from zckpt.core.recipes import WeightedSum, derive_entry
from zckpt.naming.rows import group_rows, split_rows, stack_rows

_Rules = tuple[tuple[str, str], ...]

_TOWERS = (
    *("vision_tower", "image_tower", "video_tower", "audio_tower", "vision_model", "multi_modal_projector", "mlp1"),
    *("image_newline", "vision_embed_tokens"),
)
_KINS: tuple[_Rules, ...] = (
    (
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        *((tower, f"model.{tower}") for tower in _TOWERS),
    ),
    (("visual.", "model.visual."), ("model.", "model.language_model.")),
)  # fmt: skip
"""The beginnings of names on the hub and in memory: for LLaVA and similar models, and for Qwen2-VL and similar ones."""

_INNER = ("", ""), ("_tower.vision_model.", "_tower."), ("_tower.", "_tower.vision_model.")
"""Since version 5 the towers of CLIP and SigLIP have one level less."""

_LAYER = compile_late(r"\.\d+\.")
_SINGLE = compile_late(r"(?P<home>.*\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w[123])\.weight")
_FUSED = compile_late(r"(?P<home>.*\.experts)(?P<part>\.gate_up_proj|\.down_proj)")
_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Gate, up and down, as two kins of models call them."""
_HOMES = ".block_sparse_moe.", ".mlp."


def in_form(base: Catalog, wanted: Collection[str]) -> tuple[Catalog, Callable[[Catalog], Catalog]]:
    """The base as adapters have it in memory, and a function that gives a model of these tensors the base's names and form again.

    It stays as it is where nothing makes all wanted names its own.

    Args:
        base: the base model's tensors.
        wanted: names of the weights that adapters change; a module with parameters of its own ends with `.weight` too.
    """
    names = dict(_find_names(base, {name for name in wanted if _LAYER.search(name) and ".experts." not in name}))
    lacks = {name for name in wanted if name not in {names.get(own, own) for own in base}}
    for old, new in (_HOMES, _HOMES[::-1]):
        if any(new in name for name in lacks) and not any(new in name for name in base.tensors):
            names |= {name: names.get(name, name).replace(old, new, 1) for name in base.tensors if old in name}
    renamed = _rename_tensors(base, names)
    fused, is_apart = _expert_places(renamed, lacks)

    def undo(model: Catalog) -> Catalog:
        return _rename_tensors(_turn(model, fused, fuse=is_apart), {own: name for name, own in names.items()})

    return _turn(renamed, fused, fuse=not is_apart), undo


def _find_names(base: Iterable[str], sought: Set[str]) -> Mapping[str, str]:
    """The base's name of each tensor -> the adapter's, by the rules that make all sought names the base's; empty without any."""
    there = list(base)
    backwards = (tuple((own, other) for other, own in kin) for kin in _KINS)
    for rules, (old, new) in itertools.product(((), *_KINS, *backwards), _INNER):
        names = {name: _rename(name, rules).replace(old, new) for name in there}
        if len({*names.values()}) == len(names) and sought <= {*names.values()}:
            return names
    return {}


def _rename(name: str, rules: _Rules) -> str:
    """The name with its beginning replaced; a name that already has the new beginning stays."""
    if rules and rules[-1][0] == "model." and name.startswith(tuple(new for _, new in rules)):
        return name
    for old, new in rules:
        if name.startswith(old) and (old.endswith(".") or name[len(old) :][:1] in (".", "")):
            return new + name[len(old) :]
    return name


def _rename_tensors(catalog: Catalog, names: Mapping[str, str]) -> Catalog:
    """The catalog under other names; what has none keeps its own."""
    tensors = {
        names.get(name, name): replace_name(entry, names.get(name, name)) for name, entry in catalog.tensors.items()
    }
    aliases = {names.get(dropped, dropped): names.get(kept, kept) for dropped, kept in catalog.aliases.items()}
    return replace(catalog, tensors=tensors, aliases=aliases)


def _expert_places(base: Catalog, lacks: Set[str]) -> tuple[Mapping[str, list[str]], bool]:
    """A parameter of all experts -> the tensors of each in it, where adapters have the one and the base the other.

    True after it: adapters have experts apart.
    """
    singles = [match for name in lacks if (match := _SINGLE.fullmatch(name))]
    homes = {match["home"]: match["part"] for match in singles}
    found = {
        name: _singles(match["home"], entry.shape[0], homes[match["home"]], match["part"])
        for name, entry in base.tensors.items()
        if (match := _FUSED.fullmatch(name)) and match["home"] in homes and len(entry.shape) == 3
    }
    if found:
        return found, True
    sizes: dict[str, tuple[int, str]] = {}
    for match in filter(None, map(_SINGLE.fullmatch, base)):
        if f"{match['home']}.weight" in lacks:
            most, _ = sizes.get(match["home"], (0, ""))
            sizes[match["home"]] = max(most, int(match["number"]) + 1), match["part"]
    for home, (number, part) in sizes.items():
        both = {home + whole: _singles(home, number, part, whole) for whole in (".gate_up_proj", ".down_proj")}
        found |= {whole: names for whole, names in both.items() if base.tensors.keys() >= {*names}}
    return found, False


def _singles(home: str, experts: int, part: str, whole: str) -> list[str]:
    """The names of single experts in a parameter, expert after expert, called as one of them is."""
    gate, up, down = next(names for names in _PARTS if part in names)
    parts = (gate, up) if whole == ".gate_up_proj" else (down,)
    return [f"{home}.{number}.{name}.weight" for number in range(experts) for name in parts]


def _turn(catalog: Catalog, fused: Mapping[str, list[str]], *, fuse: bool) -> Catalog:
    """The catalog with single experts in parameters, or parameters as single experts."""
    tensors = dict(catalog.tensors)
    for whole, names in fused.items():
        if fuse:
            tensors[whole] = _join(whole, [tensors.pop(name) for name in names])
            continue
        entry = tensors.pop(whole)
        shape = entry.shape[0] * entry.shape[1] // len(names), entry.shape[2]
        tensors |= {one.name: one for one in split_rows(entry, [(name, shape) for name in names])}
    return replace(catalog, tensors=tensors)


def _join(whole: str, parts: list[TensorEntry]) -> TensorEntry:
    if len({part.dtype for part in parts}) > 1:  # some are merged, in fp32
        parts = [part if part.dtype == F32 else _widen(part) for part in parts]
    each = 2 if whole.endswith(".gate_up_proj") else 1
    experts = [group_rows(whole, parts[at : at + each], 1) for at in range(0, len(parts), each)]
    return stack_rows(whole, experts, (len(experts),))


def _widen(entry: TensorEntry) -> TensorEntry:
    recipe = WeightedSum((replace(entry, replicas=()),), (1.0,))
    return derive_entry(entry.name, entry.shape, F32, recipe, entry.role)
