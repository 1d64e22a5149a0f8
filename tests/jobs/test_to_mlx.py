"""to-mlx: what mlx_lm.convert writes, byte for byte, by its stored digests, and by mlx itself where that is installed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from outputs import contents
from safetensors.torch import load_file, save_file

import zckpt
from zckpt import CastError, IncompleteError, InconsistentError, UnsupportedError, UsageError
from zckpt.engine.kernels import NativeKernels, ReferenceKernels
from zckpt.jobs.declarations import TO_MLX
from zckpt.naming.mlx_names import MLX_MODELS
from zckpt.quantized import affine

FIXTURES = Path(__file__).parents[2] / "fixtures"
TRUTH: dict[str, Any] = json.loads((FIXTURES / "mlx" / "truth.json").read_text())


def _generator() -> Any:
    found = importlib.util.spec_from_file_location("generate_mlx", FIXTURES / "generate_mlx.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


MLX = _generator()


def model(at: Path, family: str, **config: Any) -> Path:
    truth = TRUTH[family]
    found: Path = MLX.write_model(at, {**truth["config"], **config}, truth["shapes"])
    return found


def test_every_model_is_compared() -> None:
    assert TRUTH.keys() == MLX_MODELS.keys() == MLX.FAMILIES.keys()


@pytest.mark.parametrize("family", TRUTH)
def test_as_mlx_lm_converts(family: str, tmp_path: Path) -> None:
    """Tensors, config and index; and verify derives them again."""
    source = model(tmp_path / "model", family)
    for form, (bits, group) in MLX.FORMS.items():
        zckpt.to_mlx(source, out := tmp_path / form, bits=bits, group_size=group, progress=False)
        assert MLX.digests(out) == TRUTH[family]["forms"][form], form
        if form == "4 bits" or family == "granite":
            assert zckpt.verify(source, out, progress=False).ok


def test_a_few_tensors_are_stored_whole(tmp_path: Path) -> None:
    zckpt.to_mlx(model(tmp_path / "model", "llama"), tmp_path / "out", bits=4, progress=False)
    found = MLX.tensors(tmp_path / "out")
    for name, (dtype, shape, data) in TRUTH["llama"]["forms"]["whole"].items():
        assert found[name] == (dtype, shape, bytes.fromhex(data))


@pytest.mark.skipif(not MLX.MLX.is_dir(), reason="`make .make/mlx` installs it")
def test_mlx_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of fp32 and fp16, 200 shapes of matrices, and what it dequantises."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(MLX.MLX)])
    import mlx.core as mx

    for family, dtype in (("qwen3_moe", torch.float32), ("granite", torch.float16)):
        source = model(tmp_path / family, family, dtype=str(dtype).removeprefix("torch."))
        state = load_file(source / "model.safetensors")
        save_file({name: t.to(dtype) for name, t in state.items()}, source / "model.safetensors", {"format": "pt"})
        MLX.convert(source, tmp_path / f"{family}-theirs", 4, 32)
        zckpt.to_mlx(source, tmp_path / f"{family}-own", bits=4, group_size=32, progress=False)
        assert MLX.tensors(tmp_path / f"{family}-own") == MLX.tensors(tmp_path / f"{family}-theirs")
        assert MLX.digests(tmp_path / f"{family}-own") == MLX.digests(tmp_path / f"{family}-theirs")
    zckpt.convert(tmp_path / "qwen3_moe-own", tmp_path / "plain", dtype="fp32", progress=False)
    stored, plain = (
        mx.load(str(tmp_path / "qwen3_moe-own" / "model.safetensors")),
        load_file(tmp_path / "plain" / "model.safetensors"),
    )
    for module in [name.removesuffix(".scales") for name in stored if name.endswith(".scales")]:
        own = (64, 8) if module.endswith("mlp.gate") else (32, 4)
        numbers = mx.dequantize(*(stored[f"{module}.{part}"] for part in ("weight", "scales", "biases")), *own)
        assert np.array_equal(np.array(numbers), plain[f"{module}.weight"].numpy()), module
    random = np.random.default_rng(0)
    for number in range(200):
        bits, group = (2, 3, 4, 5, 6, 8)[number % 6], (32, 64, 128)[number % 3]
        x = random.standard_normal((1 + number % 7, group * (1 + number % 5))).astype(np.float32) * 10.0 ** (
            number % 9 - 7
        )
        x[0], x[-1, :group] = np.where(random.random(x.shape[1]) < 0.5, 0, x[0]), 0
        words, scales, biases = (np.array(one) for one in mx.quantize(mx.array(x), group, bits))
        packed, own = np.empty(x.size * bits // 8, np.uint8), np.empty((2, x.size // group), np.float32)
        assert NativeKernels().to_affine(x.reshape(-1), group, bits, packed, *own) == 0
        assert packed.tobytes() == words.tobytes() and own.tobytes() == scales.tobytes() + biases.tobytes(), number


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_both_engines_and_every_processor(bits: int) -> None:
    from zckpt._core import use_vector_paths

    x = np.random.default_rng(bits).integers(0, 2**32, 64 * 400, np.uint32).view(np.float32).reshape(-1, 64).copy()
    x[1:200] = np.random.default_rng(bits).standard_normal((199, 64)).astype(np.float32)
    x[0], x[1], x[2], x[3], x[4] = 0, 5, -np.abs(x[2]), x[3] * 1e-9, np.inf
    results = []
    for kernels in (NativeKernels(), NativeKernels(), ReferenceKernels()):
        packed, both = np.empty(x.size * bits // 8, np.uint8), np.empty((2, len(x)), np.float32)
        bad = kernels.to_affine(x.reshape(-1), 64, bits, packed, *both)
        rows = np.delete(packed.reshape(400, -1)[:200], 4, axis=0)  # the others hold infinity, or random bits
        results.append((rows.tobytes(), both[:, 5:200].tobytes(), bad))
        use_vector_paths(len(results) != 1)
    assert results[0] == results[1] == results[2] and 1 < results[0][2] < 202
    with pytest.raises(ValueError, match="groups of 64"):
        NativeKernels().to_affine(x.reshape(-1), 64, bits, packed[1:], *both)


def test_from_shards_of_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same from a save of FSDP's, in fp32; in parts, with several threads, and where scales are computed twice."""
    source = model(tmp_path / "model", "mixtral")
    zckpt.to_mlx(source, tmp_path / "out", bits=4, progress=False)
    zckpt.to_dcp(source, tmp_path / "dcp" / "save", options=zckpt.Options(), dtype="fp32", progress=False)
    (tmp_path / "dcp" / "save" / "config.json").write_text((source / "config.json").read_text())
    monkeypatch.setattr(affine, "_AT_ONCE", 1000)
    monkeypatch.setattr(affine, "_MOST_KEPT", 700)
    options = zckpt.Options(threads=3, strip_prefix="auto")
    zckpt.to_mlx(tmp_path / "dcp" / "save", tmp_path / "again", bits=4, options=options, progress=False)
    assert MLX.tensors(tmp_path / "out") == MLX.tensors(tmp_path / "again")
    made: list[affine.Affine] = []
    look = affine.Affine._look
    monkeypatch.setattr(affine.Affine, "_look", lambda self: (made.append(self), look(self))[1])
    monkeypatch.setattr(affine, "_MOST_KEPT", 1 << 23)
    shards = tmp_path / "shards"
    zckpt.to_mlx(source, shards, bits=4, options=zckpt.Options(max_shard_size="100KB"), progress=False)
    assert len([*shards.glob("*.safetensors")]) > 2 and MLX.tensors(shards) == MLX.tensors(tmp_path / "out")
    assert made and not any(one._kept for one in made)
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == MLX.tensors(shards).keys()
    assert zckpt.verify(source, shards, progress=False).ok


