"""Sources that attack the jobs which compute: adapters, scales, GGUF and its configs and tokenizers.

Each is an error that says what is wrong, in bounded time and memory, and nothing is written but the output.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import contents
from safetensors.torch import load_file, save_file

import zckpt
from zckpt.base.errors import ZckptError
from zckpt.jobs.options import LoraMerge, Options

FIXTURES = Path(__file__).parents[2] / "fixtures"
GGUF = FIXTURES / "gguf" / "llama"
MAX_SECONDS, MAX_PEAK_BYTES = 10, 64 << 20
LAYER = "model.layers.0.self_attn.q_proj"

Attack = Callable[[Path], None]


def refused(attack: Callable[[], object], out: Path, kind: type[Exception] = ZckptError) -> str:
    """Carries out an attack, which must be an error that is cheap and leaves nothing; its words."""
    around = out.parent.parent
    before, began = contents(around), time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(kind) as caught:
            attack()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < MAX_SECONDS and peak < MAX_PEAK_BYTES
    assert contents(around) == before, "something was written"
    return str(caught.value)


def changed(file: Path, **more: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


def saved(home: Path, tensors: dict[str, torch.Tensor], config: Any) -> Path:
    home.mkdir(parents=True)
    save_file(tensors, home / "model.safetensors", {"format": "pt"})
    (home / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return home


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    return tmp_path / "deep" / "er" / "out"


# ---- adapters ----------------------------------------------------------------------------------------------------------

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


def factors(rank: int = 2) -> dict[str, torch.Tensor]:
    name = f"base_model.model.{LAYER}."
    return {f"{name}lora_A.weight": torch.ones(rank, 8), f"{name}lora_B.weight": torch.ones(8, rank)}


ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "a rank of a quintillion": ({"r": 10**18}, {}),
    "a rank that is text": ({"r": "2"}, {}),
    "no rank": ({"r": None}, {}),
    "a rank of zero": ({"r": 0}, {}),
    "alpha is infinite": ({"lora_alpha": math.inf}, {}),
    "alpha is NaN": ({"lora_alpha": math.nan}, {}),
    "alpha is a list": ({"lora_alpha": [4] * 1000}, {}),
    "a pattern without end": ({"alpha_pattern": {"(.+)+(.+)+(.+)+$x" * 3: 7}}, {}),
    "a pattern that is none": ({"rank_pattern": {"(": 2, "[": 3}, "r": 3}, {}),
    "patterns that are a list": ({"rank_pattern": [1, 2]}, {}),
    "another method": ({"peft_type": "../../x"}, {}),
    "a factor of three dimensions": ({}, {f"base_model.model.{LAYER}.lora_A.weight": torch.ones(2, 2, 8)}),
    "factors that do not meet": ({}, {f"base_model.model.{LAYER}.lora_B.weight": torch.ones(8, 3)}),
    "factors the wrong way round": ({}, {f"base_model.model.{LAYER}.lora_A.weight": torch.ones(8, 2)}),
    "factors of another model": ({}, {f"base_model.model.{LAYER}.lora_A.weight": torch.ones(2, 9)}),
    "a factor of a number": ({}, {f"base_model.model.{LAYER}.lora_A.weight": torch.ones(())}),
    "an empty factor": ({}, {f"base_model.model.{LAYER}.lora_A.weight": torch.ones(0, 8)}),
    "factors of whole numbers": ({}, {f"base_model.model.{LAYER}.lora_A.weight": torch.ones(2, 8, dtype=torch.int64)}),
    "a magnitude for nothing": ({}, {f"base_model.model.{LAYER}.lora_magnitude_vector": torch.ones(8)}),
    "a magnitude of another size": (
        {"use_dora": True}, {f"base_model.model.{LAYER}.lora_magnitude_vector": torch.ones(7)}
    ),
    "a path for a module": ({}, {"base_model.model.../../../x.lora_A.weight": torch.ones(2, 8)}),
    "a whole module of another size": ({}, {"base_model.model.lm_head.weight": torch.ones(3, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name: str, tmp_path: Path, out: Path) -> None:
    said, tensors = ADAPTERS[name]
    weights = {f"{LAYER}.weight": torch.ones(8, 8), "lm_head.weight": torch.ones(4, 8)}
    base = saved(tmp_path / "base", weights, {"model_type": "llama"})
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**CONFIG, **said}))
    save_file({**factors(), **tensors}, tmp_path / "adapter" / "adapter_model.safetensors")
    options = Options(lora=LoraMerge(adapters=(tmp_path / "adapter",)))
    refused(lambda: zckpt.convert(base, out, options=options, progress=False), out)


@pytest.mark.parametrize("config", ["[" * 100_000, "[]", "nul", '{"r": ' + "9" * 1_000_000 + "}", '{"r": 1e999}'])
def test_configs_of_adapters(config: str, tmp_path: Path, out: Path) -> None:
    base = saved(tmp_path / "base", {f"{LAYER}.weight": torch.ones(8, 8)}, {"model_type": "llama"})
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(config)
    save_file(factors(), tmp_path / "adapter" / "adapter_model.safetensors")
    options = Options(lora=LoraMerge(adapters=(tmp_path / "adapter",)))
    refused(lambda: zckpt.convert(base, out, options=options, progress=False), out)


# ---- fp8 ---------------------------------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
SCALES: dict[str, tuple[Any, torch.Tensor]] = {
    "NaN": (FP8, torch.full((2, 2), math.nan)),
    "infinity": (FP8, torch.full((2, 2), math.inf)),
    "one NaN of bf16": (FP8, torch.tensor([[1, 1], [math.nan, 1]], dtype=torch.bfloat16)),
    "whole numbers": (FP8, torch.ones(2, 2, dtype=torch.int32)),
    "of fp8": (FP8, torch.ones(2, 2).to(torch.float8_e4m3fn)),
    "too few": (FP8, torch.ones(2, 1)),
    "too many": (FP8, torch.ones(32, 32)),
    "of four dimensions": (FP8, torch.ones(1, 1, 2, 2)),
    "none": (FP8, torch.ones(0, 2)),
    "huge blocks": ({**FP8, "weight_block_size": [10**30, 10**30]}, torch.ones(2, 2)),
    "blocks of nothing": ({**FP8, "weight_block_size": [0, 0]}, torch.ones(2, 2)),
    "negative blocks": ({**FP8, "weight_block_size": [-16, -16]}, torch.ones(2, 2)),
    "blocks of text": ({**FP8, "weight_block_size": ["16", "16"]}, torch.ones(2, 2)),
    "groups that are a list": ({"quant_method": "compressed-tensors", "config_groups": [[[]]]}, torch.ones(2, 2)),
    "a method that is a list": ({"quant_method": [[1]]}, torch.ones(2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALES)
def test_scales(name: str, tmp_path: Path, out: Path) -> None:
    said, scales = SCALES[name]
    weight = torch.ones(32, 32).to(torch.float8_e4m3fn)
    tensors = {"a.weight": weight, "a.weight_scale_inv": scales}
    given = saved(tmp_path / "given", tensors, {"model_type": "llama", "quantization_config": said})
    told = refused(lambda: zckpt.convert(given, out, dtype="bf16", progress=False), out)
    assert "a.weight" in told


# ---- GGUF as a source --------------------------------------------------------------------------------------------------


def with_value(data: bytes, key: str, value: bytes) -> bytes:
    """A GGUF file with other bytes for a value of the same kind."""
    at = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4
    return data[:at] + value + data[at + len(value) :]


NUMBERS = ("block_count", "attention.head_count", "attention.head_count_kv", "embedding_length", "feed_forward_length",
           "rope.dimension_count", "vocab_size", "context_length")  # fmt: skip


@pytest.mark.parametrize("value", [0, 1, 2**32 - 1])
@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_of_a_gguf(key: str, value: int, tmp_path: Path, out: Path) -> None:
    """An error, or weights that do not depend on it; never loops or allocations of that size."""
    data = (GGUF / "llama.q8_0.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(with_value(data, f"llama.{key}", struct.pack("<I", value)))

    def attack() -> None:
        zckpt.convert(tmp_path / "x.gguf", out, progress=False)
        shutil.rmtree(out)
        raise ZckptError("is harmless")

    refused(attack, out)


@pytest.mark.parametrize("name", [b"/../../../../x", b"x" * 13, b"\xff" * 3])
def test_names_in_a_gguf(name: bytes, tmp_path: Path, out: Path) -> None:
    """They are names of tensors or of an architecture, and of no files."""
    data = (GGUF / "llama.q8_0.gguf").read_bytes()
    old = b"output.weight"
    (tmp_path / "x.gguf").write_bytes(data.replace(old, (name * 13)[: len(old)], 1))

    def attack() -> None:
        zckpt.convert(tmp_path / "x.gguf", out, progress=False)
        assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "zckpt.json"]
        shutil.rmtree(out)
        raise ZckptError("is harmless")

    refused(attack, out)


# ---- what becomes GGUF -------------------------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "heads of nothing": {"num_attention_heads": 0},
    "half a head": {"num_attention_heads": 0.5},
    "negative heads": {"num_key_value_heads": -2},
    "a size that is text": {"hidden_size": "../../x"},
    "a size that is a list": {"intermediate_size": [1] * 100},
    "words without end": {"vocab_size": 10**12},
    "a long context": {"max_position_embeddings": 2**70},
    "an infinite epsilon": {"rms_norm_eps": "inf"},
    "rotary of text": {"rope_parameters": "x"},
    "rotary of lists": {"rope_parameters": {"rope_type": ["yarn"], "factor": []}},
    "an infinite factor": {"rope_parameters": {"rope_type": "llama3", "factor": math.inf, "rope_theta": 1e4}},
    "a factor of zero": {"rope_parameters": {"rope_type": "llama3", "factor": 0, "low_freq_factor": 0, "high_freq_factor": 0,
                                             "rope_theta": 0, "original_max_position_embeddings": 0}},
    "a model type that is a list": {"model_type": ["llama"]},
}  # fmt: skip


def llama(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GGUF / "model", tmp_path / "model"))


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_for_gguf(name: str, tmp_path: Path, out: Path) -> None:
    home = llama(tmp_path)
    changed(home / "config.json", **CONFIGS[name])
    for tokenizer in (None, "none"):
        refused(
            lambda tokenizer=tokenizer: zckpt.to_gguf(
                home, out.with_suffix(".gguf"), pre_tokenizer="llama-bpe", tokenizer=tokenizer, progress=False
            ),
            out,
        )  # fmt: skip


@pytest.mark.parametrize("data", [b"", b"x", b"\xff" * 1000, b"\x0a\xff\xff\xff\xff\x0f" + bytes(100)])
def test_sentencepiece_models(data: bytes, tmp_path: Path, out: Path) -> None:
    home = Path(shutil.copytree(FIXTURES / "gguf" / "mistral" / "model", tmp_path / "model"))
    (home / "tokenizer.model").write_bytes(data)
    refused(lambda: zckpt.to_gguf(home, out.with_suffix(".gguf"), progress=False), out)


CARDS = {
    "repeats itself": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)),
    "contains itself": "a: &a [*a]\n",
    "deep": "a: " + "[" * 5000 + "]" * 5000 + "\n",
    "no yaml": "a: [\n",
    "no text": "\x00\n",
    "python": "a: !!python/object/apply:os.system ['touch /tmp/evil']\n",
}


@pytest.mark.parametrize("name", CARDS)
def test_model_cards(name: str, tmp_path: Path, out: Path) -> None:
    home = llama(tmp_path)
    (home / "README.md").write_text(f"---\n{CARDS[name]}---\n")
    refused(lambda: zckpt.to_gguf(home, out.with_suffix(".gguf"), pre_tokenizer="llama-bpe", progress=False), out)


def test_a_tokenizer_that_is_too_large(tmp_path: Path, out: Path) -> None:
    home = llama(tmp_path)
    with open(home / "tokenizer.json", "ab") as file:
        file.truncate(1 << 40)
    refused(lambda: zckpt.to_gguf(home, out.with_suffix(".gguf"), pre_tokenizer="llama-bpe", progress=False), out)


def test_a_model_is_called_by_no_path(tmp_path: Path, out: Path) -> None:
    """The name is what files in OUT are called by."""
    for number, name in enumerate(("../../../evil", "/tmp/evil", "..", "a/../../evil", "x\0y", "-" * 5000)):
        home = llama(tmp_path / str(number))
        (home / "README.md").write_text(f"---\nmodel_name: {json.dumps(name)}\n---\n")
        changed(home / "config.json", _name_or_path=name)
        for more in ({}, {"model_name": name}):
            place = out.with_name(f"o{number}")
            try:
                zckpt.to_gguf(home, place, pre_tokenizer="llama-bpe", progress=False, **more)
            except ZckptError:
                assert not place.exists()
                continue
            (made,) = place.glob("*.gguf")
            assert sorted(path.name for path in place.iterdir()) == [made.name, "zckpt.json"]
            shutil.rmtree(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*map(str, range(6)), "deep"]


# ---- what becomes fp8 --------------------------------------------------------------------------------------------------

FP8_CONFIGS: dict[str, Any] = {
    "arrays in arrays": "[" * 100_000,
    "objects in objects": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "a number of many digits": '{"model_type": "llama", "n": ' + "9" * 100_000 + "}",
    "a list": "[]",
    "a model type that is a list": '{"model_type": ["llama"]}',
}


@pytest.mark.parametrize("name", FP8_CONFIGS)
def test_configs_for_fp8(name: str, tmp_path: Path, out: Path) -> None:
    home = saved(tmp_path / "given", {f"{LAYER}.weight": torch.ones(128, 128).bfloat16()}, FP8_CONFIGS[name])
    refused(lambda: zckpt.to_fp8(home, out, progress=False), out)


def test_what_a_config_says_of_another_quantisation_does_not_stay(tmp_path: Path, out: Path) -> None:
    for number, said in enumerate(
        (7, {"quant_method": ["../../x"]}, {"quant_method": "fp8", "weight_block_size": [0, 0]})
    ):
        config = {"model_type": "llama", "quantization_config": said}
        home = saved(tmp_path / str(number), {f"{LAYER}.weight": torch.ones(128, 128).bfloat16()}, config)
        zckpt.to_fp8(home, out.with_name(f"o{number}"), progress=False)
        found = json.loads((out.with_name(f"o{number}") / "config.json").read_text())["quantization_config"]
        assert found["quant_method"] == "fp8" and found["weight_block_size"] == [128, 128]


# ---- averages and states -----------------------------------------------------------------------------------------------


def test_settings_of_an_optimizer(tmp_path: Path, out: Path) -> None:
    """Of a checkpoint's settings, JSON gets what it can hold."""
    weights = {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4)}
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested]
    (tmp_path / "given").mkdir()
    save_file(weights, tmp_path / "given" / "model.safetensors", {"format": "pt"})
    for number, value in enumerate(
        (nested, math.nan, 1j, b"x", {1, 2}, torch.ones(3), torch.float16, {(1, 2): 3}, "\ud800")
    ):
        group = {"lr": value, "params": [0, 1], "param_names": list(weights)}
        state = {n: {"step": torch.tensor(3.0), "exp_avg": t} for n, t in enumerate(weights.values())}
        torch.save({"state": state, "param_groups": [group]}, tmp_path / "given" / "optimizer.pt")
        place = out.with_name(f"o{number}")
        try:
            zckpt.to_states(tmp_path / "given", place, progress=False)
        except ZckptError:
            assert not place.exists()
            continue
        held = load_file(place / "optimizer_states.safetensors")
        assert torch.equal(held["exp_avg/a.weight"], weights["a.weight"])
        json.loads((place / "optimizer_states.json").read_text())


