"""One rank of a small run under real DeepSpeed that saves a checkpoint and, at the same moment, its live weights.

    torchrun .. live_worker.py JOBS.json

JOBS is a list of objects as `deepspeed_worker` has them, with `save` (a directory): the checkpoint goes to `save`/checkpoint, the
live weights to `save`/fp32 and `save`/bf16, the consolidated ones to `save`/state.pt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import gloo_ranks

sys.path.insert(0, str(Path(__file__).parent))
from deepspeed_worker import Model, batch_of, config_of, groups_of

from zckpt import live


def run(job: dict[str, Any]) -> None:
    """Three steps, then everything is saved; a job with `undisturbed` goes on as if nothing had been."""
    import deepspeed

    def start() -> Any:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(job))[0]

    def step(engine: Any) -> float:
        loss = engine(batch_of(engine.global_steps))
        engine.backward(loss)
        engine.step()
        return loss.item()

    engine = start()
    for _ in range(3):
        step(engine)
    home = Path(job["save"])
    engine.save_checkpoint(str(home / "checkpoint"))
    for dtype in ("fp32", "bf16"):
        live.save_pretrained(engine, home / dtype, dtype, max_shard_size=600)
    state = live.consolidate(engine)
    if dist.get_rank() == 0:
        torch.save(state, home / "state.pt")
    else:
        assert state == {}
    last = step(engine)
    engine.destroy()
    if not job.get("undisturbed"):
        return
    again = start()
    losses = [step(again) for _ in range(4)]
    again.destroy()
    assert losses[-1] == last, (losses, last)


def main() -> None:
    """All jobs, one after another."""
    with gloo_ranks():
        for job in json.loads(Path(sys.argv[1]).read_text()):
            run(job)


if __name__ == "__main__":
    main()
