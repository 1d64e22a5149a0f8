"""GGUF against llama.cpp's own converter, the gguf package and transformers.

What the converter writes of each model in fixtures/gguf is recorded there, tensor by tensor and key by key.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from safetensors.torch import load_file

import zckpt
from zckpt.naming.gguf_metadata import ARCHITECTURES
from zckpt.naming.schemes import scheme

FIXTURES = Path(__file__).parents[2] / "fixtures" / "gguf"
FAMILIES = sorted(home.name for home in FIXTURES.iterdir())
TOKENS = torch.arange(24).reshape(2, 12)


def facts_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a file holds, in the form of `truth.json`."""
    reader = GGUFReader(path)
    tensors = {
        t.name: [t.tensor_type.name, [int(n) for n in reversed(t.shape)], hashlib.sha256(t.data.tobytes()).hexdigest()[:16]]
        for t in reader.tensors
    }  # fmt: skip
    metadata = {}
    for key, field in reader.fields.items():
        value = field.contents()
        if isinstance(value, list) and len(value) > 20:
            digest = hashlib.sha256(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()
            value = {"length": len(value), "sha256": digest}
        if not key.startswith("GGUF."):
            metadata[key] = [[kind.name for kind in field.types], value]
    return tensors, metadata


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Any]]:
    """A model's name, its directory (with the name that it had for the converter), and the converter's truth."""
    home = FIXTURES / request.param
    model = tmp_path_factory.mktemp("gguf") / "tiny-model"
    shutil.copytree(home / "model", model)
    yield request.param, model, json.loads((home / "truth.json").read_text())
    shutil.rmtree(model)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_it_is_what_the_converter_writes(family: tuple[str, Path, Any], kind: str, tmp_path: Path) -> None:
    _, model, truth = family
    zckpt.to_gguf(model, tmp_path / "x.gguf", type=kind, pre_tokenizer=truth["pre"], progress=False)
    tensors, metadata = facts_of(tmp_path / "x.gguf")
    assert tensors == truth["tensors"][kind]
    assert metadata == {**truth["metadata"]["all"], **truth["metadata"][kind]}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits  # type: ignore[no-any-return]


def test_it_comes_back(family: tuple[str, Path, Any], tmp_path: Path) -> None:
    """The logits are the same from the directory that zckpt makes of it again, and `verify` agrees in both directions."""
    name, model, truth = family
    kind = transformers.AutoModelForCausalLM
    wanted = logits(kind.from_pretrained(model, dtype=torch.float32))
    zckpt.to_gguf(model, tmp_path / "x.gguf", type="f32", pre_tokenizer=truth["pre"], progress=False)
    assert zckpt.verify(model, tmp_path / "x.gguf").ok
    zckpt.convert(tmp_path / "x.gguf", tmp_path / "back", progress=False)
    assert zckpt.verify(tmp_path / "x.gguf", tmp_path / "back").ok
    again, info = kind.from_pretrained(tmp_path / "back", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    if name.startswith("gemma"):  # a norm that one was added to and taken from lost bits
        assert torch.allclose(logits(again), wanted, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(logits(again), wanted)
        before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
        assert {n: t.float().numpy().tobytes() for n, t in before.items()} == {
            n: t.numpy().tobytes() for n, t in after.items()
        }


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gemma2", "gemma3"])
def test_transformers_reads_it(name: str, tmp_path: Path) -> None:
    """By its own reader, which knows no biases and no scaled rotary embeddings of Llama, and no scale of Gemma's queries."""
    kind = transformers.AutoModelForCausalLM
    model = FIXTURES / name / "model"
    if name == "llama":
        config = transformers.AutoConfig.from_pretrained(model, attention_bias=False)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
        plain = kind.from_config(config)
        plain.load_state_dict(load_file(model / "model.safetensors"), strict=False)
        plain.save_pretrained(tmp_path / "plain")
        model = tmp_path / "plain"
    wanted = kind.from_pretrained(model, dtype=torch.float32)
    own = {"tokenizer": FIXTURES / name / "model", "pre_tokenizer": "llama-bpe" if name == "llama" else "qwen2"}
    zckpt.to_gguf(model, tmp_path / "x.gguf", type="f32", progress=False, **own)
    theirs = kind.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    if name.startswith("gemma"):
        held = theirs.state_dict()
        assert all(torch.allclose(held[n], t, rtol=0, atol=1e-6) for n, t in wanted.state_dict().items())
    else:
        assert torch.equal(logits(theirs), logits(wanted))


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*/*.gguf")), ids=lambda path: path.name)
def test_the_converters_own_files_are_read(path: Path, tmp_path: Path) -> None:
    """Every number is the one that the gguf package reads, under transformers' names."""
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    own = zckpt.open_checkpoint(path, framework="pt")
    for tensor in reader.tensors:
        wanted = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)).reshape(own[tensor.name].shape))
        assert torch.equal(own[tensor.name].float(), wanted), tensor.name
    found = zckpt.inspect_checkpoint(path).as_json()
    assert found["layout"] == "gguf" and found["exportable"]["ok"], found
    zckpt.convert(path, tmp_path / "out", dtype="fp32", progress=False)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    truth = load_file(path.parent / "model" / "model.safetensors")
    assert weights.keys() == truth.keys()
    for name, tensor in truth.items():
        error = (weights[name] - tensor.float()).abs().max() / tensor.float().abs().max()
        assert error < (0.005 if "q8_0" in path.name else 0.003), name
    assert zckpt.verify(path, tmp_path / "out").ok


def test_the_names_are_those_of_the_package() -> None:
    """The scheme's names against the package's tables, for the names that transformers has."""
    own = {r.names[0].removesuffix(".weight").removesuffix(".bias"): r.parts for r in scheme("gguf").rules if r.parts}
    seen = set()
    for kind, architecture in ARCHITECTURES.items():
        number = next(a for a, name in __import__("gguf").MODEL_ARCH_NAMES.items() if name == architecture)
        assert isinstance(number, MODEL_ARCH)
        table = get_tensor_name_map(number, 2)
        hub = "hf-" + {"gemma3_text": "gemma3"}.get(kind, kind.replace("_", "-"))
        for rule in scheme(hub).rules:
            for name in rule.names if rule.parts and len(rule.parts) == 1 else ():
                plain = (
                    name.replace("{b}", "1")
                    .replace(".experts.{e}.", ".experts.")
                    .removesuffix(".weight")
                    .removesuffix(".bias")
                )
                found = table.get_name(plain)
                if found is None:
                    continue
                template = found.replace("blk.1.", "blk.{b}.")
                assert {p.rpartition(".")[0] for p in rule.parts} == {p.rpartition(".")[0] for p in own[template]}, name
                seen.add(template)
    assert len(seen) == len(own) - 0, own.keys() - seen
