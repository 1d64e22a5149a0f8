"""Checkpoints of other worlds, stages and precisions, loaded by these ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import small
import torch
from checks import PRECISIONS
from harness import check, main, world
from saves import SCHEDULE, grouped

from zckpt import runtime
from zckpt.runtime.saves import run_state


def begin(stage: int, precision: dict[str, Any]) -> runtime.Engine:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": SCHEDULE,
        "zero_optimization": {"stage": stage},
        **precision,
    }
    model = small.make(seed=1)
    return runtime.initialize(model=model, config=settings, model_parameters=grouped(model))[0]


@check(1, 2, 3)
def others() -> dict[str, bool]:
    """Saves of `saves.py`, each into another stage: masters, moments and frozen weights to the last bit.

    A third of them, such that every stage, precision and number of ranks that saved meets every other, and each save is loaded
    by one number of ranks.
    """
    out = {}
    homes = sorted(Path(sys.argv[1]).parent.glob("saves_*/saves/? *"))
    for number, home in enumerate(homes):
        if (number + number // 3 + number // 12 + world()) % 3:  # precision, stage, ranks
            continue
        name = home.name.split()[1]
        stage = (number + world()) % 4
        engine = begin(stage, PRECISIONS[name])
        path, client = engine.load_checkpoint(home)
        wanted = torch.load(home / "truth.pt")
        state = run_state.capture(engine)
        fine = path is not None and client["stage"] == int(home.name[0]) and engine.global_steps == 3
        for part in state.parts:
            tensors = {"": part.weight, **part.states}
            whole = {key: tensor.view(-1) for key, tensor in wanted[part.name].items()}
            fine = fine and tensors.keys() == whole.keys()
            fine = fine and (not part.states or part.scalars == {"step": 3.0})
            for key in whole if fine else ():
                fine = fine and torch.equal(
                    tensors[key].view(-1),
                    whole[key][part.parameter.elements],
                )
        out[f"{home.parent.parent.name} {home.name} into {stage}"] = bool(fine)
    return out


if __name__ == "__main__":
    main()
