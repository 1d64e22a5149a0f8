"""A language model trained on a text file: the loop that `zckpt train` runs on every rank.

For the command line, and as an example of how the engine is used. A checkpoint has everything that a run needs to continue, so
a run that was stopped and resumed ends with the same weights as one that was not.

The samples are the text file's bytes, or a tokenizer's tokens, in blocks of one length. Bytes are mapped, not read; tokens are
held in memory, four bytes each, by every rank.
"""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from zckpt import live
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError, OutputError, UsageError
from zckpt.base.words import count, ranks
from zckpt.jobs.open import open_catalog
from zckpt.layouts.search import is_begun
from zckpt.live.device import peak_memory
from zckpt.output.durable import replace_file
from zckpt.runtime.config.read import Settings, read_config
from zckpt.runtime.engine import Engine
from zckpt.runtime.init_context import Init
from zckpt.runtime.loader import Loader, repeat
from zckpt.runtime.observe.lookout import NOTES, Lookout, of_process
from zckpt.runtime.start import initialize
from zckpt.runtime.train.metrics import Metrics, Step
from zckpt.runtime.train.models import TINY, Model, find_model
from zckpt.runtime.world import World, join_world
from zckpt.storage.location import locate

_PART = 1 << 20


def read_corpus(path: str, length: int, tokenizer: Any, wanted: int, option: str = "--data") -> TensorDataset:
    """Samples of `length` tokens of a text file, one after another; a shorter rest at the end is not used. Without a tokenizer
    (of transformers) tokens are bytes. Raises UsageError if there is no such file, or fewer samples than `wanted`; `option` named
    it.
    """
    if not os.path.isfile(path):
        raise UsageError("no such file", file=path, remedy=f"Pass the path of a text file as {option}.")
    tokens = _bytes(path) if tokenizer is None else _tokens(path, tokenizer)
    blocks = TensorDataset(tokens[: len(tokens) // length * length].view(-1, length))
    if len(blocks) < wanted:
        raise UsageError(
            "has too little text", file=path, found=f"{count(len(blocks), 'sample')} of {length:,} tokens",
            expected=f"at least {wanted:,}" + (": one micro batch for every rank" if option == "--data" else ""),
            remedy="Use a longer text, a smaller batch size, or fewer processes." if option == "--data" else "Use a longer text.",
        )  # fmt: skip
    return blocks


def _bytes(path: str) -> torch.Tensor:
    size = os.path.getsize(path)
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)


def _tokens(path: str, tokenizer: Any) -> torch.Tensor:
    parts = [torch.empty(0, dtype=torch.int32)]
    with open(path, encoding="utf-8", errors="replace") as file:
        while lines := file.readlines(_PART):
            ids = tokenizer("".join(lines), add_special_tokens=False, verbose=False)["input_ids"]
            parts.append(torch.tensor(ids, dtype=torch.int32))
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """The job of a training run.

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
        eval_data: a text file that is not trained on, for the loss after some steps; None for none.
        eval_every: that loss every so many steps, and at the end; None for the end only.
        log_every: a line every so many steps, and for the first and the last.
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
    eval_data: str | None = None
    eval_every: int | None = None
    log_every: int = 10

    def arguments(self) -> list[str]:
        """The command line that requests the job."""
        words = ["train", self.config, "--data", self.data, "--out", self.out, "--steps", str(self.steps)]
        words += ["--model", self.model, "--seed", str(self.seed), "--log-every", str(self.log_every)]
        words += ["--eval-data", self.eval_data] if self.eval_data else []
        words += ["--eval-every", str(self.eval_every)] if self.eval_every else []
        words += ["--resume"] if self.resume else []
        words += ["--save-every", str(self.save_every)] if self.save_every else []
        return words + (["--save-pretrained", self.save_pretrained] if self.save_pretrained else [])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run.

    Attributes:
        began_after: the step that it continued from; 0 for a new run.
        step: the last step.
        first_loss: of the first step of this run; None if it made no step.
        last_loss: of the last one.
        tokens_per_s: of all ranks together, saving not counted.
        checkpoint: directory of the last save.
        stopped: it was asked to end before the last step.
        notes: sentences a person should see.
        eval_loss: the last one on `eval_data`; None without it.
        perplexity: e to `eval_loss`.
    """

    began_after: int
    step: int
    first_loss: float | None
    last_loss: float | None
    tokens_per_s: float
    checkpoint: str
    stopped: bool
    notes: tuple[str, ...]
    eval_loss: float | None = None
    perplexity: float | None = None


def check(job: TrainingJob) -> tuple[Settings, Model]:
    """Reads the config and finds the model before any process starts. Raises a ZckptError that says what is wrong."""
    settings = read_config(_config_of(job))
    if settings.config.optimizer.type is None:
        raise UsageError("has no optimizer", file=job.config, remedy="Add a section 'optimizer' to the config.")
    read_corpus(job.data, 1, None, 1)
    if job.eval_data is not None:
        read_corpus(job.eval_data, 1, None, 1, "--eval-data")
    elif job.eval_every is not None:
        raise UsageError("--eval-every needs a text", remedy="Pass --eval-data FILE.txt too, or no --eval-every.")
    found = find_model(job.model)
    if os.path.isdir(job.out) and is_begun(locate(job.out)) and not job.resume:
        raise OutputError(
            "has checkpoints of an earlier run", file=job.out,
            remedy="Pass --resume to continue that run, or another --out for a new one.",
        )  # fmt: skip
    return settings, found


def _config_of(job: TrainingJob) -> str | dict[str, Any]:
    """The config, with the defaults of transformers' Trainer for "auto" and for a batch size that is left out."""
    given = read_config(job.config, early=True).raw
    lr = given.get("optimizer", {}).get("params", {}).get("lr", 5e-5)
    params = {"lr": lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": lr, "warmup_num_steps": 1, "total_num_steps": job.steps}
    sections = {"optimizer": {"params": params}, "scheduler": {"params": warmup}}
    auto = {**sections, **{key: {"enabled": False} for key in ("fp16", "bf16")}, "gradient_clipping": 1.0}
    filled = read_config(job.config, auto=auto).raw
    if not filled.keys() & {"train_batch_size", "train_micro_batch_size_per_gpu"}:
        filled["train_micro_batch_size_per_gpu"] = 8
    return job.config if filled == given else filled


def train(
    job: TrainingJob,
    watch: Callable[[Step], None] = lambda step: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Outcome:
    """Trains; every rank calls it. `watch` is called on rank 0 after every step, `say` with a sentence about the run before the
    first one. Raises a ZckptError that says what is wrong; if another rank's process is gone, which one.
    """
    settings, found = check(job)
    logging.getLogger("zckpt.runtime.config").setLevel(logging.WARNING)  # `say` tells what is trained, and how
    world = join_world()
    lookout = of_process(world)
    with _asked_to_stop() as asked:
        try:
            return _train(job, settings, found, world, lookout, asked, watch, say)
        except RuntimeError as error:
            gone = _why(error, lookout, world, asked)
            if gone is None:
                raise
            raise gone from error
        finally:
            lookout.close()


def _train(
    job: TrainingJob,
    settings: Settings,
    found: Model,
    world: World,
    lookout: Lookout,
    asked: list[int],
    watch: Callable[[Step], None],
    say: Callable[[str], None],
) -> Outcome:
    engine, loader = _begin(job, settings, world, found)
    held_out = None
    if job.eval_data is not None:
        held_out = read_corpus(job.eval_data, found.length, found.tokenizer, 1, "--eval-data")
    if job.resume:
        lookout.at(0, "loading the checkpoint")
        engine.load_checkpoint(job.out)
    if world.rank == 0:
        _describe(engine, found, job.out)
        say(_sentence(job, engine, found))
    began = engine.global_steps
    metrics = Metrics(job.out, began, _title(job)) if world.rank == 0 else None
    steps: list[Step] = []
    saved = began if job.resume and began else -1
    evaluated: float | None = None
    stopped = False
    batches = repeat(loader)
    while engine.global_steps < job.steps and not stopped:
        step, stopped = _step(engine, batches, found.length, asked, lookout)
        last = stopped or step.step == job.steps
        if held_out is not None and (last or (job.eval_every and step.step % job.eval_every == 0)):
            lookout.at(step.step, "in the evaluation")
            evaluated = evaluate(engine, held_out)
            step = replace(step, eval_loss=evaluated, perplexity=perplexity(evaluated))
        steps.append(step)
        if metrics is not None:
            metrics.add(step)
            watch(step)
        if job.save_every and engine.global_steps % job.save_every == 0:
            saved = _save(engine, job.out, lookout, metrics)
    if saved != engine.global_steps:
        _save(engine, job.out, lookout, metrics)
    lookout.at(engine.global_steps, "saving the last checkpoint")
    engine.wait_for_checkpoint()
    if job.save_pretrained and not stopped:
        lookout.at(engine.global_steps, "saving the weights")
        engine.save_16bit_model(job.save_pretrained)
        if world.rank == 0 and found.tokenizer is not None:
            found.tokenizer.save_pretrained(job.save_pretrained)
    note = metrics.close() if metrics is not None else None
    spent = sum(1 / step.tokens_per_s for step in steps)
    return Outcome(
        began_after=began, step=engine.global_steps, first_loss=steps[0].loss if steps else None,
        last_loss=steps[-1].loss if steps else None, tokens_per_s=len(steps) / spent if spent else 0.0,
        checkpoint=os.path.join(job.out, f"global_step{engine.global_steps}"), stopped=stopped,
        notes=(note,) if note else (), eval_loss=evaluated,
        perplexity=None if evaluated is None else perplexity(evaluated),
    )  # fmt: skip


def _save(engine: Engine, out: str, lookout: Lookout, metrics: Metrics | None) -> int:
    lookout.at(engine.global_steps, "saving a checkpoint")
    if metrics is not None:
        metrics.keep()
    engine.save_checkpoint(out)
    return engine.global_steps


def _why(error: RuntimeError, lookout: Lookout, world: World, asked: list[int]) -> BaseException | None:
    """The error to raise in place of a failed communication: the name of a rank that is gone, or a silent end.

    The launcher asks all processes to end when one dies, and says itself which one it was.
    """
    if world.size == 1:
        return None
    if NOTES in os.environ:
        until = time.monotonic() + 3.0
        while not asked and time.monotonic() < until:
            time.sleep(0.05)
        if not asked:
            return None
        lookout.failed(str(error))
        return SystemExit(128 + signal.SIGTERM)
    gone = lookout.missing()
    if not gone:
        return None
    first = next(iter(gone.values()))
    return InconsistentError(
        f"{ranks(sorted(gone))} {'is' if len(gone) == 1 else 'are'} gone, and the run cannot go on without",
        found=f"{first.process} was {first.what} of step {first.step:,} when it last answered",
        remedy="Look at what that process printed last, and at its machine's memory (dmesg). Then run the same command with "
        "--resume, which continues from the last checkpoint.",
    )


def _sentence(job: TrainingJob, engine: Engine, found: Model) -> str:
    """A sentence on the run that begins."""
    parameters = sum(p.numel() for p in engine.module.parameters())
    stage, precision = engine.zero_optimization_stage(), engine.settings.config.precision
    where = f"{count(engine.world_size, 'rank')}, ZeRO stage {stage}, {precision}"
    what = f"{engine.global_steps + 1:,} to {job.steps:,} of {engine.batch.total:,} x {found.length:,} tokens"
    return f"training {job.model}, {parameters:,} parameters, on {where}; steps {what}"


def _title(job: TrainingJob) -> str:
    names = (os.path.basename(os.path.normpath(path)) for path in (job.model, job.data, job.config))
    return "{} on {} ({})".format(*names)


def _begin(job: TrainingJob, settings: Settings, world: World, found: Model) -> tuple[Engine, Loader]:
    """Model, engine and data, the same for every number of ranks."""
    random.seed(job.seed)
    torch.manual_seed(job.seed)
    config = _config_of(job)
    with Init(config=config, enabled=settings.zero.stage == 3):
        model = found.build()
    engine, _, _, _ = initialize(model=model, config=config)
    if found.weights is not None:
        live.load_into(engine.module, open_catalog(found.weights).catalog)
    blocks = read_corpus(job.data, found.length, found.tokenizer, engine.batch.micro * world.size)
    loader = engine.training_dataloader = Loader(blocks, engine.batch.micro, world, drop_last=True, seed=job.seed)
    torch.manual_seed(job.seed + 1 + world.rank)
    return engine, loader


def _describe(engine: Engine, found: Model, out: str) -> None:
    """Writes beside the checkpoints what makes their weights loadable: the config, and the tokenizer's files."""
    os.makedirs(out, exist_ok=True)
    for name, text in live.small_files(engine.module, engine.settings.config.precision).items():
        replace_file(os.path.join(out, name), text.encode())
    if found.tokenizer is not None:
        found.tokenizer.save_pretrained(out)  # not synced: every start of the run, so every resume, writes these again


def _step(engine: Engine, batches: Iterator[Any], length: int, asked: list[int], lookout: Lookout) -> tuple[Step, bool]:
    """Makes one optimizer step; returns it, and whether any rank was asked to stop."""
    began, skipped = time.perf_counter(), engine.skipped_steps
    lr = engine.get_lr()[0]
    totals = torch.zeros(2, device=engine.device)
    for _ in range(engine.batch.accumulation):
        lookout.at(engine.global_steps + 1, "reading a batch")
        tokens = _on_device(next(batches), engine)
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
        step=engine.global_steps, loss=mean, lr=lr, scale=engine.cur_scale,
        grad_norm=norm if norm is not None and norm < float("inf") else None, skipped=engine.skipped_steps > skipped,
        tokens_per_s=engine.batch.total * length / (time.perf_counter() - began),
        memory_bytes=peak_memory(engine.device), time_s=time.time(),
    )  # fmt: skip
    return step, stop > 0


def _on_device(batch: Sequence[torch.Tensor], engine: Engine) -> torch.Tensor:
    """The tokens of a batch of `read_corpus`, as the model takes them."""
    (tokens,) = batch
    return tokens.to(engine.device).long()


def evaluate(engine: Engine, blocks: TensorDataset) -> float:
    """The mean loss over all blocks, each rank computing a part. Every rank calls it, and gets the same.

    The model is in eval mode meanwhile, and no gradients are computed. All ranks do as many forwards, since sharded parameters
    are gathered by all together: a rank that has no part left computes the first one again, and leaves the result out.
    """
    size, rank = engine.batch.micro, engine.global_rank
    parts = [range(begin, min(begin + size, len(blocks))) for begin in range(0, len(blocks), size)]
    totals = torch.zeros(2, dtype=torch.float64)
    was_training = engine.module.training
    engine.module.eval()
    with torch.no_grad():
        for turn in range(math.ceil(len(parts) / engine.world_size)):
            number = turn * engine.world_size + rank
            part = parts[number] if number < len(parts) else parts[0]
            tokens = _on_device(blocks[part.start : part.stop], engine)
            loss = engine(input_ids=tokens, labels=tokens)["loss"]
            if number < len(parts):
                totals += torch.tensor([float(loss) * len(part), len(part)], dtype=torch.float64)
    engine.module.train(was_training)
    if engine.world_size > 1:
        totals = totals.float().to(engine.device)
        dist.all_reduce(totals)
    total, samples = map(float, totals.tolist())
    return total / samples


def perplexity(loss: float) -> float:
    """The exponential of a mean loss; infinite if it is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


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
