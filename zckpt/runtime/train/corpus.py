"""A text file as samples for a language model: its bytes, or a tokenizer's tokens, in blocks of one length.

For `train`. Bytes are mapped, not read; tokens are held in memory, four bytes each, by every rank.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import Dataset

from zckpt.base.errors import UsageError
from zckpt.base.words import count

_PART = 1 << 20


class Blocks(Dataset[torch.Tensor]):
    """Blocks of `length` tokens, one after another; a shorter rest at the end is not used."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._tokens[index * self._length : (index + 1) * self._length].long()


def read_corpus(path: str, length: int, tokenizer: Any, wanted: int, option: str = "--data") -> Blocks:
    """Samples of `length` tokens of a text file; without a tokenizer (of transformers) tokens are bytes. Raises UsageError if
    there is no such file, or fewer samples than `wanted`; `option` named the file.
    """
    if not os.path.isfile(path):
        raise UsageError("no such file", file=path, remedy=f"Pass the path of a text file as {option}.")
    blocks = Blocks(_bytes(path) if tokenizer is None else _tokens(path, tokenizer), length)
    if len(blocks) < wanted:
        raise UsageError(
            "has too little text", file=path, found=f"{count(len(blocks), 'sample')} of {length:,} tokens",
            expected=f"at least {wanted:,}" + (": one micro batch for every rank" if option == "--data" else ""),
            remedy="Use a longer text, a smaller batch size, or fewer processes." if option == "--data" else "Use a longer text.",
        )  # fmt: skip
    return blocks


def _bytes(path: str) -> torch.Tensor:
    size = os.path.getsize(path)
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)


def _tokens(path: str, tokenizer: Any) -> torch.Tensor:
    parts = [torch.empty(0, dtype=torch.int32)]
    with open(path, encoding="utf-8", errors="replace") as file:
        while lines := file.readlines(_PART):
            ids = tokenizer("".join(lines), add_special_tokens=False, verbose=False)["input_ids"]
            parts.append(torch.tensor(ids, dtype=torch.int32))
    return torch.cat(parts)
