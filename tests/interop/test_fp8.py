"""Weights of fp8 that zckpt wrote, read by transformers and compressed-tensors: they find what zckpt finds in them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import proofs
import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

import zckpt
from zckpt.naming.linear import layers_of

SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 32, "pad_token_id": 0, "initializer_range": 0.05,
}  # fmt: skip
ROUTED = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_local_experts": 3}
LATENT = {
    "head_dim": 32, "num_key_value_heads": 4,
    "q_lora_rank": 128, "kv_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 3, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {}),
    "phi3": ("Phi3", {}),
    "glm4": ("Glm4", {}),
    "gpt_neox": ("GPTNeoX", {}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "mixtral": ("Mixtral", ROUTED),
    "qwen2_moe": ("Qwen2Moe", {**ROUTED, "shared_expert_intermediate_size": 128}),
    "qwen3_moe": ("Qwen3Moe", ROUTED),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "gpt_oss": ("GptOss", ROUTED),
}
CASES = [
    ("qwen3", "block128"),
    ("qwen3_moe", "block128"),
    ("deepseek_v3", "block128"),
    ("qwen3", "channel"),
    ("qwen3", "tensor"),
]
MORE = [
    ("llama", "block128"),
    ("mixtral", "block128"),
    ("qwen2_moe", "block128"),
    ("qwen3_moe", "channel"),
    ("phi3", "block128"),
]
"""For `make proofs`."""


def made(name: str) -> Any:
    kind, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **more})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def vllm_takes(home: Path, scheme: str) -> None:
    """The facts by which vLLM loads such a directory, for every module that it makes a linear layer.

    Source: vLLM 0.11, in model_executor: layers/quantization/fp8.py (`Fp8Config.from_config`, `create_weights`),
    layers/quantization/compressed_tensors/compressed_tensors.py (`_is_fp8_w8a8`), compressed_tensors_moe.py and utils.py
    (`should_ignore_layer`), layers/quantization/utils/quant_utils.py (`is_layer_skipped`) and fp8_utils.py (the shapes of
    scales), parameter.py (`PerTensorScaleParameter`), models/deepseek_v2.py and qwen3_moe.py (which are joined: `PACKED`).
    """
    said = json.loads((home / "config.json").read_text())["quantization_config"]
    tensors = load_file(home / "model.safetensors")
    if scheme == "block128":
        assert said["quant_method"] == "fp8" and said["activation_scheme"] == "dynamic"
        assert said["weight_block_size"] == [128, 128]
        ignored, end = said["modules_to_not_convert"], "_scale_inv"
    else:
        read = QuantizationConfig.model_validate(said)
        assert said["quant_method"] == "compressed-tensors" and read.format in ("float-quantized", "naive-quantized")
        (group,) = read.config_groups.values()
        weights, inputs = group.weights, group.input_activations
        assert group.targets == ["Linear"]  # which are all classes of linear layers, and FusedMoE
        assert weights.num_bits == 8 and weights.type == "float" and weights.symmetric and not weights.dynamic
        assert inputs.type == "float" and inputs.dynamic
        assert (weights.strategy, inputs.strategy) in (("tensor", "tensor"), ("channel", "token"))
        ignored, end = read.ignore, "_scale"
    modules = {name.removesuffix(".weight") for name, tensor in tensors.items() if name.endswith(".weight")
               and tensor.ndim == 2 and not name.endswith("embed_tokens.weight")}  # fmt: skip
    for module in modules:
        weight = tensors[f"{module}.weight"]
        is_quantised = weight.dtype == torch.float8_e4m3fn
        assert (module in ignored) != is_quantised
        above, _, last = module.rpartition(".")
        if ".experts." in module:
            assert not is_quantised or not any(
                f"{module.partition('.experts.')[0]}.experts" in name for name in ignored
            )
        for joined in (parts for parts in PACKED.values() if last in parts):
            rows = [tensors[f"{above}.{part}.weight"] for part in joined if f"{above}.{part}.weight" in tensors]
            assert len({tensor.dtype for tensor in rows}) == 1
            assert scheme != "block128" or not is_quantised or all(len(tensor) % 128 == 0 for tensor in rows[:-1])
        if not is_quantised:
            assert f"{module}.weight{end}" not in tensors
            continue
        scale = tensors[f"{module}.weight{end}"]
        rows, columns = weight.shape
        shapes = {"block128": (-(-rows // 128), -(-columns // 128)), "channel": (rows, 1), "tensor": (1,)}
        assert tuple(scale.shape) == shapes[scheme]
        assert scale.dtype == (torch.float32 if scheme == "block128" else torch.bfloat16)  # copied into fp32
        assert weight.is_contiguous() and torch.isfinite(scale).all() and (scale > 0).all()
    assert {name for name in tensors if name.endswith(end)} == {
        f"{module}.weight{end}" for module in modules if module not in ignored
    }


def test_what_vllm_joins_and_refuses_is_said(tmp_path: Path) -> None:
    more = {**SMALL, "num_hidden_layers": 1, "head_dim": 32}  # keys have 64 rows
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**more)).to(torch.bfloat16).save_pretrained(tmp_path / "m")

    def notes(**options: Any) -> list[str]:
        done = zckpt.to_fp8(
            tmp_path / "m", tmp_path / "fp8", progress=False, options=zckpt.Options(overwrite=True), **options
        )
        return [note for note in done.notes if "vLLM" in note]

    (cut,) = notes()
    assert (
        cut.startswith("1 matrix has no whole number of blocks of 128 rows")
        and "layers.0.self_attn.k_proj.weight" in cut
    )
    assert not notes(scheme="channel") and not notes(keep=["*.self_attn.*"])
    (mixed,) = notes(scheme="tensor", keep=["*.up_proj.weight"])
    assert (
        mixed.startswith("1 matrix is quantised or left otherwise") and "model.layers.0.mlp.gate_proj.weight" in mixed
    )
    with pytest.raises(AssertionError):
        vllm_takes(tmp_path / "fp8", "tensor")


@pytest.mark.parametrize(("name", "scheme"), [*CASES, *proofs.cases(MORE)])
def test_loaders_read_what_zckpt_reads(name: str, scheme: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made(name).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    zckpt.to_fp8(tmp_path / "model", tmp_path / "fp8", scheme=scheme, progress=False)
    assert zckpt.verify(tmp_path / "model", tmp_path / "fp8", progress=False).ok
    vllm_takes(tmp_path / "fp8", scheme)
    zckpt.convert(tmp_path / "fp8", tmp_path / "plain", dtype="bf16", progress=False)
    more: dict[str, Any] = {}
    if scheme != "block128":
        more["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised, found = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "fp8", dtype=torch.bfloat16, output_loading_info=True, **more
        )
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert not any(found.values()), found
    expected, before = plain.state_dict(), original.state_dict()
    changed = 0
    for key, tensor in quantised.state_dict().items():
        assert tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key]), key
        changed += not torch.equal(tensor, before[key])
        # fp8, then bf16
        assert (tensor.float() - before[key].float()).abs().max() <= before[key].float().abs().max() * (
            1 / 27 + 1 / 512
        )
    names = json.loads((tmp_path / "fp8" / "zckpt.json").read_text())
    assert changed >= 8 and names["options"]["fp8"] == {"scheme": scheme}
    with torch.no_grad():
        ids = torch.arange(8)[None]
        assert torch.equal(quantised(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "mxfp8", "int4", "int8"])
def test_loaders_read_other_forms(form: str, tmp_path: Path) -> None:
    """transformers and compressed-tensors find zckpt's numbers; of nvfp4, which has two factors, they round products twice."""
    torch.manual_seed(0)
    made("qwen3").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    zckpt.quantize(tmp_path / "model", tmp_path / "out", to=form, progress=False)
    zckpt.convert(tmp_path / "out", tmp_path / "plain", dtype="bf16", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True,
            quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
        )  # fmt: skip
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    assert not any(info.values()), info
    numbers = plain.state_dict()
    for key, tensor in found.state_dict().items():
        off = (tensor.float() - numbers[key].float()).abs()
        assert torch.equal(tensor, numbers[key]) or (
            form == "nvfp4" and (off <= numbers[key].float().abs() / 64).all()
        ), key


