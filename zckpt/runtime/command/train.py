"""A language model trained on a text file: the loop that `zckpt train` runs on every rank.

For the command line, and as an example of how the engine is used. A checkpoint has everything that a run needs to continue, so
a run that was stopped and resumed ends with the same weights as one that was not.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from zckpt import live
from zckpt.base.errors import OutputError, UsageError
from zckpt.jobs.open import open_catalog
from zckpt.layouts.places import has_saves
from zckpt.live.device import peak_memory
from zckpt.runtime.command.corpus import Blocks, read_corpus
from zckpt.runtime.command.metrics import Metrics, Step
from zckpt.runtime.command.models import TINY, Model, find_model
from zckpt.runtime.data import Loader
from zckpt.runtime.ds_config.read import Settings, read_config
from zckpt.runtime.engine import Engine
from zckpt.runtime.start import initialize
from zckpt.runtime.world import World, join_world
from zckpt.runtime.zero import Init
from zckpt.storage.location import locate


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What is to be trained.

    Attributes:
        config: DeepSpeed's JSON.
        data: a text file.
        out: directory of checkpoints, metrics and the picture.
        steps: optimizer steps in total, those of earlier runs included.
        model: "tiny-gpt", or a path; see `models.find_model`.
        save_every: a checkpoint every so many steps, and one at the end; None for the end only.
        resume: continue from the last checkpoint in `out`, if there is one.
        seed: of weights, order of samples, and dropout.
        save_pretrained: directory for the weights at the end, in the dtype of the computation.
    """

    config: str
    data: str
    out: str
    steps: int
    model: str = TINY
    save_every: int | None = None
    resume: bool = False
    seed: int = 0
    save_pretrained: str | None = None

    def arguments(self) -> list[str]:
        """The command line that asks for it."""
        words = ["train", self.config, "--data", self.data, "--out", self.out, "--steps", str(self.steps)]
        words += ["--model", self.model, "--seed", str(self.seed)]
        words += ["--resume"] if self.resume else []
        words += ["--save-every", str(self.save_every)] if self.save_every else []
        return words + (["--save-pretrained", self.save_pretrained] if self.save_pretrained else [])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did.

    Attributes:
        began_after: the step that it continued from; 0 for a new run.
        step: the last step.
        first_loss: of the first step of this run; None if it made no step.
        last_loss: of the last one.
        tokens_per_s: of all ranks together, saving not counted.
        checkpoint: directory of the last save.
        stopped: it was asked to end before the last step.
        notes: sentences a person should see.
    """

    began_after: int
    step: int
    first_loss: float | None
    last_loss: float | None
    tokens_per_s: float
    checkpoint: str
    stopped: bool
    notes: tuple[str, ...]


def check(job: TrainingJob) -> tuple[Settings, Model]:
    """Reads the config and finds the model, so that errors are found before any process is started.

    Raises:
        ZckptError: one of its kinds says what.
    """
    settings = read_config(job.config)
    if settings.config.optimizer.type is None:
        raise UsageError("has no optimizer", file=job.config, remedy="Add a section 'optimizer' to the config.")
    read_corpus(job.data, 1, None, 1)
    found = find_model(job.model)
    if os.path.isdir(job.out) and has_saves(locate(job.out)) and not job.resume:
        raise OutputError(
            "has checkpoints of an earlier run", file=job.out,
            remedy="Pass --resume to continue that run, or another --out for a new one.",
        )  # fmt: skip
    return settings, found


def train(job: TrainingJob, watch: Callable[[Step], None] = lambda step: None) -> Outcome:
    """Trains; every rank calls it.

    Args:
        job: what.
        watch: called on rank 0 after every step.

    Raises:
        ZckptError: one of its kinds says what is wrong.
    """
    settings, found = check(job)
    world = join_world()
    engine, loader = _begin(job, settings, world, found)
    if job.resume:
        engine.load_checkpoint(job.out)
    if world.rank == 0:
        _describe(engine, found, job.out)
    began = engine.global_steps
    metrics = Metrics(job.out, began) if world.rank == 0 else None
    steps: list[Step] = []
    saved = began if job.resume and began else -1
    with _asked_to_stop() as asked:
        stopped = False
        batches = _forever(loader)
        while engine.global_steps < job.steps and not stopped:
            step, stopped = _step(engine, batches, found.length, asked)
            steps.append(step)
            if metrics is not None:
                metrics.add(step)
                watch(step)
            if job.save_every and engine.global_steps % job.save_every == 0:
                engine.save_checkpoint(job.out)
                saved = engine.global_steps
        if saved != engine.global_steps:
            engine.save_checkpoint(job.out)
        engine.wait_for_checkpoint()
    if job.save_pretrained and not stopped:
        engine.save_16bit_model(job.save_pretrained)
        if world.rank == 0 and found.tokenizer is not None:
            found.tokenizer.save_pretrained(job.save_pretrained)
    note = metrics.close() if metrics is not None else None
    spent = sum(1 / step.tokens_per_s for step in steps)
    return Outcome(
        began_after=began,
        step=engine.global_steps,
        first_loss=steps[0].loss if steps else None,
        last_loss=steps[-1].loss if steps else None,
        tokens_per_s=len(steps) / spent if spent else 0.0,
        checkpoint=os.path.join(job.out, f"global_step{engine.global_steps}"),
        stopped=stopped,
        notes=(note,) if note else (),
    )


def _begin(job: TrainingJob, settings: Settings, world: World, found: Model) -> tuple[Engine, Loader]:
    """Model, engine and data, the same for every number of ranks."""
    random.seed(job.seed)
    torch.manual_seed(job.seed)
    with Init(config=job.config, enabled=settings.zero.stage == 3):
        model = found.build()
    engine, _, _, _ = initialize(model=model, config=job.config)
    if found.weights is not None:
        live.load_into(engine.module, open_catalog(found.weights).catalog)
    blocks: Blocks = read_corpus(job.data, found.length, found.tokenizer, engine.batch.micro * world.size)
    engine.loader = Loader(blocks, engine.batch.micro, world, drop_last=True, seed=job.seed)
    torch.manual_seed(job.seed + 1 + world.rank)
    return engine, engine.loader


def _describe(engine: Engine, found: Model, out: str) -> None:
    """Writes beside the checkpoints what makes their weights loadable: the config, and the tokenizer's files."""
    os.makedirs(out, exist_ok=True)
    for name, text in live.small_files(engine.module, engine.settings.config.precision).items():
        with open(os.path.join(out, name), "w", encoding="utf-8") as file:
            file.write(text)
    if found.tokenizer is not None:
        found.tokenizer.save_pretrained(out)


