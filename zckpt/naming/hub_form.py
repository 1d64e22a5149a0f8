"""Weights in the form that the hub has them, where transformers keeps them in another one in memory.

For `forms`. Since version 5 transformers fuses some weights when it loads a model (all experts of a layer in one tensor, for
one) and takes them apart again in `save_pretrained`. A checkpoint of such a model holds the fused ones. Its own mapping, run
backwards, says what they become: it is run on tensors without memory, and what it gives are views of these, whose offsets and
strides are the fragments. Nothing is computed and nothing is copied.
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

from zckpt.base.words import examples
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.overlaps import rearranged, strided

if TYPE_CHECKING:
    import torch


def in_hub_form(catalog: Catalog, config: Mapping[str, object]) -> tuple[Catalog, tuple[str, ...]]:
    """The catalog as `save_pretrained` would name and cut its tensors, and what a person should know of it.

    Without transformers 5, or for a model that it does not keep in another form, the catalog stays what it is; and so does one
    whose names are not those of the model in memory.
    """
    if not _is_converted(config):
        return catalog, ()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what is imported on the way may print
            found = _reverted(catalog, config)
    except Exception as error:  # the mapping is transformers' own, and may not fit what it finds
        told = " ".join(str(error).split())[:200]
        return catalog, (f"The hub's form could not be found out ({type(error).__name__}: {told}): names stay.",)
    if found is None:
        return catalog, ()
    changed = len(found.tensors.keys() - catalog.tensors.keys())
    return found, (
        (f"{changed:,} tensors got the hub's names and form, by transformers' own mapping.",) if changed else ()
    )


def _is_converted(config: Mapping[str, object]) -> bool:
    """Whether transformers' mapping knows the model: a look into its source, since importing it takes seconds."""
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
    """The names that a mapping may be registered under: model types, nested ones too, and classes."""
    architectures = config.get("architectures")
    yield from (str(name) for name in architectures) if isinstance(architectures, list) else ()
    if isinstance(kind := config.get("model_type"), str):
        yield kind
    for value in config.values():
        if isinstance(value, dict):
            yield from _kinds(value)


def _reverted(catalog: Catalog, config: Mapping[str, Any]) -> Catalog | None:
    """By the mapping, run backwards on tensors without memory; None where the model is another one."""
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
    """Inside, no tensor is copied only to lie densely: it stays the view that it is."""
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if function.__name__ == "contiguous" else function(*args, **(kwargs or {}))

    with Mode():
        yield


def _entry(name: str, view: torch.Tensor, catalog: Catalog, origin: Mapping[int, str]) -> TensorEntry:
    """The tensor that a view stands for.

    Raises:
        ValueError: it is no view of any: it was computed.
    """
    source = catalog.tensors.get(origin.get(view.untyped_storage()._cdata, ""))
    if source is None:
        raise ValueError(f"{examples([name])} is computed from others")
    shape = tuple(view.shape)
    if shape == source.shape and view.is_contiguous() and view.storage_offset() == 0:
        return replace(source, name=name)
    rows = strided(int(view.storage_offset()), shape, view.stride())
    replicas = tuple(
        replace(replica, fragments=rearranged(replica.fragments, rows, replica.dtype.itemsize))
        for replica in source.replicas
    )
    fragments = rearranged(source.fragments, rows, source.dtype.itemsize)
    return TensorEntry(name, shape, source.dtype, source.role, fragments, replicas)