@pytest.mark.parametrize("weights", [[math.nan, 1], [math.inf, 1], [1e400, 1], [1], []])
def test_weights_of_an_average(weights: list[float], tmp_path: Path, out: Path) -> None:
    given = [saved(tmp_path / str(n), {"a": torch.ones(3)}, {}) for n in range(2)]
    refused(lambda: zckpt.average(given, out, weights=weights, progress=False), out)


def test_bombs_for_an_average(tmp_path: Path, out: Path) -> None:
    """Records that would unpack to more than they are, and a tensor that its file has no room for."""
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as given, zipfile.ZipFile(tmp_path / "packed.pt", "w", 8) as packed:
        for entry in given.infolist():
            packed.writestr(entry.filename, given.read(entry.filename), zipfile.ZIP_DEFLATED)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 45], "data_offsets": [0, 1 << 47]}}).encode()
    (tmp_path / "short.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    for name, words in (("packed.pt", "is compressed"), ("short.safetensors", "ends before")):
        assert words in refused(lambda name=name: zckpt.average([tmp_path / name] * 2, out, progress=False), out)


def test_names_of_an_optimizer(tmp_path: Path, out: Path) -> None:
    """Of a `FULL_STATE_DICT`: names twice, in two groups, of no weight; states of another shape."""
    weights = {"a": torch.ones(4, 4), "b": torch.ones(4)}
    states = {name: {"step": torch.tensor(1.0), "exp_avg": tensor} for name, tensor in weights.items()}
    for number, (held, groups) in enumerate(
        (
            (states, [["a", "a", "b"]]), (states, [["a", "b"], ["b"]]), (states, [["a", "b", "../../x"]]),
            (states, [["a", "module.a", "b"]]), ({"a": {"exp_avg": torch.ones(3)}}, [["a", "b"]]), ([1], [["a", "b"]]),
        )
    ):  # fmt: skip
        home = saved(tmp_path / str(number), weights, {})
        torch.save({"state": held, "param_groups": [{"params": own} for own in groups]}, home / "optimizer.bin")
        refused(lambda home=home: zckpt.to_dcp(home, out, accelerate=True, progress=False), out)
