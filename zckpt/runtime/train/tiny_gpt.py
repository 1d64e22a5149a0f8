"""A small language model over bytes: GPT-2, in plain torch, under the names that `transformers` gives its parameters.

For `zckpt train --model tiny-gpt`: to try things without a model at hand. What it is exported to, `from_pretrained` loads.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zckpt.base.dataclass import dataclass

Output = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """The model's sizes, and further facts for `transformers`."""

    vocab_size: int = 256
    n_positions: int = 128
    n_embd: int = 128
    n_layer: int = 4
    n_head: int = 4

    def to_dict(self) -> dict[str, Any]:
        """The contents of `config.json`."""
        fixed = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "tie_word_embeddings": True}
        drop = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        ends = {"bos_token_id": None, "eos_token_id": None}
        return {**fixed, **asdict(self), "activation_function": "gelu_new", **drop, **ends}

    def to_json_string(self) -> str:
        """The text of `config.json`."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


class Projection(nn.Module):
    """A linear layer with a weight of shape (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (.., inputs) to (.., outputs)."""
        return x @ self.weight + self.bias


class TransformerBlock(nn.Module):
    """One layer: causal self-attention, then a two-layer perceptron."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        width, self.heads = config.n_embd, config.n_head
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": Projection(width, 3 * width), "c_proj": Projection(width, width)})
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": Projection(width, 4 * width), "c_proj": Projection(4 * width, width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, positions, width), and back."""
        parts = self.attn["c_attn"](self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).flatten(-2))
        wide = functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        out: torch.Tensor = x + self.mlp["c_proj"](wide)
        return out


class Transformer(nn.Module):
    """The model without its head."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        with torch.no_grad():
            self.wte.weight.normal_(std=0.02)
            self.wpe.weight.normal_(std=0.02)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Shape (batch, positions) to (batch, positions, width)."""
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.h:
            x = block(x)
        out: torch.Tensor = self.ln_f(x)
        return out


class TinyGPT(nn.Module):
    """The model; `lm_head` is tied to the embedding."""

    def __init__(self, config: TinyConfig | None = None) -> None:
        super().__init__()
        self.config = config or TinyConfig()
        self.transformer = Transformer(self.config)
        self.lm_head = nn.Linear(self.config.n_embd, self.config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        """Logits, shape (batch, positions, vocabulary); with labels, the mean loss of each next byte too."""
        logits = self.lm_head(self.transformer(input_ids))
        if labels is None:
            return {"logits": logits}
        wide = logits[:, :-1].float().flatten(0, 1)
        return {"loss": functional.cross_entropy(wide, labels[:, 1:].flatten()), "logits": logits}
