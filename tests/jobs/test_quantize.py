"""quantize: scales are compressed-tensors' own, each code is the nearest one, and its readers load what is written."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
from zckpt.core.dtypes import F32
from zckpt.core.recipes import derive_entry
from zckpt.engine.kernels import ReferenceKernels
from zckpt.quantized import grids, quantise
from zckpt.quantized.targets import Second, second_of

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


@pytest.mark.parametrize("form", [*FORMS, "block128", "channel", "tensor", "nvfp4 of mxfp4"])
def test_verify_finds_one_bit(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It derives codes, scales and scales of scales by other code: the lowest bit of the first of each is planted otherwise."""
    source, (to, _, of) = model(tmp_path / "llama", torch.bfloat16), form.partition(" of ")
    if of:
        zckpt.quantize(source, tmp_path / of, to=of, progress=False)
        source = tmp_path / of

    def wrong(recipe_of: Any) -> Any:
        def made(one: Any) -> Any:
            recipe = recipe_of(one)

            def computed(start: int, stop: int, tools: Any) -> Any:
                found = np.array(recipe.compute(start, stop, tools))
                found.view(np.uint8)[: start == 0] ^= 1
                return found

            return replace(recipe, compute=computed)

        return made

    for recipe_of in (quantise.elements_of, quantise.scales_of, quantise.scale_of_scales):
        with monkeypatch.context() as patch:
            patch.setattr(quantise, recipe_of.__name__, wrong(recipe_of))
            out = tmp_path / recipe_of.__name__
            if to in FORMS:
                zckpt.quantize(source, out, to=to, progress=False)
            else:
                zckpt.to_fp8(source, out, scheme=to, progress=False)  # type: ignore[arg-type]
        verified = zckpt.verify(source, out, progress=False)
        number = next(check for check in verified.checks if check.name == "equal").number
        assert number == (0 if recipe_of is quantise.scale_of_scales and to != "nvfp4" else len(LINEAR)), (
            recipe_of,
            verified.lines(),
        )
        assert verified.ok == (not number)


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


