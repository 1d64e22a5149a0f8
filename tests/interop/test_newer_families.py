"""Families with towers of images and sound, an index of tokens or layers of Mamba: what lies in memory, as DCP and ZeRO-3,
comes out under the hub's names, bit for bit; `verify --like` has no alarm on it, and names what is wrong in mutants, by the
class of transformers and by the family's own file.

Each model is made once, and is two layers of random numbers with odd sizes.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import proofs
import pytest
import synth
import torch
import torch.distributed.checkpoint as dcp
from bits import same_bits
from bridge_names import by_hand
from mutated import WORDS, loads, mutants, problems_of, write
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.checks import like as likeness

transformers = pytest.importorskip("transformers", minversion="5")

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

SMALL = {
    "vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
ROUTED = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EYE = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
QWEN_EYE = {"depth": 2, "hidden_size": 16, "intermediate_size": 12, "num_heads": 2, "out_hidden_size": 24, "patch_size": 4,
            "num_position_embeddings": 16}  # fmt: skip
LATENT = {
    "num_key_value_heads": 6, "q_lora_rank": 10, "kv_lora_rank": 9, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 7,
    "n_routed_experts": 3, "moe_intermediate_size": 12, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "index_head_dim": 8,
    "index_n_heads": 2, "index_topk": 4,
}  # fmt: skip
MAMBA = {
    "layers_block_type": ["mamba", "attention", "mlp", "moe"], "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 5,
    "n_groups": 2, "n_routed_experts": 3, "moe_intermediate_size": 12, "num_experts_per_tok": 2,
    "moe_shared_expert_intermediate_size": 14, "moe_latent_size": 16,
}  # fmt: skip
LAYERED = {
    "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": WORDS, "num_kv_shared_layers": 1, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"], "tie_word_embeddings": True,
}  # fmt: skip
ALTERNATING = {**LAYERED, "laurel_rank": 6, "altup_num_inputs": 3, "activation_sparsity_pattern": [0.0] * 3}
BESIDE = {
    "enable_moe_block": True, "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 12, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True,
}  # fmt: skip
GEMMA4_EYE = {**EYE, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 48}
GEMMA4_EAR = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": (4, 4),
              "output_proj_dims": 12}  # fmt: skip
ROTARY = {"rope_type": "default", "mrope_section": [1, 1, 0]}
TEXT = {key: value for key, value in SMALL.items() if key != "head_dim"}


class Made(NamedTuple):
    """A family's small model, and what a refusal of Megatron-Core names; nothing where it has a form of it."""

    family: str
    name: str
    config: dict[str, Any]
    refused: str = ""


