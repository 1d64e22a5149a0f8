"""What config.json leaves out, and which versions wrote base and adapter: merged as the model was trained, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from zckpt.base.errors import UnsupportedError
from zckpt.jobs.options import LoraMerge, Options

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

WEIGHTS = "model.safetensors"


def edited(file: Path, **values: Any) -> None:
    """A JSON file with other values; None takes a key out."""
    found = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def experts(hidden: int, intermediate: int) -> Any:
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            vocab_size=40, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1, head_dim=8,
            num_attention_heads=2, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2,
        )
    )  # fmt: skip


@pytest.mark.parametrize("target", ["down_proj", "gate_up_proj"])
@pytest.mark.parametrize("transposed", [True, False])
def test_square_experts_lie_as_the_versions_say(target: str, transposed: bool, tmp_path: Path) -> None:
    """Without transformers 5's mark PEFT takes the other order since 0.19; before, it knew one order alone."""
    torch.manual_seed(0)
    base = experts(16, 16 if target == "down_proj" else 8)
    base.save_pretrained(tmp_path / "base")
    base.model.layers[0].mlp.experts.is_transposed = transposed
    config = peft.LoraConfig(target_modules=[], target_parameters=[f"experts.{target}"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    run = tmp_path / "run"  # a checkpoint of the run holds both, and its config.json is the run's
    run.mkdir()
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, run / WEIGHTS)
    for name, home in (("config.json", "base"), ("adapter_config.json", "adapter")):
        (run / name).write_bytes((tmp_path / home / name).read_bytes())
    wanted = model.merge_and_unload().state_dict()[f"model.layers.0.mlp.experts.{target}"]

    def merged(source: Path, **lora: Any) -> None:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        zckpt.convert(source, out, dtype="fp32", options=Options(lora=LoraMerge(**lora)))
        assert torch.allclose(load_file(out / WEIGHTS)[f"model.layers.0.mlp.experts.{target}"], wanted, atol=1e-6)

    def refused(source: Path, **lora: Any) -> None:
        with pytest.raises(UnsupportedError, match=rf"which way round.*{target}"):
            zckpt.convert(source, tmp_path / "no", options=Options(lora=LoraMerge(**lora)))

    for versions, order in (
        (("0.21.2", "5.23.0"), True), (("0.19.0", "5.0.0"), True), (("0.21.2", "4.57.6"), False), (("0.18.1", "4.57.6"), True),
        (("0.18.2.dev0@UNKNOWN", "5.23.0"), None), ((None, "4.55.0"), True), (("0.21.2", None), None), (("main", "5.23.0"), None),
    ):  # fmt: skip
        for home in (run, tmp_path / "adapter"):
            edited(home / "adapter_config.json", peft_version=versions[0])
        for home in (run, tmp_path / "base"):
            edited(home / "config.json", transformers_version=versions[1])
        if order is not transposed:
            if order is None:
                refused(run)
            continue
        merged(run)
        if order or versions[1] != "4.57.6":
            merged(tmp_path / "adapter", base=tmp_path / "base")
        else:  # the base is older than the run, perhaps
            refused(tmp_path / "adapter", base=tmp_path / "base")
    edited(run / "adapter_config.json", auto_mapping=0, peft_version=None)
    config_of_another = json.loads((run / "adapter_config.json").read_text())
    del config_of_another["auto_mapping"]
    (run / "adapter_config.json").write_text(json.dumps(config_of_another))
    refused(run)


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 40}
KEYS = {"num_key_value_heads": 2}
TIED_BY_CLASS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "gemma": ("Gemma", {**SMALL, **KEYS, "head_dim": 8}, "embed_tokens", "q_proj"),
    "gemma2": ("Gemma2", {**SMALL, **KEYS, "head_dim": 8}, "embed_tokens", "q_proj"),
    "gemma3_text": ("Gemma3", {**SMALL, **KEYS, "head_dim": 8}, "embed_tokens", "q_proj"),
    "cohere": ("Cohere", {**SMALL, **KEYS}, "embed_tokens", "q_proj"),
    "starcoder2": ("Starcoder2", {**SMALL, **KEYS}, "embed_tokens", "q_proj"),
    "falcon": ("Falcon", {**SMALL}, "word_embeddings", "query_key_value"),
    "bloom": ("Bloom", {**SMALL}, "word_embeddings", "query_key_value"),
    "opt": ("OPT", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32}, "embed_tokens", "q_proj"),
    "gpt2": ("GPT2", {**SMALL, "n_positions": 16}, "wte", "c_attn"),
}  # fmt: skip
TOKENS = torch.arange(12)[None]


