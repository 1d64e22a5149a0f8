"""Real DeepSpeed goes on from what this trainer saved, and this trainer from what real DeepSpeed saved."""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import small
import torch
import torch.distributed as dist
from checks import PRECISIONS
from proofs import IS_WHOLE
from saves import SCHEDULE, grouped

from zckpt import runtime

sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed_on_cpu
import gloo

VARIANTS: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    *((stage, name, {}, {}) for stage, name in itertools.product(range(4), PRECISIONS)),
    (2, "fp32", {"round_robin_gradients": True}, {}),
    (2, "bf16", {"parameter_alignment": True}, {}),
    (3, "bf16", {"sub_group_size": 40}, {}),
    (1, "bf16", {}, {"data_types": {"grad_accum_dtype": "fp32"}}),
    (1, "fp32", {"nvme": ["offload_optimizer"]}, {}),
    (2, "bf16", {"nvme": ["offload_optimizer"]}, {}),
    (3, "bf16", {"nvme": ["offload_optimizer", "offload_param"]}, {}),
]
"""Stage, precision, keys of `zero_optimization`, more. `nvme`: sections with device nvme, not in DeepSpeed's own runs."""

MORE_STEPS = 5 if IS_WHOLE else 3


def begin(initialize: Any, stage: int, name: str, zero: dict[str, Any], more: dict[str, Any], seed: int = 0) -> Any:
    sections = zero.get("nvme", []) if initialize is runtime.initialize else []
    zero = {key: value for key, value in zero.items() if key != "nvme"}
    for section in sections:
        zero[section] = {"device": "nvme", "nvme_path": f"{sys.argv[1]}/swap{stage}"}
        zero[section] |= {"max_in_cpu": 0} if section == "offload_param" else {}
    config = {
        "train_batch_size": small.GLOBAL_BATCH,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "scheduler": SCHEDULE,
        "gradient_clipping": 0.7,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **PRECISIONS[name],
        **more,
    }
    model = small.make(seed, odd=False)
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-2)
    return initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, start: int, steps: int, accumulation: int = 1) -> list[float]:
    """The mean loss of each step."""
    out = []
    for micro_batches in small.batches(steps, dist.get_rank(), dist.get_world_size(), accumulation, start):
        total = torch.zeros(())
        for tokens in micro_batches:
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            total += loss.detach().float()
        dist.all_reduce(total)
        out.append(total.item() / dist.get_world_size() / accumulation)
    return out


def scale_of(engine: Any) -> float:
    """The loss scale, of whichever engine and optimizer."""
    if isinstance(engine, runtime.Engine):
        return engine.cur_scale
    optimizer = engine.optimizer
    return float((getattr(optimizer, "loss_scale_config", None) or optimizer.loss_scaler).cur_scale)


def both_ways(home: Path, number: int) -> dict[str, Any]:
    """Losses after a save: of the run that saved, and of the run that loaded it.

    `ours`: this trainer saved, DeepSpeed loaded; `theirs`: the other way; `round`: DeepSpeed saved, this trainer loaded and
    saved again, DeepSpeed loaded that: to the last bit where it was. Without proofs, variants without device nvme take turns
    with `ours` and `theirs`.
    """
    import deepspeed

    variant = VARIANTS[number]
    stage, precision, zero, more = variant
    turn = number if zero or more else stage + list(PRECISIONS).index(precision)
    left_out = "" if IS_WHOLE or "nvme" in zero else ("ours", "theirs")[turn % 2]
    out: dict[str, Any] = {}
    wanted: dict[str, dict[str, Any]] = {}
    for name, saver, loader in (("ours", runtime, deepspeed), ("theirs", deepspeed, runtime)):
        if name == left_out == "ours":
            continue
        engine = begin(saver.initialize, *variant)
        train(engine, 0, 4)
        where = str(home / f"{name}{number}")
        engine.save_checkpoint(where, client_state={"seen": {"it": [4]}})
        if "nvme" in variant[2] and saver is runtime:
            assert list((home / f"swap{variant[0]}").glob("zckpt-swap-*"))
        wanted[name] = {"wanted": train(engine, 4, MORE_STEPS), "rates": engine.get_lr()}
        if name != left_out:
            other = begin(loader.initialize, *variant, seed=1)
            out[name] = gone_on(other, where, variant) | wanted[name]
    between = begin(runtime.initialize, *variant, seed=2)
    between.load_checkpoint(str(home / f"theirs{number}"))
    between.save_checkpoint(str(home / f"round{number}"), client_state={"seen": {"it": [4]}})
    last = begin(deepspeed.initialize, *variant, seed=3)
    out["round"] = gone_on(last, str(home / f"round{number}"), variant) | wanted["theirs"]
    return out


def between_micro_batches(home: Path, stage: int) -> dict[str, Any]:
    """Losses of DeepSpeed from a save of this trainer between two micro batches on, and of this trainer without that save."""
    import deepspeed

    variant = (stage, "fp32", {}, {"gradient_accumulation_steps": 2})
    straight = begin(runtime.initialize, *variant)
    train(straight, 0, 4, 2)
    engine = begin(runtime.initialize, *variant)
    train(engine, 0, 4, 2)
    [[first, _]] = small.batches(1, dist.get_rank(), dist.get_world_size(), 2, 4)
    engine.backward(engine(first))
    engine.step()
    where = str(home / f"between{stage}")
    engine.save_checkpoint(where)
    other = begin(deepspeed.initialize, *variant, seed=1)
    path, _ = other.load_checkpoint(where)
    return {
        "is_between": engine.micro_steps == 9 and path is not None, "steps": other.global_steps,
        "found": train(other, 4, 4, 2), "wanted": train(straight, 4, 4, 2),
    }  # fmt: skip


def gone_on(engine: Any, where: str, variant: Any) -> dict[str, Any]:
    """What an engine makes of a checkpoint."""
    path, client = engine.load_checkpoint(where)
    fine = path is not None and client["seen"] == {"it": [4]} and engine.global_steps == 4
    scale = scale_of(engine) if variant[1] == "fp16" else 256.0
    return {"fine": bool(fine), "scale": scale, "found": train(engine, 4, MORE_STEPS), "lr": engine.get_lr()}


def main() -> None:
    """All variants."""
    warnings.simplefilter("ignore")

    deepspeed_on_cpu.initialize()
    out = Path(sys.argv[1])
    results: dict[str, Any] = {"home": {"value": str(out)}}
    for number, (stage, name, zero, more) in enumerate(VARIANTS):
        results[" ".join(map(str, (stage, name, *zero, *more)))] = {"value": both_ways(out, number)}
    for stage in range(4):
        results[f"between {stage}"] = {"value": between_micro_batches(out, stage)}
    (out / f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))
    gloo.end()


if __name__ == "__main__":
    main()
