"""Other loaders read what zckpt writes: accelerate's, safetensors' own, and those that vLLM and SGLang can be told to use.

`make loaders` installs the streamers, which nothing else needs, and runs this with them: a step of RELEASE.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bits import same_bits
from safetensors import safe_open
from safetensors.torch import load_file

import zckpt

SAVE = Path(__file__).parents[2] / "fixtures" / "transformers" / "llama_zero3"


@pytest.fixture(scope="module", params=["one file", "shards"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that `zckpt convert` wrote from a ZeRO-3 save."""
    out = tmp_path_factory.mktemp("loaders") / "out"
    size = None if request.param == "one file" else "1KB"
    zckpt.convert(SAVE / "checkpoint", out, progress=False, **({"max_shard_size": size} if size else {}))
    assert (len([*out.glob("*.safetensors")]) > 1) == (size is not None)
    return out


@pytest.fixture(scope="module")
def truth() -> dict[str, torch.Tensor]:
    """The weights that the training run gathered in memory."""
    return load_file(SAVE / "truth.safetensors")


def files_of(out: Path) -> list[str]:
    """The files that a server reads: those that the index names, which must be all that are there."""
    there = sorted(map(str, out.glob("*.safetensors")))
    index = out / "model.safetensors.index.json"
    if index.exists():
        assert there == sorted({str(out / name) for name in json.loads(index.read_text())["weight_map"].values()})
    return there


def by_safetensors(out: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files_of(out):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_slice(name)[:]) for name in file.keys())  # noqa: SIM118 (it is not a mapping)


def by_run_ai(out: Path) -> Iterator[tuple[str, torch.Tensor]]:
    streamer = pytest.importorskip("runai_model_streamer", reason="make loaders installs it")
    with streamer.SafetensorsStreamer() as stream:
        stream.stream_files(files_of(out))
        yield from ((name, tensor.clone()) for name, tensor in stream.get_tensors())


def by_fastsafetensors(out: Path) -> Iterator[tuple[str, torch.Tensor]]:
    fast = pytest.importorskip("fastsafetensors", reason="make loaders installs it")
    with fast.fastsafe_open(files_of(out), nogds=True, device="cpu") as file:
        yield from ((name, file.get_tensor(name).clone()) for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize("loader", [by_safetensors, by_run_ai, by_fastsafetensors])
def test_a_loader_finds_every_weight(loader: object, written: Path, truth: dict[str, torch.Tensor]) -> None:
    found = dict(loader(written))  # type: ignore[operator]
    tied = {"lm_head.weight"}
    assert found.keys() | tied == truth.keys() | tied
    assert all(same_bits(tensor, truth[name]) for name, tensor in found.items())


def test_accelerate_fills_a_model(written: Path, truth: dict[str, torch.Tensor]) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = torch.nn.Module()
    for name, tensor in truth.items():
        *path, leaf = name.split(".")
        parent = model
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, torch.nn.Module())
            parent = parent._modules[part]  # type: ignore[assignment]
        parent.register_parameter(leaf, torch.nn.Parameter(torch.full(tensor.shape, float("nan"))))
    if "lm_head.weight" in truth:
        model.lm_head.weight = model.model.embed_tokens.weight  # type: ignore[union-attr]
    accelerate.load_checkpoint_in_model(model, str(written), strict=True)
    state = model.state_dict()
    assert all(same_bits(state[name], tensor) for name, tensor in truth.items())
