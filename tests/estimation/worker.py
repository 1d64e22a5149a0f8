"""On every rank: trains a small model in several ways and writes how many bytes were allocated, and how many were estimated."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zckpt.runtime

sys.path.insert(0, str(Path(__file__).parents[1]))

import gloo

WIDTH, WORDS = 256, 2000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if frozen:
            for block in list(self.blocks)[:6]:
                block.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def measure(counter: Any, case: dict[str, Any]) -> dict[str, int]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case["accumulation"],
        "zero_optimization": {"stage": case["stage"]},
        "optimizer": {"type": case["optimizer"], "params": {"lr": 1e-4}},
        case["precision"]: {"enabled": True},
    }
    if case["precision"] == "fp32":
        del config["fp32"]
    if case["offload"]:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    torch.manual_seed(0)
    gc.collect()
    before = counter.allocated_held()
    model = Model(case["frozen"])
    estimated = zckpt.runtime.estimate(model, config, gpus=dist.get_world_size(), accelerator=False)
    engine, *_ = zckpt.runtime.initialize(model=model, config=config)
    ids = torch.arange(8).view(1, 8)
    for _ in range(2):
        gc.collect()
        counter.allocated_reset()
        for _ in range(case["accumulation"]):
            loss = engine(ids)
            engine.backward(loss)
            del loss
            engine.step()
    gc.collect()
    held = counter.allocated_held() - before
    assert estimated.asked is not None
    peak = estimated.asked.peak
    whole = 0  # below stage 3 weights stay whole between steps
    if case["stage"] < 3:
        whole = estimated.model.numel * (4 if case["precision"] == "fp32" else 2)
    return {
        "held": held, "most": counter.allocated_most() - before,
        "states": peak.weights + peak.optimizer + whole, "estimated": peak.device,
    }  # fmt: skip


def main(path: str) -> None:
    torch.set_num_threads(1)
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    counter = ctypes.CDLL(job["counter"])
    for name in ("allocated_held", "allocated_most"):
        getattr(counter, name).restype = ctypes.c_long
    dist.init_process_group("gloo")
    found = [measure(counter, case) for case in job["cases"]]
    with open(f"{path}.{dist.get_rank()}", "w", encoding="utf-8") as file:
        json.dump(found, file)
    gloo.end()


main(sys.argv[1])
