"""Finds the model that `--model` names: how it is built, its tokenizer, and its weights, if it has any.

For `train`. transformers is needed for any model but tiny-gpt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.runtime.train.tiny_gpt import TinyConfig, TinyGPT

TINY = "tiny-gpt"
_LONGEST = 1024
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is known but not built.

    Attributes:
        build: makes it, with random weights in fp32.
        vocabulary: how many tokens it knows.
        length: tokens of a sample: what it was made for, at most 1,024.
        tokenizer: of transformers; None if its tokens are bytes.
        weights: the directory of its weights; None for a model that begins with random ones.
    """

    build: Callable[[], nn.Module]
    vocabulary: int
    length: int
    tokenizer: Any
    weights: str | None


def find_model(name: str) -> Model:
    """The model with this name. `name`: "tiny-gpt", a `config.json`, or a directory that has one: of transformers, with
    or without weights. Raises UsageError if there is no such model, or it has no tokenizer and too few tokens for
    bytes; UnsupportedError if transformers is not installed.
    """
    if name == TINY:
        return Model(TinyGPT, TinyConfig().vocab_size, TinyConfig().n_positions, None, None)
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
        vocabulary, min(int(longest), _LONGEST), tokenizer, weights,
    )  # fmt: skip
