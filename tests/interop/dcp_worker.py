"""Loads what zckpt wrote into sharded models, with torch's own loader, and says what they hold then.

    torchrun .. dcp_worker.py JOBS.json

Each job has `checkpoint`, `shape` ("fsdp"; at two ranks "tensor"; "accelerate" where that library loads it), `tensors`
(name -> [shape, dtype, role]), `tied` (dropped -> kept name), and `groups` where the optimizer is loaded too.
Rank 0 writes <number>.pt beside the jobs.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import gloo

WHOLE = StateDictOptions(full_state_dict=True)


def model_of(job: dict[str, Any]) -> torch.nn.Module:
    """A model of these names and shapes, of numbers that no checkpoint has."""
    root = torch.nn.Module()
    for name, (shape, dtype, role) in job["tensors"].items():
        owner, leaf = owner_of(root, name)
        tensor = torch.full(shape, 7, dtype=getattr(torch, dtype))
        if role == "parameter" and tensor.is_floating_point() and shape:
            owner.register_parameter(leaf, torch.nn.Parameter(tensor))
        else:
            owner.register_buffer(leaf, tensor)
    for dropped, kept in job["tied"].items():
        here, there = owner_of(root, dropped), owner_of(root, kept)
        if there[1] in there[0]._parameters:
            here[0].register_parameter(here[1], there[0]._parameters[there[1]])
        else:
            here[0].register_buffer(here[1], there[0]._buffers[there[1]])
    return root


def owner_of(root: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, torch.nn.Module())
        root = root._modules[part]
    return root, leaf


def run(job: dict[str, Any]) -> dict[str, Any]:
    """What was loaded, whole."""
    model = model_of(job)
    if job["shape"] == "accelerate":
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import load_fsdp_model

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        load_fsdp_model(plugin, Accelerator(cpu=True), fully_shard(model), str(Path(job["checkpoint"]).parent))
        return {"model": get_model_state_dict(model, options=WHOLE)}
    if job["shape"] == "fsdp":
        fully_shard(model)
    else:  # the other dimension than the one in which the files are cut
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                sharded = distribute_tensor(parameter.data, mesh, [Shard(parameter.dim() - 1)])
                module._parameters[name] = torch.nn.Parameter(sharded)
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    optimizer = None
    if "groups" in job:
        parameters = dict(model.named_parameters())
        groups = [{"params": [parameters[name] for name in group]} for group in job["groups"]]
        optimizer = torch.optim.AdamW(groups, lr=9.0)
        state["optim"] = get_optimizer_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=job["checkpoint"], planner=DefaultLoadPlanner(allow_partial_load=job["partial"]))
    set_model_state_dict(model, state["model"])
    found = {"model": get_model_state_dict(model, options=WHOLE)}
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optim"])
        found["optim"] = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    return found


def main() -> None:
    """All jobs, one after another."""
    dist.init_process_group("gloo")
    path = Path(sys.argv[1])
    for number, job in enumerate(json.loads(path.read_text())):
        found = run(job)
        if dist.get_rank() == 0:
            torch.save(found, path.with_name(f"{number}.pt"))
    gloo.end()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
