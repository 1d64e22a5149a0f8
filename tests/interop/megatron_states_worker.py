"""Loads what `to-mcore --optimizer` wrote into real models and optimizers of Megatron-Core, and lets it save them again.

    torchrun .. megatron_states_worker.py JOBS.json

Each job has `config`, `checkpoint`, `sizes` and `layers` as those of `megatron_worker`, and `again`, where model and optimizer
are saved. Weights are bf16, fp32 weights and moments are the optimizer's. Each rank tells the steps and learning rates it has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "fixtures"))

import generate_mcore
from gloo_ranks import tell_over_gloo

generate_mcore.on_cpu()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer  # noqa: E402
from megatron_on_cpu import built  # noqa: E402

if hasattr(distrib_optimizer, "quantize_param_shard"):  # of fp8, which nothing here is
    distrib_optimizer.quantize_param_shard = lambda *args, **kwargs: None
_set = distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states


def _set_all_but_steps(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
    """As it is, where each parameter has its step too; of Transformer Engine's Adam, which is not here, only groups have one."""
    group, order = self.model_param_group_index_map[parameter]
    own = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
    _set(self, parameter, {"step": own["step"], **tensors})


distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states = _set_all_but_steps


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job."""
    tp, pp, ep = job["sizes"]
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    hf = SimpleNamespace(**json.loads((Path(job["config"]) / "config.json").read_text()))
    model = built(hf, tp, pp, ep).bfloat16()
    how = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(model.config, how, model)
    settings = OptimizerConfig(
        optimizer="adam", lr=0.7, weight_decay=0.3, bf16=True, params_dtype=torch.bfloat16, clip_grad=0.0,
        use_distributed_optimizer=True, log_num_zeros_in_grad=False,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [wrapped])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)  # so that whatever is not loaded shows
            parameter.main_grad.fill_(1)
    optimizer.step()  # torch's Adam has no states before
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable", "non_homogeneous_layers": job["layers"] == "numbered",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }  # fmt: skip
    asked: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    asked["optimizer"] = optimizer.sharded_state_dict(asked["model"], is_loading=True, metadata=metadata)
    state = dist_checkpointing.load(asked, job["checkpoint"])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    again = Path(job["again"]) / "iter_0000002"
    if dist.get_rank() == 0:
        again.mkdir(parents=True)
    dist.barrier()
    saved: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    saved["optimizer"] = optimizer.sharded_state_dict(saved["model"], metadata=metadata)
    kept = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    dist_checkpointing.save(
        {**saved, "args": state["args"], "checkpoint_version": 3.0, "iteration": 2}, str(again), content_metadata=kept
    )
    inner = [each.optimizer for each in optimizer.chained_optimizers]
    groups = [group for each in inner for group in each.param_groups]
    steps = [float(held["step"]) for each in inner for held in each.state.values()]
    parallel_state.destroy_model_parallel()
    return {
        "steps": steps,
        "rates": [group["lr"] for group in groups],
        "decays": [group["weight_decay"] for group in groups],
    }


if __name__ == "__main__":
    tell_over_gloo(run)
