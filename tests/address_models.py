"""Models that are written to addresses, and what each kind of loader finds there, for the tests of the commit protocol."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

import zckpt
from zckpt.base.errors import CastError
from zckpt.jobs.options import Options

FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""In the order in which transformers looks for them."""

INDEX_FIRST = (FILES[1], FILES[0], FILES[3], FILES[2])
"""As vLLM does, which loads no file that an index does not name."""

Tree = dict[str, bytes]


class Killed(BaseException):
    """What nobody may handle."""


def source(place: Path, seed: int, scale: float = 1.0) -> Path:
    """Weights with a config and a tokenizer, all different for each seed."""
    place.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer{i}.weight": scale * torch.randn(10, 10, generator=generator) for i in range(4)}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps({"model_type": "llama", "seed": seed}))
    (place / "tokenizer.json").write_text(json.dumps({"seed": seed}))
    return place


class Model:
    """What a command writes: the shape of the output, and what loaders then find."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.options = path, options
        self.tensors = load((path / "model.safetensors").read_bytes())
        self.seed = json.loads((path / "config.json").read_text())["seed"]

    def write(self, out: str, *, overwrite: bool = True) -> zckpt.Report:
        return zckpt.convert(self.path, out, options=Options(**self.options, overwrite=overwrite))

    def is_in(self, found: dict[str, torch.Tensor]) -> bool:
        return found.keys() == self.tensors.keys() and all(torch.equal(found[n], t) for n, t in self.tensors.items())


def loaded(files: Tree, order: tuple[str, ...]) -> dict[str, torch.Tensor] | None:
    """The weights that a loader takes; None where there are none to take. What is named and missing fails."""
    name = next((name for name in order if name in files), None)
    if name is None:
        return None
    names = set(json.loads(files[name])["weight_map"].values()) if name.endswith(".json") else {name}
    tensors: dict[str, torch.Tensor] = {}
    for shard in names:
        tensors |= load(files[shard]) if shard.endswith(".safetensors") else torch.load(io.BytesIO(files[shard]))
    return tensors


def look(files: Tree, *models: Model) -> Model | None:
    """Which of the models a directory holds, for each kind of loader; None where none loads. A mix fails."""
    found: set[Model | None] = set()
    for order in (FILES, INDEX_FIRST):
        tensors = loaded(files, order)
        assert tensors is None or any(model.is_in(tensors) for model in models), "a mix of weights"
        if tensors is None or "config.json" not in files:
            found.add(None)
            continue
        (model,) = (model for model in models if model.is_in(tensors))
        found.add(model)
        for name in ("config.json", "tokenizer.json"):
            assert json.loads(files[name])["seed"] == model.seed, f"weights of one model with the {name} of another"
    manifest = json.loads(files.get("zckpt.json", b'{"files": []}'))["files"]
    if manifest and all(zlib.crc32(files.get(f["path"], b"")) == int(f["crc32"], 16) for f in manifest):
        (model,) = found  # what passes `verify` is what loaders take
        assert model is not None
        assert {f["path"] for f in manifest} <= set(files)
    return found.pop() if len(found) == 1 else None


SHAPES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "nothing to shards": (None, {"max_shard_size": 900}),
    "nothing to one": (None, {}),
    "shards to as many": ({"max_shard_size": 900}, {"max_shard_size": 900}),
    "shards to fewer": ({"max_shard_size": 500}, {"max_shard_size": 900}),
    "one to shards": ({}, {"max_shard_size": 900}),
    "shards to one": ({"max_shard_size": 900}, {}),
    "one to one": ({}, {}),
    "bin to safetensors": ({"format": "bin", "max_shard_size": 900}, {"max_shard_size": 900}),
    "safetensors to bin": ({"max_shard_size": 900}, {"format": "bin"}),
}


def three_models(place: Path, shape: str) -> tuple[Model | None, Model, Model]:
    """The old one, the new one, and one that cannot be written as fp16."""
    old, new = SHAPES[shape]
    a = None if old is None else Model(source(place / "a", 1), **old)
    return a, Model(source(place / "b", 2), **new), Model(source(place / "c", 3, 1e6), **new)


def fails(model: Model, out: str) -> None:
    """Runs a conversion that ends with an error after all else was done."""
    with pytest.raises(CastError):
        zckpt.convert(model.path, out, dtype="fp16", options=Options(**model.options, overwrite=True))
