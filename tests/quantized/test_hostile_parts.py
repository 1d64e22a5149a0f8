"""Each part of each form with another shape or dtype, lost or cut: an error names it, or the numbers are what they were."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import proofs
import pytest
import torch
from packed_forms import E4M3, FORMS, Dice, Tensors, with_last, write

import zckpt
from zckpt.engine.elements import ElementReader, elements
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog

DTYPES = (
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float32, torch.float16, torch.bfloat16, E4M3, torch.float8_e5m2),
)


def mutations(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | None]]:
    """What may have become of a tensor, with a word for it."""
    yield "missing", None
    if tensor.dim():
        yield "half the columns", tensor[..., : tensor.shape[-1] // 2]
        yield "a column more", torch.cat([tensor, tensor[..., :1]], -1)
        yield "columns doubled", torch.cat([tensor, tensor], -1)
        yield "half the rows", tensor[: len(tensor) // 2]
        yield "a row less", tensor[:-1]
        yield "rows doubled", torch.cat([tensor, tensor])
        yield "flat", tensor.reshape(-1)
        yield "a dimension more", tensor[None]
        yield "a last dimension more", tensor[..., None]
        yield "no rows", tensor[:0]
        yield "a single one", tensor.reshape(-1)[:1]
    if tensor.dim() > 1:
        yield "transposed", tensor.transpose(-1, -2)
    for dtype in DTYPES:
        if dtype != tensor.dtype:
            yield f"as {dtype}", tensor.to(dtype)
        if dtype != tensor.dtype and dtype.itemsize == tensor.dtype.itemsize:
            yield f"its bits as {dtype}", tensor.view(dtype)
    if tensor.is_floating_point():
        yield "nan", with_last(math.nan)(tensor)
        if tensor.dtype != E4M3:
            yield "inf", with_last(math.inf)(tensor)


def packed(fmt: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, "type": "int", **weights}}}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": groups}


SAID: dict[str, dict[str, Any]] = {
    "int4 by groups": packed("pack-quantized", num_bits=4, strategy="group", group_size=8),
    "int4 by rows": packed("pack-quantized", num_bits=4, strategy="channel"),
    "int4 with zero points": packed("pack-quantized", num_bits=4, strategy="group", group_size=8, symmetric=False),
    "int8, packed, with zero points": packed("pack-quantized", num_bits=8, strategy="channel", symmetric=False),
    "int3, packed, with zero points": packed(
        "pack-quantized", num_bits=3, strategy="group", group_size=8, symmetric=False
    ),
    "int6, packed": packed("pack-quantized", num_bits=6, strategy="group", group_size=8),
    "int4 in another order": packed("pack-quantized", num_bits=4, strategy="group", group_size=16, actorder="group"),
    "int4 with zero points as they are": packed(
        "pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False
    ),
    "int8 by rows": packed("int-quantized", num_bits=8, strategy="channel"),
    "int8 by groups, with zero points": packed("int-quantized", num_bits=8, strategy="group", symmetric=False),
    "int8 of a tensor": packed("int-quantized", num_bits=8, strategy="tensor"),
    "fp8 by groups": packed("float-quantized", num_bits=8, strategy="group", type="float"),
    "fp8 of mistral": packed("float-quantized", num_bits=8, strategy="tensor", type="float"),
    "mxfp8": packed("mxfp8-quantized", num_bits=8, strategy="group", group_size=32, type="float"),
    "gptq of 2 bits": {"quant_method": "gptq", "bits": 2, "group_size": 32},
    "gpt-oss": {"quant_method": "mxfp4"},
}
"""What the configs of forms say, where shapes alone could be another checkpoint."""


def numbers(at: Path, stored: Tensors, said: dict[str, Any] | None) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    opened = open_catalog(write(at, {name: t.contiguous() for name, t in stored.items()}, said), Reading())
    opened.check_read(opened.catalog.tensors.values())
    with ElementReader() as reader:
        return {
            name: (str(e.dtype), e.shape, bytes(reader.read(elements(e, 0, e.numel))) if e.numel else b"")
            for name, e in opened.catalog.tensors.items()
        }


def is_another(key: str, new: torch.Tensor | None, what: str, shape: Any, wanted: Any) -> bool:
    """Whether what was made is a sound checkpoint too, that no reader can tell from this one."""
    is_cast = what.startswith(("as ", "its bits as "))
    if new is None:  # zero points of torchao are there or not; where 0.20 writes no g_idx, groups are in order
        return key.endswith(("g_idx", "_weight_zero_point"))
    if what == "nan" or "_qdata" in key or (is_cast and new.is_floating_point()):
        return True  # a number that is none, codes of another form, or other scales
    if key.endswith("_weight_scale") and what == "a single one":
        return True  # torchao's header would tell
    return not is_cast and shape != wanted


@pytest.mark.parametrize("name", FORMS)
def test_parts_that_are_not_what_they_were(tmp_path: Path, name: str) -> None:
    make, quantization = FORMS[name]
    said = SAID.get(name, quantization)
    base = {f"a_proj.{end}" if "down" not in end else f"a.{end}": t.contiguous() for end, t in make(Dice(1))[0].items()}
    wanted = numbers(tmp_path / "sound", base, said)

    wrong = []
    for number, (key, what, new) in enumerate((k, what, new) for k in base for what, new in mutations(base[k])):
        if not proofs.IS_WHOLE and number % 5 != len(name) % 5:
            continue
        stored = {k: t for k, t in base.items() if k != key} | ({} if new is None else {key: new})
        try:
            found = numbers(tmp_path / str(number), stored, said)
        except zckpt.ZckptError as error:
            assert "a_proj." in str(error) or "a.down_proj" in str(error), (key, what, str(error))
            continue
        shapes, were = ([(key, one[1]) for key, one in them.items()] for them in (found, wanted))
        if found != wanted and not is_another(key, new, what, shapes, were):
            wrong.append((key, what, {k: found[k][:2] for k in found}))
    assert not wrong, wrong


@pytest.mark.parametrize("end", ["pre_quant_scale", "svdquant_lora_a", "_weight_act_pre_scale"])
def test_weights_that_were_scaled_before_are_refused(tmp_path: Path, end: str) -> None:
    """The numbers of NVFP4 of AWQ and of SVDQuant are not the model's: inputs are scaled, or a product is added."""
    stored = {f"a_proj.{name}": tensor for name, tensor in FORMS["modelopt"][0](Dice(1))[0].items()}
    with pytest.raises(zckpt.UnsupportedError, match="scaled or split before"):
        numbers(tmp_path / "source", stored | {f"a_proj.{end}": torch.ones(8)}, None)
