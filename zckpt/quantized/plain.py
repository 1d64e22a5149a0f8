"""Checkpoints with quantised weights, as the numbers that they stand for.

For `jobs.opened`. Matrices of fp8 with scales beside them (`weight_scale_inv`, `weight_scale`) become their products, and the
scales are not tensors any more. What zckpt cannot read is found by `packed`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt.base.errors import COPY_AGAIN, IncompleteError, InconsistentError, UnsupportedError
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import F32, DType
from zckpt.core.recipes import derive_entry
from zckpt.quantized.configs import BLOCK, Quantization
from zckpt.quantized.forms import BESIDE_MODULE

if TYPE_CHECKING:
    from zckpt.quantized.grids import Scaled

_SCALES = ("_scale_inv", "_scale", "_weight_scale")
_OF_MISTRAL = "qscale_weight"
"""The scale of a module's weight in Mistral's own form; vLLM 0.11, models/llama.py (`mistral_mapping`), multiplies by it."""
_OF_CACHE = (
    *(".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".k_zero_point", ".v_zero_point"),
    *("_fake_quantizer.qscale_act", ".k_proj.k_bias", ".v_proj.v_bias"),
)
"""Ends of names of the scales of quantised keys and values; plain weights have no use for them."""


def find_scaled(catalog: Catalog, quantization: Quantization | None, packed: Collection[str] = ()) -> dict[str, Scaled]:
    """The tensors of fp8 that have scales beside them, by name; `packed`: names of tensors of another form.

    Raises:
        InconsistentError: scales do not fit their tensor.
        IncompleteError: by the config scales should be there, and are not.
    """
    found: dict[str, Scaled] = {}
    bare: list[str] = []
    by_blocks = quantization is not None and quantization.method == "fp8"
    for name, entry in catalog.tensors.items():
        if not is_fp8(entry.dtype) or name in packed:
            continue
        scaled_by = _scales_of(name, catalog)
        if not scaled_by:
            bare.append(name)
            continue
        beside = scaled_by[0]
        from zckpt.quantized.grids import Scaled, grid_of

        scales = catalog.tensors[beside]
        block = quantization.block if quantization is not None else BLOCK
        grid = grid_of(entry.shape, scales.shape, block, has_groups=not by_blocks)
        strategies = {
            one.get("strategy", "tensor") for one in (quantization.weights if quantization is not None else ())
        }
        if strategies and "tensor" not in strategies and scales.numel == 1 < math.prod(entry.shape[:-1]):
            grid = None
        if grid is None or scales.dtype.kind != "float" or is_fp8(scales.dtype) or len(scaled_by) > 1:
            more = "".join(f" and {other!r}" for other in scaled_by[1:])
            raise InconsistentError(
                f"the scales of tensor {name!r} do not fit it", file=catalog.source.path,
                found=f"{beside!r}, {scales.dtype} {list(scales.shape)}{more}, for a tensor {list(entry.shape)}",
                expected=f"floats: one, one for each row, or one for each block of {block[0]} x {block[1]} elements",
                remedy="Copy the checkpoint again, with the config.json that belongs to it; if it is intact, dequantise it with "
                "the library that wrote it.",
            )  # fmt: skip
        found[name] = Scaled(entry, scales, grid)
    _check_bare(catalog, bare, quantization, found)
    return found


def _scales_of(name: str, catalog: Catalog) -> list[str]:
    """The names of the scales of a tensor of fp8; a second one contradicts the first."""
    names = [name + end for end in _SCALES]
    if name.endswith("weight"):
        names.append(name.removesuffix("weight") + _OF_MISTRAL)
    return [one for one in names if one in catalog.tensors]


_SCALE = re.compile("scal(e|ing)")


def _check_bare(
    catalog: Catalog, bare: Sequence[str], quantization: Quantization | None, found: Mapping[str, Scaled]
) -> None:
    """Checks that tensors of fp8 without known scales are plain numbers: that no scale of another name is beside them, and that
    neither a config nor other tensors speak of scales.

    Raises:
        UnsupportedError: there are scales of another name.
        IncompleteError: scales are missing.
    """
    if not bare:
        return
    used = {one.scales.name for one in found.values()}
    modules = {name: name.rpartition(".")[0] for name in bare}
    scaled: dict[str, str] = {}
    for other in catalog.tensors:
        module, _, last = other.rpartition(".")
        if _SCALE.search(last) and other not in used and not other.endswith((*BESIDE_MODULE, *_OF_CACHE)):
            scaled.setdefault(module, other)
    if odd := [f"{scaled[module]!r} beside {name!r}" for name, module in modules.items() if module in scaled]:
        raise UnsupportedError(
            f"{count(len(odd), 'tensor of fp8 has', 'tensors of fp8 have')} scales that zckpt does not know",
            file=catalog.source.path, found="; ".join(odd[:3]),
            expected="weight_scale_inv, weight_scale or qscale_weight",
            remedy="Dequantise the model with the library that wrote it, save it, and convert that.",
        )  # fmt: skip
    is_said = quantization is not None and quantization.is_read
    lost = bare if is_said else [name for name in bare if found and len(catalog.tensors[name].shape) > 1]
    if lost:
        reason = (
            f"its config says {quantization.about}" if quantization and is_said else "other tensors of fp8 have them"
        )
        raise IncompleteError(
            f"{count(len(lost), 'tensor of fp8 has', 'tensors of fp8 have')} no scales", file=catalog.source.path,
            found=examples(lost), expected=f"weight_scale_inv or weight_scale beside each, since {reason}",
            remedy=COPY_AGAIN,
        )  # fmt: skip


def is_fp8(dtype: DType) -> bool:
    """Whether a dtype is a floating-point one of one byte."""
    return dtype.kind == "float" and dtype.itemsize == 1


def plain(catalog: Catalog, found: Mapping[str, TensorEntry], gone: Collection[str] = ()) -> Catalog:
    """The catalog with the numbers that quantised tensors stand for, and without scales and what else belongs to them
    (`gone`).
    """
    gone = {*gone} - found.keys()
    for name, entry in found.items():
        if is_fp8(catalog.tensors[name].dtype):
            gone.update(_scales_of(name, catalog))
        module = entry.name.removesuffix("weight")
        gone.update(module + end for end in BESIDE_MODULE if module + end in catalog.tensors)
    gone.update(name for name, entry in catalog.tensors.items() if name.endswith(_OF_CACHE) and _is_of_cache(entry))
    tensors: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        if name not in gone:
            now = found.get(name, entry)
            tensors[now.name] = now
    aliases: dict[str, str] = {}
    for other, kept in catalog.aliases.items():
        if kept in found and found[kept].name != kept:
            same = next(n for n, (a, b) in enumerate(zip(kept + " ", found[kept].name + " ")) if a != b)
            aliases[other.removesuffix(kept[same:]) + found[kept].name[same:]] = found[kept].name
        elif kept not in gone:
            aliases[other] = kept
    return replace(catalog, tensors=tensors, aliases=aliases)


def _is_of_cache(entry: TensorEntry) -> bool:
    """Whether a tensor is one number, one for each head, or a vector of numbers that are added."""
    return entry.numel == 1 or entry.shape[1:] == (1, 1) or entry.name.endswith("_bias")


def product(each: Scaled, dtype: DType | None = None) -> TensorEntry:
    """The numbers of a quantised tensor, in fp32 or rounded to a dtype."""
    from zckpt.quantized.grids import in_dtype

    wide = derive_entry(each.entry.name, each.entry.shape, F32, each, each.entry.role)
    return wide if dtype is None else in_dtype(wide, dtype, each.unit)


def about(quantization: Quantization | None, found: Collection[str]) -> str:
    """The quantisation of a checkpoint's weights, in words; empty if there is none."""
    if quantization is None:
        return f"fp8 with scales ({count(len(found), 'tensor')})" if found else ""
    return f"{quantization.about} ({count(len(found), 'tensor')} of fp8 with scales)" if found else quantization.about
