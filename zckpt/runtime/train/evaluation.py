"""Computes the loss on a text that is not trained on.

For `train`. The result does not depend on the number of ranks, but for rounding.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from zckpt.runtime.engine import Engine
from zckpt.runtime.train.corpus import Blocks


def evaluate(engine: Engine, blocks: Blocks) -> float:
    """The mean loss over all blocks, each rank computing a part. Every rank calls it, and gets the same.

    The model is in eval mode meanwhile, and no gradients are computed. All ranks do as many forwards, since sharded parameters
    are gathered by all together: a rank that has no part left computes the first one again, and leaves the result out.
    """
    size, rank = engine.batch.micro, engine.global_rank
    parts = [range(begin, min(begin + size, len(blocks))) for begin in range(0, len(blocks), size)]
    totals = torch.zeros(2, dtype=torch.float64)
    was_training = engine.module.training
    engine.module.eval()
    with torch.no_grad():
        for turn in range(math.ceil(len(parts) / engine.world_size)):
            number = turn * engine.world_size + rank
            part = parts[number] if number < len(parts) else parts[0]
            tokens = torch.stack([blocks[index] for index in part]).to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens)["loss"]
            if number < len(parts):
                totals += torch.tensor([float(loss) * len(part), len(part)], dtype=torch.float64)
    engine.module.train(was_training)
    if engine.world_size > 1:
        totals = totals.float().to(engine.device)
        dist.all_reduce(totals)
    total, samples = map(float, totals.tolist())
    return total / samples


def perplexity(loss: float) -> float:
    """The exponential of a mean loss; infinite if it is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf
