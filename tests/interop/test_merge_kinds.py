"""Adapters of models that are not quite their base: names in memory, another head, more tokens. Equal to PEFT's own merge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from zckpt import InconsistentError, LoraMerge, Options

transformers = pytest.importorskip("transformers", minversion="5")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of these libraries among themselves

TEXT = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def llama(kind: str = "CausalLM", **more: Any) -> Any:
    return getattr(transformers, f"LlamaFor{kind}")(transformers.LlamaConfig(**{**TEXT, **more}))


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=16, patch_size=8)
    text = transformers.LlamaConfig(**TEXT)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=39, vision_feature_layer=-1)
    )


def qwen2_vl() -> Any:
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {**TEXT, "rope_parameters": rope}
    return transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    )


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def bert(kind: str = "MaskedLM", **more: Any) -> Any:
    return getattr(transformers, f"BertFor{kind}")(transformers.BertConfig(vocab_size=40, **SIZES, **more))


def train(model: Any, home: Path, targets: str | list[str], **more: Any) -> dict[str, torch.Tensor]:
    """Saves a random LoRA of the model; returns the weights that PEFT merges."""
    return train_as(model, home, peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, **more))


def train_as(model: Any, home: Path, config: Any) -> dict[str, torch.Tensor]:
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.normal_(std=0.1)
    model.save_pretrained(home / "adapter")
    merged = model.merge_and_unload()
    return {name: value.detach().clone() for name, value in merged.named_parameters(remove_duplicate=False)}


def check(kind: str, home: Path, want: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Merges with the base; the class loads the output, with nothing missing, and has PEFT's weights. Returns its config."""
    lora = LoraMerge(base=home / "base")
    zckpt.convert(home / "adapter", home / "out", dtype="fp32", options=Options(lora=lora), progress=False)
    loader = getattr(transformers, kind)
    model, info = loader.from_pretrained(home / "out", output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    got = dict(model.named_parameters(remove_duplicate=False))
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.allclose(got[name], value, rtol=3e-7, atol=3e-8), name
    assert zckpt.verify(home / "adapter", home / "out", lora=lora, progress=False).ok
    config: dict[str, Any] = json.loads((home / "out" / "config.json").read_text())
    assert config["architectures"] == [kind]
    return config


@pytest.mark.parametrize(("make", "targets"), [
    (llava, r".*language_model.*(q_proj|v_proj)"), (llava, r".*(vision|language).*(q_proj|v_proj)"),
    (qwen2_vl, r".*language_model.*(q_proj|v_proj)"), (qwen2_vl, r".*visual.*qkv"),
])  # fmt: skip
def test_names_in_memory_are_found_under_the_hub_s(make: Callable[[], Any], targets: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = make()
    model.save_pretrained(tmp_path / "base")
    on_disk = load_file(tmp_path / "base" / "model.safetensors").keys()
    if make is llava:
        assert not on_disk & model.state_dict().keys() - {"lm_head.weight"}
    check(type(model).__name__, tmp_path, train(model, tmp_path, targets))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == on_disk


@pytest.mark.parametrize("labels", [1, 2, 5])
def test_a_reward_model_on_a_language_model(labels: int, tmp_path: Path) -> None:
    torch.manual_seed(2)
    llama().save_pretrained(tmp_path / "base")
    model = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=labels)
    want = train(model, tmp_path, ["q_proj"], task_type="SEQ_CLS")
    check("LlamaForSequenceClassification", tmp_path, want)
    loaded = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert loaded.num_labels == labels
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_a_tagger_on_a_masked_language_model(tmp_path: Path) -> None:
    torch.manual_seed(3)
    bert().save_pretrained(tmp_path / "base")
    model = transformers.BertForTokenClassification.from_pretrained(tmp_path / "base", num_labels=3)
    want = train(model, tmp_path, ["query"], task_type="TOKEN_CLS")
    assert len(check("BertForTokenClassification", tmp_path, want)["id2label"]) == 3


@pytest.mark.parametrize("tied", [False, True])
def test_more_tokens(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = llama(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(43, pad_to_multiple_of=8)
    modules = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    want = train(model, tmp_path, ["q_proj"], modules_to_save=modules, ensure_weight_tying=tied)
    assert check("LlamaForCausalLM", tmp_path, want)["vocab_size"] == 48


def test_more_tokens_of_one_of_two(tmp_path: Path) -> None:
    """The head was resized too, and its new rows are nowhere."""
    model = llama()
    model.save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(48)
    train(model, tmp_path, ["q_proj"], modules_to_save=["embed_tokens"])
    lora = LoraMerge(base=tmp_path / "base")
    with pytest.raises(InconsistentError, match="does not fit"):
        zckpt.convert(tmp_path / "adapter", tmp_path / "out", options=Options(lora=lora), progress=False)
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_of_the_adapter_wins(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "base")
    train(model, tmp_path, ["q_proj"])
    for home, text in ((tmp_path / "base", "{}"), (tmp_path / "adapter", '{"added": 1}')):
        (home / "tokenizer_config.json").write_text(text)
    lora = LoraMerge(base=tmp_path / "base")
    zckpt.convert(tmp_path / "adapter", tmp_path / "out", options=Options(lora=lora), progress=False)
    zckpt.convert(
        tmp_path / "base",
        tmp_path / "out2",
        options=Options(lora=LoraMerge(adapters=[tmp_path / "adapter"])),
        progress=False,
    )
    for out in ("out", "out2"):
        assert (tmp_path / out / "tokenizer_config.json").read_text() == '{"added": 1}'


QD = ["q_proj", "down_proj"]
METHODS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "LoHa": (llama, {"target_modules": QD, "r": 3, "alpha": 5}),
    "LoHa of patterns": (
        llama,
        {"target_modules": QD, "r": 3, "alpha": 5, "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q": 7}},
    ),
    "LoKr": (llama, {"target_modules": QD, "r": 2, "alpha": 5}),
    "LoKr of two products": (
        llama,
        {"target_modules": QD, "r": 1, "alpha": 3, "decompose_both": True, "decompose_factor": 4},
    ),
    "LoKr of whole matrices": (llama, {"target_modules": QD, "r": 64, "alpha": 3}),
    "IA3": (llama, {"target_modules": QD, "feedforward_modules": ["down_proj"]}),
    "IA3 of biases": (
        bert,
        {"target_modules": ["query", "intermediate.dense"], "feedforward_modules": ["intermediate.dense"]},
    ),
    "IA3 of a Conv1D": (gpt2, {"target_modules": ["c_attn", "c_proj"], "feedforward_modules": ["c_proj"]}),
    "Vera": (llama, {"target_modules": QD, "r": 5}),
    "Vera of a Conv1D": (gpt2, {"target_modules": ["c_attn", "attn.c_proj"], "r": 5}),
    "OFT": (llama, {"target_modules": [*QD, "embed_tokens"], "oft_block_size": 8}),
    "OFT of one block, by its series": (
        llama,
        {"target_modules": QD, "r": 2, "oft_block_size": 0, "block_share": True, "num_cayley_neumann_terms": 7},
    ),
    "OFT by its formula": (llama, {"target_modules": QD, "oft_block_size": 4, "use_cayley_neumann": False}),
    "OFT of a bounded length": (llama, {"target_modules": QD, "oft_block_size": 4, "coft": True, "eps": 0.3}),
    "BOFT": (llama, {"target_modules": QD, "boft_block_size": 4}),
}


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_than_lora(method: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    make, more = METHODS[method]
    model = make()
    model.save_pretrained(tmp_path / "base")
    want = train_as(model, tmp_path, getattr(peft, f"{method.partition(' ')[0]}Config")(**more))
    check(type(make()).__name__, tmp_path, want)


def test_what_several_of_them_make_of_a_weight_is_no_sum(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "base")
    train_as(model, tmp_path, peft.IA3Config(target_modules=QD, feedforward_modules=["down_proj"]))
    for adapters in ([f"{tmp_path / 'adapter'}:0.5"], [tmp_path / "adapter"] * 2):
        with pytest.raises(zckpt.UsageError, match="no sum"):
            options = Options(lora=LoraMerge(adapters=adapters))
            zckpt.convert(tmp_path / "base", tmp_path / "out", options=options, progress=False)
