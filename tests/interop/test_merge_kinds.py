"""Adapters of models that are not quite their base: names in memory, another head, more tokens. Equal to PEFT's own merge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def qwen2_5_vl() -> Any:
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "out_hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 24,
        "patch_size": 4,
    }
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, tie_word_embeddings=False
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def gemma3() -> Any:
    config = transformers.Gemma3Config(
        text_config={**TEXT, "tie_word_embeddings": True},
        vision_config={**SIZES, "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=39,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def idefics3() -> Any:
    config = transformers.Idefics3Config(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**SIZES, "image_size": 16, "patch_size": 8},
        image_token_id=39,
        scale_factor=1,
        tie_word_embeddings=False,
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def internvl() -> Any:
    config = transformers.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**SIZES, "image_size": [16, 16], "patch_size": [8, 8]},
        image_token_id=39,
        tie_word_embeddings=False,
    )
    return transformers.InternVLForConditionalGeneration(config)


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
    (qwen2_5_vl, r".*(visual.*qkv|language_model.*v_proj)"), (gemma3, r".*(vision_tower|language_model).*(q_proj|v_proj)"),
    (idefics3, r".*(vision_model|text_model).*(q_proj|v_proj)"), (internvl, r".*(vision_tower|language_model).*(q_proj|v_proj)"),
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


@pytest.mark.parametrize("make", [llava, gemma3])
def test_names_of_both_versions_of_transformers(make: Callable[[], Any], tmp_path: Path) -> None:
    """In version 4 the towers have one level more, in memory and on the hub; adapters and bases of either are one model."""
    torch.manual_seed(1)
    model = make()
    model.save_pretrained(home := tmp_path / "new" / "base")
    want = train(model, home.parent, r".*(vision_tower|language_model).*(q_proj|v_proj)")
    for kind, file in (("base", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        shutil.copytree(home.parent / kind, tmp_path / "old" / kind)
        saved = {
            name.replace("_tower.", "_tower.vision_model."): tensor
            for name, tensor in load_file(home.parent / kind / file).items()
        }
        save_file(saved, tmp_path / "old" / kind / file)
        assert any("_tower.vision_model.encoder" in name for name in saved)
    for number, (base, adapter) in enumerate((("new", "old"), ("old", "new"), ("old", "old"))):
        both = tmp_path / f"{number}"
        shutil.copytree(tmp_path / base / "base", both / "base")
        shutil.copytree(tmp_path / adapter / "adapter", both / "adapter")
        check(type(model).__name__, both, want)


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


def test_an_adapter_beside_a_model_and_a_value_head(tmp_path: Path) -> None:
    """torchtune's epochs hold the merged model and the adapter; TRL puts a PEFT model's value head into pytorch_model.bin."""
    torch.manual_seed(8)
    model = llama()
    model.save_pretrained(tmp_path / "base")
    train(model, tmp_path, ["q_proj"])
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    epoch = shutil.copytree(tmp_path / "adapter", tmp_path / "epoch_0")
    shutil.copy(tmp_path / "base" / "config.json", epoch)
    shutil.copy(tmp_path / "base" / "model.safetensors", epoch / "model-00001-of-00001.safetensors")
    files = dict.fromkeys(load_file(tmp_path / "base" / "model.safetensors"), "model-00001-of-00001.safetensors")
    (epoch / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    zckpt.to_peft(epoch, tmp_path / "alone", progress=False)
    alone = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    assert alone.keys() == saved.keys() and all(torch.equal(alone[name], value) for name, value in saved.items())
    assert zckpt.verify(epoch, tmp_path / "alone", progress=False).ok
    head = {"v_head.summary.weight": torch.randn(1, 16), "v_head.summary.bias": torch.randn(1)}
    torch.save(head, tmp_path / "adapter" / "pytorch_model.bin")
    outs = []
    for source, lora in (
        (tmp_path / "base", LoraMerge(adapters=[epoch])),
        (epoch, LoraMerge(base=tmp_path / "base")),
        (tmp_path / "adapter", LoraMerge(base=tmp_path / "base")),
    ):
        out = tmp_path / f"out{len(outs)}"
        zckpt.convert(source, out, dtype="fp32", options=Options(lora=lora), progress=False)
        assert zckpt.verify(source, out, lora=lora, progress=False).ok
        outs.append(load_file(out / "model.safetensors"))
    assert (
        all(torch.equal(outs[0][name], value) for name, value in outs[1].items()) and outs[0].keys() == outs[1].keys()
    )
    assert all(torch.equal(outs[2][name], value) for name, value in {**outs[0], **head}.items())


def test_a_model_with_a_value_head_gets_the_names_that_trl_loads(tmp_path: Path) -> None:
    model = llama()
    wanted = {**model.state_dict(), "v_head.summary.weight": torch.randn(1, 16), "v_head.summary.bias": torch.randn(1)}
    run = tmp_path / "run"
    run.mkdir()
    named = {name if "v_head" in name else f"pretrained_model.{name}": value for name, value in wanted.items()}
    torch.save(named, run / "pytorch_model.bin")
    model.config.save_pretrained(run)
    zckpt.convert(run, tmp_path / "out", dtype="fp32", progress=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], value) for name, value in wanted.items())
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {*info["unexpected_keys"]} == {"v_head.summary.weight", "v_head.summary.bias"} and not info["missing_keys"]


def test_a_head_of_an_unknown_class_asks_for_the_class(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    train(llama("SequenceClassification", num_labels=2), tmp_path, ["q_proj"], task_type="SEQ_CLS")
    file = tmp_path / "base" / "config.json"
    file.write_text(
        json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "architectures"})
    )
    lora = LoraMerge(base=tmp_path / "base")
    with pytest.raises(zckpt.IncompleteError, match=r"which class.*architectures"):
        zckpt.convert(tmp_path / "adapter", tmp_path / "out", options=Options(lora=lora), progress=False)


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


def test_what_is_not_merged_is_refused_for_its_own_reason(tmp_path: Path) -> None:
    """Butterfly factors, an older PEFT's series, convolutions, tokens beyond the base's, and numbers packed in a wider dtype."""
    model = llama()
    model.save_pretrained(tmp_path / "base")
    base = tmp_path / "base"

    def refused(kind: type[Exception], words: str, base: Path = base) -> None:
        with pytest.raises(kind, match=words):
            options = Options(lora=LoraMerge(base=base))
            zckpt.convert(tmp_path / "adapter", tmp_path / "out", options=options, progress=False)
        assert not (tmp_path / "out").exists()

    train_as(llama(), tmp_path, peft.BOFTConfig(target_modules=QD, boft_block_size=4))
    file = tmp_path / "adapter" / "adapter_model.safetensors"  # without a GPU PEFT has one factor alone
    two = {name: torch.cat([value] * 2) if "boft_R" in name else value for name, value in load_file(file).items()}
    save_file(two, file)
    refused(zckpt.UnsupportedError, "several butterfly factors")
    train_as(llama(), tmp_path, peft.OFTConfig(target_modules=QD, oft_block_size=8, use_cayley_neumann=True))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "peft_version": "0.17.1"}))
    refused(zckpt.UnsupportedError, "PEFT before 0.18")
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "use_cayley_neumann"}))
    refused(
        zckpt.UnsupportedError, "no use_cayley_neumann in the config.*Put it into the adapter's config, true or false"
    )
    lora: dict[str, Any] = {"target_modules": ["down_proj"], "init_lora_weights": False}
    peft.get_peft_model(llama(), peft.LoraConfig(**lora, lora_bias=True)).save_pretrained(tmp_path / "adapter")
    refused(zckpt.UnsupportedError, "bias cannot be merged into a layer without one.*down_proj.bias.*Use it unmerged")
    peft.get_peft_model(llama(), peft.LoraConfig(**lora, alora_invocation_tokens=[3])).save_pretrained(
        tmp_path / "adapter"
    )
    refused(zckpt.UnsupportedError, "aLoRA.*Use it unmerged, with PEFT, which does not merge it either")
    twice = peft.LoraConfig(**lora, layer_replication=[[0, 2], [0, 2]])
    peft.get_peft_model(llama(), twice).save_pretrained(tmp_path / "adapter")
    refused(zckpt.UnsupportedError, "layer replication.*Use it unmerged.*share")
    more = llama()
    more.resize_token_embeddings(44)
    train(more, tmp_path, ["q_proj"], trainable_token_indices=[3, 41])
    refused(InconsistentError, r"token 41 .*below 40, the rows of 'model.embed_tokens.weight'")
    train(llama(), tmp_path, ["q_proj"])
    weights = load_file(base / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    packed = shutil.copytree(base, tmp_path / "packed")
    save_file(
        {**weights, name: torch.zeros(weights[name].numel() // 4, 1, dtype=torch.bfloat16)},
        packed / "model.safetensors",
    )
    refused(zckpt.UnsupportedError, "Only the adapter can be had", packed)
    convolution = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3))
    save_file({name: value.detach() for name, value in convolution.state_dict().items()}, base / "model.safetensors")
    train_as(convolution, tmp_path, peft.OFTConfig(target_modules=["0"], oft_block_size=4))
    refused(zckpt.UnsupportedError, "OFT of the convolution '0.weight'")


@pytest.mark.parametrize(
    ("how", "ranks"), [("linear", (3, 3)), ("cat", (3, 2)), ("ties", (3, 3)), ("magnitude_prune", (3, 3))]
)
def test_several_combined_as_by_add_weighted_adapter(how: Any, ranks: tuple[int, int], tmp_path: Path) -> None:
    torch.manual_seed(6)
    model = llama()
    model.save_pretrained(tmp_path / "base")
    config = {"lora_alpha": 4, "init_lora_weights": False}
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=ranks[0], target_modules=["q_proj", "embed_tokens"], **config), "one"
    )
    model.add_adapter(
        "two", peft.LoraConfig(r=ranks[1], target_modules=["q_proj", "down_proj", "embed_tokens"], **config)
    )
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    density = 0.6 if how in ("ties", "magnitude_prune") else None
    model.add_weighted_adapter(["one", "two"], [0.5, -1.5], "sum", how, density=density)
    want = model.merge_and_unload(adapter_names=["sum"]).state_dict()
    adapters = [f"{tmp_path / 'one'}:0.5", f"{tmp_path / 'two'}:-1.5"]
    lora = LoraMerge(adapters=adapters, combine=how, density=density)
    zckpt.convert(tmp_path / "base", tmp_path / "out", dtype="fp32", options=Options(lora=lora), progress=False)
    for name, found in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.allclose(found, want[name], rtol=3e-7, atol=3e-8), name
    again = LoraMerge(adapters=adapters)  # how they were combined, the output says itself
    assert zckpt.verify(tmp_path / "base", tmp_path / "out", lora=again, progress=False).ok


def test_what_cannot_be_combined(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    for name, more in (
        ("lora", {"r": 2}),
        ("more", {"r": 4}),
        ("dora", {"r": 2, "use_dora": True}),
        ("rslora", {"r": 2, "use_rslora": True}),
    ):
        config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, **more)
        peft.get_peft_model(llama(), config).save_pretrained(tmp_path / name)
    for other, how, density, kind, word in (
        ("more", "linear", None, InconsistentError, "ranks"), ("dora", "cat", None, zckpt.UnsupportedError, "DoRA"),
        ("rslora", "cat", None, zckpt.UnsupportedError, "rsLoRA"), ("lora", "ties", None, zckpt.UsageError, "needs a density"),
        ("lora", "svd", None, zckpt.UsageError, "add_weighted_adapter"),
        ("lora", "cat", 0.5, zckpt.UsageError, "no density"), ("lora", None, 0.5, zckpt.UsageError, "--combine"),
    ):  # fmt: skip
        lora = LoraMerge(adapters=[tmp_path / "lora", tmp_path / other], combine=how, density=density)
        with pytest.raises(kind, match=word):
            zckpt.convert(tmp_path / "base", tmp_path / "out", options=Options(lora=lora), progress=False)


def test_what_several_of_them_make_of_a_weight_is_no_sum(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "base")
    train_as(model, tmp_path, peft.IA3Config(target_modules=QD, feedforward_modules=["down_proj"]))
    for adapters in ([f"{tmp_path / 'adapter'}:0.5"], [tmp_path / "adapter"] * 2):
        with pytest.raises(zckpt.UsageError, match="not a sum"):
            options = Options(lora=LoraMerge(adapters=adapters))
            zckpt.convert(tmp_path / "base", tmp_path / "out", options=options, progress=False)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_a_quantised_base_is_dequantised_and_its_config_says_so(form: str, tmp_path: Path) -> None:
    """Merged as if the base had been dequantised first; what the output's config says of its weights is true."""
    model = llama(hidden_size=32, intermediate_size=64, head_dim=16)
    model.save_pretrained(tmp_path / "model")
    train(model, tmp_path, ["q_proj"])
    zckpt.quantize(
        tmp_path / "model", tmp_path / "packed", to=form, group_size=32 if form == "int4" else None, progress=False
    )
    zckpt.convert(tmp_path / "packed", tmp_path / "plain", progress=False)
    for name in ("packed", "plain"):
        options = Options(lora=LoraMerge(base=tmp_path / name))
        zckpt.convert(tmp_path / "adapter", tmp_path / f"of_{name}", options=options, progress=False)
    config = json.loads((tmp_path / "of_packed" / "config.json").read_text())
    assert (
        "quantization_config" not in config
        and "quantization_config" in (tmp_path / "packed" / "config.json").read_text()
    )
    found, want = (load_file(tmp_path / f"of_{name}" / "model.safetensors") for name in ("packed", "plain"))
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "of_packed")
    assert all(torch.equal(loaded.state_dict()[name], want[name]) for name in want)