def test_a_model_of_mlx_is_a_source(tmp_path: Path) -> None:
    """Numbers are code * scale + bias, each step rounded; modules may have bits of their own."""
    for family, bits, group in (("granite", 6, 32), ("mixtral", 4, 128), ("llama", 3, 64)):
        source, out, plain = model(tmp_path / family, family), tmp_path / f"{family}-mlx", tmp_path / f"{family}-plain"
        zckpt.to_mlx(source, out, bits=bits, group_size=group, progress=False)
        zckpt.convert(out, plain, dtype="fp32", progress=False)
        stored, found = load_file(out / "model.safetensors"), load_file(plain / "model.safetensors")
        own = json.loads((out / "config.json").read_text())["quantization"]
        assert "quantization" not in json.loads((plain / "config.json").read_text())
        for name, numbers in found.items():
            module = name.removesuffix(".weight")
            if f"{module}.scales" not in stored:
                assert torch.equal(numbers, stored[name].float())
                continue
            said = own.get(module, own)
            raw = np.unpackbits(stored[name].view(torch.uint8).numpy(), axis=-1, bitorder="little")
            codes = np.packbits(raw.reshape(*numbers.shape, said["bits"]), axis=-1, bitorder="little")[..., 0]
            groups = torch.from_numpy(codes).float().reshape(*numbers.shape[:-1], -1, said["group_size"])
            scales, biases = (stored[f"{module}.{end}"].float()[..., None] for end in ("scales", "biases"))
            assert torch.equal(numbers, (groups * scales + biases).reshape(numbers.shape)), name
        assert found.keys() == {name for name in stored if not name.endswith((".scales", ".biases"))}
        assert zckpt.verify(out, plain, progress=False).ok
        assert "MLX" in dict(zckpt.inspect_checkpoint(out).catalog.source.details)["quantized"]  # type: ignore[union-attr]
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization": {"bits": 3, "group_size": 32}}))
    with pytest.raises(InconsistentError, match=r"scales of tensor .* do not fit it"):
        zckpt.convert(out, tmp_path / "x", progress=False)


