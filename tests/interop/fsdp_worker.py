"""One rank of the training run of `deepspeed_worker`, under fully_shard: saves, resumes, and tells its losses.

    torchrun .. fsdp_worker.py JOBS.json

JOBS is a list of objects: `load` (a torch.distributed.checkpoint directory, or nothing), `at` (the steps it has done),
`steps`, `save` (or nothing) after how many of them. Rank 0 writes `JOBS.json.losses`: a list of losses per job.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed_worker import Model, batch_of, groups_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))

import gloo


def run(job: dict[str, Any]) -> list[float]:
    """The losses of one job's steps."""
    from deepspeed.runtime.lr_schedules import WarmupLR

    torch.manual_seed(0)
    model = Model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    schedule = WarmupLR(optimizer, warmup_num_steps=6, warmup_max_lr=0.01, warmup_type="linear")
    done = job.get("at", 0)
    if job.get("load"):
        with torch.no_grad():  # what was loaded must not be what was there
            for parameter in model.parameters():
                parameter.mul_(0.5)
        tensors, states = get_state_dict(model, optimizer)
        dcp.load({"model": tensors, "optim": states}, checkpoint_id=job["load"])
        set_state_dict(model, optimizer, model_state_dict=tensors, optim_state_dict=states)
        schedule.load_state_dict({"last_batch_iteration": done - 1})
    losses = []
    for step in range(done, done + job["steps"]):
        if step == job.get("save_at"):
            tensors, states = get_state_dict(model, optimizer)
            whole = {"model": tensors, "optim": states, "lr_scheduler": schedule.state_dict(), "step": step}
            dcp.save(whole, checkpoint_id=job["save"])
        optimizer.zero_grad()
        loss = model(batch_of(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def main() -> None:
    """All jobs, one after another."""
    dist.init_process_group("gloo")
    jobs = json.loads(Path(sys.argv[1]).read_text())
    losses = [run(job) for job in jobs]
    if dist.get_rank() == 0:
        Path(sys.argv[1] + ".losses").write_text(json.dumps(losses))
    gloo.end()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
