"""Adapters out of real DeepSpeed checkpoints of real PEFT models: equal to what PEFT itself saves, and loaded by it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file, save_file

import zckpt
from zckpt.base.errors import CorruptError, UnsupportedError, UsageError
from zckpt.jobs.declarations import TO_PEFT
from zckpt.jobs.to_peft import prepare
from zckpt.naming.adapter_names import found_in

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

# PEFT and transformers warn of each other's coming changes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    # the fixtures' PEFT may be the newer one
    pytest.mark.filterwarnings("ignore:Unexpected keyword arguments:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),  # 0.18
]

HOMES = sorted(path.parent for path in (Path(__file__).parents[2] / "fixtures" / "peft").glob("*/how_peft.json"))
HOME = {home.name: home for home in HOMES}
CASES = [(home, name) for home in HOMES for name in json.loads((home / "how_peft.json").read_text())["adapters"]]


def id_of(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def saved_by_peft(home: Path, adapter: str) -> Path:
    return home / "adapter" if adapter == "default" else home / "adapter" / adapter


def is_half(home: Path) -> bool:
    return bool(json.loads((home / "how_peft.json").read_text())["half"])


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert same_bits(found[name], tensor), name


def test_there_are_fixtures_of_all_stages() -> None:
    assert {json.loads((home / "how_peft.json").read_text())["stage"] for home in HOMES} == {1, 2, 3}


@pytest.mark.parametrize(("home", "adapter"), CASES[:3], ids=id_of)
def test_what_peft_itself_wrote_is_an_adapter(home: Path, adapter: str, tmp_path: Path) -> None:
    """`to-peft` takes it, `verify` compares it, and `to-*` says that it is not a model, instead of sending people back."""
    own = saved_by_peft(home, adapter)
    zckpt.to_peft(own, tmp_path / "out", dtype="bf16")
    wanted = load_file(own / "adapter_model.safetensors")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert_same(found, {name: tensor.bfloat16() for name, tensor in wanted.items()})
    mine, theirs = ((path / "adapter_config.json").read_bytes() for path in (tmp_path / "out", own))
    assert mine == theirs
    assert zckpt.verify(own, tmp_path / "out").ok
    with pytest.raises(zckpt.UsageError, match="adapter of PEFT") as raised:
        zckpt.convert(own, tmp_path / "model")
    assert "to-peft" in raised.value.remedy and not (tmp_path / "model").exists()


@pytest.mark.parametrize(("home", "adapter"), CASES, ids=id_of)
def test_the_same_bytes_as_peft_itself(home: Path, adapter: str, tmp_path: Path) -> None:
    report = zckpt.to_peft(
        home / "checkpoint", tmp_path / "out", adapter=adapter, dtype="bf16" if is_half(home) else "fp32"
    )
    own = saved_by_peft(home, adapter)
    assert_same(load_file(tmp_path / "out" / "adapter_model.safetensors"), load_file(own / "adapter_model.safetensors"))
    assert {name for name, _ in report.files} == {"adapter_model.safetensors", "adapter_config.json"}
    config = (tmp_path / "out" / "adapter_config.json").read_bytes()
    assert config == (own / "adapter_config.json").read_bytes()
    assert report.adapter == adapter
    assert len(report.untrained) == (2 if adapter == "other" else 0)


@pytest.mark.parametrize("home", HOMES, ids=id_of)
def test_fp32_is_the_masters(home: Path, tmp_path: Path) -> None:
    """By names that this test makes for itself."""
    adapter = next(name for h, name in CASES if h == home)
    masters = load_file(home / "masters.safetensors")
    zckpt.to_peft(home / "checkpoint", tmp_path / "out", adapter=adapter)
    wanted = {}
    for name, tensor in masters.items():
        name = name.replace(f".modules_to_save.{adapter}", "").replace(f".{adapter}", "")
        wanted[name.replace("magnitude_vector.weight", "magnitude_vector")] = tensor
    assert_same(load_file(tmp_path / "out" / "adapter_model.safetensors"), wanted)


def base_of(home: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(home / "base", dtype="auto")


@pytest.mark.parametrize(("home", "adapter"), CASES, ids=id_of)
def test_peft_loads_it_and_gives_the_live_logits(home: Path, adapter: str, tmp_path: Path) -> None:
    half = is_half(home)
    out = tmp_path / "out"
    zckpt.to_peft(home / "checkpoint", out, adapter=adapter, dtype="bf16" if half else "fp32")
    model = peft.PeftModel.from_pretrained(base_of(home), out, autocast_adapter_dtype=not half).eval()
    loaded = peft.set_peft_model_state_dict(model, peft.load_peft_weights(out, device="cpu"))
    missing = [name for name in loaded.missing_keys if (found := found_in(name)) and found[0] == "default"]
    assert not missing and not loaded.unexpected_keys
    assert any(".lora_A.default." in name for name in model.state_dict())
    own = peft.PeftModel.from_pretrained(
        base_of(home), saved_by_peft(home, adapter), autocast_adapter_dtype=not half
    ).eval()
    stored = load_file(home / "logits.safetensors")
    with torch.no_grad():
        logits = model(input_ids=stored["input_ids"]).logits.float()
        assert torch.equal(logits, own(input_ids=stored["input_ids"]).logits.float())
        plain = base_of(home)(input_ids=stored["input_ids"]).logits.float()
    # The stored ones are of the live engine, perhaps on a processor with other kernels: equal within rounding.
    assert torch.allclose(logits, stored[adapter], atol=2e-2 if half else 1e-5)
    assert torch.equal(plain, logits) == (adapter == "other")


@pytest.mark.parametrize("name", ["lora_zero2", "several_zero3"])
def test_the_base_is_not_read(name: str, tmp_path: Path) -> None:
    """Its bytes become noise, and nothing changes; the plan reads what it writes."""
    home = Path(shutil.copytree(HOME[name], tmp_path / name))
    prepared = prepare(str(home / "checkpoint"), str(tmp_path / "out"), TO_PEFT.ask(adapter="default"))
    assert prepared.plan.bytes_read == prepared.catalog.numel * 4
    every = prepared.opened.catalog.tensors
    base = [entry for tensor, entry in every.items() if found_in(tensor) is None]
    assert len(base) > 10
    for entry in base:
        for fragment in entry.fragments:
            with open(str(fragment.store), "r+b") as file:
                file.seek(fragment.byte_offset)
                file.write(b"\xff" * fragment.numel * entry.dtype.itemsize)
    zckpt.to_peft(home / "checkpoint", tmp_path / "out", adapter="default")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert_same(found, load_file(home / "adapter" / "adapter_model.safetensors"))


@pytest.mark.parametrize(("home", "adapter"), CASES, ids=id_of)
def test_verify_knows_an_adapter(home: Path, adapter: str, tmp_path: Path) -> None:
    zckpt.to_peft(home / "checkpoint", tmp_path / "out", adapter=adapter)
    found = zckpt.verify(home / "checkpoint", tmp_path / "out")
    assert found.ok
    excluded = json.loads((home / "how_peft.json").read_text())["exclude_frozen"]
    assert found.deletable is not None and found.deletable[0] == excluded, "the base must not be thought safe"
    path = tmp_path / "out" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert not zckpt.verify(home / "checkpoint", tmp_path / "out").ok


def tiny() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


QV = {"target_modules": ["q_proj", "v_proj"]}
METHODS = {
    "lora": lambda: peft.LoraConfig(**QV, r=2, use_rslora=True),
    "lora of all biases": lambda: peft.LoraConfig(**QV, r=2, bias="all", lora_bias=True),
    "lora of tokens": lambda: peft.LoraConfig(**QV, r=2, trainable_token_indices={"embed_tokens": [1, 2]}),
    "adalora": lambda: peft.AdaLoraConfig(**QV, total_step=10, init_r=3),
    "loha": lambda: peft.LoHaConfig(**QV, r=2),
    "lokr": lambda: peft.LoKrConfig(**QV, r=2),
    "ia3": lambda: peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": lambda: peft.OFTConfig(**QV, oft_block_size=4),
    "boft": lambda: peft.BOFTConfig(target_modules=["q_proj"], boft_block_size=4),
    "hra": lambda: peft.HRAConfig(**QV, r=2),
    "miss": lambda: peft.MissConfig(**QV, r=2),
    "c3a": lambda: peft.C3AConfig(target_modules=["q_proj"], block_size=4),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 3], target_modules=["embed_tokens"]),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=2, save_projection=False),
    "road": lambda: peft.RoadConfig(**QV, group_size=4),
    "waveft": lambda: peft.WaveFTConfig(**QV, n_frequency=4),
    "gralora": lambda: peft.GraloraConfig(target_modules=["q_proj"], r=4, gralora_k=2),
    "delora": lambda: peft.DeloraConfig(target_modules=["q_proj"], r=2),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def whole_state(model: Any, path: Path) -> dict[str, torch.Tensor]:
    """All of a PEFT model in one torch file, every number another."""
    generator = torch.Generator().manual_seed(7)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    path.mkdir(exist_ok=True)
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    return peft.get_peft_model_state_dict(model, save_embedding_layers=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_named_as_peft_names_it(method: str, tmp_path: Path) -> None:
    if method == "gralora":
        pytest.importorskip("peft", minversion="0.19")
    model = peft.get_peft_model(tiny(), METHODS[method]())
    wanted = whole_state(model, tmp_path / "model")
    model.peft_config["default"].save_pretrained(tmp_path / "model")
    zckpt.to_peft(tmp_path / "model", tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "adapter_model.safetensors"), wanted)


def test_tied_modules_have_both_names(tmp_path: Path) -> None:
    config = peft.LoraConfig(**QV, r=2, modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    model = peft.get_peft_model(tiny(), config)
    wanted = whole_state(model, tmp_path / "model")
    zckpt.to_peft(tmp_path / "model", tmp_path / "out")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert_same(found, wanted)
    assert {"base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"} <= found.keys()


def test_a_model_that_adapters_were_injected_into(tmp_path: Path) -> None:
    """As transformers' `add_adapter` does: no `base_model.model.` in the model, but in the file."""
    model = peft.inject_adapter_in_model(peft.LoraConfig(**QV, r=2), tiny(), "mine")
    (tmp_path / "model").mkdir()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    wanted = peft.get_peft_model_state_dict(model, adapter_name="mine")
    zckpt.to_peft(tmp_path / "model", tmp_path / "out")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert_same(found, {f"base_model.model.{name}": tensor for name, tensor in wanted.items()})