@pytest.mark.parametrize("name", MODELS)
def test_linear_layers_are_those_of_the_model(name: str) -> None:
    """Of a model without memory: every torch.nn.Linear but routers and the head, and every stack of experts."""
    with torch.device("meta"):
        model = made(name)
    linear = {f"{path}.weight" for path, module in model.named_modules() if type(module) is torch.nn.Linear}
    experts = {
        key
        for key, tensor in model.state_dict().items()
        if tensor.ndim == 3 and ".experts." in key and name != "gpt_oss"
    }
    head = {"lm_head.weight", "embed_out.weight"}
    gates = {key for key in linear if key.endswith((".mlp.gate.weight", ".shared_expert_gate.weight"))}
    found = layers_of(model.state_dict(), model.config.to_dict())
    assert found is not None
    assert found.linear == (linear | experts) - head - gates
    assert not found.linear & found.other


def test_other_classes_are_not_taken_for_linear_layers() -> None:
    for kind in ("gpt2", "falcon", "unheard_of"):
        assert layers_of(["transformer.h.0.mlp.c_fc.weight"], {"model_type": kind}) is None


def test_blocks_that_transformers_misreads_are_said(tmp_path: Path) -> None:
    """transformers 5.23 takes rows / blocks for the size of a block: 300 rows are no 3 blocks of 100."""
    torch.manual_seed(0)
    more = {**SMALL, "intermediate_size": 300, "num_hidden_layers": 1}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**more)).to(torch.bfloat16).save_pretrained(
        tmp_path / "model"
    )
    report = zckpt.to_fp8(tmp_path / "model", tmp_path / "fp8", progress=False)
    assert any(note.startswith("3 matrices are not a whole number of blocks") for note in report.notes)
    report = zckpt.to_fp8(tmp_path / "model", tmp_path / "kept", keep=["*.mlp.*"], progress=False)
    assert not any("blocks" in note for note in report.notes)
    zckpt.convert(tmp_path / "fp8", tmp_path / "plain", dtype="bf16", progress=False)
    name = "model.layers.0.mlp.up_proj.weight"
    weight = load_file(tmp_path / "model" / "model.safetensors")[name].float()
    error = (load_file(tmp_path / "plain" / "model.safetensors")[name].float() - weight).abs().max()
    # half a step is a 28th of a block's largest number, and bf16 rounds once more
    assert error <= weight.abs().max() / 26
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp8").state_dict()[name].float()
    assert (theirs - weight).abs().max() > error, "if this fails, transformers reads them, and the note can go"


