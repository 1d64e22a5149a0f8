"""One rank of runs under real DeepSpeed that save, and load again what `zckpt slim` made of the save.

    torchrun .. slim_worker.py JOBS.json

JOBS is an object: `place` (a directory), and `jobs`: `stage`, `drop` (of what `slim` may leave out), `load` (arguments of
DeepSpeed's `load_checkpoint`), `then` (a method of its optimizer that is called after it, or nothing), `universal` (whether the
save is made universal first). Rank 0 writes
`JOBS.json.told`: for each job the losses before the save and after the load, the same of the next step, and the largest
difference of the fp32 weights, absolute and against those that were rounded to bf16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_worker import Model, batch_of, config_of, groups_of
from gloo_ranks import gloo_ranks

SAVED_AT = 3


def engine_of(stage: int, seed: int, **config: Any) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = Model()
    if seed:
        with torch.no_grad():  # what is loaded must not be what was there
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(0.5)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config_of({"stage": stage, "precision": "bf16"}) | config
    )
    return engine


def loss_of(engine: Any, step: int) -> Any:
    loss = engine(batch_of(step))
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return loss, total.item() / dist.get_world_size()


def masters_of(engine: Any) -> list[torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    found = [safe_get_full_fp32_param(p) for p in engine.module.parameters() if p.requires_grad]
    return [tensor.clone() for tensor in found if tensor is not None]


def next_losses(engine: Any) -> list[float]:
    """The loss of a step as the weights are, and that of the step after it."""
    losses = []
    for _ in range(2):
        loss, shown = loss_of(engine, engine.global_steps)
        losses.append(shown)
        engine.backward(loss)
        engine.step()
    return losses


def main() -> None:
    with gloo_ranks():
        asked = json.loads(Path(sys.argv[1]).read_text())
        place = Path(asked["place"])
        references: dict[int, tuple[list[float], list[torch.Tensor]]] = {}
        told = []
        for job in asked["jobs"]:
            stage = job["stage"]
            if stage not in references:
                engine = engine_of(stage, 0)
                for _ in range(SAVED_AT):
                    loss, _ = loss_of(engine, engine.global_steps)
                    engine.backward(loss)
                    engine.step()
                engine.save_checkpoint(str(place / str(stage)))
                masters = masters_of(engine)
                references[stage] = (next_losses(engine), masters)
                engine.destroy()
            universal = {"checkpoint": {"load_universal": True}} if job["universal"] else {}
            slim = place / f"{stage}-{'-'.join(job['drop'])}{'-universal' if universal else ''}"
            if dist.get_rank() == 0 and not slim.exists():
                import zckpt
                from zckpt.jobs.declarations import SLIM
                from zckpt.jobs.slim import execute, prepare

                source = place / str(stage)
                if universal:
                    source = place / f"{stage} universal"
                    zckpt.to_universal(place / str(stage), source, progress=False)
                execute(prepare(source, slim, SLIM.ask(drop=job["drop"])))
            dist.barrier()
            engine = engine_of(stage, 1, **universal)
            path, _ = engine.load_checkpoint(str(slim), **job["load"])
            assert path is not None, job
            if job.get("then"):
                getattr(engine.optimizer, job["then"])()
            wanted, masters = references[stage]
            found = masters_of(engine)
            exact = [float((a - b).abs().max()) for a, b in zip(found, masters, strict=True)]
            rounded = [float((a - b.bfloat16().float()).abs().max()) for a, b in zip(found, masters, strict=True)]
            told.append({"wanted": wanted, "found": next_losses(engine), "exact": max(exact, default=0.0),
                         "rounded": max(rounded, default=0.0), "masters": len(found)})  # fmt: skip
            engine.destroy()
        if dist.get_rank() == 0:
            Path(sys.argv[1] + ".told").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
