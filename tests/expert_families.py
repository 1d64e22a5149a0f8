"""Random small models of transformers' families with experts, whose every number is its own."""

from __future__ import annotations

from typing import Any

import torch

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip

ROUTED = {"moe_intermediate_size": 8, "num_experts_per_tok": 2, "intermediate_size": 20}

LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip

DENSE_FIRST = {"n_routed_experts": 4, "first_k_dense_replace": 1}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {**ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 12, "mlp_only_layers": [0]},
    ),
    "qwen3-moe": ("Qwen3Moe", {**ROUTED, "num_experts": 4, "head_dim": 8, "mlp_only_layers": [1]}),
    "deepseek-v2": ("DeepseekV2", {**ROUTED, **LATENT, **DENSE_FIRST, "n_shared_experts": 2}),
    "deepseek-v2 lite": ("DeepseekV2", {**ROUTED, **LATENT, **DENSE_FIRST, "n_shared_experts": 2, "q_lora_rank": None}),
    "deepseek-v3": (
        "DeepseekV3",
        {**ROUTED, **LATENT, **DENSE_FIRST, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    ),
    "glm4-moe": (
        "Glm4Moe",
        {**ROUTED, **DENSE_FIRST, "n_shared_experts": 1, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
    ),
    "gpt-oss": ("GptOss", {"intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
}
"""Family, perhaps with a word for a variant -> beginning of its classes' names, and what its config says."""


def family(kind: str) -> str:
    """The family's name, as `--to hf:NAME` takes it."""
    return kind.split()[0]


def made(kind: str, **more: Any) -> Any:
    """A model; norms and biases too are random."""
    import transformers

    name, own = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **own, **more})
    return filled(getattr(transformers, f"{name}ForCausalLM")(config))


def filled(model: Any, seed: int = 3) -> Any:
    """The model with other numbers in every parameter, and in the buffers that are saved."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and "inv_freq" not in name:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5 + 0.1)
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    """What the model says of twelve tokens."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(12).reshape(2, 6)).logits
    return found
