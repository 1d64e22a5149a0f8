"""The same training by real DeepSpeed and by this engine, side by side in one process group."""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import small
import torch
import torch.distributed as dist
from proofs import IS_WHOLE, covering

from zckpt import runtime

sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed_on_cpu
import gloo

STEPS = 20 if IS_WHOLE else 8
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
}
"""Kind -> more of the config."""


def losses(initialize: Any, stage: int, accumulation: int, extra: dict[str, Any]) -> list[float]:
    model = small.make(odd=False)
    config = {
        "train_batch_size": small.GLOBAL_BATCH,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": STEPS // 2}},
        "gradient_clipping": 0.3,
        "zero_allow_untested_optimizer": True,
        **extra,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = initialize(model=model, model_parameters=trained, config=config)
    out = []
    for micros in small.batches(STEPS, dist.get_rank(), dist.get_world_size(), accumulation):
        total = torch.zeros(())
        for tokens in micros:
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / accumulation
        dist.all_reduce(total)
        out.append(total.item() / dist.get_world_size())
    return out


def main() -> None:
    """Losses by optimizer, stage and accumulation, theirs and ours; without proofs, each pair of two of these."""
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed_on_cpu.initialize()
    results = {}
    axes = tuple(OPTIMIZERS), tuple(range(4)), (1, 2)
    for kind, stage, accumulation in itertools.product(*axes) if IS_WHOLE else covering(*axes):
        theirs, ours = (
            losses(initialize, stage, accumulation, OPTIMIZERS[kind])
            for initialize in (deepspeed.initialize, runtime.initialize)
        )
        results[f"{kind} {stage} {accumulation}"] = {"value": [theirs, ours]}
    out = Path(sys.argv[1])
    (out / f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))
    gloo.end()


if __name__ == "__main__":
    main()
