"""Scales that are powers of two, as torch's float8_e8m0fnu, which transformers and torchao write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import zckpt

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}


def powers(*shape: int) -> torch.Tensor:
    return torch.randint(100, 150, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def codes(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)


def spread(scales: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """The scale of each element, by torch's own numbers."""
    wide = scales.view(torch.float8_e8m0fnu).float()
    return wide.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., : shape[-2], : shape[-1]]


def written(path: Path, tensors: dict[str, torch.Tensor], said: Any = None) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", **({"quantization_config": said} if said else {})})
    )
    return path


@pytest.mark.parametrize(
    ("kind", "shape", "scales", "block"),
    [
        (torch.float8_e8m0fnu, (300, 200), (3, 2), (128, 128)),
        (torch.float8_e8m0fnu, (300, 192), (300, 6), (1, 32)),
        (torch.uint8, (300, 192), (300, 6), (1, 32)),
        (torch.float8_e8m0fnu, (3, 130, 64), (3, 2, 1), (128, 128)),
        (torch.float8_e8m0fnu, (20, 70), (20, 3), (1, 32)),
    ],
    ids=str,
)
def test_numbers_of_fp8(
    tmp_path: Path, kind: torch.dtype, shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int]
) -> None:
    held, own = codes(*shape), powers(*scales)
    tensors = {"a.weight": held, "a.weight_scale_inv": own.view(kind), "norm.weight": torch.ones(5)}
    source = written(tmp_path / "source", tensors, {**FP8, "weight_block_size": list(block)})
    zckpt.convert(source, tmp_path / "out", dtype="fp32", progress=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["a.weight"], held.float() * spread(own, shape, block)) and len(found) == 2
    assert zckpt.verify(source, tmp_path / "out", progress=False).ok
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    zckpt.convert(source, tmp_path / "half", dtype="bf16", progress=False)
    half = load_file(tmp_path / "half" / "model.safetensors")["a.weight"]
    assert (
        torch.equal(half, found["a.weight"].bfloat16()) and zckpt.verify(source, tmp_path / "half", progress=False).ok
    )


def test_mxfp4_and_its_own_form_again(tmp_path: Path) -> None:
    packed, own = powers(64, 32), powers(64, 2)
    names = {"a.weight_packed": packed, "a.weight_scale": own.view(torch.float8_e8m0fnu)}
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"}
    said = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"g": {"weights": weights}},
    }
    source = written(tmp_path / "source", names, said)
    zckpt.convert(source, tmp_path / "out", dtype="fp32", progress=False)
    plain = written(tmp_path / "bytes", {"a.weight_packed": packed, "a.weight_scale": own}, said)
    zckpt.convert(plain, tmp_path / "same", dtype="fp32", progress=False)
    found, same = (load_file(tmp_path / one / "model.safetensors")["a.weight"] for one in ("out", "same"))
    assert torch.equal(found, same) and zckpt.verify(source, tmp_path / "out", progress=False).ok
    zckpt.quantize(source, tmp_path / "again", to="mxfp4", progress=False)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert torch.equal(again["a.weight_packed"], packed) and torch.equal(again["a.weight_scale"].view(torch.uint8), own)
    assert zckpt.verify(source, tmp_path / "again", progress=False).ok


def test_scales_that_are_no_numbers_or_do_not_fit(tmp_path: Path) -> None:
    own = powers(3, 2)
    own[1, 1] = 255
    tensors = {"a.weight": codes(300, 200), "a.weight_scale_inv": own.view(torch.float8_e8m0fnu)}
    with pytest.raises(zckpt.CorruptError, match=r"scales of tensor 'a\.weight' hold NaN or infinity"):
        zckpt.convert(written(tmp_path / "nan", tensors, FP8), tmp_path / "out", progress=False)
    tensors["a.weight_scale_inv"] = powers(3, 1).view(torch.float8_e8m0fnu)
    with pytest.raises(zckpt.InconsistentError, match="do not fit"):
        zckpt.convert(written(tmp_path / "half", tensors, FP8), tmp_path / "out", progress=False)
    tensors["a.weight_scale_inv"] = powers(3, 2)  # bytes are scales of MXFP8 alone
    with pytest.raises(zckpt.InconsistentError, match="do not fit"):
        zckpt.convert(written(tmp_path / "bytes", tensors, FP8), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_power_alone_is_copied_and_never_cast(tmp_path: Path) -> None:
    own = powers(7).view(torch.float8_e8m0fnu)
    dcp.save({"a": own, "b": torch.ones(3)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    zckpt.convert(tmp_path / "saved", tmp_path / "out", dtype="fp32", progress=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["a"].dtype == own.dtype and torch.equal(found["a"].view(torch.uint8), own.view(torch.uint8))
    assert zckpt.verify(tmp_path / "saved", tmp_path / "out", progress=False).ok
    assert zckpt.diff(tmp_path / "saved", tmp_path / "out", progress=False).same
    other = own.view(torch.uint8).clone()
    other[2] += 1
    save_file({"a": other.view(own.dtype), "b": torch.ones(3)}, tmp_path / "other.safetensors")
    found_apart = zckpt.diff(tmp_path / "out", tmp_path / "other.safetensors", progress=False)
    (apart,) = (one.statistics for one in found_apart.tensors if not one.same)
    assert apart is not None and (apart.differ, apart.first, apart.max_abs) == (1, 2, float(own[2].float()))
    with zckpt.open_checkpoint(tmp_path / "out") as opened:
        assert torch.equal(opened["a"].view(torch.uint8), own.view(torch.uint8))


def test_inspect_names_the_form(tmp_path: Path) -> None:
    tensors = {"a.weight": codes(300, 200), "a.weight_scale_inv": powers(3, 2).view(torch.float8_e8m0fnu)}
    found = zckpt.inspect_checkpoint(written(tmp_path / "source", tensors, FP8))
    assert found.exportable.ok and "fp8 with powers of two as scales" in str(found)
