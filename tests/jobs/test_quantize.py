"""quantize: scales are compressed-tensors' own, each code is the nearest one, and its readers load what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from outputs import contents
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import zckpt
from zckpt.cli import app
from zckpt.engine.kernels import NativeKernels
from zckpt.quantized import grids, targets

CONFIG: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (40, 256),
    LAYER + "input_layernorm.weight": (256,),
    LAYER + "self_attn.q_proj.weight": (96, 256),
    LAYER + "self_attn.k_proj.weight": (32, 256),
    LAYER + "self_attn.v_proj.weight": (32, 256),
    LAYER + "self_attn.o_proj.weight": (256, 128),
    LAYER + "mlp.gate_proj.weight": (64, 256),
    LAYER + "mlp.up_proj.weight": (64, 256),
    "lm_head.weight": (40, 256),
}
LINEAR = [name for name in SHAPES if "_proj.weight" in name]
FORMS = ("nvfp4", "mxfp4", "mxfp8", "int4", "int8")


def model(at: Path, dtype: torch.dtype) -> Path:
    """A model with blocks of zeros, of tiny numbers, and of numbers halfway between two codes."""
    at.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * 0.03 for name, shape in SHAPES.items()}
    first = tensors[LAYER + "self_attn.q_proj.weight"]
    first[0, :128], first[1], first[2] = 0, first[1] * 1e-20, torch.arange(256) % 15 / 64
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, at / "model.safetensors")
    (at / "config.json").write_text(json.dumps(CONFIG))
    return at


def together(name: str) -> list[str]:
    """The matrices that vLLM joins with one."""
    kinds = next(
        (kinds for kinds in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if name.split(".")[-2] in kinds),
        (),
    )
    return [f"{name.rpartition('.')[0].rpartition('.')[0]}.{kind}.weight" for kind in kinds] or [name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_scales_and_codes(tmp_path: Path, form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = model(tmp_path / "llama", dtype), tmp_path / "out"
    zckpt.quantize(source, out, to=form, dtype="bf16" if dtype == torch.bfloat16 else "fp32", progress=False)
    stored, weights = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(said)
    scheme = config.config_groups["group_0"]
    args = scheme.weights
    assert args is not None and said["ignore"] == ["lm_head"]
    kind = BaseCompressor.get_value_from_registry(said["format"])
    for name in SHAPES:
        if name not in LINEAR:
            assert torch.equal(stored[name], weights[name])
            continue
        own = {key.removeprefix(name.removesuffix("weight")): t for key, t in stored.items() if key.startswith(name)}
        weight = weights[name]
        groups = weight.reshape(len(weight), -1, args.group_size) if args.group_size else weight[:, None]
        whole = None
        if form == "nvfp4":
            joined = torch.cat([weights[other].float().flatten() for other in together(name)])
            whole = generate_gparam(joined.amin(), joined.amax())
            assert torch.equal(own["weight_global_scale"], whole)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=whole)
        state = {
            "weight": weight,
            "weight_scale": scale,
            "weight_zero_point": zero,
            **({} if whole is None else {"weight_global_scale": whole}),
        }
        theirs = kind.compress(state, scheme)
        assert own.keys() == theirs.keys() and all(own[key].dtype == theirs[key].dtype for key in own), (own, theirs)
        assert all(
            torch.equal(own[key].view(torch.uint8), theirs[key].view(torch.uint8))
            for key in own
            if "scale" in key or "shape" in key
        ), name
        numbers = zckpt_numbers(kind, own, scheme, whole)
        off, other = (
            (weight.double() - got.double()).pow(2).sum()
            for got in (numbers, zckpt_numbers(kind, theirs, scheme, whole))
        )
        assert off <= other
        check_nearest(form, weight, own, scale.float() if whole is None else scale.float() / whole)
    assert zckpt.verify(source, out, progress=False).ok
    before = contents(out)
    monkeypatch.setattr(grids, "_MOST", 1000)  # in many parts
    zckpt.quantize(
        source,
        again := tmp_path / "again",
        to=form,
        dtype="bf16" if dtype == torch.bfloat16 else "fp32",
        progress=False,
        options=zckpt.Options(threads=3),
    )
    assert contents(again) == before


def zckpt_numbers(kind: Any, own: dict[str, torch.Tensor], scheme: Any, whole: torch.Tensor | None) -> torch.Tensor:
    """What the library's own compressor makes of it, in fp32."""
    args = scheme.weights
    if "weight_packed" in own and own["weight_packed"].dtype == torch.uint8:
        codes = unpack_fp4_from_uint8(
            own["weight_packed"], len(own["weight_packed"]), own["weight_packed"].shape[1] * 2, dtype=torch.float32
        )
        return dequantize(
            codes,
            kind._decompress_scale(own["weight_scale"], torch.float32),
            args=args,
            global_scale=whole,
            dtype=torch.float32,
        )
    scale = own["weight_scale"]
    state = {**own, "weight_scale": scale if scale.dtype == torch.uint8 else scale.float()}
    return kind.decompress(state, scheme)["weight"].float()


