"""Packed weights as a source: each form's numbers are its library's, bit for bit, on shapes of all kinds, with zero blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import proofs
import pytest
import synth
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import zckpt
from zckpt.quantized.coded import Coded

Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, str, torch.Tensor]
"""Ends of the names of what is stored, the end of the plain name, and the numbers."""
E4M3 = torch.float8_e4m3fn
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Dice:
    """Random tensors, the same for the same number."""

    def __init__(self, seed: int) -> None:
        self.torch = torch.Generator().manual_seed(seed)
        self.seed = seed

    def below(self, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=self.torch)

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.torch))

    def bytes(self, *shape: int) -> torch.Tensor:
        return self.below(256, *shape).to(torch.uint8)

    def scales(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Positive numbers of many sizes; some are zero, as those of blocks of zeros."""
        found = torch.rand(shape, generator=self.torch) * 2.0 ** self.below(9, *shape).float() / 64
        return (found * (self.below(8, *shape) > 0)).to(dtype or FLOATS[self.seed % 3])


def pack_quantized(bits: int, strategy: str, *, symmetric: bool = True) -> Callable[[Dice], Made]:
    def make(dice: Dice) -> Made:
        rows, group = (
            dice.number(1 if symmetric else 9, 40),
            dice.number(1, 9) * 2,
        )  # the library fails with one row of words
        columns = group * dice.number(1, 6) + (32 if group > 4 else 64) // group * group
        across = columns // group if strategy == "group" else 1
        args = QuantizationArgs(
            num_bits=bits,
            type="int",
            strategy=strategy,
            group_size=group if strategy == "group" else None,
            symmetric=symmetric,
        )
        low = 1 << bits - 1
        codes, scales = dice.below(2 * low, rows, columns) - low, dice.scales(rows, across)
        zeros = (dice.below(2 * low, rows, across) - low).to(torch.int8)
        stored = {
            "weight_packed": pack_to_int32(codes.to(torch.int8), bits), "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }  # fmt: skip
        if not symmetric:
            stored["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0).contiguous()
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        kind = BaseCompressor.get_value_from_registry("pack-quantized")
        return stored, "weight", kind.decompress({**stored, "weight_scale": scales.float()}, scheme)["weight"]

    return make


def act_order(dice: Dice) -> Made:
    """As compressed-tensors 0.9.4 wrote it: column j is of group g_idx[j]."""
    rows, groups = dice.number(1, 40), dice.number(1, 5)
    columns = groups * 16
    order = torch.arange(columns) // 16
    order = order[torch.randperm(columns, generator=dice.torch)]
    codes, scales = dice.below(16, rows, columns) - 8, dice.scales(rows, groups)
    stored = {
        "weight_packed": pack_to_int32(codes.to(torch.int8), 4), "weight_scale": scales, "weight_g_idx": order.int(),
        "weight_shape": torch.tensor([rows, columns]),
    }  # fmt: skip
    if dice.seed % 4 == 0:  # none
        stored["weight_g_idx"], order = torch.full((columns,), -1, dtype=torch.int32), torch.arange(columns) // 16
    return stored, "weight", codes.float() * scales.float()[:, order]


def naive(strategy: str, kind: str = "int", *, symmetric: bool = True) -> Callable[[Dice], Made]:
    def make(dice: Dice) -> Made:
        rows, group = dice.number(1, 40), dice.number(1, 20)
        columns = group * dice.number(1, 6)
        shape = {"tensor": (1,), "channel": (rows, 1), "group": (rows, columns // group)}[strategy]
        args = QuantizationArgs(
            num_bits=8,
            type=kind,
            strategy=strategy,
            group_size=group if strategy == "group" else None,
            symmetric=symmetric,
        )
        scales, codes = dice.scales(*shape), dice.bytes(rows, columns)
        codes = codes.view(torch.int8) if kind == "int" else torch.where(codes & 127 == 127, 0, codes).view(E4M3)
        stored = {"weight": codes, "weight_scale": scales}
        zeros = None
        if not symmetric:
            zeros = stored["weight_zero_point"] = dice.bytes(*shape).view(torch.int8)
        return stored, "weight", dequantize(codes.float(), scales.float(), zeros, args=args, dtype=torch.float32)

    return make


def nvfp4(dice: Dice) -> Made:
    rows, columns = dice.number(1, 40), 16 * dice.number(1, 9)
    packed, scales = dice.bytes(rows, columns // 2), dice.scales(rows, columns // 16, dtype=E4M3)
    whole = torch.rand(1, generator=dice.torch) * 1000 + 1
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    codes = unpack_fp4_from_uint8(packed, rows, columns, dtype=torch.float32)
    numbers = dequantize(codes, scales.float(), args=args, global_scale=whole, dtype=torch.float32)
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole}, "weight", numbers


def mxfp4(dice: Dice) -> Made:
    rows, columns = dice.number(1, 40), 32 * dice.number(1, 9)
    packed, powers = dice.bytes(rows, columns // 2), dice.below(200, rows, columns // 32).to(torch.uint8)
    codes = unpack_fp4_from_uint8(packed, rows, columns, dtype=torch.float32)
    numbers = torch.ldexp(codes.reshape(rows, -1, 32), powers.int()[..., None] - 127).reshape(rows, columns)
    end = "weight_packed" if dice.seed % 2 else "weight"
    return {end: packed, "weight_scale": powers}, "weight", numbers


def mxfp8(dice: Dice) -> Made:
    rows, columns = dice.number(1, 40), 32 * dice.number(1, 9)
    codes, powers = dice.bytes(rows, columns), dice.below(200, rows, columns // 32).to(torch.uint8)
    codes = torch.where(codes & 127 == 127, 0, codes).view(E4M3)
    numbers = torch.ldexp(codes.float().reshape(rows, -1, 32), powers.int()[..., None] - 127).reshape(rows, columns)
    return {"weight": codes, "weight_scale": powers}, "weight", numbers


def modelopt(dice: Dice) -> Made:
    """NVFP4QTensor.dequantize: the scales are multiplied first; experts may be stacked."""
    lead = (dice.number(2, 4),) if dice.seed % 3 == 0 else ()
    rows, columns = dice.number(1, 20), 16 * dice.number(1, 9)
    packed, scales = dice.bytes(*lead, rows, columns // 2), dice.scales(*lead, rows, columns // 16, dtype=E4M3)
    second = torch.rand(lead, generator=dice.torch) / 100
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(*lead, rows, columns)
    both = scales.float() * second[..., None, None]
    stored = {"weight": packed, "weight_scale": scales, "weight_scale_2": second, "input_scale": torch.ones(())}
    return stored, "weight", table[codes.long()] * both.repeat_interleave(16, -1)


def gpt_oss(dice: Dice) -> Made:
    experts, rows, across = dice.number(1, 4), dice.number(1, 30), dice.number(1, 4)
    blocks, powers = dice.bytes(experts, rows, across, 16), dice.below(200, experts, rows, across).to(torch.uint8)
    numbers = convert_moe_packed_tensors(blocks, powers, dtype=torch.float32)
    return {"down_proj_blocks": blocks, "down_proj_scales": powers}, "down_proj", numbers


def words(codes: torch.Tensor, bits: int, order: Any = None) -> torch.Tensor:
    """Codes in words of 32 bits, along the last dimension, least significant first; nibble p has column order[p]."""
    each = 32 // bits
    codes = codes.long().reshape(*codes.shape[:-1], -1, each)[..., list(order or range(each))]
    return (codes << torch.arange(each) * bits).sum(-1).to(torch.int32)


def gptq(bits: int, version: int = 1, *, ordered: bool = True, symmetric: bool = False) -> Callable[[Dice], Made]:
    """GPTQModel's `dequantize_weight`: scales[g] * (weight - zeros[g]); version 1 stores zeros - 1."""

    def make(dice: Dice) -> Made:
        each = 32 // bits
        rows, size, groups = each * dice.number(1, 6), each * dice.number(1, 3), dice.number(1, 5)
        columns = size * groups
        order = torch.arange(columns) // size
        if ordered and dice.seed % 2:
            order = order[torch.randperm(columns, generator=dice.torch)]
        codes, scales = dice.below(1 << bits, columns, rows), dice.scales(groups, rows, dtype=torch.float16)
        zeros = dice.below((1 << bits) - 1, groups, rows) + int(version == 1)
        if symmetric:
            zeros = torch.full_like(zeros, 1 << bits - 1)
        stored = {
            "qweight": words(codes.T, bits).T, "qzeros": words(zeros - int(version == 1), bits), "scales": scales,
            **({"g_idx": order.int()} if ordered else {}),
        }  # fmt: skip
        return stored, "weight", (scales.float()[order] * (codes - zeros[order]).float()).T

    return make


def awq(dice: Dice) -> Made:
    """AutoAWQ's `dequantize_gemm`."""
    rows, size, groups = 8 * dice.number(1, 6), dice.number(1, 40), dice.number(1, 5)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros = dice.below(16, size * groups, rows), dice.below(16, groups, rows)
    scales = dice.scales(groups, rows, dtype=torch.float16)
    s, z = (x.float().repeat_interleave(size, 0) for x in (scales, zeros))
    stored = {"qweight": words(codes, 4, order), "qzeros": words(zeros, 4, order), "scales": scales}
    return stored, "weight", ((codes - z) * s).T


def bnb(kind: str, *, nested: bool = False) -> Callable[[Dice], Made]:
    """bitsandbytes' `dequantize_4bit`, and of `QuantState.as_dict(packed=True)` what is stored; the table is any."""

    def make(dice: Dice) -> Made:
        shape, size = (dice.number(1, 40), dice.number(1, 60)), (64, 128, 256)[dice.seed % 3]
        numel = math.prod(shape)
        blocks = -(-numel // size)
        packed, table = dice.bytes(-(-numel // 2), 1), torch.rand(16, generator=dice.torch) * 2 - 1
        said: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": shape}
        stored = {"weight": packed, "weight.quant_map": table}
        if nested:
            own, codes = torch.rand(256, generator=dice.torch), dice.bytes(blocks)
            scales, offset = dice.scales(-(-blocks // 256), dtype=torch.float32), float(np.float32(0.0123))
            said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            stored |= {"weight.absmax": codes, "weight.nested_absmax": scales, "weight.nested_quant_map": own}
            absmax = own[codes.long()] * scales.repeat_interleave(256)[:blocks] + offset
        else:
            absmax = stored["weight.absmax"] = dice.scales(blocks, dtype=torch.float32)
        state = torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)
        stored[f"weight.quant_state.bitsandbytes__{kind}"] = state
        codes = torch.stack([packed >> 4, packed & 15], -1).reshape(-1)[:numel]
        if dice.seed % 4 == 0 and len(packed) % 4 == 0:  # bnb_4bit_quant_storage
            stored["weight"] = packed.view(-1).view(torch.bfloat16)[:, None]
        return stored, "weight", (table[codes.long()] * absmax.repeat_interleave(size)[:numel]).reshape(shape)

    return make


def bnb_int8(dice: Dice) -> Made:
    codes, scales = dice.bytes(dice.number(1, 40), dice.number(1, 60)).view(torch.int8), None
    scales = dice.scales(len(codes), dtype=torch.float32)
    stored = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, "weight", codes * scales[:, None] * 7.874015718698502e-3


def torchao(kind: str) -> Callable[[Dice], Made]:
    def make(dice: Dice) -> Made:
        stored, _, numbers = naive("channel", kind, symmetric=kind == "float")(dice)
        return {"_weight_" + end: stored[old] for old, end in (
            ("weight", "qdata"), ("weight_scale", "scale"), ("weight_zero_point", "zero_point")) if old in stored
        }, "weight", numbers  # fmt: skip

    return make


FORMS: dict[str, tuple[Callable[[Dice], Made], dict[str, Any] | None]] = {
    "int4 by groups": (pack_quantized(4, "group"), None),
    "int4 by rows": (pack_quantized(4, "channel"), None),
    "int4 with zero points": (pack_quantized(4, "group", symmetric=False), None),
    "int8, packed, with zero points": (pack_quantized(8, "channel", symmetric=False), None),
    "int3, packed, with zero points": (pack_quantized(3, "group", symmetric=False), None),
    "int6, packed": (pack_quantized(6, "group"), None),
    "int4 in another order": (act_order, None),
    "int8 by rows": (naive("channel"), None),
    "int8 by groups, with zero points": (naive("group", symmetric=False), None),
    "int8 of a tensor": (naive("tensor"), None),
    "fp8 by groups": (naive("group", "float"), None),
    "nvfp4": (nvfp4, None),
    "mxfp4": (mxfp4, None),
    "mxfp8": (mxfp8, None),
    "modelopt": (modelopt, None),
    "gpt-oss": (gpt_oss, None),
    "gptq of 4 bits": (gptq(4), {"quant_method": "gptq", "bits": 4}),
    "gptq of 8 bits": (gptq(8), {"quant_method": "gptq", "bits": 8}),
    "gptq, symmetric": (gptq(4, symmetric=True), None),
    "gptq, version 2, symmetric": (gptq(8, 2, symmetric=True), None),
    "gptq of 2 bits": (gptq(2, ordered=False), {"quant_method": "gptq", "bits": 2}),
    "gptq, version 2": (gptq(4, 2), {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "nf4": (bnb("nf4"), None),
    "fp4, twice": (bnb("fp4", nested=True), None),
    "int8 of bitsandbytes": (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "int8 of torchao": (torchao("int"), None),
    "fp8 of torchao": (torchao("float"), None),
}
COUNT = 200 if proofs.IS_WHOLE else 24


def make_all(make: Callable[[Dice], Made], count: int = COUNT) -> tuple[Tensors, Tensors]:
    """What is stored of so many modules, and the numbers that they stand for."""
    stored: Tensors = {"norm.weight": torch.ones(8, dtype=torch.bfloat16)}
    numbers: Tensors = dict(stored)
    for number in range(count):
        own, end, truth = make(Dice(number))
        stored |= {f"layers.{number}.{name}": tensor.contiguous() for name, tensor in own.items()}
        numbers[f"layers.{number}.{end}"] = truth
    return stored, numbers


def write(at: Path, tensors: Tensors, quantization: dict[str, Any] | None = None) -> Path:
    at.mkdir()
    save_file(tensors, at / "model.safetensors", {"format": "pt"})
    config = {"model_type": "llama", **({"quantization_config": quantization} if quantization else {})}
    (at / "config.json").write_text(json.dumps(config))
    return at


def check_equal(found: Tensors, numbers: Tensors) -> None:
    assert found.keys() == numbers.keys()
    for name, tensor in numbers.items():
        bits, other = (t.float().contiguous().view(torch.int32) for t in (found[name], tensor))
        assert torch.equal(bits, other), (name, found[name], tensor)


@pytest.mark.parametrize("name", [pytest.param(name, marks=proofs.MORE) for name in FORMS])
def test_numbers(tmp_path: Path, name: str) -> None:
    make, quantization = FORMS[name]
    stored, numbers = make_all(make)
    source = write(tmp_path / "source", stored, quantization)
    zckpt.convert(source, tmp_path / "out", dtype="fp32", progress=False)
    check_equal(load_file(tmp_path / "out" / "model.safetensors"), numbers)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert zckpt.verify(source, tmp_path / "out", progress=False).ok
    said = zckpt.inspect_checkpoint(source).as_json()
    assert said["exportable"]["ok"] and said["numel"] == sum(t.numel() for t in numbers.values())  # type: ignore[index]
    assert "quantized" in said["details"]  # type: ignore[operator]


LAYOUTS: dict[str, Callable[[Path, Tensors], Path]] = {
    "bin": lambda at, tensors: synth.write(at / "pytorch_model.bin", tensors).parent,
    "zero2": lambda at, tensors: synth.zero12(at, [{"trained": torch.ones(4)}], 2, frozen=tensors),
    "zero2 buffers": lambda at, tensors: synth.zero12(at, [{"trained": torch.ones(4)}], 2, buffers=tensors),
    "zero3": lambda at, tensors: synth.zero3(at, [{"trained": torch.ones(4)}], 3, frozen=tensors),
}


@pytest.mark.parametrize(
    ("layout", "name"), proofs.covering(tuple(LAYOUTS), ("modelopt", "gptq, symmetric", "fp4, twice", "gpt-oss"))
)
def test_layouts(tmp_path: Path, layout: str, name: str) -> None:
    """Wherever codes and scales are: in one file, or spread over ranks."""
    stored, numbers = make_all(FORMS[name][0], 3)
    source = LAYOUTS[layout](tmp_path / "source", stored)
    zckpt.convert(source, tmp_path / "out", dtype="fp32", progress=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    found.pop("trained", None)
    check_equal(found, numbers)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "fp8 by groups"])
def test_verify_finds_a_fault_of_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It derives the numbers by other code: what goes wrong in the first does so in the output alone."""
    make, quantization = FORMS[name]
    source = write(tmp_path / "source", make_all(make, 3)[0], quantization)
    compute = Coded.compute
    monkeypatch.setattr(Coded, "compute", lambda *asked: compute(*asked) + 1)
    zckpt.convert(source, tmp_path / "out", dtype="fp32", progress=False)
    verified = zckpt.verify(source, tmp_path / "out", progress=False)
    problems = next(check for check in verified.checks if check.name == "equal").number
    assert not verified.ok and problems == 3


def changed(name: str, number: int = 1, **changes: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    """What one module of a form stores, with some tensors as they should not be."""
    stored = {f"a.{end}": tensor.contiguous() for end, tensor in FORMS[name][0](Dice(number))[0].items()}
    for end, change in changes.items():
        stored[f"a.{end}"] = change(stored[f"a.{end}"]).contiguous()
    return stored


def with_last(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.float().reshape(-1).clone()
        wide[-1] = value
        return wide.reshape(tensor.shape).to(tensor.dtype)

    return change


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., : tensor.shape[-1] // 2 or 0]


def wider(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[..., :1]], -1)


ZERO_POINTS = {"qzeros": lambda t: torch.full_like(t, -1)}
HOSTILE: dict[str, tuple[Callable[[], Tensors], dict[str, Any] | None, str]] = {
    "modelopt, half the columns": (lambda: changed("modelopt", weight_scale=halved), None, "scales of tensor 'a.weight' do not"),
    "nvfp4, too many scales": (lambda: changed("nvfp4", weight_scale=wider), None, "weight_packed' do not fit"),
    "mxfp8, too many scales": (lambda: changed("mxfp8", weight_scale=wider), None, "scales of tensor 'a.weight' do not"),
    "int8, too many rows": (lambda: changed("int8 by rows", weight_scale=lambda t: torch.cat([t, t])), None, "do not fit it"),
    "awq, groups that do not divide": (
        lambda: changed("awq", 5, scales=lambda t: torch.cat([t] * 97), qzeros=lambda t: torch.cat([t] * 97)), None,
        "groups of equal size",
    ),
    "another group in the config": (
        lambda: changed("int4 by groups"),
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
            "g": {"weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 999}}}}, "groups of 999",
    ),
    "nan among scales": (lambda: changed("nvfp4", weight_scale=with_last(math.nan)), None, "scales of tensor 'a.weight' hold"),
    "a power that is nan": (lambda: changed("mxfp4", weight_scale=with_last(255)), None, "scales of tensor 'a.weight' hold NaN"),
    "a global scale of zero": (
        lambda: changed("nvfp4", weight_global_scale=torch.zeros_like), None, "scales of tensor 'a.weight' hold NaN or inf",
    ),
    "an absmax that is nan": (lambda: changed("nf4") | {"a.weight.absmax": torch.full_like(
        changed("nf4")["a.weight.absmax"], math.nan)}, None, "scales of tensor 'a.weight' hold"),
    "groups that there are not": (lambda: changed("gptq of 4 bits", g_idx=lambda t: t + 99), None, "names groups"),
    "zero points without a meaning": (
        lambda: changed("gptq of 4 bits", **ZERO_POINTS), {"quant_method": "gptq"}, "has no agreed meaning",
    ),
    "zero points of another shape": (lambda: changed("awq", qzeros=wider), None, "the zero points of tensor"),
    "two of a name": (lambda: changed("awq") | {"a.weight": torch.ones(2)}, None, "there are two"),
    "a state that is not a json": (
        lambda: changed("nf4") | {"a.weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)},
        None, "cannot be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_does_not_fit_is_named(tmp_path: Path, name: str) -> None:
    make, quantization, words = HOSTILE[name]
    source = write(tmp_path / "source", make(), quantization)
    with pytest.raises((zckpt.InconsistentError, zckpt.CorruptError), match=words) as caught:
        zckpt.convert(source, tmp_path / "out", progress=False)
    assert caught.value.remedy and not (tmp_path / "out").exists()


def test_a_list_of_what_is_not_quantised_is_not_trusted(tmp_path: Path) -> None:
    """vLLM took a quantised module for a plain one, since `exclude_modules` named it."""
    stored, numbers = make_all(modelopt, 3)
    source = write(tmp_path / "source", stored)
    said = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["layers.*"]}}
    (source / "hf_quant_config.json").write_text(json.dumps(said))
    zckpt.convert(source, tmp_path / "out", dtype="fp32", progress=False)
    check_equal(load_file(tmp_path / "out" / "model.safetensors"), numbers)


GPTQ = {"quant_method": "gptq", "bits": 4}
TOLD: dict[str, tuple[int, str, dict[str, Any]]] = {
    "config.json, no version": (1, "config.json", GPTQ),
    "format, as transformers 5 has it": (2, "config.json", {**GPTQ, "format": "gptq_v2"}),
    "checkpoint_format before format": (1, "config.json", {**GPTQ, "checkpoint_format": "gptq", "format": "gptq_v2"}),
    "no bits": (1, "config.json", {"quant_method": "gptq"}),
    "auto-gptq's own file": (
        1,
        "quantize_config.json",
        {"bits": 4, "group_size": 128, "desc_act": False, "sym": False},
    ),
    "auto-gptq's own file, version 2": (2, "quantize_config.json", {"bits": 4, "checkpoint_format": "gptq_v2"}),
    "auto-round": (
        1,
        "config.json",
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4},
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_zero_points_of_gptq_mean(tmp_path: Path, name: str) -> None:
    """What transformers, auto-gptq and vLLM take absent keys for; verify has a second opinion."""
    version, file, said = TOLD[name]
    stored, numbers = make_all(gptq(4, version), 3)
    source = write(tmp_path / "source", stored, said if file == "config.json" else None)
    if file != "config.json":
        (source / file).write_text(json.dumps(said))
    zckpt.convert(source, tmp_path / "out", dtype="fp32", progress=False)
    check_equal(load_file(tmp_path / "out" / "model.safetensors"), numbers)
    assert zckpt.verify(source, tmp_path / "out", progress=False).ok


def test_the_defaults_are_those_of_transformers() -> None:
    from transformers import AwqConfig, GPTQConfig

    from zckpt.quantized.configs import Quantization

    for method, config in (("gptq", GPTQConfig), ("awq", AwqConfig)):
        for said in (
            {},
            {"format": "gptq_v2" if method == "gptq" else "gemv"},
            {"checkpoint_format": "gptq_v2"} if method == "gptq" else {"version": "GEMV"},
        ):
            known = Quantization(method, method, is_read=False, facts={"quant_method": method, **said})
            found = known.version_of_gptq if method == "gptq" else known.version_of_awq
            assert found == config(bits=4, **said).format


UNTOLD: dict[str, tuple[Callable[[Dice], Made], dict[str, Any] | None, tuple[str, ...], str]] = {
    "no config": (gptq(4), None, (), "nothing says what the zero points"),
    "of another method": (gptq(4), {"quant_method": "of somebody"}, (), "nothing says what the zero points"),
    "another version": (gptq(4), {**GPTQ, "checkpoint_format": "bitblas"}, (), "quantised as GPTQ, which zckpt does not read"),
    "no zero points": (gptq(4), GPTQ, ("qzeros",), "quantised as GPTQ, which zckpt does not read"),
    "no bits, zero points or groups": (
        gptq(4), {"quant_method": "gptq", "sym": True}, ("qzeros", "g_idx"), "quantised as GPTQ, which zckpt does not read",
    ),
    "gemv": (awq, {"quant_method": "awq", "format": "gemv"}, (), "quantised as AWQ, which zckpt does not read"),
    "llm-awq": (awq, {"quant_method": "awq", "backend": "llm-awq"}, (), "quantised as AWQ, which zckpt does not read"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNTOLD)
def test_what_nothing_says_is_refused(tmp_path: Path, name: str) -> None:
    make, quantization, without, words = UNTOLD[name]
    stored = {n: t for n, t in make_all(make, 2)[0].items() if not n.endswith(without or ("-",))}
    source = write(tmp_path / "source", stored, quantization)
    with pytest.raises(zckpt.UnsupportedError, match=words) as caught:
        zckpt.convert(source, tmp_path / "out", progress=False)
    assert caught.value.remedy and not (tmp_path / "out").exists()


def test_bits_by_shapes_or_else_as_the_config_says(tmp_path: Path) -> None:
    """A symmetric model that has no zero points: order and words say how many bits there are, or else the config."""
    stored, numbers = make_all(gptq(8, symmetric=True), 3)
    for ends, said in ((("qzeros",), {"sym": True}), (("qzeros", "g_idx"), {"sym": True, "bits": 8})):
        kept = {n: t for n, t in stored.items() if not n.endswith(ends)}
        at = tmp_path / str(len(ends))
        source = write(at, kept, {"quant_method": "gptq", **said})
        groups = [n for n, t in stored.items() if n.endswith("g_idx") and (t.diff() < 0).any()]
        zckpt.convert(source, out := tmp_path / f"out{len(ends)}", dtype="fp32", progress=False)
        found = load_file(out / "model.safetensors")
        if "g_idx" in ends:  # the order is lost with it
            for name in groups:
                found.pop(name.replace("g_idx", "weight")), numbers.pop(name.replace("g_idx", "weight"))
        check_equal(found, numbers)
