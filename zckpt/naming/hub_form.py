"""Weights in the form of the hub, for models that transformers has in another form in memory.

For `transform`. Since version 5 transformers fuses some weights when it loads a model (such as all experts of a layer in one
tensor) and takes them apart again in `save_pretrained`. A checkpoint of such a model holds the fused ones. Here transformers' own
mapping is run backwards on tensors without memory. It returns views of these; their offsets and strides are the
fragments.
Nothing is computed and nothing is copied.
Source: transformers 5.23, core_model_loading.py `revert_weight_conversion`, conversion_mapping.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, TensorEntry, replace_name
from zckpt.core.overlaps import reorder_rows
from zckpt.core.views import rows_of_strided

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
