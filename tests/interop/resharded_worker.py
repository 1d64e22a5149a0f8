"""DeepSpeed itself, under transformers' Trainer and under accelerate, goes on from what zckpt made of their directories.

Argument: the directory in which `trainer_worker` has trained on two ranks. One rank goes on with twice the rows in a batch. More
ranks, with as many fewer, go on from each `resharded/on RANKS/stage N`, which the test has made for them.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from trainer_worker import HOME, accelerated, deepspeed_on_cpu, ds_config, train

import zckpt

sys.path.insert(0, str(Path(__file__).parents[1]))

import gloo
from proofs import IS_WHOLE

RANKS = int(os.environ["WORLD_SIZE"])
UNIVERSAL: dict[str, Any] = {"checkpoint": {"load_universal": True}}


def grown() -> None:
    """More ranks than the run had."""
    warnings.simplefilter("ignore")
    deepspeed_on_cpu.initialize()
    here = HOME / "resharded"
    more = {"per_device_train_batch_size": 4 // RANKS, "load_best_model_at_end": False}
    results = {
        path.name: train(here / f"{path.name} run on {RANKS}", ds_config(int(path.name[-1])), resume=path, **more)
        for path in sorted((here / f"on {RANKS}").iterdir())
    }
    (HOME / f"grown_{RANKS}_{os.environ['RANK']}.json").write_text(json.dumps(results))
    gloo.end()


def main() -> None:
    warnings.simplefilter("ignore")
    deepspeed_on_cpu.initialize()
    theirs, out = HOME / "deepspeed", HOME / "resharded"
    notes: dict[str, Any] = {}

    def trained(name: str, config: dict[str, Any], **more: Any) -> dict[str, Any]:
        resumed = out / name
        return train(
            out / f"{name} run", config, resume=resumed, per_device_train_batch_size=4, load_best_model_at_end=False, **more
        )  # fmt: skip

    results: dict[str, Any] = {}
    report = zckpt.reshard(theirs / "stage 2" / "checkpoint-2", out / "stage 3", world_size=1, stage=3)
    notes["reshard"] = report.notes
    results["stage 2, resharded"] = trained("stage 3", ds_config(3))
    zckpt.to_universal(theirs / "stage 1", out / "universal", tag="checkpoint-2")
    results["stage 1, universal"] = trained("universal", ds_config(2) | UNIVERSAL)
    zckpt.reshard(theirs / "LoRA 3", out / "LoRA", world_size=1, tag="global_step2")
    results["LoRA 3, resharded"] = trained("LoRA", ds_config(3), lora=True)
    zckpt.reshard(theirs / "accelerate 2", out / "accelerate", world_size=1)
    results["accelerate 2, resharded"] = accelerated(out / "none", 2, rows=4, load=out / "accelerate")
    zckpt.to_universal(theirs / "accelerate 2", out / "accelerate universal")
    results["accelerate 2, universal"] = accelerated(
        out / "none", 2, rows=4, load=out / "accelerate universal", **UNIVERSAL
    )  # fmt: skip
    if IS_WHOLE:
        alone = {"per_device_train_batch_size": 4, "load_best_model_at_end": False}
        results["alone"] = train(out / "alone", ds_config(1), **alone)
    (HOME / "resharded.json").write_text(json.dumps({"notes": notes, "results": results}))
    gloo.end()


if __name__ == "__main__":
    main() if RANKS == 1 else grown()
