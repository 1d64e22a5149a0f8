"""TIES and DARE are what mergekit means by them, and its YAML is read: equal to mergekit itself where that is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import zckpt
from zckpt import CorruptError, UnsupportedError, UsageError

MERGEKIT = Path(__file__).parents[2] / ".make" / "mergekit"
SHAPES = {
    "model.embed_tokens.weight": (40, 16),
    **{f"model.layers.{n}.{w}.weight": (24, 16) for n in range(3) for w in ("mlp", "attn")},
    "model.norm.weight": (16,),
}  # fmt: skip


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = []
    for number in range(3):
        home = tmp_path_factory.mktemp(f"model{number}")
        generator = torch.Generator().manual_seed(number)
        save_file(
            {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()},
            home / "model.safetensors",
        )
        found.append(str(home))
    return found


def read(home: Path | str) -> dict[str, torch.Tensor]:
    return load_file(Path(home) / "model.safetensors")


def ties(base: torch.Tensor, others: list[torch.Tensor], weights: list[float], densities: list[float]) -> torch.Tensor:
    """As in the paper, with weights: trim, elect a sign, and take the weighted mean of the numbers of that sign."""
    deltas = torch.stack([other - base for other in others])
    for delta, density in zip(deltas, densities, strict=True):
        least = delta.abs().flatten().sort(descending=True).values[max(1, int(density * delta.numel())) - 1]
        delta[delta.abs() < least] = 0
    scaled = torch.stack([delta * weight for delta, weight in zip(deltas, weights, strict=True)])
    agree = scaled.sign() == torch.where(scaled.sum(0) >= 0, 1, -1)
    counts = sum((one * weight for one, weight in zip(agree, weights, strict=True)), torch.zeros_like(base))
    return base + (scaled * agree).sum(0) / torch.where(counts == 0, 1, counts)


def test_ties(homes: list[str], tmp_path: Path) -> None:
    base, *others = map(read, homes)
    zckpt.average(
        homes[1:], tmp_path / "out", task_vector=homes[0], method="ties", weights=[0.6, 1.3], density=[0.4, 0.7],
        dtype="fp32", progress=False,
    )  # fmt: skip
    for name, found in read(tmp_path / "out").items():
        want = ties(base[name], [other[name] for other in others], [0.6, 1.3], [0.4, 0.7])
        assert torch.allclose(found, want, rtol=1e-6, atol=1e-7), name
    facts = json.loads((tmp_path / "out" / "zckpt.json").read_text())["options"]["average"]
    assert (facts["method"], facts["density"], facts["weights"]) == ("ties", [0.4, 0.7], [0.6, 1.3])


def test_of_equal_magnitudes_the_first_stay(tmp_path: Path) -> None:
    """As many as the density says, also where the smallest that stays is there more often."""
    base = torch.zeros(3_000_000)
    other = torch.where(torch.arange(len(base)) % 3 == 0, 2.0, 1.0)
    for name, tensor in (("base", base), ("other", other)):
        (tmp_path / name).mkdir()
        save_file({"weight": tensor}, tmp_path / name / "model.safetensors")
    zckpt.average(
        [tmp_path / "other"],
        tmp_path / "out",
        task_vector=tmp_path / "base",
        method="ties",
        density=[0.5],
        progress=False,
    )
    found = read(tmp_path / "out")["weight"]
    assert int((found != 0).sum()) == 1_500_000 and bool((found[::3] == 2).all())
    last = int(found.nonzero().max())
    assert bool((found[:750_000] != 0).all()) and torch.equal(found[750_001::3], torch.zeros_like(found[750_001::3]))
    assert last == 2_999_997


def test_dare(homes: list[str], tmp_path: Path) -> None:
    """Random numbers stay, as many as the density says, and are multiplied so that their magnitudes add up to what they did."""
    base, other, _ = map(read, homes)

    def dare(out: str, **more: Any) -> dict[str, torch.Tensor]:
        how: dict[str, Any] = {
            "task_vector": homes[0],
            "method": "dare_linear",
            "dtype": "fp32",
            "progress": False,
            **more,
        }
        zckpt.average([homes[1]], tmp_path / out, **how)
        return read(tmp_path / out)

    found, again, others = dare("a", density=[0.3]), dare("b", density=[0.3]), dare("c", density=[0.3], seed=1)
    assert all(torch.equal(found[name], again[name]) for name in SHAPES) and not torch.equal(
        *(x["model.embed_tokens.weight"] for x in (found, others))
    )
    stays = 0
    for name in SHAPES:
        moved, delta = found[name] - base[name], other[name] - base[name]
        mask = moved != 0
        stays += int(mask.sum())
        want = torch.where(mask, delta, 0) * (delta.abs().sum() / delta[mask].abs().sum())
        assert torch.allclose(moved, want, rtol=1e-4, atol=1e-5), name
    assert abs(stays / sum(tensor.numel() for tensor in base.values()) - 0.3) < 0.03
    whole = dare("d", density=[1.0], method="dare_ties")
    assert all(torch.allclose(whole[name], other[name], atol=1e-6) for name in SHAPES)


FILTERS = [{"filter": "attn", "value": [0.2, 0.8]}, {"value": 0.5}]
RECIPES: dict[str, dict[str, Any]] = {
    "linear": {"models": [0, 1, 2], "own": {"weight": [0.2, 0.9]}},
    "task_arithmetic": {"models": [1, 2], "own": {"weight": 0.4}, "parameters": {"normalize": True, "lambda": 0.7}},
    "ties": {"models": [0, 1, 2], "own": {"weight": 0.7, "density": FILTERS}, "parameters": {"int8_mask": True}},
    "dare_ties": {"models": [1, 2], "own": {"weight": 0.5, "density": 1}},
    "slerp": {"slices": [0, 1], "parameters": {"t": FILTERS}},
}


def recipe(method: str, homes: list[str], path: Path, **more: Any) -> Path:
    how = dict(RECIPES[method])
    said: dict[str, Any] = {
        "merge_method": method,
        "dtype": "float32",
        "out_dtype": "bfloat16",
        "parameters": how.get("parameters"),
    }
    if "slices" in how:
        said["slices"] = [{"sources": [{"model": homes[n], "layer_range": [0, 3]} for n in how["slices"]]}]
    else:
        said["models"] = [{"model": homes[n], "parameters": how["own"]} for n in how["models"]]
    if method != "linear":
        said["base_model"] = homes[0]
    path.write_text(yaml.safe_dump({key: value for key, value in {**said, **more}.items() if value is not None}))
    return path


@pytest.mark.parametrize("method", RECIPES)
def test_a_recipe_of_mergekit(method: str, homes: list[str], tmp_path: Path) -> None:
    zckpt.average([recipe(method, homes, tmp_path / "merge.yaml")], tmp_path / "out", progress=False)
    models = [read(home) for home in homes]
    for name, found in read(tmp_path / "out").items():
        base, *others = (model[name] for model in models)
        layer = int(name.split(".")[2]) / 2 if ".layers." in name else 0.0
        t = 0.2 + 0.6 * layer if "attn" in name else 0.5
        if method == "linear":
            want = (base + others[0] + others[1]) / 3
        elif method == "task_arithmetic":
            want = base + 0.7 * (others[0] + others[1] - 2 * base) / 2
        elif method == "slerp":
            angle = torch.acos((base / base.norm() * (others[0] / others[0].norm())).sum())
            want = (torch.sin((1 - t) * angle) * base + torch.sin(t * angle) * others[0]) / torch.sin(angle)
        elif method == "dare_ties":
            deltas = torch.stack([other - base for other in others]) * 0.5
            want = base + (deltas * (deltas.sign() == torch.where(deltas.sum(0) >= 0, 1, -1))).sum(0)
        else:
            want = ties(base, others, [0.7, 0.7], [t, t])
        assert found.dtype == torch.bfloat16
        assert bool(((found.float() - want).abs() <= want.abs() * 2**-7 + 1e-6).all()), name  # one ulp of bf16


@pytest.mark.filterwarnings("ignore")  # of mergekit and its libraries among themselves
@pytest.mark.skipif(not MERGEKIT.is_dir(), reason="`make .make/mergekit` installs it")
@pytest.mark.parametrize("method", RECIPES)
def test_mergekit_itself(method: str, homes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(MERGEKIT)])
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    transformers = pytest.importorskip("transformers")
    paths = []
    for number in range(3):
        torch.manual_seed(number)
        sizes = {
            "vocab_size": 40,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
        }
        paths.append(str(tmp_path / str(number)))
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(paths[-1])
    file = recipe(method, paths, tmp_path / "merge.yaml")
    config = MergeConfiguration.model_validate(yaml.safe_load(file.read_text()))
    run_merge(config, str(tmp_path / "theirs"), MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True))
    zckpt.average([file], tmp_path / "ours", progress=False)
    theirs, ours = (load_file(next((tmp_path / out).glob("*.safetensors"))) for out in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    for name, want in theirs.items():
        assert bool(((ours[name].float() - want.float()).abs() <= want.float().abs() * 2**-7).all()), name


@pytest.mark.parametrize(("change", "kind", "words"), [
    ({"merge_method": "della"}, UnsupportedError, ["merge_method", "della", "dare_ties"]),
    ({"chat_template": "auto"}, UnsupportedError, ["chat_template"]),
    ({"tokenizer_source": "union"}, UnsupportedError, ["tokenizer_source", "union"]),
    ({"dtype": "float64", "out_dtype": None}, UnsupportedError, ["dtype", "float64"]),
    ({"parameters": {"gamma": 0.1}}, UnsupportedError, ["gamma"]),
    ({"models": [{"model": "nobody/nothing"}]}, UsageError, ["nobody/nothing", "YAML"]),
    ({"models": [{"model": "a+b"}]}, UnsupportedError, ["LoRA", "a+b"]),
    ({"models": 3}, CorruptError, ["list of models"]),
    ({"models": None, "slices": [{}, {}]}, UnsupportedError, ["slices"]),
    ({"base_model": None}, CorruptError, ["number of models"]),
])  # fmt: skip
def test_what_is_not_done_is_named(
    change: dict[str, Any], kind: Any, words: list[str], homes: list[str], tmp_path: Path
) -> None:
    file = recipe("ties", homes, tmp_path / "merge.yml", **change)
    with pytest.raises(kind) as caught:
        zckpt.average([file], tmp_path / "out")
    assert all(word in str(caught.value) for word in (*words, str(file))) or "nobody/nothing" in words
    assert not (tmp_path / "out").exists()


def test_parameters_that_are_missing_or_wrong(homes: list[str], tmp_path: Path) -> None:
    for own, word in (
        ({}, "weight"),
        ({"weight": "much"}, "much"),
        ({"weight": [{"filter": "attn", "value": 1}]}, "embed_tokens"),
    ):
        models = [{"model": homes[1], "parameters": own}]
        with pytest.raises(CorruptError, match=word):
            zckpt.average([recipe("ties", homes, tmp_path / "m.yaml", models=models)], tmp_path / "out", progress=False)
    for more, word in (
        ({"weights": [1.0]}, "beside a YAML"),
        ({"method": "ties", "density": [1.5], "task_vector": homes[0]}, "--density"),
    ):
        with pytest.raises(UsageError, match=word):
            paths = [tmp_path / "m.yaml"] if "weights" in more else homes[1:]
            zckpt.average(paths, tmp_path / "out", progress=False, **more)
    for more in ({"method": "ties"}, {"density": [0.5]}):
        with pytest.raises(UsageError, match=r"--method|--task-vector"):
            zckpt.average(homes, tmp_path / "out", progress=False, **more)