MODELS = {
    "qwen2-vl": Made("qwen2-vl", "Qwen2VLForConditionalGeneration", {
        "text_config": {**TEXT, "rope_parameters": ROTARY},
        "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 24, "num_heads": 2, "patch_size": 4, "mlp_ratio": 3},
    }, "vision_config"),
    "qwen2_5-vl": Made("qwen2_5-vl", "Qwen2_5_VLForConditionalGeneration", {
        "text_config": {**TEXT, "rope_parameters": ROTARY},
        "vision_config": {**QWEN_EYE, "window_size": 8, "fullatt_block_indexes": [1]},
    }),
    "qwen3-vl": Made("qwen3-vl", "Qwen3VLForConditionalGeneration", {
        "text_config": SMALL, "vision_config": {**QWEN_EYE, "deepstack_visual_indexes": [0]},
    }),
    "qwen3-vl-moe": Made("qwen3-vl-moe", "Qwen3VLMoeForConditionalGeneration", {
        "text_config": {**SMALL, **ROUTED}, "vision_config": {**QWEN_EYE, "deepstack_visual_indexes": [0]},
    }, "vision_config"),
    "qwen3_5-vl": Made("qwen3_5-vl", "Qwen3_5ForConditionalGeneration", {
        "text_config": {**SMALL, **DELTA}, "vision_config": QWEN_EYE,
    }),
    "qwen3_5-moe-vl": Made("qwen3_5-moe-vl", "Qwen3_5MoeForConditionalGeneration", {
        "text_config": {**SMALL, **ROUTED, **DELTA, "shared_expert_intermediate_size": 14}, "vision_config": QWEN_EYE,
    }),
    "gemma3-vl": Made("gemma3-vl", "Gemma3ForConditionalGeneration", {
        "text_config": {**SMALL, "tie_word_embeddings": True, "query_pre_attn_scalar": 8}, "vision_config": EYE,
        "mm_tokens_per_image": 4,
    }),
    "gemma3-vl without a head": Made("gemma3-vl", "Gemma3ForConditionalGeneration", {
        "text_config": SMALL, "vision_config": {**EYE, "vision_use_head": False}, "mm_tokens_per_image": 4,
        "tie_word_embeddings": False,
    }),
    "gemma3n": Made("gemma3n", "Gemma3nForCausalLM", {**SMALL, **ALTERNATING}, "altup_num_inputs"),
    "gemma4": Made("gemma4", "Gemma4ForCausalLM", {**SMALL, **LAYERED}, "layer_scalar"),
    "gemma4 with experts": Made("gemma4", "Gemma4ForCausalLM", {**SMALL, **BESIDE}, "layer_scalar"),
    "gemma4-vl": Made("gemma4-vl", "Gemma4ForConditionalGeneration", {
        "text_config": {**SMALL, **LAYERED, "pad_token_id": 0}, "vision_config": GEMMA4_EYE, "audio_config": GEMMA4_EAR,
    }, "audio_config"),
    "gemma4-vl with experts": Made("gemma4-vl", "Gemma4ForConditionalGeneration", {
        "text_config": {**SMALL, **BESIDE, "pad_token_id": 0},
        "vision_config": {**GEMMA4_EYE, "standardize": True, "use_clipped_linears": True},
        "audio_config": None,
    }, "vision_config"),
    "llama4-vl": Made("llama4-vl", "Llama4ForConditionalGeneration", {
        "text_config": {**SMALL, "num_local_experts": 3, "intermediate_size_mlp": 22, "interleave_moe_layer_step": 2},
        "vision_config": {**EYE, "intermediate_size": 64, "projector_input_dim": 18, "projector_output_dim": 18,
                          "vision_output_dim": 18, "pixel_shuffle_ratio": 0.5},
    }, "vision_config"),
    "glm5": Made("glm5", "GlmMoeDsaForCausalLM", {**TEXT, **LATENT}),
    "nemotron-h": Made("nemotron-h", "NemotronHForCausalLM", {
        **{key: value for key, value in SMALL.items() if key != "num_hidden_layers"}, **MAMBA,
    }),
    "vit": Made("vit", "ViTForImageClassification", EYE, "image_size"),
    "clip": Made("clip", "CLIPModel", {
        "text_config": {"vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3,
                        "num_attention_heads": 2, "max_position_embeddings": 16, "projection_dim": 14},
        "vision_config": {**EYE, "projection_dim": 14}, "projection_dim": 14,
    }, "vision_config"),
}  # fmt: skip
FEW = ("gemma3-vl", "nemotron-h", "vit")
CHOSEN = [*FEW, *proofs.cases([(name,) for name in MODELS if name not in FEW])]
TRIED = ("drop", "cut", "layer", "expert") if not proofs.IS_WHOLE else ()
"""What is tried outside of proofs with transformers' classes; with the family's own file all is."""

UNSEEN = {"gemma4": ("cut",), "gemma4 with experts": ("cut",)}
"""What a family's file cannot show, where layers have heads of several sizes."""


def made(name: str, own: dict[str, Any]) -> Any:
    """A model with random numbers."""
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**own)).eval()
    generator = torch.Generator().manual_seed(3)
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not key.endswith(("_min", "_max")):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + (tensor.ndim == 1))
        if key.endswith("linear_attn.norm.weight"):  # Megatron-Core counts it from one: a weight of bf16 comes back
            tensor.copy_(tensor.bfloat16())
    return model