@pytest.mark.parametrize(
    ("name", "adapter", "saved"),
    [
        ("base_model.model.a.lora_A.x.weight", "x", "base_model.model.a.lora_A.weight"),
        ("wrapped.base_model.model.a.lora_A.x.weight", "x", "base_model.model.a.lora_A.weight"),
        ("base_model.model.a.lora_B.lora_x.weight", "lora_x", "base_model.model.a.lora_B.weight"),
        ("base_model.model.a.lora_magnitude_vector.x", "x", "base_model.model.a.lora_magnitude_vector"),
        ("base_model.model.score.modules_to_save.x.0.weight", "x", "base_model.model.score.0.weight"),
        ("base_model.model.score.original_module.0.weight", None, None),
        ("base_model.model.a.base_layer.weight", None, None),
        ("rwkv.time_mix.lora_A.weight", None, None),
    ],
)
def test_names(name: str, adapter: str | None, saved: str | None) -> None:
    assert (found_in(name) or (None, None)) == (adapter, saved)


def refused(kind: type[Exception], checkpoint: Path, tmp_path: Path, **words: Any) -> Any:
    with pytest.raises(kind) as caught:
        zckpt.to_peft(checkpoint, tmp_path / "out", **words)
    assert not (tmp_path / "out").exists()
    return caught.value


