"""Every family of transformers: a model of random numbers goes through parts, and through other writers' names, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import UnsupportedError
from zckpt.core.catalog import Catalog, Source, TensorEntry
from zckpt.core.dtypes import BY_TORCH_NAME
from zckpt.core.fragments import Fragment, MemoryStore
from zckpt.jobs.open import read_tensor
from zckpt.naming.compose import compose
from zckpt.naming.decompose import decomposed
from zckpt.naming.facts import facts_of
from zckpt.naming.schemes import families, scheme, schemes
from zckpt.naming.transform import Form

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
OLD = {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
GPT2 = {
    "vocab_size": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "bos_token_id": None,
    "eos_token_id": None,
}
OLD_NEOX = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
FALCON = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {**SMALL, "tie_word_embeddings": False}),
    "llama-biased": ("llama", "Llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    "llama-tied": ("llama", "Llama", {**SMALL, "tie_word_embeddings": True}),
    "mistral": ("mistral", "Mistral", SMALL),
    "qwen2": ("qwen2", "Qwen2", SMALL),
    "qwen3": ("qwen3", "Qwen3", {**SMALL, "head_dim": 8}),
    "gemma2": ("gemma2", "Gemma2", {**SMALL, "head_dim": 8}),
    "gemma3": ("gemma3", "Gemma3Text", {**SMALL, "head_dim": 8}),
    "phi3": ("phi3", "Phi3", SMALL),
    "glm4": ("glm4", "Glm4", {**SMALL, "attention_bias": True, "head_dim": 4}),
    "bloom": ("bloom", "Bloom", OLD),
    "falcon-7b": ("falcon", "Falcon", {**FALCON, "multi_query": True, "parallel_attn": True, "bias": False}),
    "falcon-rw": ("falcon", "Falcon", {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-40b": ("falcon", "Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt2": (
        "gpt2",
        "GPT2",
        {key: value for key, value in {**OLD, "n_embd": 16, "n_positions": 16}.items() if key != "hidden_size"},
    ),
    "gpt-neox": ("gpt-neox", "GPTNeoX", OLD_NEOX),
}
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A family's name, and the directory of a model of it as transformers writes it; and the model."""
    family, name, given = MODELS[request.param]
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**given)
    model = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    home = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(home)
    return family, home, model


def as_catalog(tensors: dict[str, torch.Tensor]) -> Catalog:
    entries = {}
    for name, tensor in tensors.items():
        store = MemoryStore(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)
        dtype = BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")]
        entries[name] = TensorEntry(
            name, tuple(tensor.shape), dtype, "parameter", (Fragment(store, 0, 0, tensor.numel()),)
        )
    return Catalog(entries, Source("test", "memory"))


def assert_same_tensors(catalog: Catalog, wanted: dict[str, torch.Tensor]) -> None:
    assert catalog.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        found = read_tensor(catalog[name], "pt")
        assert found.shape == tensor.shape and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_model_stays_itself(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    """`--to hf` finds the family by the config; every byte and the logits are the same, and `verify` agrees."""
    family, home, model = saved
    report = zckpt.convert(home, tmp_path / "out", options=zckpt.Options(form=Form("hf")))
    assert any(f"hf:{family}" in note for note in report.notes)
    assert_same_tensors(
        as_catalog(load_file(tmp_path / "out" / "model.safetensors")), load_file(home / "model.safetensors")
    )
    found, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(found.eval()(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert zckpt.verify(home, tmp_path / "out").ok


WRITERS = [name for name in schemes() if not name.startswith("hf-")]


def test_there_and_back(saved: tuple[str, Path, Any]) -> None:
    """Through the names and rows of every writer that has a place for all parts, each tensor comes back to the last bit."""
    family, home, _ = saved
    tensors = load_file(home / "model.safetensors")
    config = json.loads((home / "config.json").read_text())
    own = scheme(f"hf-{family}")
    start = decomposed(as_catalog(tensors), own, facts_of(as_catalog(tensors), config))
    assert_same_tensors(compose(start.parts, own, start.facts), tensors)
    crossed = set()
    for name in WRITERS:
        writer = scheme(name)
        try:
            theirs = compose(start.parts, writer, start.facts)
        except UnsupportedError:
            continue
        again = decomposed(theirs, writer, start.facts.having(version=3.0 if name == "megatron" else None))
        assert_same_tensors(compose(again.parts, own, again.facts), tensors)
        crossed.add(name)
    assert crossed or family in ("gemma2", "gemma3", "glm4", "qwen3"), family


def test_every_family_is_tried_here() -> None:
    """Or in the page of another part: a family without a model is not proved."""
    assert {family for family, *_ in MODELS.values()} <= set(families())