def experts(generator: torch.Generator, rows: int, span: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of gpt-oss whose powers of two span so much."""
    blocks = torch.randint(0, 256, (3, rows, 2, 16), generator=generator, dtype=torch.uint8)
    powers = torch.randint(120 - span, 121, (3, rows, 2), generator=generator, dtype=torch.uint8)
    powers[0, 0], powers[1, 1] = 120, 120 - span
    return blocks, powers


def of_mxfp4(at: Path) -> Path:
    """A layer of gpt-oss; a scale of `down_proj` is too small for NVFP4 beside the largest."""
    at.mkdir()
    generator, own = torch.Generator().manual_seed(0), f"{LAYER}mlp.experts."
    tensors = {
        LAYER + "self_attn.q_proj.weight": torch.randn(64, 64).bfloat16(),
        "lm_head.weight": torch.ones(8, 64).bfloat16(),
    }
    for name, rows, span in (("gate_up_proj", 96, 17), ("down_proj", 64, 20)):
        tensors[f"{own}{name}_blocks"], tensors[f"{own}{name}_scales"] = experts(generator, rows, span)
    save_file(tensors, at / "model.safetensors")
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]}
    (at / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "quantization_config": said}))
    return at


def test_mxfp4_of_gpt_oss_becomes_nvfp4_without_loss(tmp_path: Path) -> None:
    """In ModelOpt's form of turned stacks, with its arithmetic of the cast; what was not quantised is not."""
    source, out, own = of_mxfp4(tmp_path / "oss"), tmp_path / "out", f"{LAYER}mlp.experts."
    said = CliRunner().invoke(app, ["quantize", str(source), str(out), "--to", "nvfp4", "--json"])
    found = json.loads(said.stdout)
    assert {t["name"]: t["lossless"] for t in found["quantized_tensors"]} == {
        own + "gate_up_proj": True,
        own + "down_proj": False,
    }
    assert found["lossless"] == [1, 2]
    stored, blocks = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    assert stored[LAYER + "self_attn.q_proj.weight"].dtype == torch.bfloat16
    for name, top in (("gate_up_proj", 120), ("down_proj", 120)):
        codes, powers = blocks[f"{own}{name}_blocks"], blocks[f"{own}{name}_scales"]
        second = stored[f"{own}{name}_weight_scale_2"]
        assert second.shape == () and second == 2.0 ** (top - 127 - 8)
        wanted = (2.0 ** (powers.float() - top + 8).clamp(-9, 8)).repeat_interleave(2, -1)
        assert torch.equal(stored[f"{own}{name}_weight_scale"].float(), wanted.mT)
        if name == "gate_up_proj":
            assert torch.equal(stored[own + name], codes.flatten(-2).mT)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "W4A16_NVFP4" and config["ignore"] == ["lm_head", LAYER + "self_attn.q_proj"]
    assert zckpt.verify(source, out, progress=False).ok
    for at in (source, out):
        zckpt.convert(at, tmp_path / f"{at.name}.safetensors", dtype="fp32", progress=False)
    one, two = (load_file(tmp_path / f"{name}.safetensors") for name in ("oss", "out"))
    assert one.keys() == two.keys() and torch.equal(one[own + "gate_up_proj"], two[own + "gate_up_proj"])
    off = (one[own + "down_proj"] - two[own + "down_proj"]).abs().max()
    assert 0 < off <= 2.0 ** (120 - 127 - 17)  # half a step of the smallest scale, at most 1
    assert zckpt.verify(out, tmp_path / "out.safetensors", progress=False).ok
    again = tmp_path / "again"
    zckpt.quantize(out, again, to="nvfp4", progress=False)
    same = load_file(again / "model.safetensors")
    assert all(
        torch.equal(same[key].view(torch.uint8), stored[key].view(torch.uint8)) for key in stored if stored[key].dim()
    )


def test_mxfp4_of_layers_becomes_nvfp4_without_loss(tmp_path: Path) -> None:
    """Matrices that servers join share the power of two."""
    source = model(tmp_path / "llama", torch.bfloat16)
    zckpt.quantize(source, tmp_path / "mxfp4", to="mxfp4", progress=False)
    zckpt.quantize(tmp_path / "mxfp4", tmp_path / "nvfp4", to="nvfp4", progress=False)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("mxfp4", "nvfp4"))
    of = {kind: two[f"{LAYER}self_attn.{kind}.weight_global_scale"] for kind in ("q_proj", "k_proj", "v_proj")}
    assert len({float(value) for value in of.values()}) == 1
    top = max(int(one[f"{LAYER}self_attn.{kind}.weight_scale"].max()) for kind in of)
    assert of["q_proj"] == 2.0 ** (8 + 127 - top)
    name = LAYER + "mlp.up_proj.weight"
    assert torch.equal(one[name + "_packed"], two[name + "_packed"])
    assert zckpt.verify(tmp_path / "mxfp4", tmp_path / "nvfp4", progress=False).ok


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
def test_modelopts_own_form_stays_as_it_is(tmp_path: Path, kind: str) -> None:
    """All scales are carried, also those of activations and of the cache; what is excluded stays so."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    name, tensors = LAYER + "self_attn.k_proj.", {"lm_head.weight": torch.ones(8, 64).bfloat16()}
    tensors[LAYER + "self_attn.q_proj.weight"] = torch.randn(64, 64).bfloat16()
    tensors |= {name + "k_scale": torch.tensor(0.5), name + "input_scale": torch.tensor(0.1)}
    if kind == "nvfp4":
        tensors[name + "weight"] = torch.randint(0, 256, (32, 32), dtype=torch.uint8)
        tensors[name + "weight_scale"] = torch.rand(32, 4).to(torch.float8_e4m3fn)
        tensors[name + "weight_scale_2"] = torch.tensor(0.3)
    else:
        tensors |= {
            name + "weight": torch.randn(32, 64).to(torch.float8_e4m3fn),
            name + "weight_scale": torch.tensor(0.3),
        }
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(CONFIG))
    said = {"quant_algo": kind.upper(), "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.q_proj"]}
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    zckpt.quantize(source, out, to=kind, progress=False)
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert stored[key].dtype == tensor.dtype and torch.equal(stored[key].view(-1), tensor.view(-1)), key
    assert json.loads((out / "config.json").read_text()) == CONFIG
    assert json.loads((out / "hf_quant_config.json").read_text())["quantization"] == said
    assert zckpt.verify(source, out, progress=False).ok


def test_a_source_is_opened_once_and_read_as_often_as_it_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; for a scale of scales, which is of whole tensors, once before. Scales come from the same reading as codes."""
    from zckpt import layouts
    from zckpt.engine import bringing

    source, numel = model(tmp_path / "source", torch.bfloat16), sum(math.prod(SHAPES[name]) for name in LINEAR)
    read, opened, original = [], [], bringing._Worker.read
    read_layout = layouts.read

    def counted(self: Any, entry: Any, start: int, stop: int, dtype: Any = None) -> Any:
        read.append(stop - start)
        return original(self, entry, start, stop, dtype)

    def opening(*args: Any, **more: Any) -> Any:
        opened.append(args)
        return read_layout(*args, **more)

    monkeypatch.setattr(bringing._Worker, "read", counted)
    monkeypatch.setattr(layouts, "read", opening)
    monkeypatch.setattr("zckpt.engine.batches.MOST_DISTANT_BYTES", 1)
    for form in FORMS:
        zckpt.quantize(source, tmp_path / form, to=form, progress=False)
        assert sum(read) == numel * (2 if form == "nvfp4" else 1), form
        assert len(opened) == 1
        read.clear(), opened.clear()
        zckpt.quantize(tmp_path / form, tmp_path / f"{form} again", to=form, progress=False)
        assert len(opened) == 1
        read.clear(), opened.clear()