def logits(model: Any) -> torch.Tensor:
    pictures = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 256).reshape(2, 3, 16, 16)}
    tokens = {"input_ids": torch.arange(12).reshape(2, 6)}
    kind = model.config.model_type
    with torch.no_grad():
        found = model(**(pictures if kind in ("vit", "clip") else {}), **(tokens if kind != "vit" else {}))
    return torch.as_tensor(found.logits_per_image if kind == "clip" else found.logits)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A family's model, and the directory with its forms: of the hub, of DCP and of ZeRO-3; made once."""
    known: dict[str, tuple[Any, Path]] = {}

    def one(name: str) -> tuple[Any, Path]:
        if name in known:
            return known[name]
        model, home = made(*MODELS[name][1:3]), tmp_path_factory.mktemp("home")
        model.save_pretrained(home / "hub")
        with warnings.catch_warnings(action="ignore"):  # it is one process
            dcp.save({"model": model.state_dict()}, checkpoint_id=home / "dcp", no_dist=True)
        parameters = dict(model.named_parameters())
        shared = {} if "lm_head.weight" in parameters else {
            name: next(n for n, p in parameters.items() if p is tensor)
            for name, tensor in model.named_parameters(remove_duplicate=False) if name not in parameters
        }  # fmt: skip
        buffers = {n: t for n, t in model.state_dict().items() if n not in parameters and n not in shared}
        trained = {name: parameter.detach() for name, parameter in parameters.items()}
        synth.zero3(home / "zero3", [trained], 2, buffers=buffers, shared=shared)
        for form in ("dcp", "zero3"):
            shutil.copy(home / "hub" / "config.json", home / form)
        known[name] = model, home
        return known[name]

    return one


def all_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def on_the_hub(name: str) -> str:
    """The tower of Gemma 3 has a level more on the hub than in what transformers 5 writes; it loads both, others only this."""
    return name.replace("vision_tower.", "vision_tower.vision_model.") if name.startswith("vision_tower.") else name


@pytest.mark.parametrize("name", CHOSEN)
def test_what_lies_in_memory_becomes_what_the_hub_has(name: str, saved: Any, tmp_path: Path) -> None:
    own, (model, home) = MODELS[name], saved(name)
    truth = {on_the_hub(key): tensor for key, tensor in all_of(home / "hub").items()}
    for form in ("dcp", "zero3", "hub"):
        options = zckpt.Options(form=zckpt.Form(to="hf"))
        report = zckpt.convert(home / form, tmp_path / form, dtype="fp32", options=options, progress=False)
        assert any(f"hf:{own.family}," in note for note in report.notes)
        assert not any("A loader of" in note for note in report.notes)
        found = all_of(tmp_path / form)
        assert found.keys() == truth.keys()
        assert all(same_bits(found[key], truth[key]) for key in truth)
        assert zckpt.verify(home / form, tmp_path / form, progress=False).ok
    again, info = type(model).from_pretrained(tmp_path / "dcp", output_loading_info=True, dtype=model.dtype)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert all(same_bits(tensor, model.state_dict()[key]) for key, tensor in again.state_dict().items())
    assert torch.equal(logits(again.eval()), logits(model))
    if own.refused:
        with pytest.raises(UnsupportedError, match="cannot say") as caught:
            zckpt.to_mcore(home / "hub", tmp_path / "megatron", progress=False)
        assert own.refused in str(caught.value.found) and str(model.config.model_type) in str(caught.value.found)
    else:
        zckpt.to_mcore(home / "hub", tmp_path / "megatron", progress=False)
        assert zckpt.verify(home / "hub", tmp_path / "megatron", progress=False).ok
        options = zckpt.Options(form=zckpt.Form(to="hf", vocab_size=WORDS))
        zckpt.convert(tmp_path / "megatron", tmp_path / "back", dtype="fp32", options=options, progress=False)
        found = all_of(tmp_path / "back")
        assert found.keys() == truth.keys() and all(same_bits(found[key], truth[key]) for key in truth)
    (home / "dcp" / "config.json").rename(home / "dcp" / "moved.json")
    try:
        with pytest.raises(UsageError, match=r"cannot be made|is not recorded"):
            zckpt.convert(
                home / "dcp",
                tmp_path / "out",
                options=zckpt.Options(form=zckpt.Form(to=f"hf:{own.family}", vocab_size=WORDS)),
            )
    finally:
        (home / "dcp" / "moved.json").rename(home / "dcp" / "config.json")


