"""Finds the model that `--model` names: how it is built, its tokenizer, and its weights, if it has any.

For `train`. transformers is needed for any model but tiny-gpt, which is here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError, UsageError

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


TINY = "tiny-gpt"
_LONGEST = 1024
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is known but not built.

    Attributes:
        build: makes it, with random weights in fp32.
        length: tokens of a sample: what it was made for, at most 1,024.
        tokenizer: of transformers; None if its tokens are bytes.
        weights: the directory of its weights; None for a model that begins with random ones.
    """

    build: Callable[[], nn.Module]
    length: int
    tokenizer: Any
    weights: str | None


def find_model(name: str) -> Model:
    """The model with this name. `name`: "tiny-gpt", a `config.json`, or a directory that has one: of transformers, with
    or without weights. Raises UsageError if there is no such model, or it has no tokenizer and too few tokens for
    bytes; UnsupportedError if transformers is not installed.
    """
    if name == TINY:
        return Model(TinyGPT, TinyConfig().n_positions, None, None)
    directory = os.path.dirname(os.path.abspath(name)) if os.path.isfile(name) else name
    path = name if os.path.isfile(name) else os.path.join(name, "config.json")
    if not os.path.isfile(path):
        raise UsageError(
            "no such model", file=name, expected=f"{TINY!r}, a config.json, or a directory that has one",
            remedy="Correct --model. To train a model of the hub, download it first: hf download NAME --local-dir DIR.",
        )  # fmt: skip
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise UnsupportedError(
            "needs transformers, which is not installed", file=name,
            remedy=f"Run: pip install transformers. Or pass --model {TINY}.",
        ) from error  # fmt: skip
    try:
        config = AutoConfig.from_pretrained(path)
    except (ValueError, KeyError, OSError, json.JSONDecodeError) as error:
        raise UsageError(
            "transformers cannot make a model of this config", file=path, found=str(error),
            remedy="Update transformers, or pass the directory or config.json of another causal language model.",
        ) from error  # fmt: skip
    whole = not os.path.isfile(name)
    tokenizer = None
    if whole and any(os.path.isfile(os.path.join(directory, file)) for file in _TOKENIZERS):
        tokenizer = AutoTokenizer.from_pretrained(directory)
    text = config.get_text_config()
    vocabulary = int(text.vocab_size)
    if tokenizer is None and vocabulary < 256:
        raise UsageError(
            "has no tokenizer, and too few tokens for bytes", file=name, found=f"{vocabulary} tokens",
            expected="at least 256", remedy="Add the tokenizer's files to the directory, or choose another model.",
        )  # fmt: skip
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or _LONGEST
    weights = directory if whole and any(os.path.isfile(os.path.join(directory, file)) for file in _WEIGHTS) else None
    return Model(
        lambda: AutoModelForCausalLM.from_config(config, dtype="float32"),  # type: ignore[no-untyped-call]
        min(int(longest), _LONGEST), tokenizer, weights,
    )  # fmt: skip
