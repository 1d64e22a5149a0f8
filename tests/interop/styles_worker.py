"""One rank of small runs by real DeepSpeed and by this engine, side by side, in every way to write a training loop.

    torchrun .. styles_worker.py JOBS.json

JOBS is a list of objects: `style` (a function below), `stage`, `precision`, `accumulation`, `config`. Rank 0 writes beside it,
for each rank and job, what both found: the losses of all micro batches, or the error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import gloo_ranks, tell
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from zckpt import runtime

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 4


def config_of(job: dict[str, Any]) -> dict[str, Any]:
    precision = job.get("precision", "fp32")
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": job.get("accumulation", 1),
        "zero_optimization": {"stage": job["stage"], "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **({"fp16": {"enabled": True, "initial_scale_power": 8}} if precision == "fp16" else {}),
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
        **job.get("config", {}),
    }


def make(seed: int, inputs: int = 4, outputs: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, outputs))


def data(job: dict[str, Any], step: int, width: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(3, width, generator=generator).to(DTYPES[job.get("precision", "fp32")])


def begun(job: dict[str, Any], initialize: Any, seed: int = 0, *shape: int) -> tuple[Any, Any]:
    model = make(seed, *shape)
    engine, optimizer, _, _ = initialize(model=model, model_parameters=list(model.parameters()), config=config_of(job))
    return engine, optimizer


def micro_batches(job: dict[str, Any]) -> range:
    return range(STEPS * job.get("accumulation", 1))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output.float() - 1).pow(2).mean()


def scaled(engine: Any, job: dict[str, Any], loss: torch.Tensor) -> torch.Tensor:
    return engine.scale(loss) if job.get("precision") == "fp16" else loss


def by_engine(job: dict[str, Any], initialize: Any) -> list[float]:
    engine, _ = begun(job, initialize)
    losses = []
    for step in micro_batches(job):
        loss = loss_of(engine(data(job, step)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def zero_step(job: dict[str, Any], initialize: Any) -> list[float]:
    """`by_engine`, after the step on zeros that DeepSpeed's fp16 optimizers begin with."""
    engine, optimizer = begun(job, initialize)
    if initialize is runtime.initialize:
        optimizer.step()
    losses = []
    for step in micro_batches(job):
        loss = loss_of(engine(data(job, step)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def direct(job: dict[str, Any], initialize: Any) -> list[float]:
    engine, _ = begun(job, initialize)
    losses = []
    for step in micro_batches(job):
        loss = loss_of(engine(data(job, step)))
        scaled(engine, job, loss).backward()
        engine.step()
        losses.append(loss.item())
    return losses


def unscaled(job: dict[str, Any], initialize: Any) -> list[float]:
    engine, _ = begun(job, initialize)
    loss_of(engine(data(job, 0))).backward()
    engine.step()
    return []


def not_scalar(job: dict[str, Any], initialize: Any) -> list[float]:
    engine, _ = begun(job, initialize)
    losses = []
    for step in micro_batches(job):
        output = engine(data(job, step))
        output.backward(2 * (output.detach() - 1) / output.numel())
        engine.step()
        losses.append(loss_of(output).item())
    return losses


def optimizer_steps(job: dict[str, Any], initialize: Any) -> list[float]:
    engine, optimizer = begun(job, initialize)
    losses = []
    for step in micro_batches(job):
        loss = loss_of(engine(data(job, step)))
        engine.backward(loss)
        if (step + 1) % job.get("accumulation", 1) == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def two_losses(job: dict[str, Any], initialize: Any) -> list[float]:
    engine, _ = begun(job, initialize)
    losses = []
    for step in micro_batches(job):
        output = engine(data(job, step))
        first, second = loss_of(output), output.float().abs().mean()
        engine.backward(first, retain_graph=True)
        engine.backward(second)
        engine.step()
        losses.append(first.item())
    return losses


def two_forwards(job: dict[str, Any], initialize: Any) -> list[float]:
    engine, _ = begun(job, initialize)
    losses = []
    for step in micro_batches(job):
        loss = loss_of(engine(data(job, step))) + engine(data(job, step + 50)).float().abs().mean()
        scaled(engine, job, loss).backward()
        engine.step()
        losses.append(loss.item())
    return losses


def scales(job: dict[str, Any], initialize: Any) -> list[float]:
    """Instead of losses, the loss scale and the number of skipped steps after each of ten steps."""
    engine, optimizer = begun(job, initialize)
    found = []
    for step in range(10 * job["accumulation"]):
        engine.backward(5 * loss_of(engine(data(job, step))))
        engine.step()
        if (step + 1) % job["accumulation"] == 0:
            found += [float(optimizer.loss_scale), engine.skipped_steps]
    return found


def gan(job: dict[str, Any], initialize: Any) -> list[float]:
    """As DeepSpeed's GAN example does: the discriminator's two losses, and the generator's through the discriminator."""
    generator, steps_generator = begun(job, initialize, 1, 4, 4)
    judge, steps_judge = begun(job, initialize, 2, 4, 1)
    losses = []
    for step in micro_batches(job):
        last = (step + 1) % job.get("accumulation", 1) == 0
        if step % job.get("accumulation", 1) == 0:
            judge.zero_grad()
        real = loss_of(judge(data(job, step)))
        fakes = generator(data(job, step + 50))
        fake = judge(fakes.detach()).float().pow(2).mean()
        judge.backward(real + fake)
        if last:
            steps_judge.step()
            judge.zero_grad()
        fooled = loss_of(judge(generator(data(job, step + 90))))
        generator.backward(fooled)
        if last:
            steps_generator.step()
            generator.zero_grad()
            judge.zero_grad()
        losses += [real.item(), fake.item(), fooled.item()]
    return losses


STYLES: dict[str, Callable[[dict[str, Any], Any], list[float]]] = {
    one.__name__: one
    for one in (by_engine, zero_step, direct, unscaled, not_scalar, optimizer_steps, two_losses, two_forwards, gan, scales)
}  # fmt: skip


def run(job: dict[str, Any]) -> list[Any]:
    """What DeepSpeed found, and what this engine found."""
    import deepspeed

    found: list[Any] = []
    for initialize in (deepspeed.initialize, runtime.initialize):
        try:
            found.append(STYLES[job["style"]](job, initialize))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}"[:200])
    return found


def main() -> None:
    """All jobs."""
    warnings.simplefilter("ignore")
    with gloo_ranks():
        tell(run)


if __name__ == "__main__":
    main()