def test_several_adapters_and_none_chosen(tmp_path: Path) -> None:
    error = refused(UsageError, HOME["several_zero3"] / "checkpoint", tmp_path)
    assert error.found == "'default', 'other'" and "--adapter default" in error.remedy
    error = refused(UsageError, HOME["several_zero3"] / "checkpoint", tmp_path, adapter="third")
    assert "third" in error.what and "other" in error.found


def test_no_adapter(tmp_path: Path) -> None:
    home = HOME["lora_zero2"].parents[1] / "zero2" / "bf16_w2" / "checkpoint"
    assert "to-bf16" in refused(UsageError, home, tmp_path).remedy


def test_without_a_config_a_sentence_says_what_to_write(tmp_path: Path) -> None:
    home = Path(shutil.copytree(HOME["lora_zero3"] / "checkpoint", tmp_path / "checkpoint"))
    (home / "adapter_config.json").unlink()
    report = zckpt.to_peft(home, tmp_path / "out")
    assert "r = 3 and target_modules = ['q_proj', 'v_proj']" in report.notes[-1]
    assert [name for name, _ in report.files] == ["adapter_model.safetensors"]


def test_another_adapters_config_is_not_taken(tmp_path: Path) -> None:
    home = Path(shutil.copytree(HOME["several_zero3"] / "checkpoint", tmp_path / "checkpoint"))
    (home / "other" / "adapter_config.json").unlink()
    report = zckpt.to_peft(home, tmp_path / "out", adapter="other")
    assert "adapter_config.json of 'other'" in report.notes[0]
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    home = Path(shutil.copytree(HOME["lora_zero2"] / "checkpoint", tmp_path / "checkpoint"))
    for text in ("{", "[]"):
        (home / "adapter_config.json").write_text(text)
        assert "adapter_config.json" in refused(CorruptError, home, tmp_path).file


