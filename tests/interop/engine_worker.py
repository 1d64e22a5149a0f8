"""One rank with two engines of one small model side by side, DeepSpeed's and zckpt's: what each says, returns and copies."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import gloo_ranks, tell

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

import small

from zckpt import UsageError, runtime

ACCUMULATION = 2
PRECISIONS: dict[str, Any] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
OPTIONS: list[dict[str, bool]] = [
    {}, {"load_module_only": True}, {"load_optimizer_states": False}, {"load_lr_scheduler_states": False},
]  # fmt: skip
ELEMENTS = {"frozen_param_fragments", "optimizer"}
"""Entries of DeepSpeed's client state that hold a second copy of weights or states."""

COUNTERS = (
    "global_steps", "global_samples", "skipped_steps", "loaded_checkpoint_dp_world_size", "loaded_checkpoint_mp_world_size",
)  # fmt: skip
SAID = (
    "communication_data_type", "dynamic_loss_scale()", "get_data_types()", "optimizer_name()", "zero_overlap_comm()",
    "steps_per_print()", "gradient_clipping()", "zero_optimization_stage()", "fp16_enabled()", "bfloat16_enabled()",
    "initial_dynamic_scale()", "postscale_gradients()", "scheduler_name()", "scheduler_params()", "get_lr()", "get_mom()",
)  # fmt: skip


def begin(library: Any, stage: int, precision: str, seed: int = 0) -> Any:
    model = small.make(seed, odd=False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    config = {
        "train_batch_size": small.GLOBAL_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
        **PRECISIONS[precision],
    }
    return library.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, steps: int, start: int = 0) -> None:
    for micro_batches in small.batches(steps, dist.get_rank(), dist.get_world_size(), ACCUMULATION, start):
        for tokens in micro_batches:
            engine.backward(engine(tokens))
            engine.step()


def answers(engine: Any) -> dict[str, str]:
    return {name: repr(getattr(engine, name[:-2])() if name.endswith("()") else getattr(engine, name)) for name in SAID}


def equal(one: Any, other: Any) -> bool:
    """Whether values are equal and of one kind, a mapping's kind aside."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def loads(stage: int, precision: str, home: str) -> list[str]:
    """Where the engines differ after a load of what DeepSpeed saved."""
    import deepspeed

    wrong: list[str] = []
    for options in OPTIONS:
        found = []
        for library in (deepspeed, runtime):
            engine = begin(library, stage, precision, 1)
            path, client = engine.load_checkpoint(home, **options)
            found.append((path, client, {name: getattr(engine, name) for name in COUNTERS}))
        (path, client, counters), (our_path, our_client, our_counters) = found
        absent = {key for key in ELEMENTS & client.keys() if client[key] is not None}
        wrong += [f"{options}: {path} {our_path}"] * (path != our_path)
        wrong += [f"{options}: {counters} {our_counters}"] * (counters != our_counters)
        wrong += [f"{options}: {key}" for key in (client.keys() - absent) ^ our_client.keys()]
        wrong += [
            f"{options}: {key} differs"
            for key in client.keys() & our_client.keys()
            if not equal(client[key], our_client[key])
        ]
    return wrong


def copies(engine: Any, *, again: bool = False) -> list[str]:
    """What is wrong with a copy of the module that an engine trains, which trains on then."""
    [[tokens, _]] = small.batches(1, dist.get_rank(), dist.get_world_size(), ACCUMULATION)
    made = copy.deepcopy(engine.module)
    with torch.no_grad():
        same = torch.equal(made(tokens), engine(tokens))
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    live = engine.module.state_dict()
    train(engine, 1, 7)
    made(tokens).backward()
    facts = {
        "a plain class": type(made) is small.Small,
        "plain parameters": all(type(one) is torch.nn.Parameter for one in made.parameters()),
        "its names": list(before) == list(live),
        "its dtypes": [one.dtype for one in before.values()] == [one.dtype for one in live.values()],
        "tied ones": made.head.weight is made.embed.weight,
        "the same result": same,
        "apart from training": equal(before, dict(made.state_dict())),
        "gradients of its own": made.embed.weight.grad is not None,
        "copies of parts": type(copy.deepcopy(engine.module.blocks[0])) is small.Block,
        "a copy that is sharded": again or not copies(runtime.initialize(
            model=made, optimizer=torch.optim.AdamW([one for one in made.parameters() if one.requires_grad]),
            config=engine.config,
        )[0], again=True),
    }  # fmt: skip
    return [fact for fact, holds in facts.items() if not holds]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """What one stage and precision gives."""
    import deepspeed

    stage, precision = job["stage"], job["precision"]
    theirs, ours = begin(deepspeed, stage, precision), begin(runtime, stage, precision)
    train(theirs, 3)
    train(ours, 3)
    theirs.save_checkpoint(job["home"], client_state={"seen": {"rank": dist.get_rank(), "at": torch.arange(3)}})
    said, wanted = answers(ours), answers(theirs)
    out: dict[str, Any] = {
        "answers": [f"{name}: {wanted[name]} {said[name]}" for name in SAID if said[name] != wanted[name]],
        "loads": loads(stage, precision, job["home"]),
    }
    if stage < 3:
        out["copies"] = copies(ours)
        return out
    try:
        copy.deepcopy(ours.module)
    except UsageError as error:
        out["refused"] = str(error)
    with runtime.zero.GatheredParameters(list(ours.module.parameters())):
        made = copy.deepcopy(ours.module)
    whole = ours._zero3_consolidated_16bit_state_dict()
    out["copies"] = [
        name
        for name, tensor in (whole or {}).items()
        if not torch.equal(made.state_dict()[name].to(tensor.dtype), tensor)
    ]
    return out


def main() -> None:
    """All jobs, one after another."""
    warnings.simplefilter("ignore")
    with gloo_ranks():
        tell(run)


if __name__ == "__main__":
    main()
