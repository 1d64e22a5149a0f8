"""The line that says how an output is loaded: it is run, and loads the model; where it would not, what is missing is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from hf_models import bert, llama, llava, t5, whisper
from safetensors.torch import save_file
from typer.testing import CliRunner

from zckpt.cli import app
from zckpt.cli.loading import auto_class, loader_of, wrong_prefix

transformers = pytest.importorskip("transformers", minversion="5")


def gemma() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(vocab_size=40, num_key_value_heads=1, head_dim=8, pad_token_id=0, **sizes)
    )


MODELS = {
    "a language model": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "tied by its class": gemma,
    "a picture reader": llava,
    "a translator": t5,
    "a listener": whisper,
    "a reward model": lambda: llama("SequenceClassification", num_labels=1),
    "a tagger": lambda: llama("TokenClassification", num_labels=3),
    "a filler of gaps": bert,
}


def say(*words: object) -> str:
    """What a command prints, in one line."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def check_line(text: str, truth: dict[str, torch.Tensor]) -> str:
    """Runs the line that a command printed: nothing is missing, and every tensor is the one of the model. Returns the class."""
    (line,) = re.findall(r"load it with (transformers\.\w+\.from_pretrained\([^)]*\))", text)
    assert 'dtype="auto"' in line and "/'," not in line
    model, info = eval(line.replace(")", ", output_loading_info=True)"), {"transformers": transformers})
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    state = model.state_dict()
    assert all(same_bits(state[name], tensor) for name, tensor in truth.items())
    return type(model).__name__


@pytest.mark.parametrize("kind", MODELS)
def test_the_printed_line_loads_the_model(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = MODELS[kind]().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    assert check_line(say("to-bf16", tmp_path / "in", f"{tmp_path}/out/"), model.state_dict()) == type(model).__name__


@pytest.mark.parametrize("kind", ["a language model", "tied", "tied by its class", "a picture reader"])
def test_a_config_that_names_no_class(kind: str, tmp_path: Path) -> None:
    """As a model's own config is written by hand: the tensors show what the model is for."""
    torch.manual_seed(3)
    model = MODELS[kind]().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    del config["architectures"]
    if kind == "tied by its class":
        config.pop("tie_word_embeddings", None)
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    assert check_line(say("to-bf16", tmp_path / "in", tmp_path / "out"), model.state_dict()) == type(model).__name__


@pytest.mark.parametrize("kind", ["a reward model", "a tagger", "a filler of gaps", "a listener"])
def test_a_class_that_nothing_shows_is_not_promised(kind: str, tmp_path: Path) -> None:
    MODELS[kind]().to(torch.bfloat16).save_pretrained(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    said = say("to-bf16", tmp_path / "in", tmp_path / "out").partition("load it with")[2]
    assert "from_pretrained" not in said and "architectures" in said


def test_a_model_in_lightning_s_names(tmp_path: Path) -> None:
    """They begin with the attribute that holds the model; the advice is followed."""
    tied = llama(tie_word_embeddings=True)
    for name, model, others in (("llama", llama(), False), ("tied", tied, False), ("more", llama(), True)):
        home, own = tmp_path / name, dict(model.to(torch.bfloat16).state_dict())
        if name == "tied":
            del own["lm_head.weight"]
        home.mkdir()
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(home)
        extra = {"metric.total": torch.ones(3)} if others else {}
        save_file({**{f"net.{key}": value.clone() for key, value in own.items()}, **extra}, home / "model.safetensors")
        text = say("to-bf16", home, tmp_path / f"{name}-out")
        assert "from_pretrained" not in text and "--strip-prefix net." in text
        advice = re.findall(r"--(?:strip-prefix|include) \S+", text.partition("load it with")[2])
        words = [word.strip("':") for each in advice for word in each.split()]
        check_line(say("to-bf16", home, tmp_path / f"{name}-again", *words), own)


def test_names_of_another_program(tmp_path: Path) -> None:
    model = llama().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    say("to-dcp", tmp_path / "in", tmp_path / "titan", "--names", "torchtitan")
    text = say("to-bf16", tmp_path / "titan", tmp_path / "out")
    assert "from_pretrained" not in text and "--to hf" in text
    check_line(say("to-bf16", tmp_path / "titan", tmp_path / "again", "--to", "hf"), model.state_dict())


@pytest.mark.parametrize(("config", "said"), [
    (None, "config.json"), ({"trainer": {}}, "config.json"), ({"model_type": "llama"}, "architectures"),
    ({"_class_name": "FluxTransformer2DModel"}, "FluxTransformer2DModel"),
    ({"model_type": "llama", "architectures": ["x'; import os"]}, "architectures"),
])  # fmt: skip
def test_what_is_missing_is_said(config: dict[str, Any] | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"model.embed_tokens.weight": torch.ones(3)}, tmp_path / "in" / "model.safetensors")
    if config is not None:
        (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    text = say("to-bf16", tmp_path / "in", tmp_path / "out")
    assert "from_pretrained" not in text and said in text.partition("load it with")[2]


def test_every_class_of_the_auto_classes() -> None:
    """The one that is named has the class for that type of model, or it is the class itself."""
    mappings = {
        name: cls._model_mapping._model_mapping
        for name, cls in vars(transformers.models.auto.modeling_auto).items()
        if name.startswith("AutoModel") and getattr(cls, "_model_mapping", None) is not None
    }
    seen = 0
    for mapping in mappings.values():
        for kind, classes in mapping.items():
            for name in [classes] if isinstance(classes, str) else classes:
                auto = auto_class(name)
                held = mappings[auto].get(kind) if auto != name else name
                assert name == held or name in (held or ()), (name, auto)
                seen += 1
    assert seen > 1000 and auto_class("LlavaForConditionalGeneration") == "LlavaForConditionalGeneration"


def test_code_of_a_model_s_authors() -> None:
    code = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    said = loader_of({"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": code}, "out")
    assert (
        said.startswith("transformers.AutoModelForCausalLM.from_pretrained('out', ")
        and "trust_remote_code=True)" in said
    )


@pytest.mark.parametrize(("names", "config", "prefix"), [
    (["model.model.norm.weight", "model.lm_head.weight"], {}, "model."),
    (["model.encoder.x", "model.shared.weight", "model.lm_head.weight"], {}, "model."),
    (["model.norm.weight", "model.layers.0.w"], {}, ""), (["distilbert.transformer.x", "distilbert.embeddings.y"], {}, ""),
    (["language_model.model.x", "language_model.lm_head.weight", "vision_tower.x"], {"text_config": {}}, ""),
    (["thinker.model.x", "thinker.lm_head.weight", "thinker.visual.y"], {"thinker_config": {}}, ""),
    (["decoder.transformer.x", "decoder.lm_head.weight", "encoder.y"], {"decoder": {}}, ""),
])  # fmt: skip
def test_prefixes(names: list[str], config: dict[str, object], prefix: str) -> None:
    assert wrong_prefix(names, config)[0] == prefix
