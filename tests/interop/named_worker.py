"""One rank under real DeepSpeed: models whose state dict has other names than their parameters, or that freeze layers on the way.

    torchrun .. named_worker.py JOBS.json

JOBS is a list of objects: `kind` (of `KINDS`), `stage`, `save` (a directory), or `load`; with `middle`, the body is frozen
after a step; with `exclude`, the save has no frozen parameters. Beside a save lies `live.pt`: all parameters, as they are.
`told` are the losses.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import gloo_ranks, tell

sys.path.insert(0, str(Path(__file__).parent))
from deepspeed_worker import Model, batch_of, config_of


class ValueHead(torch.nn.Module):
    """Saves what it wraps without the wrapper's prefix, as TRL's models with a value head do."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_model = Model()
        self.v_head = torch.nn.Linear(6, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.v_head(self.pretrained_model.embed(tokens))
        return self.pretrained_model(tokens) + value.float().pow(2).mean()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        held = dict(self.pretrained_model.state_dict(*args, **kwargs))
        return held | {f"v_head.{name}": value for name, value in self.v_head.state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        head = {name: value for name, value in state.items() if name.startswith("v_head.")}
        rest = {name: value for name, value in state.items() if name not in head}
        self.v_head.load_state_dict({name.removeprefix("v_head."): value for name, value in head.items()}, strict)
        return self.pretrained_model.load_state_dict(rest, strict)


NEW = {"embed": "wte", "body.": "blocks.in.", "back.": "blocks.out.", "norm.": "ln.", "head.": "lm."}


def hooked(names: dict[str, str]) -> torch.nn.Module:
    """A model with hooks that give its state dict other names, and take them again."""
    model = Model()

    def save(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        for old, new in names.items():
            for key in [key for key in state if key.startswith(old)]:
                state[new + key[len(old) :]] = state.pop(key)

    def load(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        for old, new in names.items():
            for key in [key for key in state if key.startswith(new)]:
                state[old + key[len(new) :]] = state.pop(key)

    model.register_state_dict_post_hook(save)
    model.register_load_state_dict_pre_hook(load)
    return model


def wrapped() -> torch.nn.Module:
    """A model of which one layer is under torch's own CheckpointWrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    model.body = checkpoint_wrapper(model.body)
    return model


def other_words() -> torch.nn.Module:
    """A model whose state dict has no word of its parameters' names."""
    model = Model()
    names = {}

    def save(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        names.update({f"tensor_{number}": key for number, key in enumerate(list(state))})
        for new, old in names.items():
            state[new] = state.pop(old)

    model.register_state_dict_post_hook(save)
    return model


def fixed_embedding() -> torch.nn.Module:
    """A model whose tied embedding is not trained."""
    model = Model()
    model.embed.requires_grad_(False)
    return model


KINDS: dict[str, Any] = {
    "plain": Model, "fixed embedding": fixed_embedding,
    "value head": ValueHead, "hook": lambda: hooked(NEW),
    "prefix": lambda: hooked({"": "transformer."}),
    "checkpoint wrapper": wrapped, "other words": other_words,
}  # fmt: skip


def run(job: dict[str, Any]) -> list[float]:
    """The losses of one job's steps."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    torch.manual_seed(job.get("seed", 0))
    model = KINDS[job["kind"]]()
    groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(job))
    if "load" in job:
        path, _ = engine.load_checkpoint(job["load"])
        assert path is not None, job
    losses = []
    for number in range(2):
        loss = engine(batch_of(engine.global_steps))
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        if job.get("middle") and not number:
            model.body.requires_grad_(False)
    if "save" in job:
        engine.save_checkpoint(f"{job['save']}/checkpoint", exclude_frozen_parameters=job.get("exclude", False))
        live = {}
        for name, value in model.named_parameters():
            with deepspeed.zero.GatheredParameters([value], enabled=hasattr(value, "ds_id")):
                whole = value.detach().clone()
            master = safe_get_full_fp32_param(value)
            live[name] = whole if master is None else master.detach().clone().view(whole.shape)
        if dist.get_rank() == 0:
            torch.save(live, f"{job['save']}/live.pt")
        dist.barrier()
    engine.destroy()
    return losses


if __name__ == "__main__":
    with gloo_ranks():
        tell(run)