@pytest.mark.parametrize("told", [{"peft_type": "P_TUNING"}, {"peft_type": "ADALORA", "rank_pattern": {"q": 1}}])
def test_files_that_are_computed_are_refused(told: dict[str, Any], tmp_path: Path) -> None:
    home = Path(shutil.copytree(HOME["lora_zero2"] / "checkpoint", tmp_path / "checkpoint"))
    (home / "adapter_config.json").write_text(json.dumps(told))
    assert told["peft_type"] in refused(UnsupportedError, home, tmp_path).found


def test_a_prompt_encoder_that_must_be_run(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    names = ["prompt_encoder.default.embedding.weight", "prompt_encoder.default.mlp_head.0.weight"]
    save_file({name: torch.rand(2, 2) for name in names}, tmp_path / "in" / "model.safetensors")
    assert "mlp_head" in refused(UnsupportedError, tmp_path / "in", tmp_path).found


def test_what_was_trained_beside_the_adapter_is_named(tmp_path: Path) -> None:
    home = HOME["dora_zero1"] / "checkpoint"
    assert not any("stay out" in note for note in zckpt.to_peft(home, tmp_path / "a").notes)
    bare = Path(shutil.copytree(home, tmp_path / "bare"))
    (bare / "style" / "adapter_config.json").unlink()  # nothing says that biases belong to it
    notes = zckpt.to_peft(bare, tmp_path / "b").notes
    assert any("stay out" in note and "base_layer.bias" in note for note in notes)


def test_the_command(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "zckpt",
        "to-peft",
        str(HOME["several_zero3"] / "checkpoint"),
        str(tmp_path / "out"),
    ]
    planned = subprocess.run([*command, "--adapter", "other", "--dry-run"], capture_output=True, text=True, check=True)
    assert "adapter 'other', 4 tensors as fp32" in planned.stdout and not (tmp_path / "out").exists()
    done = subprocess.run(
        [*command, "--adapter", "other", "--dtype", "bf16", "--json"], capture_output=True, text=True, check=True
    )
    facts = json.loads(done.stdout)
    assert (facts["adapter"], facts["dtype"], facts["tensors"], facts["numel"]) == ("other", "bf16", 4, 80)
    assert len(facts["untrained"]) == 2 and "were" not in facts["untrained"][0]
    assert "all zeros" in done.stderr
    failed = subprocess.run([*command, "--overwrite"], capture_output=True, text=True, check=False)
    assert failed.returncode == 2 and "'default', 'other'" in failed.stderr
