"""Quantised weights as a source: fp8 with scales is what it stands for, other quantisations are errors that name them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
}


def written(at: Path, tensors: dict[str, torch.Tensor], quantization: Any) -> Path:
    at.mkdir()
    save_file(tensors, at / "model.safetensors")
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": quantization}
    (at / "config.json").write_text(json.dumps(config if quantization else {"model_type": "llama"}))
    return at


def quantised(
    shape: tuple[int, ...], scales: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(shape, generator=generator) * 100).to(torch.float8_e4m3fn)
    return {
        "a.weight": weight,
        "a.weight_scale_inv": (torch.rand(scales, generator=generator) + 0.5).to(dtype),
        "a.input_scale": torch.ones(1),
        "norm.weight": torch.ones(5, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize(
    ("shape", "scales", "blocks"),
    [
        ((40, 50), (3, 4), (16, 16)),
        ((40, 50), (40, 1), (1, 50)),
        ((40, 50), (40,), (1, 50)),
        ((40, 50), (1,), (40, 50)),
        ((40, 50), (), (40, 50)),
        ((3, 40, 50), (3, 3, 4), (16, 16)),
        ((3, 40, 50), (3, 1, 1), (40, 50)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(tmp_path: Path, shape: Any, scales: Any, blocks: Any, dtype: torch.dtype) -> None:
    tensors = quantised(shape, scales, dtype)
    given = written(tmp_path / "given", tensors, FP8)
    spread = tensors["a.weight_scale_inv"].float()
    if spread.numel() == 1:
        spread = spread.reshape(1, 1)
    elif spread.ndim == 1:
        spread = spread[:, None]
    spread = spread.repeat_interleave(blocks[0], -2).repeat_interleave(blocks[1], -1)[..., :40, :50]
    product = tensors["a.weight"].float() * spread
    for name in ("fp32", "bf16"):
        zckpt.convert(given, tmp_path / name, dtype=name, progress=False)
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == {"a.weight", "norm.weight"}
        assert torch.equal(found["a.weight"], product if name == "fp32" else product.bfloat16())
        assert "quantization_config" not in json.loads((tmp_path / name / "config.json").read_text())
        assert zckpt.verify(given, tmp_path / name, progress=False).ok
    zckpt.to_dcp(given, tmp_path / "dcp", progress=False)
    with zckpt.open_checkpoint(tmp_path / "dcp") as saved:
        assert torch.equal(saved["a.weight"], product.bfloat16()) and len(saved) == 2


def test_what_looks_leaves_it_as_it_is(tmp_path: Path) -> None:
    given = written(tmp_path / "given", quantised((40, 50), (3, 4)), FP8)
    with zckpt.open_checkpoint(given) as stored:
        assert stored["a.weight"].dtype == torch.float8_e4m3fn and stored["a.weight_scale_inv"].shape == (3, 4)
    details = zckpt.inspect_checkpoint(given).as_json()["details"]
    assert details == {"quantized": "fp8 (1 tensor of fp8 with scales)"}
    assert zckpt.verify(given, given, progress=False).checks
    assert zckpt.diff(given, given, progress=False).same


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    given = written(tmp_path / "wrong", quantised((40, 50), (2, 4)), FP8)
    with pytest.raises(zckpt.InconsistentError, match=r"the scales of tensor 'a\.weight' do not fit"):
        zckpt.convert(given, tmp_path / "out", progress=False)
    tensors = quantised((40, 50), (3, 4))
    del tensors["a.weight_scale_inv"]
    given = written(tmp_path / "missing", tensors, FP8)
    with pytest.raises(zckpt.IncompleteError, match="1 tensor of fp8 has no scales"):
        zckpt.convert(given, tmp_path / "out", progress=False)
    assert not zckpt.inspect_checkpoint(given).exportable.ok
    bare = written(tmp_path / "bare", tensors, None)  # nothing says that there should be scales: plain numbers
    zckpt.convert(bare, tmp_path / "out", progress=False)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a.weight"], tensors["a.weight"].float())


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({**CHANNEL, "format": "pack-quantized"}, r"compressed-tensors \(pack-quantized\)"),
        ({"bits": 4}, "of an unnamed method"),
    ],
)
def test_other_quantisations_are_named(tmp_path: Path, said: Any, name: str) -> None:
    tensors = {"a.qweight": torch.ones(4, 4, dtype=torch.int32), "norm.weight": torch.ones(5)}
    given = written(tmp_path / "given", tensors, said)
    for convert in (zckpt.convert, zckpt.to_fp8, zckpt.to_dcp):
        with pytest.raises(zckpt.UnsupportedError, match=f"quantised by {name}, which zckpt does not read"):
            convert(given, tmp_path / "out", progress=False)
    zckpt.convert(given, tmp_path / "norms", options=zckpt.Options(exclude=["*.qweight"]), progress=False)
    assert re.search(f"quantised by {name}", zckpt.inspect_checkpoint(given).exportable.reason)
    with zckpt.open_checkpoint(given) as stored:
        assert torch.equal(stored["a.qweight"], tensors["a.qweight"])


def test_compressed_tensors_and_a_config_from_before_the_training(tmp_path: Path) -> None:
    tensors = quantised((40, 50), (40, 1), torch.bfloat16)
    tensors["a.weight_scale"] = tensors.pop("a.weight_scale_inv")
    given = written(tmp_path / "given", tensors, CHANNEL)
    zckpt.convert(given, tmp_path / "out", dtype="fp32", progress=False)
    product = tensors["a.weight"].float() * tensors["a.weight_scale"].float()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a.weight"], product)
    trained = written(tmp_path / "trained", {"a.weight": product.bfloat16()}, FP8)
    zckpt.convert(trained, tmp_path / "of", dtype="bf16", progress=False)
    assert "quantization_config" not in json.loads((tmp_path / "of" / "config.json").read_text())


@pytest.mark.parametrize("end", ["scale_weight", "weights_scaling_factor", "weight_scales", "scale"])
def test_scales_of_another_name_are_not_left_out(tmp_path: Path, end: str) -> None:
    """Numbers of fp8 with scales beside them are not the model's, whatever the scales are called."""
    tensors = {"a.weight": torch.ones(4, 8).to(torch.float8_e4m3fn), f"a.{end}": torch.tensor(0.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(zckpt.UnsupportedError, match="scales that zckpt does not know") as caught:
        zckpt.convert(tmp_path, tmp_path / "out", progress=False)
    assert caught.value.found == f"'a.{end}' beside 'a.weight'"


def test_a_tensor_without_scales_among_others(tmp_path: Path) -> None:
    codes = torch.ones(4, 8).to(torch.float8_e4m3fn)
    tensors = {"a.weight": codes, "a.weight_scale": torch.ones(4, 1), "b.weight": codes.clone()}
    (source := tmp_path / "source").mkdir()
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(zckpt.IncompleteError, match="1 tensor of fp8 has no scales"):
        zckpt.convert(source, tmp_path / "out", progress=False)
    save_file({"b.weight": codes}, source / "model.safetensors")
    zckpt.convert(source, tmp_path / "out", progress=False)


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_scales_that_are_lost_where_only_modelopts_config_speaks_of_them(tmp_path: Path, file: str) -> None:
    said = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}
    key = "quantization_config" if file == "config.json" else "quantization"
    (source := tmp_path / "source").mkdir()
    (source / file).write_text(json.dumps({"model_type": "llama", key: said}))
    codes = torch.ones(4, 8).to(torch.float8_e4m3fn)
    save_file({"a.weight": codes, "a.weight_scale": torch.tensor(2.0)}, source / "model.safetensors")
    zckpt.convert(source, tmp_path / "out", dtype="fp32", progress=False)
    assert (load_file(tmp_path / "out" / "model.safetensors")["a.weight"] == 2).all()
    save_file({"a.weight": codes}, source / "model.safetensors")
    with pytest.raises(zckpt.IncompleteError, match="1 tensor of fp8 has no scales"):
        zckpt.convert(source, tmp_path / "lost", dtype="fp32", progress=False)


def test_blocks_as_text(tmp_path: Path) -> None:
    """As compressed-tensors wrote them before 0.11."""
    codes, scales = torch.ones(100, 8).to(torch.float8_e4m3fn), torch.tensor([[1.0], [2.0], [3.0]])
    (source := tmp_path / "source").mkdir()
    save_file({"a.weight": codes, "a.weight_scale": scales}, source / "model.safetensors")
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "40x8"}
    said = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": {"weights": weights}},
    }
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": said}))
    zckpt.convert(source, tmp_path / "out", dtype="fp32", progress=False)
    found = load_file(tmp_path / "out" / "model.safetensors")["a.weight"]
    assert torch.equal(found, scales.repeat_interleave(40, 0)[:100].expand(100, 8))
    assert zckpt.verify(source, tmp_path / "out", progress=False).ok
