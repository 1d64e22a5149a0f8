"""A small model with everything that sharding finds hard, and the data that every test trains it on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

WORDS = 11
GLOBAL_BATCH = 8


class Block(nn.Module):
    def __init__(self, width: int, odd: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.gain = nn.Parameter(torch.tensor(0.9) if odd else torch.tensor([0.9]))
        self.nothing = nn.Parameter(torch.empty(0, width)) if odd else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.gain


class Small(nn.Module):
    """Tied and frozen parameters, sizes that no world size divides, buffers; `odd`: scalars, parameters without elements."""

    def __init__(self, width: int = 6, blocks: int = 3, odd: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, odd) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(-1, 1, width))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next token."""
        x = self.embed(tokens)
        x = x + self.frozen(x) * self.shift.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1))


def make(seed: int = 0, odd: bool = True) -> Small:
    torch.manual_seed(seed)
    return Small(odd=odd)


def batches(steps: int, rank: int, world: int, accumulation: int = 1, start: int = 0) -> Iterator[list[torch.Tensor]]:
    """For each step, this rank's micro batches; the global batch is the same for every world and accumulation."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, WORDS, (GLOBAL_BATCH, 7), generator=generator)
        yield list(tokens.view(accumulation, world, -1, 7)[:, rank].unbind())
