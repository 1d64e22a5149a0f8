"""Families that are a file each: random models of transformers to the hub's form and to Megatron-Core's, and back, bit for bit.

A family that Megatron-Core does not compute is refused by name. The example of docs/families.md is one more family.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pages
import proofs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.cli import app
from zckpt.naming import schemes

transformers = pytest.importorskip("transformers", minversion="5")

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

WORDS = 33
SMALL = {
    "vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
WIDE = {**SMALL, "head_dim": 8}
ROUTED = {
    **SMALL, "num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 14,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 7, "head_dim": 8,
    "linear_conv_kernel_dim": 3, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 6, "q_lora_rank": 10, "kv_lora_rank": 9, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 7,
    "n_routed_experts": 3, "moe_intermediate_size": 12, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "index_head_dim": 8,
    "index_n_heads": 2, "index_topk": 4,
}  # fmt: skip
HYBRID = {key: value for key, value in WIDE.items() if key != "num_hidden_layers"}
MAMBA = {
    "layers_block_type": ["mamba", "attention", "mlp", "moe"], "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 5,
    "n_groups": 2, "n_routed_experts": 3, "moe_intermediate_size": 12, "num_experts_per_tok": 2,
    "moe_shared_expert_intermediate_size": 14, "moe_latent_size": 16,
}  # fmt: skip
SPEECH = {
    "vocab_size": WORDS, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 20, "decoder_ffn_dim": 22, "num_mel_bins": 10, "max_source_positions": 30,
    "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
COMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie4_5": ("Ernie4_5ForCausalLM", WIDE),
    "exaone4": ("Exaone4ForCausalLM", {**SMALL, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        {**SMALL, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_ssm": 48, "mamba_d_state": 5, "mamba_n_groups": 2},
    ),
    "gemma": ("GemmaForCausalLM", WIDE),
    "glm5": ("GlmMoeDsaForCausalLM", {**SMALL, **LATENT}),
    "granite": ("GraniteForCausalLM", {**SMALL, "attention_multiplier": 0.25}),
    "granitemoe": ("GraniteMoeForCausalLM", ROUTED),
    "minimax-m2": ("MiniMaxM2ForCausalLM", {**ROUTED, "head_dim": 8, "rotary_dim": 4}),
    "nemotron": ("NemotronForCausalLM", WIDE),
    "nemotron-h": ("NemotronHForCausalLM", {**HYBRID, **MAMBA}),
    "olmoe": ("OlmoeForCausalLM", ROUTED),
    "qwen3-next": ("Qwen3NextForCausalLM", {**ROUTED, **DELTA}),
    "qwen3_5": ("Qwen3_5ForCausalLM", {**SMALL, **DELTA}),
    "qwen3_5-moe": ("Qwen3_5MoeForCausalLM", {**ROUTED, **DELTA}),
    "seed-oss": ("SeedOssForCausalLM", WIDE),
    "smollm3": ("SmolLM3ForCausalLM", {**SMALL, "num_hidden_layers": 5, "no_rope_layer_interval": 3}),
    "starcoder2": ("Starcoder2ForCausalLM", SMALL),
}
"""Family -> class and config of a small model that Megatron-Core's arguments say."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertForMaskedLM", {**SMALL, "pad_token_id": 0}, "is_decoder"),
    "cohere": ("CohereForCausalLM", SMALL, "logit_scale"),
    "cohere2": ("Cohere2ForCausalLM", SMALL, "logit_scale"),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", {
        **SMALL, "moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 12, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    }, "e_score_correction_bias"),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", WIDE, "query_layernorm"),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", {**ROUTED, "head_dim": 8, "moe_topk": 2}, "query_layernorm"),
    "jamba": ("JambaForCausalLM", {
        **ROUTED, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 5, "use_mamba_kernels": False,
    }, "mamba_d_state"),
    "lfm2": ("Lfm2ForCausalLM", {**SMALL, "layer_types": ["conv", "full_attention"]}, "conv_L_cache"),
    "llama4": ("Llama4ForCausalLM", {
        **ROUTED, "head_dim": 8, "intermediate_size_mlp": 22, "interleave_moe_layer_step": 2
    }, "attn_temperature_tuning"),
    "mamba2": ("Mamba2ForCausalLM", {
        "vocab_size": WORDS, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 8, "state_size": 5,
        "n_groups": 2, "pad_token_id": None,
    }, "state_size"),
    "minimax": ("MiniMaxForCausalLM", {
        **ROUTED, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]
    }, "layer_types"),
    "olmo": ("OlmoForCausalLM", SMALL, "clip_qkv"),
    "olmo2": ("Olmo2ForCausalLM", SMALL, "q_norm"),
    "olmo3": ("Olmo3ForCausalLM", SMALL, "q_norm"),
    "phimoe": ("PhimoeForCausalLM", ROUTED, "router_jitter_noise"),
    "t5": ("T5ForConditionalGeneration", {
        "vocab_size": WORDS, "d_model": 24, "d_kv": 5, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
        "decoder_start_token_id": 0,
    }, "num_decoder_layers"),
    "whisper": ("WhisperForConditionalGeneration", SPEECH, "encoder_layers"),
}  # fmt: skip
"""Family -> class, config, and the key of it that the refusal names."""

FEW = ("qwen3-next", "smollm3", "t5", "qwen3_5-moe")


def made(name: str, own: dict[str, Any]) -> Any:
    """A model with random numbers; in bf16 where Megatron-Core counts the weights of one norm from one."""
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**own)).eval()
    generator = torch.Generator().manual_seed(3)
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not any(word in key for word in ("inv_freq", "decay", "slope")):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + (tensor.ndim == 1))
    return model.bfloat16() if "linear_num_key_heads" in own else model


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(12).reshape(2, 6)
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    sound = {"input_features": torch.full((2, 10, 60), 0.1)} if model.config.model_type == "whisper" else {}
    with torch.no_grad():
        found: torch.Tensor = model(**(sound or {"input_ids": tokens}), **more).logits
    return found


def all_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(path: Path, model: Any, hub: Path) -> None:
    """The same names and bits as `save_pretrained` wrote, and a model that says the same."""
    found, truth = all_of(path), all_of(hub)
    assert found.keys() == truth.keys()
    assert all(same_bits(found[name], truth[name]) for name in truth)
    again, info = type(model).from_pretrained(path, output_loading_info=True, dtype=model.dtype)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.equal(logits(again.eval()), logits(model))


def saved(model: Any, home: Path) -> tuple[Path, Path, str]:
    """The hub's form, a save of torch.distributed.checkpoint of what lies in memory, and the dtype."""
    model.save_pretrained(home / "hub")
    with warnings.catch_warnings(action="ignore"):  # it is one process
        dcp.save({"model": model.state_dict()}, checkpoint_id=home / "dcp", no_dist=True)
    shutil.copy(home / "hub" / "config.json", home / "dcp")
    return home / "hub", home / "dcp", "bf16" if model.dtype == torch.bfloat16 else "fp32"


def options(**form: Any) -> zckpt.Options:
    return zckpt.Options(form=zckpt.Form(**form))


EVERY = {name: own[:2] for name, own in {**COMPUTED, **REFUSED}.items()}


@pytest.mark.parametrize("family", [*FEW, *proofs.cases([(name,) for name in EVERY if name not in FEW])])
def test_there_and_back(family: str, tmp_path: Path) -> None:
    name, own = EVERY[family]
    model = made(name, own)
    hub, memory, dtype = saved(model, tmp_path)
    report = zckpt.convert(memory, tmp_path / "out", dtype=dtype, options=options(to="hf"), progress=False)
    assert any(f"hf:{family}," in note for note in report.notes)
    assert not any("A loader of" in note for note in report.notes)
    assert_same(tmp_path / "out", model, hub)
    if family in REFUSED:
        with pytest.raises(UnsupportedError, match="cannot say") as caught:
            zckpt.to_mcore(hub, tmp_path / "megatron", progress=False)
        assert REFUSED[family][2] in str(caught.value.found) and own.get("model_type", "model_type") in str(
            caught.value
        )
        return
    zckpt.to_mcore(hub, tmp_path / "megatron", progress=False)
    assert zckpt.verify(hub, tmp_path / "megatron", progress=False).ok
    (tmp_path / "megatron" / "config.json").unlink()
    form = options(to=f"hf:{family}", vocab_size=WORDS)
    zckpt.convert(tmp_path / "megatron", tmp_path / "back", dtype=dtype, options=form, progress=False)
    assert_same(tmp_path / "back", model, hub)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("granite", "residual_multiplier", 0.5),
        ("smollm3", "use_sliding_window", True),
        *proofs.cases([("seed-oss", "attention_out_bias", True), ("qwen3-next", "attn_output_gate", False)]),
    ],
)
def test_a_key_that_megatron_core_cannot_say_is_named(family: str, key: str, value: object, tmp_path: Path) -> None:
    """Nothing of the tensors shows it."""
    name, own = COMPUTED[family]
    made(name, own).save_pretrained(tmp_path / "hub")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    with pytest.raises(UnsupportedError) as caught:
        zckpt.to_mcore(tmp_path / "hub", tmp_path / "out", config={**config, key: value}, progress=False)
    assert str(caught.value.found).startswith(key)


def test_the_family_of_the_page(tmp_path: Path) -> None:
    """A stranger's file: to Megatron-Core and back on the command line; `verify` knows the family by the manifest alone."""
    text = next(block.text for block in pages.blocks_of("docs/families.md") if block.about == "arcee.json")
    file = tmp_path / "arcee.json"
    file.write_text(text)
    model = made("ArceeForCausalLM", WIDE)
    hub, memory, _ = saved(model, tmp_path)
    with pytest.raises(UnsupportedError, match="arcee"):
        zckpt.to_mcore(hub, tmp_path / "none", progress=False)
    for words in (
        ["to-mcore", hub, tmp_path / "megatron", "--family", file],
        ["to-fp32", memory, tmp_path / "out", "--family", file, "--to", "hf"],
        ["to-fp32", tmp_path / "megatron", tmp_path / "back", "--family", file, "--vocab-size", str(WORDS)],
    ):
        app([*map(str, words), "--quiet"], standalone_mode=False)
    for out in ("out", "back"):
        assert_same(tmp_path / out, model, hub)
    schemes._added.clear()
    schemes._by_type.cache_clear()
    schemes.scheme.cache_clear()
    assert zckpt.verify(hub, tmp_path / "megatron", progress=False).ok
    assert zckpt.verify(memory, tmp_path / "out", progress=False).ok


def test_a_file_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    fixed = {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    good = {"family": "mine", "about": "", "like": "llama", "config": {"fixed": fixed}}
    for data, found in (
        ({**good, "like": "nobody"}, "nobody"),
        ({**good, "family": "qwen3"}, "qwen3, which zckpt has already"),
        ({**good, "config": {"fixed": {**fixed, "model_type": "llama"}}}, "'llama', which zckpt has already"),
        ({**good, "tensors": [["x.{b}.weight", "blocks.{b}.nothing.weight"]]}, "blocks.{b}.nothing.weight"),
        ({**good, "tensors": [["x.weight", "blocks.{b}.mlp.up.weight"]]}, "x.weight"),
        (
            {**good, "tensors": [["x.{b}.weight", "blocks.{b}.mlp.up.weight", {"transposed": True}]]},
            "no key 'transposed'",
        ),
        ({"family": "mine"}, "no 'tensors'"),
    ):
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(data))
        with pytest.raises(UsageError, match="cannot be used") as caught:
            zckpt.add_family(path)
        assert found in str(caught.value.found)
    with pytest.raises(UsageError, match="cannot be used"):
        zckpt.add_family(tmp_path / "absent.json")
