"""to-fp8: scales and elements are what torch computes; whatever the engine, the cut and the layout; and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import contents
from safetensors.torch import load_file, save_file
from schemas import check
from typer.testing import CliRunner

import zckpt
from zckpt.checks import verify as verifying
from zckpt.cli import app
from zckpt.core import plan as plans
from zckpt.engine import move
from zckpt.jobs.declarations import TO_FP8
from zckpt.jobs.planned import execute
from zckpt.jobs.quantize import prepare
from zckpt.quantized import grids

FIXTURES = Path(__file__).parents[2] / "fixtures"
CONFIG: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (40, 300),
    LAYER + "input_layernorm.weight": (300,),
    LAYER + "self_attn.q_proj.weight": (260, 300),
    LAYER + "self_attn.o_proj.weight": (300, 260),
    LAYER + "mlp.up_proj.weight": (128, 300),
    LAYER + "mlp.up_proj.bias": (128,),
    LAYER + "mlp.down_proj.weight": (300, 128),
    "lm_head.weight": (40, 300),
}
LINEAR = [name for name in SHAPES if "_proj.weight" in name]


def weights(shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) * 0.03 for name, shape in shapes.items()}
    found[LAYER + "self_attn.q_proj.weight"][:128, 128:256] = 0  # a block of zeros
    found[LAYER + "self_attn.q_proj.weight"][200] *= 1e-20
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def model(at: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = CONFIG) -> Path:
    at.mkdir()
    save_file(tensors, at / "model.safetensors")
    if config is not None:
        (at / "config.json").write_text(json.dumps(config))
    return at


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return model(tmp_path / "llama", weights())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def expected(weight: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Elements, scales and what they stand for, by torch alone."""
    rows, columns = weight.shape[-2:]
    down, across = {"block128": (128, 128), "channel": (1, columns), "tensor": (rows, columns)}[scheme]
    shape = (*weight.shape[:-2], math.ceil(rows / down), math.ceil(columns / across))
    wide = torch.zeros(*weight.shape[:-2], shape[-2] * down, shape[-1] * across)
    wide[..., :rows, :columns] = weight.float()
    blocks = wide.reshape(*weight.shape[:-2], shape[-2], down, shape[-1], across)
    scales = blocks.abs().amax(dim=(-3, -1)).clamp(min=1e-12) / 448
    if scheme != "block128":
        scales = scales.bfloat16()
    spread = scales.float().repeat_interleave(down, -2).repeat_interleave(across, -1)[..., :rows, :columns]
    elements = (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return elements, scales.reshape(1) if scheme == "tensor" else scales, elements.float() * spread


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("scheme", ["block128", "channel", "tensor"])
def test_it_is_what_torch_computes(llama: Path, out: Path, scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = weights()
    zckpt.to_fp8(llama, out, scheme=scheme, progress=False)
    found = load_file(out / "model.safetensors")
    end = "_scale_inv" if scheme == "block128" else "_scale"
    assert found.keys() == SHAPES.keys() | {name + end for name in LINEAR}
    for name, weight in source.items():
        if name in LINEAR:
            elements, scales, _ = expected(weight, scheme)
            assert same(found[name], elements), name
            assert same(found[name + end], scales), name
        else:
            assert same(found[name], weight.bfloat16()), name
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == ("fp8" if scheme == "block128" else "compressed-tensors")
    assert said["modules_to_not_convert" if scheme == "block128" else "ignore"] == ["lm_head"]
    assert zckpt.verify(llama, out, progress=False).ok
    before = contents(out)
    monkeypatch.setattr(grids, "_MOST", 1000)  # matrices are computed in many parts, and blocks are cut
    monkeypatch.setattr(grids, "_FEW_ROWS", 128)
    monkeypatch.setattr(plans, "SLAB_BYTES", 40_000)
    zckpt.to_fp8(
        llama, again := out.with_name("parts"), scheme=scheme, options=zckpt.Options(threads=3), progress=False
    )
    assert contents(again) == before
    assert zckpt.verify(llama, out, progress=False).ok
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="the slow Python one is used"):
        patch.setattr(move, "native_run", None)
        zckpt.to_fp8(llama, again := out.with_name("slow"), scheme=scheme, progress=False)
    assert contents(again) == before
    # and back
    zckpt.convert(out, out.with_name("back"), dtype="fp32", progress=False)
    back = load_file(out.with_name("back") / "model.safetensors")
    assert back.keys() == SHAPES.keys()
    for name in LINEAR:
        assert same(back[name], expected(source[name], scheme)[2]), name
    assert "quantization_config" not in json.loads((out.with_name("back") / "config.json").read_text())
    assert zckpt.verify(out, out.with_name("back"), progress=False).ok
    assert zckpt.diff(out, out.with_name("back"), progress=False).same is False  # norms are bf16 there, fp32 here
    assert all(
        tensor.same
        for tensor in zckpt.diff(out, out.with_name("back"), progress=False).tensors
        if tensor.name in LINEAR
    )


def test_the_numbers_of_each_tensor(llama: Path, out: Path) -> None:
    result = CliRunner().invoke(app, ["to-fp8", str(llama), str(out), "--json"])
    facts = check("written", result.stdout)
    check("manifest", (out / "zckpt.json").read_text())
    assert facts["quantized"] == len(LINEAR)
    for said in facts["quantized_tensors"]:  # type: ignore[attr-defined]
        weight = weights()[said["name"]]
        elements, _, stands_for = expected(weight, "block128")
        assert said["shape"] == list(weight.shape) and said["saturated"] == 0
        assert said["largest"] == weight.abs().max().item()
        assert said["max_error"] == (weight - stands_for).abs().max().item()
        assert said["max_relative_error"] <= 1 / 28
        assert said["underflowed"] == ((elements.float() == 0) & (weight != 0)).sum().item()
    assert sum(said["underflowed"] for said in facts["quantized_tensors"]) > 0  # type: ignore[attr-defined]
    again = check("written", CliRunner().invoke(app, ["to-fp8", str(llama), str(out), "--json"]).stdout)
    assert again["already_done"] and again["quantized_tensors"][0]["max_error"] is None  # type: ignore[index]


def test_scales_come_from_the_same_reading(llama: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements are laid before scales, so a matrix is read once; it is read again only where scales are asked for alone."""
    from zckpt.engine import bringing

    read: list[int] = []
    original = bringing._Worker.read

    def counted(self: Any, entry: Any, start: int, stop: int, dtype: Any = None) -> Any:
        read.append(stop - start)
        return original(self, entry, start, stop, dtype)

    monkeypatch.setattr(bringing._Worker, "read", counted)
    monkeypatch.setattr("zckpt.engine.batches.MOST_DISTANT_BYTES", 1)
    zckpt.to_fp8(llama, out, progress=False)
    assert sum(read) == sum(math.prod(SHAPES[name]) for name in LINEAR)


def test_what_is_quantised_can_be_chosen(llama: Path, out: Path) -> None:
    zckpt.to_fp8(llama, out, keep=["*.o_proj.weight"], quantize=["*self_attn*", "*.up_proj.weight"], progress=False)
    found = load_file(out / "model.safetensors")
    half = {name for name, tensor in found.items() if tensor.dtype == torch.bfloat16}
    assert half == SHAPES.keys() - {LAYER + "self_attn.q_proj.weight", LAYER + "mlp.up_proj.weight"}
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert sorted(ignored) == ["lm_head", LAYER + "mlp.down_proj", LAYER + "self_attn.o_proj"]
    assert zckpt.verify(llama, out, progress=False).ok
    damaged = {
        **found,
        LAYER + "self_attn.q_proj.weight_scale_inv": found[LAYER + "self_attn.q_proj.weight_scale_inv"] * 2,
    }
    shutil.copytree(llama, copy := out.with_name("copy"))
    save_file(damaged, out / "model.safetensors", {"format": "pt"})
    assert not verifying.verify(copy, out, progress=False).ok


def test_stacks_of_experts_and_routers(tmp_path: Path, out: Path) -> None:
    layer = "model.layers.0."
    shapes = {
        layer + "self_attn.q_proj.weight": (256, 128),
        layer + "mlp.gate.weight": (3, 128),
        layer + "mlp.gate.e_score_correction_bias": (3,),
        layer + "mlp.experts.gate_up_proj": (3, 200, 140),
        "lm_head.weight": (10, 128),
    }
    source = weights(shapes)
    given = model(tmp_path / "moe", source, {"model_type": "deepseek_v3"})
    zckpt.to_fp8(given, out, progress=False)
    found = load_file(out / "model.safetensors")
    elements, scales, _ = expected(source[layer + "mlp.experts.gate_up_proj"], "block128")
    assert same(found[layer + "mlp.experts.gate_up_proj"], elements)
    assert same(found[layer + "mlp.experts.gate_up_proj_scale_inv"], scales) and scales.shape == (3, 2, 2)
    assert found[layer + "mlp.gate.weight"].dtype == torch.bfloat16
    assert same(found[layer + "mlp.gate.e_score_correction_bias"], source[layer + "mlp.gate.e_score_correction_bias"])
    said = json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert sorted(said) == ["lm_head", layer + "mlp.gate"]
    assert zckpt.verify(given, out, progress=False).ok
    with pytest.raises(zckpt.UnsupportedError, match="stacks of experts"):
        zckpt.to_fp8(given, out.with_name("other"), scheme="channel", progress=False)


def test_what_is_refused(tmp_path: Path, out: Path) -> None:
    def refused(error: type[Exception], match: str, tensors: Any = None, config: Any = CONFIG, **options: Any) -> None:
        shutil.rmtree(tmp_path / "given", ignore_errors=True)
        given = model(tmp_path / "given", weights() if tensors is None else tensors, config)
        with pytest.raises(error, match=match):
            zckpt.to_fp8(given, out, progress=False, **options)
        assert not out.exists()

    refused(zckpt.UnsupportedError, "not known which tensors", config={"model_type": "gpt2"})
    refused(zckpt.UnsupportedError, "not known which tensors", config={"model_type": "unheard_of"})
    refused(zckpt.IncompleteError, "no config.json", config=None)
    refused(zckpt.UsageError, "'x' matches no weight", keep=["x"])
    refused(zckpt.UsageError, "matches no weight", quantize=["lm_head.weight"])
    refused(zckpt.UsageError, "nothing to quantise", keep=["*"])
    refused(zckpt.UsageError, "scheme", scheme="block64")
    for bad in (math.nan, -math.inf):
        tensors = weights()
        tensors[LINEAR[-1]][5, 7] = bad
        refused(zckpt.CastError, "NaN or infinity", tensors)
        zckpt.to_fp8(tmp_path / "given", tmp_path / f"kept{bad}", keep=[LINEAR[-1]], progress=False)
    experts = {
        LAYER + f"mlp.experts.{e}.{name}_proj.weight": (64, 64) for e in range(2) for name in ("gate", "up", "down")
    }
    tensors = {name: torch.ones(shape) for name, shape in experts.items()}
    refused(zckpt.UsageError, "some experts", tensors, {"model_type": "qwen3_moe"}, keep=["*experts.1.*"])
    with pytest.raises(zckpt.UsageError, match="must be a directory"):
        zckpt.to_fp8(tmp_path / "given", tmp_path / "one.safetensors", progress=False)


def test_an_unknown_model_with_named_weights(tmp_path: Path, out: Path) -> None:
    given = model(tmp_path / "given", weights(), {"model_type": "unheard_of"})
    zckpt.to_fp8(given, out, quantize=["*_proj.weight"], progress=False)
    found = load_file(out / "model.safetensors")
    assert {name for name in SHAPES if found[name].dtype == torch.float8_e4m3fn} == set(LINEAR)
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert sorted(ignored) == ["lm_head", "model.embed_tokens"]
    assert zckpt.verify(given, out, progress=False).ok


@pytest.mark.parametrize("fixture", ["transformers/llama_zero3", "transformers/llama_zero2"])
def test_from_a_sharded_checkpoint_in_shards_resumed(fixture: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = FIXTURES / fixture / "checkpoint"
    monkeypatch.setattr("zckpt.engine.batches.LEAST_BYTES", 0)
    options = TO_FP8.ask(max_shard_size=100)

    class Stopped(BaseException):
        pass

    def stop(written: int) -> None:
        if written > 1800:
            raise Stopped

    planned = prepare(given, out, options)
    assert len([file for file, _ in planned.plan.files if file.path.endswith(".safetensors")]) > 3
    with pytest.raises(Stopped):
        execute(planned, stop)
    assert execute(prepare(given, out, options)).kept >= 1
    plain = out.with_name("plain")
    zckpt.convert(given, plain, dtype="fp32", progress=False)
    source = load_file(plain / "model.safetensors")
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, torch.Tensor] = {}
    for shard in set(index.values()):
        found |= load_file(out / shard)
    assert found.keys() <= index.keys()
    quantised = [name for name in found if name.endswith("_scale_inv")]
    assert len(quantised) >= 7
    for scale in quantised:
        elements, scales, _ = expected(source[scale.removesuffix("_scale_inv")], "block128")
        assert same(found[scale.removesuffix("_scale_inv")], elements) and same(found[scale], scales)
    assert zckpt.verify(given, out, progress=False).ok
