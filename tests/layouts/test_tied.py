"""The table of tied weights is that of the installed transformers, and nested configs are read as each version reads them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from zckpt.layouts.save import tied
from zckpt.layouts.save.tied import embedding_of, heads_of, is_tied

CLASS_OR_KEYS = re.compile(
    r"^class (?P<name>\w+)(?:\((?P<bases>[^)]*)\))?:|^    _tied_weights_keys\b[^=\n]*= (?P<keys>None|\{[^}]*\}|\[[^]]*\])",
    re.MULTILINE,
)
TABLE = json.loads((Path(tied.__file__).parent / "tied_weights.json").read_text())


def test_defaults_of_all_model_types() -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    found: dict[str, object] = {}
    for kind in CONFIG_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[kind]
        except (ImportError, ValueError, KeyError, AttributeError):  # it needs a package that is not here
            continue
        try:
            found[kind] = getattr(config(), "tie_word_embeddings", None)
        except Exception:  # a config that cannot be made without values
            found[kind] = getattr(config, "tie_word_embeddings", None)
    assert len(found) > 300
    assert {kind for kind, value in found.items() if value is True} == set(TABLE["tied"]) & found.keys()
    assert {kind for kind, value in found.items() if value is False} == set(TABLE["apart"]) & found.keys()
    assert {kind: is_tied({"model_type": kind}) for kind in found} == {
        kind: value if isinstance(value, bool) else None for kind, value in found.items()
    }


def test_tied_weights_of_all_classes() -> None:
    """`_tied_weights_keys` is read from the source: importing all models takes minutes, and parsing them half of one."""
    transformers = pytest.importorskip("transformers")
    own: dict[str, dict[str, str]] = {}
    bases: dict[str, list[str]] = {}
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        name = ""
        for match in CLASS_OR_KEYS.finditer(file.read_text()):
            if match["name"]:
                name = match["name"]
                bases[name] = [
                    base.strip() for base in (match["bases"] or "").split(",") if base.strip().isidentifier()
                ]
            else:
                own[name] = ast.literal_eval(match["keys"]) or {}
    simple = re.compile(r"[\w.]+\.weight")

    def keys_of(name: str) -> Mapping[str, str]:
        inherited = (keys_of(base) for base in bases.get(name, ()) if base != name)
        return own[name] if name in own else next(filter(None, inherited), {})

    found = {
        name: {a: b for a, b in keys_of(name).items() if simple.fullmatch(a) and simple.fullmatch(b)} for name in bases
    }
    said = {name: weights for weights, names in TABLE["weights"] for name in names}
    assert {name: weights for name, weights in found.items() if weights} == said


KEY = "tie_word_embeddings"
LLAMA, GEMMA = {"model_type": "llama"}, {"model_type": "gemma2"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"model_type": "somebodys"}, None),
        ({"model_type": "somebodys", KEY: False}, False),
        (LLAMA, False),
        (GEMMA, True),
        ({**GEMMA, KEY: False}, False),
        ({"model_type": "llava", "text_config": LLAMA}, False),
        ({"model_type": "llava", "text_config": {**LLAMA, KEY: True}}, True),
        ({"model_type": "llava", "text_config": GEMMA, "transformers_version": "4.50.0"}, True),
        ({"model_type": "llava", "text_config": GEMMA, "transformers_version": "5.1.0"}, None),
        ({"model_type": "llava", "text_config": GEMMA}, None),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}, "transformers_version": "4.50.0"}, False),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}, "transformers_version": "5.1.0"}, True),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, True),
        ({"model_type": "gemma3", KEY: False, "text_config": {"model_type": "gemma3_text", KEY: False}}, False),
    ],
)
def test_configs_that_lack_the_key(config: Mapping[str, Any], expected: bool | None) -> None:
    assert is_tied(config) is expected


def test_names_of_heads() -> None:
    def of(name: str, embedding: str) -> tuple[str, ...]:
        return heads_of({"architectures": [name]}, embedding)

    assert of("OPTForCausalLM", "model.decoder.embed_tokens.weight") == ("lm_head.weight",)
    assert of("BertForMaskedLM", "bert.embeddings.word_embeddings.weight") == ("cls.predictions.decoder.weight",)
    assert of("BertForSequenceClassification", "bert.embeddings.word_embeddings.weight") == ()
    assert of("LlamaModel", "embed_tokens.weight") == ()
    new, old = "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight"
    assert of("Gemma3ForConditionalGeneration", new) == ("lm_head.weight",)
    assert of("Gemma3ForConditionalGeneration", old) == ("language_model.lm_head.weight",)
    assert of("InternLM2ForCausalLM", "model.tok_embeddings.weight") == ("output.weight",)
    assert of("LlamaForCausalLM", "model.layers.0.mlp.up_proj.weight") == ()
    names = {"bert.embeddings.word_embeddings.weight": 1, "model.embed_tokens.weight": 1}
    bert = {"architectures": ["BertForMaskedLM"]}
    assert embedding_of(bert, "cls.predictions.decoder.weight", names) == "bert.embeddings.word_embeddings.weight"
    assert embedding_of({}, "lm_head.weight", {"model.embed_tokens.weight": 1}) == "model.embed_tokens.weight"
    assert embedding_of({}, "lm_head.weight", names) is None
