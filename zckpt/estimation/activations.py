"""Bytes of activations: what a forward keeps for the backward, by formula, for transformers of known kinds.

For `rehearsal`. Counted are the tensors that torch's autograd keeps when transformers' own modules run with scaled dot product
attention and without a mask of padding.
[Note: bytes of a block] Per token, with c bytes of the computation's dtype, width h, queries q, keys k, inner width f:
Llama: c (4h + 2q + 2k + 4f) and 8h + 8 in fp32 for its two norms; Qwen 3 also (c + 4)(q + k) for the norms of queries and keys.
GPT-2 and BERT: c (8h + 2f), and with GPT-2's own gelu, which is made from five operations, c (8h + 5f).
Each head keeps 4 bytes for the softmax. On a GPU torch has no kernel for grouped queries in fp32: the matrix
of scores is kept, and keys and values once for each query. Dropout keeps a mask of every element that it sees: a byte on a GPU, c
bytes on a CPU, where dropout in the attention also keeps three fp32 matrices of scores.
Source: transformers 5.23; checked by tests/estimation/test_activations.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zckpt.base.dataclass import dataclass

LLAMA = frozenset(("llama", "mistral", "qwen2", "qwen3"))
BERT = frozenset(("bert", "roberta"))


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one micro batch on one rank.

    Attributes:
        embedding: kept of what is before the blocks.
        unit: kept of one block.
        unit_input: kept of one block that is computed again in the backward.
        unit_backward: needed for a moment in the backward of a block.
        head: kept of what is behind the blocks; mostly the logarithms of probabilities that the loss keeps.
        head_forward: needed for a moment in computing the loss.
        head_backward: needed for a moment in the backward of the loss.
    """

    embedding: int = 0
    unit: int = 0
    unit_input: int = 0
    unit_backward: int = 0
    head: int = 0
    head_forward: int = 0
    head_backward: int = 0


def activations_of(
    config: Mapping[str, Any], *, compute_bytes: int, micro_batch: int, length: int, accelerator: bool = True
) -> Activations | None:
    """The bytes of activations of a model; None for a kind of model that has no formula.

    Args:
        config: transformers' config of the model.
        compute_bytes: of a number in the dtype of the computation.
        micro_batch: samples per rank and forward.
        length: tokens of a sample.
        accelerator: a GPU computes.
    """
    kind, tokens, c = config.get("model_type"), micro_batch * length, compute_bytes
    if kind in LLAMA:
        h, block = _llama(config, c, length if accelerator else 0)
        vocabulary, norm = int(config["vocab_size"]), 2 * c * h + 4 * h
        inner = int(config["intermediate_size"])
    elif kind == "gpt2":
        h, heads = int(config.get("n_embd", 768)), int(config.get("n_head", 12))
        inner = int(config.get("n_inner") or 4 * h)
        own_gelu = config.get("activation_function", "gelu_new") == "gelu_new"
        block = c * (8 * h + (5 if own_gelu else 2) * inner + 4) + 4 * heads
        dropped = float(config.get("resid_pdrop", 0.1)), float(config.get("attn_pdrop", 0.1))
        block += _dropout(*dropped, h=h, heads=heads, length=length, c=c, accelerator=accelerator)
        vocabulary, norm = int(config.get("vocab_size", 50257)), 2 * c * h
    elif kind in BERT:
        h, heads = int(config.get("hidden_size", 768)), int(config.get("num_attention_heads", 12))
        inner = int(config.get("intermediate_size", 3072))
        block = c * (8 * h + 2 * inner + 4) + 4 * heads
        dropped = float(config.get("hidden_dropout_prob", 0.1)), float(config.get("attention_probs_dropout_prob", 0.1))
        block += _dropout(*dropped, h=h, heads=heads, length=length, c=c, accelerator=accelerator)
        vocabulary, norm = int(config.get("vocab_size", 30522)), 4 * c * h
    else:
        return None
    names = config.get("architectures") or [""]
    scores = vocabulary if any(word in str(names[0]) for word in ("CausalLM", "LMHead", "MaskedLM")) else 0
    exact = c if kind in BERT else 4  # the loss of causal language models is computed in fp32
    return Activations(
        embedding=tokens * c * h,
        unit=tokens * block,
        unit_input=tokens * c * h,
        unit_backward=tokens * c * 2 * inner,
        head=tokens * (norm + exact * scores),
        head_forward=tokens * scores * (c + (exact if exact != c else 0)),
        head_backward=tokens * scores * 2 * exact,
    )


_KEY_HEADS, _HEAD_SIZES = {"mistral": 8, "qwen2": 32, "qwen3": 32}, {"qwen3": 128}
"""The values that transformers takes where a config lacks the key; null means the number of heads, and width / heads.
"""


def longest(config: Mapping[str, Any]) -> int | None:
    """The largest number of tokens of a model; None if its config does not give it."""
    for key in ("max_position_embeddings", "n_positions"):
        if isinstance(value := config.get(key), int) and value > 0:
            return value
    return None


def _llama(config: Mapping[str, Any], c: int, length: int) -> tuple[int, int]:
    """The width, and the bytes of a block per token; `length` is 0 on a CPU."""
    h, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kind = str(config.get("model_type"))
    size = int(config.get("head_dim", _HEAD_SIZES.get(kind)) or h // heads)
    groups = int(config.get("num_key_value_heads", _KEY_HEADS.get(kind)) or heads)
    q, k, f = heads * size, groups * size, int(config["intermediate_size"])
    block = c * (4 * h + 2 * q + 2 * k + 4 * f) + 8 * h + 8 + 4 * heads
    if kind == "qwen3":
        block += (c + 4) * (q + k) + 4 * (heads + groups)
    if c == 4 and k < q and length:
        block += 2 * c * (q - k) + 4 * heads * (length - 1)
    return h, block


def _dropout(hidden: float, scores: float, *, h: int, heads: int, length: int, c: int, accelerator: bool) -> int:
    """The bytes of masks per token, and of what attention keeps on a CPU because of dropout."""
    masks = 2 * h * (1 if accelerator else c) if hidden else 0
    if not scores or accelerator:
        return masks
    return masks + 12 * heads * length + 3 * h * (4 - c) - 4 * heads