def check_nearest(form: str, weight: torch.Tensor, own: dict[str, torch.Tensor], scale: torch.Tensor) -> None:
    """No other number of the form is nearer."""
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid, codes = {
        "nvfp4": (e2m1, lambda: unpack_fp4_from_uint8(own["weight_packed"], *weight.shape, dtype=torch.float32)),
        "mxfp4": (e2m1, lambda: unpack_fp4_from_uint8(own["weight_packed"], *weight.shape, dtype=torch.float32)),
        "mxfp8": (e4m3, lambda: own["weight"].float()),
        "int4": (torch.arange(8).double(), lambda: unpack_from_int32(own["weight_packed"], 4, weight.shape).float()),
        "int8": (torch.arange(128).double(), lambda: own["weight"].float()),
    }[form]
    every = (
        torch.cat([grid, -grid, torch.tensor([-8.0 if form == "int4" else -128.0])])
        if "int" in form
        else torch.cat([grid, -grid])
    )
    wanted = weight.double() / scale.double().repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    off = (codes().double() - wanted).abs()
    best = torch.stack([(one - wanted).abs() for one in every.unique()]).amin(0)
    assert torch.equal(off, best)


@pytest.mark.parametrize("form", [*FORMS, "fp8"])
def test_its_own_form_stays_as_it_is(tmp_path: Path, form: str) -> None:
    """Numbers quantised again would have other scales."""
    source, out = model(tmp_path / "llama", torch.bfloat16), tmp_path / "out"
    zckpt.quantize(source, out, to=form, progress=False)
    zckpt.quantize(out, again := tmp_path / "again", to=form, progress=False)
    one, two = (load_file(at / "model.safetensors") for at in (out, again))
    assert one.keys() == two.keys()
    assert all(
        one[name].dtype == two[name].dtype and torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8))
        for name in one
    )
    assert (again / "config.json").read_bytes() == (out / "config.json").read_bytes()
    assert zckpt.verify(out, again, progress=False).ok


@pytest.mark.parametrize("form", [*FORMS, "fp8"])
def test_verify_finds_a_fault_in_what_quantises(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It derives codes and scales by other code."""
    source = model(tmp_path / "llama", torch.bfloat16)
    to_codes = NativeKernels.to_codes

    def wrong(self: Any, grid: Any, numbers: Any, blocks: Any, factors: Any, out: Any) -> Any:
        found = to_codes(self, grid, numbers, blocks, factors, out)
        out[:1] ^= 1
        return found

    with monkeypatch.context() as patch:
        patch.setattr(NativeKernels, "to_codes", wrong)
        zckpt.quantize(source, tmp_path / "codes", to=form, progress=False)
    assert not zckpt.verify(source, tmp_path / "codes", progress=False).ok
    if form in targets.TARGETS:
        scales_of = targets.Target.scales_of
        with monkeypatch.context() as patch:
            patch.setattr(targets.Target, "scales_of", lambda *asked: scales_of(*asked) * 2)
            zckpt.quantize(source, tmp_path / "scales", to=form, progress=False)
        assert not zckpt.verify(source, tmp_path / "scales", progress=False).ok


def test_groups_and_what_is_left(tmp_path: Path) -> None:
    source = model(tmp_path / "llama", torch.bfloat16)
    words = [
        "quantize",
        str(source),
        str(tmp_path / "out"),
        "--to",
        "int4",
        "--group-size",
        "32",
        "--exclude",
        "*o_proj*",
        "--json",
    ]
    said = json.loads(CliRunner().invoke(app, words).stdout)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored[LAYER + "mlp.up_proj.weight_scale"].shape == (64, 8) and said["quantized"] == len(LINEAR) - 1
    assert stored[LAYER + "self_attn.o_proj.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert set(config["ignore"]) == {LAYER + "self_attn.o_proj", "lm_head"}
    assert zckpt.verify(source, tmp_path / "out", progress=False).ok
    for to, size, words_of in (
        ("int4", 100, "not a whole number of groups"),
        ("mxfp4", 16, "meaning for int4 alone"),
        ("int3", None, "unknown"),
    ):
        with pytest.raises(zckpt.UsageError, match=words_of):
            zckpt.quantize(source, tmp_path / "no", to=to, group_size=size, progress=False)
    tensors = load_file(source / "model.safetensors")
    tensors[LAYER + "mlp.up_proj.weight"][3, 7] = float("nan")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(zckpt.CastError, match=r"up_proj\.weight' holds NaN"):
        zckpt.quantize(source, tmp_path / "no", to="nvfp4", progress=False)
    assert not (tmp_path / "no").exists()


def test_to_fp8_is_its_short_form(tmp_path: Path) -> None:
    source = model(tmp_path / "llama", torch.bfloat16)
    zckpt.quantize(source, tmp_path / "a", to="fp8", progress=False)
    zckpt.to_fp8(source, tmp_path / "b", progress=False)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
