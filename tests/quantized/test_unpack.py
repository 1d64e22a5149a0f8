"""Packed weights as a source: each form's numbers are its library's, bit for bit, on shapes of all kinds, with zero blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import proofs
import pytest
import synth
import torch
from packed_forms import FORMS, Dice, Made, Tensors, awq, gptq, make_all, modelopt, with_last, write
from safetensors.torch import load_file

import zckpt
from zckpt.quantized.coded import Coded


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
    named = said["details"]["quantized"]  # type: ignore[index]
    assert ("fp8 with scales" in named) == (name.startswith("fp8") and "torchao" not in name), named


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


@pytest.mark.parametrize("name", [name for name in FORMS if not name.startswith("fp8") or "torchao" in name])
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


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., : tensor.shape[-1] // 2 or 0]


def wider(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[..., :1]], -1)


def of_text(text: str) -> torch.Tensor:
    return torch.tensor([*text.encode()], dtype=torch.uint8)


STATES = (
    '{"shape": [true, 2], "blocksize": 64}', '{"shape": [2, 2], "blocksize": 64.5}', '{"shape": [2, 2], "blocksize": Infinity}',
    '{"blocksize": 64, "shape": [2, 2], "nested_blocksize": 0, "nested_offset": 0}', "[" * 9000,
    f'{{"nested_offset": 1{"0" * 400}, "shape": [2, 2], "blocksize": 64, "nested_blocksize": 256}}',
)  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4}
OF_SHAPE: dict[str, Callable[[Dice, int, int], Tensors]] = {
    "fp8 of mistral": lambda dice, rows, columns: {
        "weight": torch.randn(rows, columns, generator=dice.torch).to(torch.float8_e4m3fn),
        "qscale_weight": torch.rand((), generator=dice.torch),
    },
    "gptq of 4 bits": lambda dice, rows, columns: {
        "qweight": dice.below(1 << 31, columns // 8, rows).int(), "scales": torch.rand(columns // 32, rows).half(),
        "qzeros": torch.full((columns // 32, rows // 8), 0x77777777).int(), "g_idx": torch.arange(columns).int() // 32,
    },
    "mlx's mxfp4": lambda dice, rows, columns: {
        "weight": dice.below(1 << 31, rows, columns // 8).to(torch.uint32),
        "scales": (110 + dice.below(9, rows, columns // 32)).to(torch.uint8),
    },
}  # fmt: skip
"""Of a form: what is stored of a matrix of a shape."""
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
    "groups of other sizes": (lambda: changed("gptq of 4 bits", 4, g_idx=torch.zeros_like), GPTQ, "are not of one size"),
    "no groups in GPTQ": (lambda: changed("gptq of 4 bits", 4, g_idx=lambda t: t * 0 - 1), GPTQ, "names groups"),
    "two scales": (
        lambda: changed("fp8 of a tensor") | {"a.weight_scale_inv": torch.ones(1)}, None, "scales of tensor 'a.weight' do not",
    ),
    "groups that there are not": (lambda: changed("gptq of 4 bits", g_idx=lambda t: t + 99), None, "names groups"),
    "zero points without a meaning": (
        lambda: changed("gptq of 4 bits", **ZERO_POINTS), {"quant_method": "gptq"}, "has no agreed meaning",
    ),
    "zero points of another shape": (lambda: changed("awq", qzeros=wider), None, "the zero points of tensor"),
    "two of a name": (lambda: changed("awq") | {"a.weight": torch.ones(2)}, None, "there are two"),
    **{f"a state with {said[:30]}": (
        lambda said=said: changed("fp4, twice") | {"a.weight.quant_state.bitsandbytes__fp4": of_text(said)}, None,
        "cannot be read",
    ) for said in STATES},
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


TOLD: dict[str, tuple[int, str, dict[str, Any]]] = {
    "config.json, no version": (1, "config.json", GPTQ),
    "format, as transformers 5 has it": (2, "config.json", {**GPTQ, "format": "gptq_v2"}),
    "checkpoint_format before format": (1, "config.json", {**GPTQ, "checkpoint_format": "gptq", "format": "gptq_v2"}),
    "no bits": (1, "config.json", {"quant_method": "gptq"}),
    "auto-gptq's own file": (
        1,
        "quantize_config.json",
        {"bits": 4, "desc_act": False, "sym": False},
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


def test_two_files_that_say_otherwise_of_zero_points(tmp_path: Path) -> None:
    source = write(tmp_path / "source", make_all(gptq(4, 2), 3)[0], GPTQ)
    (source / "quantize_config.json").write_text(json.dumps({**GPTQ, "checkpoint_format": "gptq_v2"}))
    with pytest.raises(zckpt.InconsistentError, match="two files say otherwise of the zero points"):
        zckpt.convert(source, tmp_path / "out", progress=False)


def test_what_activations_need_is_no_tensor_of_plain_weights(tmp_path: Path) -> None:
    """Scales and zero points of inputs, outputs and the cache, under all names that libraries have for them."""
    ends = ("input_scale", "input_scale_ub", "output_scale", "k_scale", "kv_scale", "k_proj.k_bias")
    more = {f"layers.0.{end}": torch.ones(1) for end in ends} | {
        "layers.0.output_zero_point": torch.zeros(1).to(torch.int8)
    }
    more["layers.0.v_scale"] = torch.ones(4, 1, 1)
    for name in ("fp8 of a tensor", "int8 by rows"):
        stored, numbers = make_all(FORMS[name][0], 1)
        source = write(tmp_path / name, stored | more, {"quant_method": "compressed-tensors"})
        zckpt.convert(source, tmp_path / f"{name} out", dtype="fp32", progress=False)
        check_equal(load_file(tmp_path / f"{name} out" / "model.safetensors"), numbers)


def test_of_two_configs_mlx_takes_its_own(tmp_path: Path) -> None:
    stored, numbers = make_all(FORMS["mlx of 4 bits"][0], 2)
    source = write(tmp_path / "source", stored, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization": FORMS["mlx of 4 bits"][1]}))
    zckpt.convert(source, tmp_path / "out", dtype="fp32", progress=False)
    check_equal(load_file(tmp_path / "out" / "model.safetensors"), numbers)


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


@pytest.mark.parametrize("name", ["fp8 of mistral", "gptq of 4 bits", "mlx's mxfp4"])
def test_numbers_are_rounded_once_on_the_way_to_gguf(tmp_path: Path, name: str) -> None:
    """They were rounded to bf16 before, and verify said so."""
    dice, stored = Dice(1), dict[str, torch.Tensor]()
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64)}
    shapes |= {
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (96, 64),
        "mlp.up_proj": (96, 64),
        "mlp.down_proj": (64, 96),
    }
    for module, shape in shapes.items():
        stored |= {f"model.layers.0.{module}.{end}": tensor for end, tensor in OF_SHAPE[name](dice, *shape).items()}
    stored |= {f"model.{end}.weight": torch.rand(64) for end in ("norm", "layers.0.input_layernorm")}
    stored |= {"model.embed_tokens.weight": torch.rand(40, 64), "lm_head.weight": torch.rand(40, 64)}
    source = write(tmp_path / "source", stored | {"model.layers.0.post_attention_layernorm.weight": torch.rand(64)})
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 40,
        "quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}, "quantization_config": FORMS[name][1],
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value}))
    zckpt.convert(source, tmp_path / "plain", dtype="fp32", progress=False)
    files = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for one, out in zip((source, tmp_path / "plain"), files, strict=True):
        zckpt.to_gguf(one, out, type="f32", tokenizer="none", model_name="x", progress=False)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert zckpt.verify(source, files[0], progress=False).ok
    if name == "mlx's mxfp4":  # powers of two stay as they are
        zckpt.quantize(source, tmp_path / "nvfp4", to="nvfp4", progress=False)
        assert zckpt.verify(source, tmp_path / "nvfp4", progress=False).ok


def test_a_stack_of_mxfp4_that_is_not_turned_is_no_crash(tmp_path: Path) -> None:
    dice, name = Dice(1), "model.layers.0.mlp.experts.gate_up_proj"
    stored = {name: dice.bytes(3, 64, 96), f"{name}_scale": (110 + dice.below(9, 3, 64, 6)).to(torch.uint8)}
    source = write(tmp_path / "source", stored | {"model.layers.0.self_attn.q_proj.weight": torch.rand(64, 64)})
    zckpt.quantize(source, tmp_path / "out", to="nvfp4", progress=False)
    assert zckpt.verify(source, tmp_path / "out", progress=False).ok
