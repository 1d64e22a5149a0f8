"""Packed weights of each form, on shapes of all kinds and with zero blocks, and the numbers that its library makes of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import proofs
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

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


def zeros_as_they_are(dice: Dice) -> Made:
    """As compressed-tensors 0.8 wrote them: zero points are I8, one for each scale."""
    rows, groups = dice.number(1, 40), dice.number(1, 5)
    codes, scales = dice.below(16, rows, 16 * groups) - 8, dice.scales(rows, groups)
    zeros = (dice.below(16, rows, groups) - 8).to(torch.int8)
    stored = {
        "weight_packed": pack_to_int32(codes.to(torch.int8), 4), "weight_scale": scales,
        "weight_zero_point": zeros, "weight_shape": torch.tensor([rows, 16 * groups]),
    }  # fmt: skip
    wide = [one.repeat_interleave(16, 1).float() for one in (scales, zeros)]
    return stored, "weight", (codes - wide[1]) * wide[0]


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


def modelopt_turned(dice: Dice) -> Made:
    """Experts of gpt-oss and Llama 4, which ModelOpt transposes before it packs and again behind that."""
    experts, rows, columns = dice.number(1, 4), dice.number(1, 30), 16 * dice.number(1, 9)
    packed, scales = dice.bytes(experts, rows, columns // 2), dice.scales(experts, rows, columns // 16, dtype=E4M3)
    second = torch.rand((), generator=dice.torch) / 100
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(experts, rows, columns)
    numbers = table[codes.long()] * (scales.float() * second).repeat_interleave(16, -1)
    name = "gate_up_proj"
    stored = {name: packed.mT, f"{name}_weight_scale": scales.mT, f"{name}_weight_scale_2": second}
    return stored, name, numbers.mT


def fp8_blocks(dice: Dice) -> Made:
    """DeepSeek's `weight_dequant`: a scale for 128 x 128 elements, the last ones of a matrix for fewer."""
    rows, columns = dice.number(1, 300), dice.number(1, 300)
    codes = dice.bytes(rows, columns)
    codes = torch.where(codes & 127 == 127, 0, codes).view(E4M3)
    scales = dice.scales(-(-rows // 128), -(-columns // 128), dtype=torch.float32)
    wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return {"weight": codes, "weight_scale_inv": scales}, "weight", codes.float() * wide


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


def mistral(dice: Dice) -> Made:
    """fp8 in Mistral's own form: a scale of the weight and one of the input, and one of the cache beside them."""
    stored, _, numbers = naive("tensor", "float")(dice)
    stored["qscale_weight"] = stored.pop("weight_scale").reshape(())
    stored |= {"qscale_act": torch.ones(()), "kv_fake_quantizer.qscale_act": torch.ones(())}
    return stored, "weight", numbers


def modelopt_blocks(dice: Dice) -> Made:
    """fp8 in blocks of 128 x 128 as ModelOpt exports it: with extents of 1 between those of the scales."""
    down, across = dice.number(1, 3), dice.number(1, 4)
    codes, scales = dice.bytes(128 * down, 128 * across), dice.scales(down, across, dtype=torch.float32)
    codes = torch.where(codes & 127 == 127, 0, codes).view(E4M3)
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {"weight": codes, "weight_scale": scales[:, None, :, None]}, "weight", codes.float() * wide


def modelopt_of(group: int) -> Callable[[Dice], Made]:
    def make(dice: Dice) -> Made:
        rows, columns = dice.number(1, 20), group * dice.number(1, 9)
        packed, scales = dice.bytes(rows, columns // 2), dice.scales(rows, columns // group, dtype=E4M3)
        second = torch.rand((), generator=dice.torch) / 100
        codes = torch.stack([packed & 15, packed >> 4], -1).reshape(rows, columns)
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        both = (scales.float() * second).repeat_interleave(group, -1)
        return (
            {"weight": packed, "weight_scale": scales, "weight_scale_2": second},
            "weight",
            table[codes.long()] * both,
        )

    return make


def mlx_mode(mode: str) -> Callable[[Dice], Made]:
    """Without biases: the bytes of scales are powers, or E4M3. Source: mlx 0.32, ops.cpp `fp_quantize`."""

    def make(dice: Dice) -> Made:
        bits, group = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
        rows, across = dice.number(1, 40), dice.number(1, 5) * 2
        packed, scales = (
            dice.bytes(rows, across * group * bits // 8),
            (60 + dice.below(60, rows, across)).to(torch.uint8),
        )
        if bits == 8:
            packed = torch.where(packed & 127 == 127, 0, packed)
            numbers = packed.view(E4M3).float()
        else:
            numbers = unpack_fp4_from_uint8(packed, rows, across * group, dtype=torch.float32)
        factors = (
            scales.view(E4M3).float() if mode == "nvfp4" else torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
        )
        stored = {"weight": packed.reshape(-1).view(torch.uint32).reshape(rows, -1), "scales": scales}
        return stored, "weight", numbers * factors.repeat_interleave(group, -1)

    return make


def mlx(bits: int) -> Callable[[Dice], Made]:
    """Groups with a scale and a bias. Source: mlx 0.32, ops.cpp `dequantize`; tests/jobs/test_to_mlx.py compares with it."""

    def make(dice: Dice) -> Made:
        group, rows, across = {4: 32, 6: 64}[bits], dice.number(1, 40), dice.number(1, 5)
        codes, scales = dice.below(1 << bits, rows, across, group), dice.scales(rows, across)
        biases = (dice.scales(rows, across).float() - 1).to(scales.dtype)
        places = codes.reshape(rows, -1, 1) >> torch.arange(bits) & 1
        packed = np.packbits(places.to(torch.uint8).numpy().reshape(rows, -1), axis=1, bitorder="little")
        stored = {"weight": torch.from_numpy(packed.view("<u4").copy()), "scales": scales, "biases": biases}
        numbers = codes.float() * scales.float()[..., None] + biases.float()[..., None]
        return stored, "weight", numbers.reshape(rows, -1)

    return make


FORMS: dict[str, tuple[Callable[[Dice], Made], dict[str, Any] | None]] = {
    "int4 by groups": (pack_quantized(4, "group"), None),
    "int4 by rows": (pack_quantized(4, "channel"), None),
    "int4 with zero points": (pack_quantized(4, "group", symmetric=False), None),
    "int8, packed, with zero points": (pack_quantized(8, "channel", symmetric=False), None),
    "int3, packed, with zero points": (pack_quantized(3, "group", symmetric=False), None),
    "int6, packed": (pack_quantized(6, "group"), None),
    "int4 in another order": (act_order, None),
    "int4 with zero points as they are": (zeros_as_they_are, None),
    "int8 by rows": (naive("channel"), None),
    "int8 by groups, with zero points": (naive("group", symmetric=False), None),
    "int8 of a tensor": (naive("tensor"), None),
    "fp8 by groups": (naive("group", "float"), None),
    "nvfp4": (nvfp4, None),
    "mxfp4": (mxfp4, None),
    "mxfp8": (mxfp8, None),
    "modelopt": (modelopt, None),
    "modelopt, turned": (modelopt_turned, None),
    "modelopt in groups of 32": (modelopt_of(32), {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}),
    "fp8 by blocks of modelopt": (modelopt_blocks, {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}),
    "fp8 of mistral": (mistral, None),
    "fp8 by blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8 of a tensor": (naive("tensor", "float"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
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
    "mlx of 4 bits": (mlx(4), {"bits": 4, "group_size": 32, "mode": "affine"}),
    "mlx of 6 bits": (mlx(6), {"bits": 6, "group_size": 64}),
    "mlx's mxfp4": (mlx_mode("mxfp4"), {"bits": 4, "group_size": 32, "mode": "mxfp4"}),
    "mlx's mxfp8": (mlx_mode("mxfp8"), {"bits": 8, "group_size": 32, "mode": "mxfp8"}),
    "mlx's nvfp4": (mlx_mode("nvfp4"), {"bits": 4, "group_size": 16, "mode": "nvfp4"}),
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


def with_last(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.float().reshape(-1).clone()
        wide[-1] = value
        return wide.reshape(tensor.shape).to(tensor.dtype)

    return change