def _forever(loader: Loader) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def _step(engine: Engine, batches: Iterator[torch.Tensor], length: int, asked: list[int]) -> tuple[Step, bool]:
    """One optimizer step, and whether any rank was asked to stop."""
    began, skipped = time.perf_counter(), engine.skipped_steps
    lr = engine.get_lr()[0]
    totals = torch.zeros(2, device=engine.device)
    for _ in range(engine.batch.accumulation):
        tokens = next(batches).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens)["loss"]
        engine.backward(loss)
        engine.step()
        totals[0] += loss.detach().float() / engine.batch.accumulation / engine.world_size
    totals[1] = float(bool(asked))
    if engine.world_size > 1:
        dist.all_reduce(totals)
    mean, stop = totals.tolist()
    norm = engine.get_global_grad_norm()
    step = Step(
        step=engine.global_steps,
        loss=mean,
        lr=lr,
        scale=engine.cur_scale,
        grad_norm=norm if norm is not None and norm < float("inf") else None,
        skipped=engine.skipped_steps > skipped,
        tokens_per_s=engine.batch.total * length / (time.perf_counter() - began),
        memory_bytes=peak_memory(engine.device),
        time_s=time.time(),
    )
    return step, stop > 0


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that is empty until a signal asks the run to end: SIGTERM, SIGINT, or SIGUSR1, as schedulers send it."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
