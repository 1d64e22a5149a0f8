"""A Llama of two layers whose tensors zckpt knows from its config.json: for tests of what proves weights whole."""

from __future__ import annotations

import torch

from zckpt.layouts.save.known_shapes import known_shapes

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 12, "intermediate_size": 20,
    "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 23,
    "tie_word_embeddings": False,
}  # fmt: skip
KNOWN = known_shapes(CONFIG)
assert KNOWN is not None
SHAPES = KNOWN.shapes


def weights() -> dict[str, torch.Tensor]:
    """Random ones."""
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}
