"""Weights in the form of the hub, for models that transformers has in another form in memory.

For `transform`. Since version 5 transformers fuses some weights when it loads a model (such as all experts of a layer in one
tensor) and takes them apart again in `save_pretrained`. A checkpoint of such a model holds the fused ones. Here transformers' own
mapping is run backwards on tensors without memory. It returns views of these; their offsets and strides are the
fragments.
Nothing is computed and nothing is copied.
Source: transformers 5.23, core_model_loading.py `revert_weight_conversion`, conversion_mapping.py.

A base model in the form in which a run had it in memory, where its files have another: names, and how experts are cut.
For `jobs.merged`. The hub keeps the names of older versions of transformers; since 4.52 a run of a model of text and pictures has
others, which PEFT saves. Since version 5 transformers has all experts of a layer in `experts.gate_up_proj` (experts x 2*out x in,
the gate first) and `experts.down_proj`; before, and on the hub, each expert has Linear modules. Mixtral and its kin call their
home `block_sparse_moe` there, and the modules `w1` (gate), `w3` (up) and `w2` (down). Nothing is computed.
Source: transformers 4.57.6, `_checkpoint_conversion_mapping` in models/*/modeling_*.py, models/mixtral/modeling_mixtral.py; 5.23,
conversion_mapping.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zckpt.base.patterns import compile_late
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, TensorEntry, replace_name
from zckpt.core.dtypes import F32
from zckpt.core.overlaps import reorder_rows
from zckpt.core.recipes import derive_entry, weighted_sum_of
from zckpt.core.views import rows_of_strided
from zckpt.naming.rows import group_rows, split_rows, stack_rows

if TYPE_CHECKING:
    import torch


def in_hub_form(catalog: Catalog, config: Mapping[str, object]) -> tuple[Catalog, tuple[str, ...]]:
    """The catalog with its tensors named and cut as by `save_pretrained`, and notes for the user.

    The catalog stays as it is without transformers 5, for a model that has no other form in memory, and if its names are not
    those of the model in memory.
    """
    if not _is_converted(config):
        return catalog, ()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # imported modules may print
            found = _revert_names(catalog, config)
    except Exception as error:  # transformers' mapping may not fit these tensors
        reason = " ".join(str(error).split())[:200]
        return catalog, (f"Names stay as they are: transformers' mapping failed ({type(error).__name__}: {reason}).",)
    if found is None:
        return catalog, ()
    changed = len(found.tensors.keys() - catalog.tensors.keys())
    note = f"{count(changed, 'tensor')} got the hub's names and form, by transformers' own mapping."
    return found, (note,) if changed else ()


def _is_converted(config: Mapping[str, object]) -> bool:
    """Whether transformers' mapping knows the model; its source is searched, since importing it takes seconds."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations or not config.get("architectures"):
        return False
    path = os.path.join(next(iter(spec.submodule_search_locations)), "conversion_mapping.py")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError:  # transformers before 5
        return False
    return any(f'"{name}"' in text for name in _kinds(config))


def _kinds(config: Mapping[str, object]) -> Iterator[str]:
    """The keys of a mapping: model types, nested ones too, and classes."""
    architectures = config.get("architectures")
    yield from (str(name) for name in architectures) if isinstance(architectures, list) else ()
    if isinstance(kind := config.get("model_type"), str):
        yield kind
    for value in config.values():
        if isinstance(value, dict):
            yield from _kinds(value)


def _revert_names(catalog: Catalog, config: Mapping[str, Any]) -> Catalog | None:
    """Runs the mapping backwards on tensors without memory; None if the tensors are not those of the model."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    model_class = getattr(transformers, config["architectures"][0], None)
    layers = config.get("num_hidden_layers")
    if model_class is None or (isinstance(layers, int) and layers > len(catalog.tensors)):
        return None
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(dict(config)))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    names = {**{name: name for name in catalog.tensors}, **catalog.aliases}
    if any(shapes.get(name) != catalog.tensors[kept].shape for name, kept in names.items()):
        return None
    empty = {name: torch.empty(entry.shape, device="meta") for name, entry in catalog.tensors.items()}
    origin = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
    with _views_only():
        views = revert_weight_conversion(model, dict(empty))
        dropped = {old: revert_weight_conversion(model, {old: empty[kept]}) for old, kept in catalog.aliases.items()}
    tensors = {name: _entry(name, view, catalog, origin) for name, view in views.items()}
    new = {origin[view.untyped_storage()._cdata]: name for name, view in views.items()}
    aliases = {next(iter(result)): new[catalog.aliases[old]] for old, result in dropped.items()}
    return replace(catalog, tensors=tensors, aliases=aliases)


@contextlib.contextmanager
def _views_only() -> Iterator[None]:
    """Makes `contiguous` copy nothing and return the view itself, while the context lasts."""
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if function.__name__ == "contiguous" else function(*args, **(kwargs or {}))

    with Mode():
        yield


def _entry(name: str, view: torch.Tensor, catalog: Catalog, origin: Mapping[int, str]) -> TensorEntry:
    """The entry of a view. Raises ValueError if it is not a view of one of the tensors."""
    source = catalog.tensors.get(origin.get(view.untyped_storage()._cdata, ""))
    if source is None:
        raise ValueError(f"{examples([name])} is computed from others")
    shape = tuple(view.shape)
    if shape == source.shape and view.is_contiguous() and view.storage_offset() == 0:
        return replace_name(source, name)
    rows = rows_of_strided(int(view.storage_offset()), shape, view.stride())
    replicas = tuple(
        replace(replica, fragments=reorder_rows(replica.fragments, rows, replica.dtype.itemsize))
        for replica in source.replicas
    )
    fragments = reorder_rows(source.fragments, rows, source.dtype.itemsize)
    return TensorEntry(name, shape, source.dtype, source.role, fragments, replicas)


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
    recipe = weighted_sum_of((replace(entry, replicas=()),), (1.0,))
    return derive_entry(entry.name, entry.shape, F32, recipe, entry.role)
