"""Adapters that real Megatron Bridge saves on two ranks: merged, the model says what Bridge's own model with the adapter says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import MEGATRON, run_ranks
from safetensors.torch import load_file, save_file

import zckpt
from zckpt import LoraMerge, Options

WORKER = Path(__file__).parent / "bridge_worker.py"
BRIDGE = Path(__file__).parents[2] / ".make" / "megatron-bridge"
"""Where `make .make/megatron-bridge` puts it."""
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not BRIDGE.is_dir(), reason="`make .make/megatron-bridge` installs it"),
]

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "vocab_size": 131, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "head_dim": 8,
}  # fmt: skip
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen3": {}, "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}, "Qwen3Moe": ROUTED,
    "Qwen2Moe": {**ROUTED, "shared_expert_intermediate_size": 24}, "DeepseekV3": LATENT,
}  # fmt: skip
EVERY = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
OF_LATENT = [
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_proj",
    *EVERY[2:],
]
ONE, TP2 = (1, 1, 1), (2, 1, 1)
CASES: list[tuple[str, tuple[int, int, int], str, str, list[str]]] = [
    ("Llama", TP2, "stacked", "dora.DoRA", ["linear_qkv", "linear_fc1"]),
    ("Qwen3", ONE, "numbered", "dora.DoRA", EVERY),
    ("Qwen3Moe", TP2, "stacked", "lora.LoRA", EVERY),
    ("Mixtral", TP2, "numbered", "lora.LoRA", EVERY),
    ("Qwen2Moe", TP2, "stacked", "lora.LoRA", EVERY),
    ("DeepseekV3", TP2, "numbered", "lora.LoRA", OF_LATENT),
]
"""Family, ranks, layers, adapter and modules. Bridge 0.3.1 fails to save experts of several expert ranks."""

TOLERANCE = 1e-5
"""How far logits may be apart, which are of the order of 1: both compute in fp32, in another order."""


def test_the_merged_model_says_what_bridges_own_says(tmp_path: Path) -> None:
    """The run's directory is named, not the save's."""
    jobs: list[dict[str, Any]] = []
    for number, (name, sizes, layers, kind, targets) in enumerate(CASES):
        home = tmp_path / f"{number}"
        torch.manual_seed(number)
        model = getattr(transformers, f"{name}ForCausalLM")(
            getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name]})
        )
        with torch.no_grad():
            for own, tensor in model.named_parameters():
                tensor.normal_(1.0 if "norm" in own else 0.0, 0.1)
        model.save_pretrained(home / "hf")
        save_file({"words": torch.randint(0, SMALL["vocab_size"], (2, 12))}, home / "words.safetensors")
        zckpt.to_mcore(
            home / "hf", home / "base", tensor_parallel=sizes[0], numbered_layers=layers == "numbered", progress=False
        )
        arguments = {"dim": 4, "alpha": 6, "target_modules": targets}
        jobs.append({
            "config": str(home / "hf"), "checkpoint": str(home / "base"), "sizes": sizes, "layers": layers, "kind": kind,
            "arguments": arguments, "words": str(home / "words.safetensors"), "out": str(home / "run"),
            "target": f"megatron.bridge.models.{name}ModelProvider",
        })  # fmt: skip
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    run_ranks(2, path, WORKER, MEGATRON)
    told = json.loads(Path(f"{path}.told").read_text())[0]
    for number, (case, said) in enumerate(zip(CASES, told, strict=True)):
        home = tmp_path / f"{number}"
        lora = LoraMerge(base=home / "hf")
        zckpt.convert(home / "run", home / "out", dtype="fp32", options=Options(lora=lora), progress=False)
        assert zckpt.verify(home / "run", home / "out", lora=lora, progress=False).ok, case
        model = transformers.AutoModelForCausalLM.from_pretrained(home / "out")
        with torch.no_grad():
            found = model(load_file(home / "words.safetensors")["words"]).logits
            before = transformers.AutoModelForCausalLM.from_pretrained(home / "hf")(
                load_file(home / "words.safetensors")["words"]
            ).logits
        wanted = torch.tensor(said)[..., : SMALL["vocab_size"]]
        assert float((found - wanted).abs().max()) < TOLERANCE < float((before - wanted).abs().max()), case