def test_a_wrong_code_is_found(tmp_path: Path) -> None:
    source, out = model(tmp_path / "model", "llama"), tmp_path / "out"
    to_affine = NativeKernels.to_affine

    def wrong(self: Any, numbers: Any, size: int, bits: int, packed: Any, scales: Any, biases: Any) -> int:
        found = to_affine(self, numbers, size, bits, packed, scales, biases)
        packed[7] ^= 1
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeKernels, "to_affine", wrong)
        zckpt.to_mlx(source, out, bits=4, progress=False)
    found = zckpt.verify(source, out, progress=False)
    assert not found.ok and "differs" in "".join(found.lines())
    assert contents(out) != contents(source)


def test_what_cannot_be(tmp_path: Path) -> None:
    source, out = model(tmp_path / "model", "olmoe"), tmp_path / "out"
    state = load_file(source / "model.safetensors")

    def refused(kind: type[Exception], words: str, **more: Any) -> None:
        with pytest.raises(kind, match=words):
            zckpt.to_mlx(source, out, bits=4, progress=False, **more)
        assert not out.exists()

    def write(**changed: Any) -> None:
        save_file({**state, **changed}, source / "model.safetensors", {"format": "pt"})

    write(**{"lm_head.weight": torch.full_like(state["lm_head.weight"], float("nan"))})
    refused(CastError, "'lm_head.weight' holds NaN")
    write(**{"model.more.weight": torch.ones(2, 2)})
    refused(UnsupportedError, "1 tensor has no place in MLX's olmoe.*model.more.weight")
    write()
    refused(IncompleteError, "experts of .* are missing", options=zckpt.Options(exclude=["*.experts.1.*"]))
    (source / "config.json").write_text(json.dumps({**TRUTH["olmoe"]["config"], "model_type": "bert"}))
    refused(UnsupportedError, "model_type 'bert'")
    for bits, group in ((7, 64), (4, 16)):
        with pytest.raises(UsageError, match="MLX has no such form"):
            TO_MLX.ask(bits=bits, group_size=group)
    narrow = {
        name: [96 if size == 128 else size for size in shape] for name, shape in TRUTH["granite"]["shapes"].items()
    }
    MLX.write_model(tmp_path / "granite", TRUTH["granite"]["config"], narrow)
    with pytest.raises(UsageError, match="groups of 64 columns"):
        zckpt.to_mlx(tmp_path / "granite", out, bits=4, group_size=32, progress=False)
    latent = TRUTH["deepseek_v3"]["config"] | {"v_head_dim": 31}
    MLX.write_model(tmp_path / "deepseek", latent, TRUTH["deepseek_v3"]["shapes"])
    with pytest.raises(UsageError, match=r"what .*kv_b_proj.* consists of"):
        zckpt.to_mlx(tmp_path / "deepseek", out, bits=4, progress=False)


def test_heads_and_ends(tmp_path: Path) -> None:
    """A head that nothing says to be tied stays; a tied one goes; the end of a text is generation_config.json's."""
    source = model(tmp_path / "model", "llama")
    state = load_file(source / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, source / "model.safetensors", {"format": "pt"})
    report = zckpt.to_mlx(source, tmp_path / "tied", bits=4, dtype="fp16", progress=False)
    assert not any(name.startswith("lm_head") for name in MLX.tensors(tmp_path / "tied")) and report.tensors
    left = json.loads((tmp_path / "tied" / "zckpt.json").read_text())["left_out"]
    assert [fate["name"] for fate in left] == ["lm_head.weight"]
    config = {name: value for name, value in TRUTH["llama"]["config"].items() if name != "tie_word_embeddings"}
    (source / "config.json").write_text(json.dumps({**config, "_name_or_path": "x"}))
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    zckpt.to_mlx(source, tmp_path / "own", bits=4, progress=False)
    said = json.loads((tmp_path / "own" / "config.json").read_text())
    assert said["tie_word_embeddings"] is False and said["eos_token_id"] == [2, 3] and "_name_or_path" not in said
    assert (
        "lm_head.scales" in MLX.tensors(tmp_path / "own") and zckpt.verify(source, tmp_path / "own", progress=False).ok
    )


@pytest.mark.parametrize("kind", ["smollm3", "starcoder2", "ernie4_5", "gemma"])
def test_a_head_that_the_class_ties_goes_where_the_config_says_nothing(kind: str, tmp_path: Path) -> None:
    source = model(tmp_path / "model", kind)
    state = load_file(source / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, source / "model.safetensors", {"format": "pt"})
    config = {name: value for name, value in TRUTH[kind]["config"].items() if name != "tie_word_embeddings"}
    (source / "config.json").write_text(json.dumps(config))
    zckpt.to_mlx(source, tmp_path / "out", bits=4, progress=False)
    assert not any(name.startswith("lm_head") for name in MLX.tensors(tmp_path / "out"))


def test_a_quantised_model_is_quantised_again(tmp_path: Path) -> None:
    """What zckpt makes of a model of MLX has names of the source's parts, and is no copy of it."""
    zckpt.to_mlx(model(tmp_path / "model", "llama"), tmp_path / "4", bits=4, group_size=32, progress=False)
    zckpt.to_mlx(tmp_path / "4", tmp_path / "8", bits=8, group_size=64, progress=False)
    assert zckpt.verify(tmp_path / "4", tmp_path / "8", progress=False).ok
