"""Packed weights are known by their names, dtypes and shapes, in every layout, and every command says so."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import synth
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import zckpt
from zckpt.cli import app
from zckpt.hub import load
from zckpt.jobs.declarations import PUSH
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog
from zckpt.jobs.options import LoraMerge, Options
from zckpt.pictures.checkpoint_map import checkpoint_map
from zckpt.quantized.forms import FORMS
from zckpt.quantized.packed import find_packed

Tensors = dict[str, torch.Tensor]
M = "model.layers.0.mlp.up_proj."
N = "base_model.model.model.layers.0.mlp.up_proj."


def whole(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def four_bits(kind: str, **more: torch.Tensor) -> Tensors:
    state = {"absmax": floats(16), "quant_map": floats(16), f"quant_state.bitsandbytes__{kind}": whole(80), **more}
    return {f"{M}weight.{name}": tensor for name, tensor in state.items()} | {f"{M}weight": whole(512, 1)}


I32, I8, E4M3 = torch.int32, torch.int8, torch.float8_e4m3fn
META = {"nbits": torch.tensor(4), "group_size": torch.tensor(64), "packing": whole(8), "shape": torch.tensor([16, 64])}
FOUND: dict[str, tuple[str, Tensors]] = {
    "modelopt": ("NVFP4 of ModelOpt", {
        "weight": whole(16, 32), "weight_scale": floats(16, 4, dtype=E4M3), "weight_scale_2": floats(dtype=torch.float32),
        "input_scale": floats(),
    }),
    "modelopt experts": ("NVFP4 of ModelOpt", {
        "experts": whole(3, 16, 32), "experts_weight_scale": floats(3, 16, 4, dtype=E4M3), "experts_weight_scale_2": floats(3),
    }),
    "ct nvfp4": ("NVFP4 of compressed-tensors", {
        "weight_packed": whole(16, 32), "weight_scale": floats(16, 4, dtype=E4M3), "weight_global_scale": floats(1),
    }),
    "ct mxfp4": ("MXFP4 of compressed-tensors", {"weight_packed": whole(16, 32), "weight_scale": whole(16, 2)}),
    "ct int4": ("packed integers of compressed-tensors", {
        "weight_packed": whole(16, 8, dtype=I32), "weight_scale": floats(16, 1), "weight_shape": torch.tensor([16, 64]),
    }),
    "gpt-oss": ("MXFP4 of gpt-oss", {"down_blocks": whole(2, 8, 3, 16), "down_scales": whole(2, 8, 3)}),
    "mxfp4": ("MXFP4", {"weight": whole(16, 32), "weight_scale": whole(16, 2)}),
    "mxfp8": ("MXFP8", {"weight": floats(16, 64, dtype=E4M3), "weight_scale": whole(16, 2)}),
    "fp8 by powers": ("fp8 with powers of two as scales", {
        "weight": floats(200, 64, dtype=E4M3), "weight_scale_inv": whole(2, 1).view(torch.float8_e8m0fnu),
    }),
    "int8": ("int8 with scales", {"weight": whole(16, 64, dtype=I8), "weight_scale": floats(16, 1)}),
    "int8 of a tensor": ("int8 with scales", {"weight": whole(16, 64, dtype=I8), "weight_scale": floats()}),
    "gptq": ("GPTQ", {
        "qweight": whole(8, 16, dtype=I32), "qzeros": whole(2, 2, dtype=I32), "scales": floats(2, 16),
        "g_idx": whole(64, dtype=I32),
    }),
    "gptq without order": ("GPTQ", {"qweight": whole(8, 16, dtype=I32), "scales": floats(2, 16)}),
    "awq": ("AWQ", {"qweight": whole(64, 2, dtype=I32), "qzeros": whole(2, 2, dtype=I32), "scales": floats(2, 16)}),
    "bnb int8": ("int8 of bitsandbytes", {"weight": whole(16, 64, dtype=I8), "SCB": floats(16), "weight_format": whole()}),
    "bnb int8, frozen left out": ("int8 of bitsandbytes", {"SCB": floats(16), "weight_format": whole()}),
    "hqq": ("HQQ", {"W_q": whole(32, 16), "scale": floats(64, 1), "zero": floats(64, 1), **META}),
    "hqq as floats": ("HQQ", {"W_q": floats(16, 16), "scale": floats(64, 1), "zero": floats(64, 1), **META}),
    "torchao": ("torchao's quantised tensors", {
        "_weight_qdata": floats(16, 64, dtype=E4M3), "_weight_scale": floats(16, 1),
    }),
    "quanto": ("optimum-quanto's quantised tensors", {"weight._data": whole(16, 64, dtype=I8), "weight._scale": floats(16, 1)}),
    "mlx": ("MLX's quantised tensors", {
        "weight": whole(16, 8, dtype=torch.uint32), "scales": floats(16, 1), "biases": floats(16, 1),
    }),
    "mlx's mxfp4": ("MLX's quantised tensors", {"weight": whole(16, 8, dtype=torch.uint32), "scales": whole(16, 2)}),
    "sparse": ("sparse weights of compressed-tensors", {
        "compressed": floats(16, 16), "bitmask": whole(16, 4), "shape": torch.tensor([16, 32]),
    }),
    "aqlm": ("AQLM", {"codes": whole(2, 8, 1, dtype=I8), "codebooks": floats(1, 256, 1, 8), "scales": floats(2, 1, 1, 1)}),
    "exl2": ("EXL2", {"q_weight": whole(8, 16, dtype=I32), "q_scale": whole(2, 2, dtype=I32)}),
    "exl3": ("EXL3", {"trellis": whole(1, 1, 64, dtype=torch.int16), "suh": floats(16, dtype=torch.float16)}),
    "torchao, with colons": ("torchao's quantised tensors", {"weight:qdata": whole(16, 32), "weight:scale": floats(16, 1)}),
    "qtip": ("QTIP", {"trellis": whole(1, 64, dtype=torch.int16), "SU": floats(64), "SV": floats(16)}),
    "quip": ("QuIP#", {
        "Qidxs": whole(16, 8, dtype=torch.int64), "SU": floats(64), "SV": floats(16), "Wscale": floats(),
    }),
    "squeezellm": ("SqueezeLLM", {"qweight": whole(8, 16, dtype=I32), "lookup_table": floats(16, 16)}),
    "spqr": ("SpQR", {
        "dense_weights": whole(64, dtype=torch.int64), "row_offsets": whole(17, dtype=I32), "col_vals": whole(4, dtype=I32),
    }),
    "vptq": ("VPTQ", {
        "indices": whole(1, 16, 8, dtype=I32), "centroids.weight": floats(1, 2048), "weight_scale": floats(64),
        "weight_bias": floats(64),
    }),
    "marlin": ("Marlin", {"B": whole(4, 32, dtype=I32), "s": floats(1, 16)}),
    "another": ("packed integers with scales", {"qweight": whole(16, 32, dtype=torch.int16), "scales": floats(16, 1)}),
    "bitnet": ("packed integers with scales", {"weight": whole(4, 64), "weight_scale": floats(1)}),
}  # fmt: skip
STATES: dict[str, tuple[str, Tensors]] = {
    "nf4": ("nf4 of bitsandbytes", four_bits("nf4")),
    "fp4": ("fp4 of bitsandbytes", four_bits("fp4")),
    "nf4, twice": ("nf4 of bitsandbytes", four_bits("nf4", nested_absmax=floats(1), nested_quant_map=floats(256))),
    "frozen left out": ("4 bits of bitsandbytes", {f"{M}weight.absmax": whole(4), f"{M}weight.quant_map": floats(16)}),
}
CASES = {name: (about, {M + end: t for end, t in own.items()}) for name, (about, own) in FOUND.items()} | STATES
LORA = {f"{N}lora_A.default.weight": floats(4, 64), f"{N}lora_B.default.weight": floats(32, 4)}
COLUMNS: dict[str, Tensors] = {
    "beside a LoRA": {f"{N}base_layer.weight": floats(512, 1), **LORA},
    "in and out": {f"model.layers.0.self_attn.{name}_proj.weight": floats(256, 1) for name in ("q", "o")},
    "of bytes": {M + "weight": whole(1024, 1)},
}
NORM = {"model.norm.weight": torch.ones(64)}
READ = {
    *(
        "modelopt",
        "modelopt experts",
        "ct nvfp4",
        "ct mxfp4",
        "ct int4",
        "gpt-oss",
        "mxfp4",
        "mxfp8",
        "fp8 by powers",
        "int8",
        "int8 of a tensor",
    ),
    *("gptq", "gptq without order", "awq", "bnb int8", "torchao", "nf4", "fp4", "nf4, twice"),
}
"""Those whose numbers `test_unpack` compares."""


def written(at: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    at.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, at / "model.safetensors")
    if config is not None:
        (at / "config.json").write_text(json.dumps(config))
    return at


def refused(source: Path, out: Path, about: str) -> None:
    """Every command refuses in the same words, and none leaves anything."""
    words = f"its weights are quantised as {about}, which zckpt does not read"
    for dtype in ("fp32", "bf16"):
        with pytest.raises(zckpt.UnsupportedError, match=words):
            zckpt.convert(source, out, dtype=dtype, progress=False)
    for convert in (zckpt.to_fp8, zckpt.to_dcp, zckpt.to_mcore, zckpt.to_gguf):
        with pytest.raises(zckpt.UnsupportedError, match=words):
            convert(source, out, progress=False)
    with pytest.raises(zckpt.UnsupportedError, match=words):
        zckpt.average([source, source], out, progress=False)
    with pytest.raises(zckpt.UnsupportedError, match=words):
        load(str(source), None, PUSH.ask())
    assert not out.exists()
    inspection = inspect_checkpoint(source)
    assert not inspection.exportable.ok and words in inspection.exportable.reason
    assert inspection.catalog is not None and dict(inspection.catalog.source.details)["quantized"].startswith(about)
    found = checkpoint_map(source)
    assert found.inspection.exportable == inspection.exportable and found.layers


@pytest.mark.parametrize("name", CASES)
def test_forms_without_a_config(tmp_path: Path, name: str) -> None:
    about, tensors = CASES[name]
    source = written(tmp_path / "source", {**tensors, **NORM})
    if name not in READ:
        refused(source, tmp_path / "out", about)
    packed = find_packed(open_catalog(source, as_stored=True).catalog, None)
    assert packed is not None and packed.members == tensors.keys()
    if name not in READ:
        zckpt.convert(source, tmp_path / "norm", options=Options(exclude=("*layers*",)), progress=False)
        assert load_file(tmp_path / "norm" / "model.safetensors").keys() == NORM.keys()


def test_every_form_of_the_table_is_tried() -> None:
    assert {form.about for form in FORMS} <= {about for about, _ in CASES.values()}


@pytest.mark.parametrize("name", COLUMNS)
def test_bytes_without_scales(tmp_path: Path, name: str) -> None:
    source = written(tmp_path / "source", {**COLUMNS[name], **NORM})
    refused(source, tmp_path / "out", "4 bits of bitsandbytes without their scales")


def test_bytes_that_a_config_names(tmp_path: Path) -> None:
    said = {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    source = written(tmp_path / "source", {M + "weight": floats(512, 1), **NORM}, said)
    with pytest.raises(zckpt.UnsupportedError, match="4 bits of bitsandbytes without their scales"):
        zckpt.convert(source, tmp_path / "out", progress=False)
    assert not inspect_checkpoint(source).exportable.ok


def test_the_config_of_modelopt_alone(tmp_path: Path) -> None:
    """Of a form that no table has, this file is the only word."""
    source = written(tmp_path / "source", {M + "weight": whole(16, 32), **NORM}, {"model_type": "llama"})
    zckpt.convert(source, tmp_path / "as_before", progress=False)
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(zckpt.UnsupportedError, match=r"quantised by ModelOpt \(W4A8_AWQ\)"):
        zckpt.convert(source, tmp_path / "out", progress=False)
    for other in ("{", "[]", '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}'):
        (source / "hf_quant_config.json").write_text(other)
        assert inspect_checkpoint(source).exportable.ok


SOUND: dict[str, Tensors] = {
    "a mask of bytes": {"attn.mask": whole(16, 16), "attn.scale": floats(1)},
    "a float that is called a scale": {M + "weight": floats(16, 64), M + "weight_scale": floats(16, 1)},
    "scales": {M + "weight": floats(16, 64), M + "scales": floats(16), M + "biases": floats(16)},
    "groups of columns": {M + "weight": floats(16, 64), M + "g_idx": whole(64, dtype=I32), M + "qzeros": whole(2, 2, dtype=I32)},
    "scales of a cache": {M + "weight": floats(16, 64), M + "k_scale": floats(), M + "v_scale": floats(1)},
    "positions": {"embeddings.position_ids": torch.arange(9)[None], "embeddings.weight": floats(9, 4)},
    "observers": {
        M + "weight": floats(16, 64), M + "weight_fake_quant.scale": floats(16), M + "weight_fake_quant.zero_point": whole(1),
        M + "weight_fake_quant.fake_quant_enabled": whole(1), M + "weight_quantizer._amax": floats(16, 1),
    },
    "a matrix called W_q": {"attn.W_q": floats(16, 16), "attn.W_k": floats(16, 16), "attn.scale": floats(1)},
    "one input": {"gate.weight": floats(64, 1), "embed_scalar.q_proj.weight": floats(64, 1), "norm.weight": floats(64)},
    "a LoRA of one input": {f"{N}base_layer.weight": floats(64, 1), f"{N}lora_A.default.weight": floats(4, 1)},
    "codes of a tokenizer": {"vq.codebooks": floats(1, 256, 8), "vq.codes": whole(32, dtype=I8), "vq.usage": whole(256)},
    "blocks and scales": {"net.down_blocks": whole(4, 4), "net.down_scales": whole(4), "net.weight": floats(4, 4)},
    "an absolute maximum": {"obs.absmax": floats(1), "obs.weight": floats(4, 4)},
    "relative positions": {"attn.relative_position_index": whole(16, 16, dtype=I32), "attn.logit_scale": floats(4, 1, 1)},
    "integers that are called a weight": {"loss.weight": whole(4, 4, dtype=I32), "loss.class_ids": whole(4)},
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_what_looks_like_them_is_copied(tmp_path: Path, name: str) -> None:
    tensors = SOUND[name]
    source = written(tmp_path / "source", tensors, {"model_type": "llama"})
    assert inspect_checkpoint(source).exportable.ok
    zckpt.convert(source, tmp_path / "out", dtype="fp32", progress=False)
    written_out = load_file(tmp_path / "out" / "model.safetensors")
    assert written_out.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(written_out[key], tensor.float() if tensor.is_floating_point() else tensor)
    zckpt.to_dcp(source, tmp_path / "dcp", progress=False)


GROUPS = [{"model.norm.weight": torch.ones(64), **{name: t.float() for name, t in LORA.items()}}]


def save_dcp(at: Path, tensors: Tensors) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": tensors}, checkpoint_id=at, no_dist=True)
    return at


def save_ranks(at: Path, tensors: Tensors) -> Path:
    return synth.write(at / "model_world_size_1_rank_0.pt", tensors).parent


LAYOUTS = {
    "bin": lambda at, tensors: synth.write(at / "pytorch_model.bin", tensors).parent,
    "dcp": save_dcp,
    "zero2": lambda at, tensors: synth.zero12(at, GROUPS, 2, frozen=tensors),
    "zero2 buffers": lambda at, tensors: synth.zero12(at, GROUPS, 2, buffers=tensors),
    "zero3": lambda at, tensors: synth.zero3(at, GROUPS, 2, frozen=tensors),
    "ranks": save_ranks,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mlx", "quip", "frozen left out", "beside a LoRA"])
def test_layouts(tmp_path: Path, layout: str, name: str) -> None:
    about, tensors = CASES.get(name) or ("4 bits of bitsandbytes without their scales", COLUMNS[name])
    if layout.startswith("zero"):
        tensors = {key: tensor for key, tensor in tensors.items() if "lora_" not in key}
    refused(LAYOUTS[layout](tmp_path / "source", tensors), tmp_path / "out", about)


def test_an_adapter_on_packed_weights(tmp_path: Path) -> None:
    """It is written alone, and merged into the model that was quantised; with packed weights, it is refused."""
    leftovers = {
        f"{N}base_layer.weight.{end}": tensor for end, tensor in (("absmax", whole(32)), ("quant_map", floats(16)))
    }
    adapter = {name: torch.randn(tensor.shape) for name, tensor in LORA.items()}
    source = synth.zero12(tmp_path / "run", [adapter], 2, buffers=leftovers)
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["up_proj"]}
    (source / "adapter_config.json").write_text(json.dumps(said))
    with pytest.raises(zckpt.UnsupportedError, match=r"(?s)4 bits of bitsandbytes.*to-peft"):
        zckpt.convert(source, tmp_path / "whole", progress=False)
    zckpt.to_peft(source, tmp_path / "adapter", progress=False)
    alone = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert alone.keys() == {name.replace(".default", "") for name in LORA}
    plain = {M + "weight": floats(32, 64), **NORM}
    base = written(tmp_path / "base", plain, {"model_type": "llama"})
    options = Options(lora=LoraMerge(base=base))
    zckpt.convert(source, tmp_path / "merged", options=options, progress=False)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == plain.keys()
    factors = [adapter[f"{N}lora_{side}.default.weight"] for side in "BA"]
    torch.testing.assert_close(merged[M + "weight"], plain[M + "weight"].float() + factors[0] @ factors[1])
    quantised = written(tmp_path / "quantised", {**CASES["hqq"][1], **NORM}, {"model_type": "llama"})
    with pytest.raises(zckpt.UnsupportedError, match="quantised as HQQ"):
        zckpt.convert(source, tmp_path / "no", options=Options(lora=LoraMerge(base=quantised)), progress=False)


def test_a_copy_with_its_config_is_pushed(tmp_path: Path) -> None:
    said = {"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}
    source = written(tmp_path / "source", {**CASES["hqq"][1], **NORM}, said)
    assert load(str(source), None, PUSH.ask()).plan.files
    with pytest.raises(zckpt.UnsupportedError, match="quantised as HQQ"):
        load(str(source), "bf16", PUSH.ask())


def test_exit_statuses(tmp_path: Path) -> None:
    source = str(written(tmp_path / "source", {**CASES["hqq"][1], **NORM}))
    for args, status in (
        (["inspect", source], 1), (["map", source], 0), (["to-bf16", source, "out"], None), (["to-dcp", source, "out"], None),
        (["push", source, "me/model", "--dry-run"], None), (["average", source, source, "out"], None),
    ):  # fmt: skip
        result = CliRunner().invoke(app, args)
        if status is None:
            assert isinstance(result.exception, zckpt.UnsupportedError), args
        else:
            assert result.exit_code == status, args
        said = " ".join(result.output.split()) if status is not None else str(result.exception)
        assert "quantised as HQQ" in said, args
