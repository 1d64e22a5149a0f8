"""Adapters of experts in one parameter, as in transformers 5, and bases with single experts; and the other way round."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from zckpt import LoraMerge, Options

transformers = pytest.importorskip("transformers", minversion="5")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of these libraries among themselves

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts_per_tok": 2,
}  # fmt: skip
TOKENS = torch.arange(12)[None]


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=3))


def qwen() -> Any:
    more = {"moe_intermediate_size": 12, "num_experts": 4, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **more))


MODELS = {"mixtral": mixtral, "qwen3_moe": qwen}
NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj")}


def in_memory(model: Any, home: Path) -> Path:
    """A model as a run's checkpoint has it."""
    home.mkdir()
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, home / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (home / "config.json").write_text(json.dumps(config, default=str))
    return home


def check(model: Any, base: Path, adapter: Path, out: Path, hub: Path) -> None:
    """`model` is a PEFT model with the adapter. The output has the hub's names, PEFT's weights and PEFT's logits."""
    logits = model.eval()(TOKENS).logits
    want = model.merge_and_unload().state_dict()
    lora = LoraMerge(base=base)
    zckpt.convert(adapter, out, dtype="fp32", options=Options(lora=lora), progress=False)
    assert load_file(out / "model.safetensors").keys() == load_file(hub / "model.safetensors").keys()
    assert zckpt.verify(adapter, out, lora=lora, progress=False).ok
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    for name, tensor in loaded.state_dict().items():
        assert torch.allclose(tensor, want[name], rtol=3e-7, atol=3e-8), name
    assert torch.allclose(loaded(TOKENS).logits, logits, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_parameters_of_all_experts_and_a_base_with_each_apart(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make: Callable[[], Any] = MODELS[kind]
    base = make()
    base.save_pretrained(tmp_path / "base")
    assert any(
        f"{NAMES[kind][0]}.experts.1.{NAMES[kind][1]}" in n for n in load_file(tmp_path / "base/model.safetensors")
    )
    for number, parameters in enumerate(
        (["experts.gate_up_proj", "experts.down_proj", "gate.weight"], ["experts.down_proj"])
    ):
        config = peft.LoraConfig(
            r=2, lora_alpha=3, target_modules=["q_proj"], target_parameters=["mlp." + one for one in parameters],
            init_lora_weights=False, rank_pattern={"experts.down_proj": 3},
        )  # fmt: skip
        model = peft.get_peft_model(type(base).from_pretrained(tmp_path / "base"), config)
        model.save_pretrained(adapter := tmp_path / f"adapter{number}")
        check(model, tmp_path / "base", adapter, tmp_path / f"out{number}", tmp_path / "base")


@pytest.mark.parametrize("kind", MODELS)
def test_modules_of_single_experts_and_a_base_with_all_in_one(kind: str, tmp_path: Path) -> None:
    """The adapter is as PEFT saves it with transformers 4; with transformers 5 PEFT fuses it where it loads it."""
    torch.manual_seed(1)
    base = MODELS[kind]()
    in_memory(base, tmp_path / "memory")
    base.save_pretrained(tmp_path / "hub")
    home, *parts = NAMES[kind]
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tmp_path / "hub" / "model.safetensors").items():
        if name.endswith(("q_proj.weight", *(f"experts.{e}.{part}.weight" for e in range(4) for part in parts))):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(2, tensor.shape[1]) * 0.1
            tensors[f"{module}.lora_B.weight"] = torch.randn(tensor.shape[0], 2) * 0.1
    assert any(f"{home}.experts.2" in name for name in tensors)
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", *parts])
    config.save_pretrained(tmp_path / "adapter")
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    for number, form in enumerate(("memory", "hub")):
        model = peft.PeftModel.from_pretrained(type(base).from_pretrained(tmp_path / "hub"), tmp_path / "adapter")
        check(model, tmp_path / form, tmp_path / "adapter", tmp_path / f"out{number}", tmp_path / "hub")
    some = {name: tensor for name, tensor in tensors.items() if ".experts.1." not in name}
    save_file(some, tmp_path / "adapter" / "adapter_model.safetensors")
    found = []
    for form in ("memory", "hub"):  # the bits are the same, also of experts that the adapter leaves as they are
        options = Options(lora=LoraMerge(base=tmp_path / form))
        zckpt.convert(tmp_path / "adapter", tmp_path / f"some_{form}", options=options, progress=False)
        found.append(load_file(tmp_path / f"some_{form}" / "model.safetensors"))
    assert found[0].keys() == found[1].keys() and all(torch.equal(found[0][name], found[1][name]) for name in found[1])
