"""Loads what zckpt wrote into real models of Megatron-Core, with its own loader, asks them, and lets it save them again.

    torchrun .. megatron_worker.py JOBS.json

Each job has `config` (a directory with a config.json of transformers), `checkpoint` (a run directory that `to-mcore` wrote),
`sizes` (tensor, pipeline and expert parallel), `layers` ("stacked" or "numbered"), `logits` (a file, with the words), and `again`
(where the model is saved). Rank 0 writes for each how far the logits are from those of the file, beside the jobs.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import tell_over_gloo
from megatron.core import dist_checkpointing, parallel_state
from megatron_on_cpu import built, logits
from safetensors.torch import load_file


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job."""
    tp, pp, ep = job["sizes"]
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    config = SimpleNamespace(**json.loads((Path(job["config"]) / "config.json").read_text()))
    model = built(config, tp, pp, ep)
    metadata = {"non_homogeneous_layers": job["layers"] == "numbered"}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(7)  # so that whatever is not loaded shows
    asked = {"model": model.sharded_state_dict(metadata=metadata)}
    state = dist_checkpointing.load(asked, f"{job['checkpoint']}/release")
    model.load_state_dict(state["model"])
    held = load_file(job["logits"])
    found = logits(model, held["words"])
    apart = 0.0 if found is None else float((found[..., : config.vocab_size] - held["logits"]).abs().max())
    again = Path(job["again"])
    if dist.get_rank() == 0:
        (again / "iter_0000007").mkdir(parents=True)
        (again / "latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    saved = {
        "model": model.sharded_state_dict(metadata=metadata),
        **{key: state[key] for key in ("args", "checkpoint_version")},
    }
    dist_checkpointing.save({**saved, "iteration": 7}, str(again / "iter_0000007"), content_metadata=metadata)
    parallel_state.destroy_model_parallel()
    return {"apart": apart, "computed": found is not None, "layers": state["args"].num_layers}


if __name__ == "__main__":
    tell_over_gloo(run)