def without_key(file: Path, **more: Any) -> None:
    """A config.json as transformers 4 writes it: without a key that has its class's default."""
    edited(file, tie_word_embeddings=None, transformers_version="4.57.6", **more)


def randomized(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


@pytest.mark.parametrize("how", ["modules_to_save", "target_modules"])
@pytest.mark.parametrize("kind", TIED_BY_CLASS)
def test_a_head_that_its_class_ties(kind: str, how: str, tmp_path: Path) -> None:
    """The logits are those of the trained model: only one of the two was trained."""
    name, sizes, embedding, target = TIED_BY_CLASS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}TextConfig" if kind == "gemma3_text" else f"{name}Config")(**sizes)
    kinds = (f"{name}ForCausalLM", f"{name}LMHeadModel")
    base = next(getattr(transformers, kind) for kind in kinds if hasattr(transformers, kind))(config)
    base.save_pretrained(tmp_path / "base")
    without_key(tmp_path / "base" / "config.json")
    said = {"target_modules": [target], "modules_to_save": [embedding]}
    said = said if how == "modules_to_save" else {"target_modules": [target, embedding]}
    model = randomized(peft.get_peft_model(base, peft.LoraConfig(r=2, init_lora_weights=False, **said)))
    model.save_pretrained(tmp_path / "adapter")
    report = zckpt.convert(
        tmp_path / "base",
        tmp_path / "out",
        dtype="fp32",
        options=Options(lora=LoraMerge(adapters=[tmp_path / "adapter"])),
    )
    assert any("lm_head.weight" in note and "tied in the base" in note for note in report.notes)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    with torch.no_grad():
        found = type(base).from_pretrained(tmp_path / "out").eval()(TOKENS).logits
        assert torch.allclose(found, model(TOKENS).logits, atol=1e-5)


def test_a_head_that_nobody_knows_of(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**SMALL, **KEYS, "head_dim": 8}))
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], init_lora_weights=False)
    model = randomized(peft.get_peft_model(base, config))
    model.save_pretrained(tmp_path / "adapter")
    options = Options(lora=LoraMerge(adapters=[tmp_path / "adapter"]))
    file = tmp_path / "base" / "config.json"
    without_key(file, model_type="somebodys", architectures=["SomebodysForCausalLM"])
    with pytest.raises(UnsupportedError, match=r"embed_tokens\.weight'.* may be the head(.*\n)*.*tie_word_embeddings"):
        zckpt.convert(tmp_path / "base", tmp_path / "out", options=options)
    for number, (tied, architecture, apart) in enumerate((
        (True, "SomebodysForCausalLM", True), (False, "SomebodysForCausalLM", False), (None, "Gemma2Model", False),
        (None, "Gemma2ForSequenceClassification", False),
    )):  # fmt: skip
        edited(file, tie_word_embeddings=tied, architectures=[architecture])
        zckpt.convert(tmp_path / "base", tmp_path / f"{number}", options=options)
        assert ("lm_head.weight" in load_file(tmp_path / f"{number}" / WEIGHTS)) is apart
    file.unlink()
    with pytest.raises(UnsupportedError, match="may be the head"):
        zckpt.convert(tmp_path / "base", tmp_path / "out", options=options)
    (tmp_path / "run").mkdir()  # all names of a run are in its own save
    torch.save(model.state_dict(), tmp_path / "run" / "pytorch_model.bin")
    model.peft_config["default"].save_pretrained(tmp_path / "run")
    zckpt.convert(tmp_path / "run", tmp_path / "own", options=Options(lora=LoraMerge()))
    assert "lm_head.weight" in load_file(tmp_path / "own" / WEIGHTS)


def test_embeddings_that_many_modules_share(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 40, "d_kv": 8}
    base = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q"], modules_to_save=["shared"]))
    randomized(model).save_pretrained(tmp_path / "adapter")
    options = Options(lora=LoraMerge(adapters=[tmp_path / "adapter"]))
    with pytest.raises(UnsupportedError, match=r"shared\.weight"):
        zckpt.convert(tmp_path / "base", tmp_path / "out", options=options)
