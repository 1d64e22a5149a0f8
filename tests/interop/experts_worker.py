"""One rank of real DeepSpeed with experts that loads universal checkpoints: `torchrun .. experts_worker.py JOBS.json`.

JOBS is a list of objects: `fixture` (its name, whose model is built with other weights), `load` (the universal checkpoint).
Rank 0 writes `JOBS.json.told`: for each the names of the masters that are not the fixture's truth, and how many were compared.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from gloo_ranks import gloo_ranks, tell
from safetensors.torch import load_file

FIXTURES = Path(__file__).parents[2] / "fixtures"
sys.path.insert(0, str(FIXTURES))


def run(job: dict[str, str]) -> tuple[list[str], int]:
    """What differs from the truth after loading, and how many masters there are; then takes a step."""
    import deepspeed
    from auto_models import auto_model
    from deepspeed.utils import groups
    from expert_models import MIXTURES, Mixture, groups_of
    from generate_parallel import VARIANTS, master

    variant = VARIANTS[job["fixture"]]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": variant.stage, "stage3_param_persistence_threshold": 0},
        **variant.config,
        "checkpoint": {"load_universal": True},
    }
    torch.manual_seed(5)
    tokens = torch.randint(0, 11, (4, 5))
    if variant.kind == "autoep":
        model, inputs = auto_model(variant.model), {"input_ids": tokens, "labels": tokens}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    else:
        model, inputs = Mixture(**MIXTURES[variant.model]), {"tokens": tokens}
        optimizer = torch.optim.AdamW(groups_of(model, variant.groups), lr=0.05)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.load_checkpoint(job["load"])
    truth = load_file(FIXTURES / job["fixture"] / "truth.safetensors")
    differ, compared = [], 0
    for name, parameter in engine.module.named_parameters():
        wanted, group = truth[name], groups._get_data_parallel_group()
        if not getattr(parameter, "allreduce", True):
            group = groups._get_expert_data_parallel_group(parameter.group_name)
            rank, ep = groups._get_expert_parallel_rank(parameter.group_name), variant.ep
            wanted = wanted.chunk(ep)[rank] if variant.kind == "autoep" else wanted
        compared += 1
        if not torch.equal(master(variant.stage, engine, parameter, group), wanted):
            differ.append(name)
    out = engine(**inputs)
    engine.backward(getattr(out, "loss", out))
    engine.step()
    engine.destroy()
    return differ, compared


def main() -> None:
    """All jobs, one after another."""
    with gloo_ranks():
        from deepspeed.module_inject.auto_ep import AutoEP

        AutoEP._retarget_transformers_output_recorders = lambda *args: None  # it would need an older transformers
        tell(run)


if __name__ == "__main__":
    main()