@pytest.mark.parametrize("block", [(128, 128), (1, 32)], ids=str)
def test_transformers_finds_the_same_numbers_where_scales_are_powers_of_two(
    tmp_path: Path, block: tuple[int, int]
) -> None:
    """Its own class for such weights, which takes them apart when it loads."""
    config = transformers.LlamaConfig(**SMALL)
    dice = torch.Generator().manual_seed(4)
    stored = dict(transformers.LlamaForCausalLM(config).bfloat16().state_dict())
    for name, weight in list(stored.items()):
        if name.endswith("_proj.weight"):
            rows, columns = (-(-extent // size) for extent, size in zip(weight.shape, block, strict=True))
            scales = torch.randint(115, 130, (rows, columns), generator=dice, dtype=torch.uint8)
            stored[name] = torch.randn(weight.shape, generator=dice).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales.view(torch.float8_e8m0fnu)
    said = {
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": block,
        "modules_to_not_convert": ["lm_head"],
    }
    (source := tmp_path / "source").mkdir()
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    known = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": said}
    (source / "config.json").write_text(json.dumps(known))
    zckpt.convert(source, tmp_path / "out", dtype="bf16", progress=False)
    plain = transformers.FineGrainedFP8Config(
        weight_block_size=block, dequantize=True, modules_to_not_convert=["lm_head"]
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=plain, dtype=torch.bfloat16)
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
