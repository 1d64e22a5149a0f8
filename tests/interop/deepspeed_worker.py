"""One rank of a small training run under real DeepSpeed: saves, resumes, and tells its losses.

    torchrun .. deepspeed_worker.py JOBS.json

JOBS is a list of objects: `stage`; `load` (a checkpoint directory, or nothing), `steps`, `save` (or nothing) after how many of
them, `precision`, `universal`, `groups` (1 for a single group of parameters). Rank 0 writes `JOBS.json.losses`: a list of losses
per job. The global batch is the same at every world size.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import gloo_ranks

GLOBAL_BATCH = 12


class Model(torch.nn.Module):
    """Odd sizes, tied and frozen weights, a buffer, and two groups of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.body = torch.nn.Linear(6, 13)
        self.frozen = torch.nn.Linear(13, 13)
        self.back = torch.nn.Linear(13, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.norm(x + self.back(torch.tanh(self.frozen(torch.tanh(self.body(x))))) * self.scale.to(x.dtype))
        logits = self.head(x).float()
        return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 11), tokens[:, 1:].reshape(-1))


def batch_of(step: int) -> torch.Tensor:
    """This rank's part of the global batch."""
    tokens = torch.randint(0, 11, (GLOBAL_BATCH, 7), generator=torch.Generator().manual_seed(step))
    mine = GLOBAL_BATCH // dist.get_world_size()
    return tokens[dist.get_rank() * mine : (dist.get_rank() + 1) * mine]


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Weights decay, biases and norms do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def config_of(job: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's config for a job."""
    precision = job.get("precision", "fp32")
    return {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": job["stage"], "stage3_param_persistence_threshold": 0, **job.get("zero", {})},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.01, "warmup_type": "linear"},
        },
        "gradient_clipping": 1.0,
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
        **({"fp16": {"enabled": True, "initial_scale_power": 8}} if precision == "fp16" else {}),
        **({"checkpoint": {"load_universal": True}} if job.get("universal") else {}),
    }


def run(job: dict[str, Any]) -> list[float]:
    """The losses of one job's steps."""
    import deepspeed

    torch.manual_seed(0)
    model = Model()
    groups = groups_of(model)
    if job.get("optimizer") == "Adagrad" or job.get("groups") == 1:  # DeepSpeed makes Adagrad anew, with a single group
        groups = [{"params": [p for group in groups for p in group["params"]]}]
    optimizer = getattr(torch.optim, job.get("optimizer", "AdamW"))(groups, lr=0.01)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(job))
    if job.get("load"):
        with torch.no_grad():  # what was loaded must not be what was there
            for parameter in model.parameters():
                if parameter.requires_grad or not job.get("universal"):  # which DeepSpeed leaves as they are, then
                    parameter.data.mul_(0.5)
        path, state = engine.load_checkpoint(job["load"], tag=job.get("tag"))
        assert path is not None, job
        assert job.get("client") is None or state.get("client") == job["client"], state
    losses = []
    for _ in range(job["steps"]):
        if engine.global_steps == job.get("save_at"):
            engine.save_checkpoint(job["save"], client_state={"client": {"seen": engine.global_steps}})
        loss = engine(batch_of(engine.global_steps))
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    engine.destroy()
    return losses


def main() -> None:
    """All jobs, one after another."""
    with gloo_ranks():
        jobs = json.loads(Path(sys.argv[1]).read_text())
        losses = [run(job) for job in jobs]
        if dist.get_rank() == 0:
            Path(sys.argv[1] + ".losses").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