ROUTED_ALIKE = {**SMALL, "num_local_experts": 3, **ROUTED}
BRIDGED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: MODELS[name][1:3] for name in ("nemotron-h", "qwen3-vl", "gemma3-vl", "glm5", "qwen2_5-vl")},
    "falcon-h1": (
        "FalconH1ForCausalLM",
        {
            **TEXT,
            "mamba_n_heads": 6,
            "mamba_d_head": 8,
            "mamba_d_ssm": 48,
            "mamba_d_state": 5,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "key_multiplier": 0.5,
            "ssm_multipliers": [1.0, 0.5, 2.0, 1.0, 0.25],
        },
    ),
    "exaone4": ("Exaone4ForCausalLM", {**SMALL, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "minimax-m2": ("MiniMaxM2ForCausalLM", ROUTED_ALIKE),
    "olmoe": ("OlmoeForCausalLM", {**TEXT, **ROUTED}),
}
"""Family -> class and config of a model that Megatron Bridge has tables of names for."""


@pytest.mark.parametrize("family", ["nemotron-h", "qwen3-vl", *proofs.cases([(n,) for n in BRIDGED][2:])])
def test_what_megatron_bridge_reads(family: str, tmp_path: Path) -> None:
    """The tensors are those that its tables say."""
    model = made(*BRIDGED[family])
    model.save_pretrained(tmp_path / "hub")
    zckpt.to_mcore(tmp_path / "hub", tmp_path / "out", numbered_layers=True, progress=False)
    hub = {on_the_hub(name): tensor for name, tensor in all_of(tmp_path / "hub").items()}
    wanted, found = by_hand(family, hub, model.config.to_dict()), zckpt.open_checkpoint(tmp_path / "out")
    assert {*wanted} <= {*found} and sum(t.numel() for t in wanted.values()) >= sum(t.numel() for t in hub.values())
    assert all(same_bits(found[name], tensor.contiguous()) for name, tensor in wanted.items())


@pytest.mark.parametrize("by", ["class", "file"])
@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_wrong_is_named(
    by: str, name: str, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, home = saved(name)
    if by == "file":
        monkeypatch.setattr(likeness, "load_on_meta", lambda config, tensors: None)
    like = home / "hub" / "config.json"
    found = zckpt.verify(home / "hub", like=like)
    assert found.ok and found.loads_as and ("transformers" in found.loads_as) is (by == "class"), found
    for what, state, lost in mutants(all_of(home / "hub")):
        if by == "class" and TRIED and what not in TRIED:
            continue
        out = write(tmp_path / "out", state, home / "hub")
        found = zckpt.verify(out, like=like)
        if by == "class" or what not in UNSEEN.get(name, ()):
            assert not found.ok and lost in problems_of(found), what
        assert by == "file" or not proofs.IS_WHOLE or not loads(type(model).__name__, out), what
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    if not any(key.endswith("lm_head.weight") for key in all_of(home / "hub")):
        state.pop("lm_head.weight", None)
    if by == "class" and state.keys() - all_of(home / "hub").keys():
        out = write(tmp_path / "out", state, home / "hub")
        assert "names that a model has in memory" in problems_of(zckpt.verify(out, like=like))


def test_gemma_3n_with_its_towers(saved: Any, tmp_path: Path) -> None:
    """Its tower of images is a network of timm, whose names nobody lists: each tensor of it stays as it is."""
    model, home = saved("gemma3n")
    sound = transformers.Gemma3nAudioConfig(
        hidden_size=16,
        conf_num_attention_heads=2,
        conf_num_hidden_layers=2,
        input_feat_size=8,
        sscp_conv_channel_size=(4, 4),
    )
    ear = transformers.models.gemma3n.modeling_gemma3n.Gemma3nAudioEncoder(sound)
    state = {key: tensor for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
    state = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in state.items()}
    state |= {f"model.audio_tower.{key}": tensor for key, tensor in ear.state_dict().items()}
    parts = ("embedding", "hard_embedding_norm", "soft_embedding_norm", "embedding_projection")
    state |= {f"model.embed_{what}.{part}.weight": torch.rand(5, 3) for what in ("vision", "audio") for part in parts}
    state |= {f"model.vision_tower.timm_model.blocks.{n}.0.conv.weight": torch.rand(3, n + 1) for n in range(5)}
    config = {
        "model_type": "gemma3n",
        "architectures": ["Gemma3nForConditionalGeneration"],
        "text_config": model.config.to_dict(),
        "audio_config": sound.to_dict(),
        "vision_config": {},
    }
    source = tmp_path / "in"
    write(source, {key: tensor.clone() for key, tensor in state.items()}, home / "hub")
    (source / "config.json").write_text(json.dumps(config))
    report = zckpt.convert(source, tmp_path / "out", options=zckpt.Options(form=zckpt.Form(to="hf")), progress=False)
    assert any("hf:gemma3n-vl," in note for note in report.notes)
    assert not any("A loader of" in note for note in report.notes)
    found = all_of(tmp_path / "out")
    assert found.keys() == state.keys() and all(same_bits(found[key], state[key]) for key in state)
    gone = "model.audio_tower.conformer.1.norm.weight"
    write(source, {key: tensor.clone() for key, tensor in state.items() if key != gone}, tmp_path / "out")
    found_without = zckpt.verify(source, like=tmp_path / "out" / "config.json")
    assert not found_without.ok and gone in problems_of(found_without)


def test_kimi_k2_has_the_form_of_deepseek_v3(tmp_path: Path) -> None:
    """Its config differs in its type alone; Megatron-Core takes it."""
    own = {key: value for key, value in LATENT.items() if not key.startswith("index")}
    model = made("DeepseekV3ForCausalLM", {**TEXT, **own, "n_group": 1, "topk_group": 1})
    model.save_pretrained(tmp_path / "hub")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    (tmp_path / "hub" / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    zckpt.to_mcore(tmp_path / "hub", tmp_path / "megatron", progress=False)
    shutil.copy(tmp_path / "hub" / "config.json", tmp_path / "megatron")
    form = zckpt.Options(form=zckpt.Form(to="hf"))
    report = zckpt.convert(tmp_path / "megatron", tmp_path / "back", dtype="fp32", options=form, progress=False)
    assert any("hf:deepseek-v3, since" in note and "kimi_k2" in note for note in report.notes)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "kimi_k2"
    found, truth = all_of(tmp_path / "back"), all_of(tmp_path / "hub")
    assert found.keys() == truth.keys() and all(same_bits(found[key], truth[key]) for key in truth)


def test_a_gguf_of_a_model_that_sees_is_its_text_model(saved: Any, tmp_path: Path) -> None:
    """llama.cpp has the tower in a file of its own."""
    model, home = saved("gemma3-vl")
    report = zckpt.to_gguf(home / "hub", tmp_path / "whole.gguf", type="f32", tokenizer="none", progress=False)
    assert any("to-gguf --mmproj" in note for note in report.notes)
    assert zckpt.verify(home / "hub", tmp_path / "whole.gguf", progress=False).ok
    text = transformers.Gemma3ForCausalLM(model.config.text_config)
    text.model.load_state_dict(model.model.language_model.state_dict())
    text.save_pretrained(tmp_path / "text")
    zckpt.to_gguf(tmp_path / "text", tmp_path / "text.gguf", type="f32", tokenizer="none", progress=False)
    whole, alone = (zckpt.open_checkpoint(tmp_path / f"{name}.gguf") for name in ("whole", "text"))
    assert {*whole} == {*alone}
    assert all(same_bits(whole[key], alone[key]) for key in alone)


@pytest.mark.parametrize("name", ["nemotron-h", *proofs.cases([("qwen3_5-moe-vl",)])])
def test_layers_that_predict_further_tokens_stay(name: str, saved: Any, tmp_path: Path) -> None:
    """The hub has them as `mtp.*`; the class does not load them."""
    model, home = saved(name)
    more = {"mtp.layers.0.norm.weight": torch.rand(24), "mtp.fc.weight": torch.rand(24, 48)}
    source = write(tmp_path / "in", {**all_of(home / "hub"), **more}, home / "hub")
    report = zckpt.convert(source, tmp_path / "out", options=zckpt.Options(form=zckpt.Form(to="hf")), progress=False)
    assert not any("A loader of" in note for note in report.notes)
    found, truth = all_of(tmp_path / "out"), all_of(source)
    assert found.keys() == truth.keys() and all(same_bits(found[key], truth[key]) for key in truth)
    again, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True, dtype=model.dtype)
    assert not any(info.values()) and torch.equal(logits(again.eval()), logits(model))
    assert zckpt.verify(tmp_path / "out", like=home / "hub" / "config.json").ok
