"""transformers' Trainer and accelerate under FSDP: runs that never stop, and such as go on from what zckpt made of a save.

Argument: a directory. Where it has directories `on RANKS/NAME`, these ranks go on from each, in the way its name begins with,
and rank 0 writes `RANKS resumed.json`. Otherwise they train in all ways, save after two steps, and it writes `RANKS.json`.
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
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader
from trainer_worker import CONFIG, HOME, samples, train
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

import fsdp_on_cpu
import gloo

RANKS = int(os.environ["WORLD_SIZE"])
KINDS = {"S": "SHARDED_STATE_DICT", "F": "FULL_STATE_DICT"}
WAYS = ("Trainer 2S", "Trainer 2F", "Trainer 1S", "accelerate 2S")
"""Whose loop, which FSDP, which form of its saves."""


def trained(out: Path, way: str, resume: Path | None = None) -> dict[str, Any]:
    """A run of the Trainer, or its end; the global batch is the same on any number of ranks."""
    config = {
        "version": int(way[-2]), "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": KINDS[way[-1]],
        "sync_module_states": False,
    }  # fmt: skip
    more = {
        "per_device_train_batch_size": 4 // RANKS,
        "load_best_model_at_end": False,
        "save_steps": 1,
    }
    return train(out, None, resume=resume, fsdp=True, fsdp_config=config, save_final=False, **more)


def looped(out: Path, resume: Path | None = None) -> dict[str, Any]:
    """A loop of accelerate, which saves after two steps; or its end."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(7)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader([one["input_ids"] for one in samples(32)], batch_size=8 // RANKS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume is not None:
        accelerator.load_state(str(resume))
        loader = accelerator.skip_first_batches(loader, 2)
    losses = []
    for number, tokens in enumerate(loader):
        if number == 2 and resume is None:
            accelerator.save_state(str(out / "checkpoint-2"))
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([accelerator.reduce(loss.detach(), "mean").item()])
    return {"history": losses}


def main() -> None:
    warnings.simplefilter("ignore")
    fsdp_on_cpu.initialize()
    results: dict[str, Any] = {}
    here = HOME / f"on {RANKS}"
    jobs = [(way, None) for way in WAYS] if not here.exists() else [(p.name, p) for p in sorted(here.iterdir())]
    for name, resume in jobs:
        out = HOME / ("runs" if resume is None else f"runs on {RANKS}") / name
        way = " ".join(name.split()[:2])
        results[name] = looped(out, resume) if way.startswith("accelerate") else trained(out, way, resume)
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()
        os.environ.pop("ACCELERATE_USE_FSDP", None)
    if dist.get_rank() == 0:
        (HOME / f"{RANKS}{' resumed' if here.exists() else ''}.json").write_text(json.dumps(results))
    gloo.end()


if __name__ == "__main__":
    main()
