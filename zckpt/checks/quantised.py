"""Finds what an output must hold of a checkpoint with quantised weights, or of one with weights that it quantises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import BF16, DType
from zckpt.core.recipes import DerivedStore
from zckpt.engine.elements import ElementReader, elements
from zckpt.jobs.casting import to_dtype
from zckpt.jobs.opened import dequantise, opened_as_stored
from zckpt.layouts.gguf import METADATA
from zckpt.layouts.places import Place
from zckpt.layouts.save.companions import read_config
from zckpt.output.manifest import Manifest
from zckpt.quantized.configs import RECORDED
from zckpt.quantized.plain import is_fp8

Expected = tuple[Catalog, Mapping[str, DType]]
"""The tensors that an output must hold, and the dtype of each where it does not follow from what was asked for."""


def in_numbers(catalog: Catalog, place: Place, output: Catalog, facts: Manifest | None) -> Catalog:
    """The checkpoint's tensors, with quantised ones as the numbers that they stand for, unless the output holds them as
    stored.
    """
    if METADATA in catalog.extras:
        from zckpt.layouts.gguf.blocks import read_again

        return read_again(catalog)
    was_made = facts is not None and not facts.options.keys().isdisjoint((RECORDED, "mlx"))
    dtypes = [entry.dtype for entry in output.tensors.values()]
    opened = opened_as_stored(catalog, place)
    codes = () if opened.packed is None else opened.packed.members
    is_copy = all(name in output.tensors for name in codes) if codes else any(map(is_fp8, dtypes))
    if not was_made and is_copy:
        return catalog
    numbers = dequantise(opened).catalog
    if numbers is catalog:
        return catalog
    from zckpt.quantized.second import derive_again

    with ElementReader() as reader:
        own = opened.quantization
        again = derive_again(catalog.tensors, own.facts if own is not None else {}, partial(_read_small, reader))
    tensors = {name: _second(entry, again.get(name)) for name, entry in numbers.tensors.items()}
    return replace(numbers, tensors=tensors)


def _read_small(reader: ElementReader, entry: TensorEntry) -> Any:
    import numpy as np

    return np.frombuffer(reader.read(elements(entry, 0, entry.numel)), entry.dtype.numpy)


def _second(entry: TensorEntry, again: TensorEntry | None) -> TensorEntry:
    """The tensor as the second reader decodes it; a plain tensor as it is."""
    is_stored = not any(isinstance(fragment.store, DerivedStore) for fragment in entry.fragments)
    return entry if is_stored or again is None else replace(again, role=entry.role)


def expect_quantised(wanted: Catalog, output: Place, facts: Manifest | None) -> Expected:
    """The tensors of an output, in which they have these names already, with those of fp8 if it was quantised: its manifest
    says so, and the config beside it of what family the model is.
    """
    if facts is not None and isinstance(said := facts.options.get("mlx"), Mapping):
        return _expect_mlx(wanted, output, facts, said)
    said = facts.options.get(RECORDED) if facts is not None else None
    if facts is None or not isinstance(said, Mapping):
        return wanted, {}
    from zckpt.jobs.quantize import fp8_weights
    from zckpt.quantized.quantise import as_stack
    from zckpt.quantized.second import powers_again, stored_again
    from zckpt.quantized.second_codes import quantise_again

    scheme, group = said.get("scheme", "block128"), said.get("group_size")
    config, dtype = read_config(output.home) or {}, to_dtype(facts.dtype) if facts.dtype else BF16
    doubled = {name: powers_again(wanted.tensors[name]) for name in said.get("powers", ()) if name in wanted.tensors}
    powers = {name: one for name, one in doubled.items() if one is not None}
    weights = fp8_weights(
        wanted, config, scheme, said.get("quantize", ()), said.get("keep", ()), dtype, group, powers=powers
    )
    tensors = dict(weights.catalog.tensors)
    for name, quantiser in weights.quantisers.items():
        entry = wanted.tensors[name]
        if name in said.get("carried", ()):
            again = stored_again(entry, {one: made for one, made in tensors.items() if one.startswith(name)})
        else:
            second = quantiser.second
            together = () if second is None else second.entries
            of = [] if quantiser.powers is None or second is None else [quantiser.powers]
            of += second.powers if second is not None else ()
            again = quantise_again(quantiser.entry, scheme, group, quantiser.dtype, together, of)
            again = as_stack(again, entry) if entry.shape != quantiser.entry.shape else again
        tensors |= again
    dtypes = {**weights.dtypes, **{name: tensors[name].dtype for name in weights.dtypes.keys() - wanted.tensors.keys()}}
    return replace(weights.catalog, tensors=tensors), dtypes


def _expect_mlx(wanted: Catalog, output: Place, facts: Manifest, said: Mapping[str, Any]) -> Expected:
    """The tensors of an output in MLX's form."""
    from zckpt.jobs.to_mlx import mlx_tensors
    from zckpt.naming.mlx_names import in_mlx_form
    from zckpt.quantized.second_codes import affine_again

    dtype = to_dtype(facts.dtype)
    form = in_mlx_form(wanted, read_config(output.home) or {}, said.get("bits"), int(said.get("group_size", 64)))
    made, dtypes = mlx_tensors(form, dtype)
    tensors = dict(made.tensors)
    for name, width in form.widths.items():
        tensors |= affine_again(form.catalog.tensors[name], *width, dtype)
    return replace(made, tensors=tensors), dtypes