def test_the_disk_reads_matrices_while_those_before_are_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first ones, which nothing precedes; those that servers join are read together."""
    from zckpt.engine import bringing

    source, asked = model(tmp_path / "source", torch.bfloat16), list[tuple[int, int]]()
    monkeypatch.setattr(bringing, "will_need", lambda fd, offset, nbytes: asked.append((offset, nbytes)))
    zckpt.quantize(source, tmp_path / "out", to="nvfp4", progress=False)
    with (source / "model.safetensors").open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    places = {name: (8 + size + header[name]["data_offsets"][0], 2 * math.prod(SHAPES[name])) for name in LINEAR}
    first = {name for name in LINEAR if "mlp." in name}
    assert sorted(asked) == sorted(place for name, place in places.items() if name not in first)


def test_a_scale_of_scales_is_found_once() -> None:
    """What cannot be read is asked for again; then each part is read once, whoever asks."""
    entry = derive_entry("w", (4, 1 << 19), F32, None)  # type: ignore[arg-type] - nobody follows the recipe
    read: list[int] = []

    class Tools:
        kernels = ReferenceKernels()
        fails = True

        def read_floats(self, entry: Any, start: int, stop: int) -> Any:
            if self.fails:
                raise OSError("a disk")
            read.append(start)
            return np.full(stop - start, start + 1, np.float32)

        def each(self, work: Any, parts: Any) -> Any:
            return [work(part, self) for part in parts]

    tools, second = Tools(), Second((entry,))
    with pytest.raises(OSError, match="a disk"):
        second.value(tools)  # type: ignore[arg-type]
    tools.fails = False
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(second.value, [tools, tools]))  # type: ignore[arg-type, list-item]
    assert sorted(read) == [n << 19 for n in range(4)]
    assert found == [second_of(3 * 2**19 + 1)] * 2


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "mxfp8", "int4"])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, form: str) -> None:
    peaks = []
    for layers in (6, 60):  # 25 MB of weights, and ten times as much
        at, header = tmp_path / f"sparse{layers}", {}
        at.mkdir()
        size = 2 * 2048 * 1024
        for layer in range(layers):
            places = [layer * size, (layer + 1) * size]
            header[f"model.layers.{layer}.mlp.up_proj.weight"] = {
                "dtype": "BF16",
                "shape": [2048, 1024],
                "data_offsets": places,
            }
        text = json.dumps(header).encode()
        with (at / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + layers * size)
        (at / "config.json").write_text(json.dumps(CONFIG))
        words = [sys.executable, "-m", "zckpt", "quantize", str(at), str(tmp_path / f"out{layers}"), "--to", form]
        done = subprocess.run([*words, "--json"], capture_output=True, check=True)
        peaks.append(json.loads(done.stdout)["peak_rss_bytes"])
    assert peaks[1] - peaks[0] < 32 << 20 and peaks[1] < 150 << 20, peaks


def test_codes_that_no_config_names_are_not_copied(tmp_path: Path) -> None:
    """A copy would have no config that says what the codes are: a loader would take them for numbers."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    name = f"{LAYER}mlp.up_proj.weight"
    save_file(
        {name: torch.randn(32, 64).to(torch.float8_e4m3fn), f"{name}_scale": torch.tensor(4.0)},
        source / "model.safetensors",
    )
    (source / "config.json").write_text(json.dumps(CONFIG))
    report = zckpt.quantize(source, out, to="fp8", progress=False)
    assert not [note for note in report.notes if "is a copy" in note]
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    for form in (source, out):
        zckpt.convert(form, tmp_path / f"numbers of {form.name}", progress=False)
    mine, theirs = (load_file(tmp_path / f"numbers of {at}" / "model.safetensors")[name] for at in ("source", "out"))
    assert torch.allclose(mine, theirs, rtol=0.07, atol=0.05)
