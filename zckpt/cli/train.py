"""`zckpt train`: a language model on a text file, sharded over one process or many; `zckpt demo`, which shows what follows.

The demo trains a model, resumes in another form, and compares two exports of its weights. Without torch, a small save of two
ranks that comes with zckpt, written by DeepSpeed with ZeRO-3, is converted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import MISSING, asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zckpt.base import collector
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.base.words import count, size
from zckpt.cli.declare import Shown, command, positive
from zckpt.cli.output import Console
from zckpt.jobs.groups import option

if TYPE_CHECKING:
    from zckpt.runtime.train.metrics import Step
    from zckpt.runtime.train.train import Outcome


def progress_lines(
    total: int, every: int, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[Step], None]:
    """What takes each step, and prints a line for the first and the last one, every so many steps, and after each evaluation.

    Args:
        total: steps of the run.
        every: steps between two lines.
        write: prints a line.
        clock: seconds that pass, as `time.monotonic`.
    """
    first: tuple[int, float] | None = None
    spent: list[float] = []  # seconds for each token, since the last line

    def add(step: Step) -> None:
        nonlocal first
        begins, now = first is None, clock()
        first = number, began = first or (step.step, now)
        spent.append(1 / step.tokens_per_s)
        if begins or step.step % every == 0 or step.step == total or step.eval_loss is not None:
            left_s = None if begins else (now - began) / (step.step - number) * (total - step.step)
            write(_line(step, total, len(spent) / sum(spent), left_s))
            spent.clear()

    return add


def _line(step: Step, total: int, tokens_per_s: float, left_s: float | None) -> str:
    width = len(f"{total:,}")
    facts = [f"step {step.step:>{width},}/{total:,}", f"loss {step.loss:.4f}", f"lr {step.lr:.3g}"]
    facts += [f"norm {step.grad_norm:.3g}"] if step.grad_norm is not None else []
    facts += [f"scale {step.scale:g}"] if step.scale != 1 else []
    facts += ["skipped"] if step.skipped else []
    facts += [f"{tokens_per_s:,.0f} tokens/s", size(step.memory_bytes)]
    if step.eval_loss is not None and step.perplexity is not None:
        facts += [f"eval loss {step.eval_loss:.4f}", f"perplexity {step.perplexity:,.2f}"]
    facts += [f"{duration(left_s)} left"] if left_s is not None and step.step < total else []
    return "  ".join(facts)


def duration(seconds: float) -> str:
    """Seconds as a clock shows them: 0:07, 12:30, 1:02:03, 2 d 03:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


_RUN = "Run"
_run = partial(typer.Option, rich_help_panel=_RUN)


@dataclass(frozen=True, repr=False, eq=False)
class RunOptions:
    """What is trained, on what and how long; the fields of `TrainingJob`."""

    data: str = option(MISSING, "--data", "text", "Text to train on.", _RUN, metavar="FILE.txt", show_default=False)
    out: str = option(
        MISSING, "--out", "text", "For checkpoints, metrics.jsonl and loss.png.", _RUN, metavar="DIR",
        show_default=False,
    )  # fmt: skip
    steps: int = option(
        MISSING, "--steps", "positive", "Optimizer steps in all.", _RUN, metavar="N", show_default=False
    )
    model: str = option(
        "tiny-gpt", "--model", "text", "tiny-gpt, a config.json, or a model's directory.", _RUN, metavar="MODEL"
    )
    save_every: int | None = option(
        None, "--save-every", "positive", "Save a checkpoint every N steps.", _RUN, metavar="N"
    )
    resume: bool = option(False, "--resume", "flag", "Resume from the last checkpoint in DIR.", _RUN)
    seed: int = option(0, "--seed", "number", "For weights, data order and dropout.", _RUN, metavar="N")
    save_pretrained: str | None = option(
        None, "--save-pretrained", "text", "At the end, write the weights there too.", _RUN, metavar="DIR"
    )
    eval_data: str | None = option(
        None, "--eval-data", "text", "Text that is not trained on, for a loss and perplexity.", _RUN, metavar="FILE.txt"
    )
    eval_every: int | None = option(
        None, "--eval-every", "positive", "Evaluate every N steps, not only at the end.", _RUN, metavar="N"
    )
    log_every: int = option(10, "--log-every", "positive", "Print a line every N steps.", _RUN, metavar="N")


@command(
    "train",
    about="Train a language model on a text file with ZeRO sharding. Its checkpoints are those of DeepSpeed.",
    example="zckpt train ds_config.json --data text.txt --out run --steps 1000 --nproc 4",
)
def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG.json", help="DeepSpeed's config.", show_default=False)],
    options: RunOptions,
    nproc: Annotated[int, _run("--nproc", metavar="N", callback=positive, help="Processes on this machine.")] = 1,
    *,
    shown: Shown,
) -> None:
    """Starts the processes of a run, or is one of them."""
    try:
        from zckpt.runtime.train import train as run
        from zckpt.runtime.train.launch import is_worker, launch
    except ImportError as error:
        raise UnsupportedError(
            "training needs libraries that are not installed", found=str(error),
            remedy="Run pip install 'zckpt[train]'.",
        ) from error  # fmt: skip
    job = run.TrainingJob(config, **asdict(options))
    if not is_worker(os.environ) and nproc > 1:
        run.check(job)
        words = [*job.arguments(), *(["--json"] if shown.as_json else []), *(["--quiet"] if shown.quiet else [])]
        raise typer.Exit(2 if launch(words, nproc, named=True) else 0)
    collector.switch_on()  # without it, a run of weeks would fill memory
    first = os.environ.get("RANK", "0") == "0"
    sink = Console(as_json=shown.as_json, quiet=shown.quiet or not first)
    with sink.steps(options.steps) as show, redirect_stdout(sys.stderr):  # stdout is for the result
        line = progress_lines(options.steps, options.log_every, sink.line)
        outcome = run.train(job, lambda step: _report(step, show, line), lambda sentence: sink.line(sentence))
    if first:
        sink.notes(outcome.notes)
        sink.result(lambda: asdict(outcome), lambda: _lines(outcome, options.out), done="The run has ended well.")


def _report(step: Step, show: Callable[[int, dict[str, str]], None], line: Callable[[Step], None]) -> None:
    show(step.step, _facts(step))
    line(step)


def _facts(step: Step) -> dict[str, str]:
    """The facts that the progress bar shows."""
    facts = {"loss": f"{step.loss:.4f}", "tok/s": f"{step.tokens_per_s:,.0f}", "lr": f"{step.lr:.3g}"}
    facts |= {"scale": f"{step.scale:g}"} if step.scale != 1 else {}
    return {**facts, "mem": size(step.memory_bytes)}


def _lines(outcome: Outcome, out: str) -> Iterator[str]:
    how = "stopped as asked" if outcome.stopped else "done"
    first, last = outcome.began_after + 1, outcome.step
    if first > last:
        made = f"the run in {out} has {count(last, 'step')}"
        yield f"{how}: {made}, as before" if outcome.stopped else f"nothing to do: {made} already"
    else:
        yield f"{how}: {f'step {first:,}' if first == last else f'steps {first:,}-{last:,}'} of the run in {out}"
    if outcome.first_loss is not None:
        yield f"  loss        {outcome.first_loss:.4f} -> {outcome.last_loss:.4f}, {outcome.tokens_per_s:,.0f} tokens/s"
    if outcome.eval_loss is not None:
        yield f"  evaluation  loss {outcome.eval_loss:.4f}, perplexity {outcome.perplexity:,.2f}"
    yield f"  checkpoint  {outcome.checkpoint}"


_CONFIG: dict[str, Any] = {
    "train_batch_size": 12,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
}


@command(
    "demo",
    about="Train a small model with ZeRO-3, resume with ZeRO-2 on another number of ranks, and show that its weights are "
    "exported bit for bit.",
    example="zckpt demo",
    status="0 equal, 1 a number differs, 2 error",
)
def demo() -> None:
    """Runs other commands in a temporary directory; one that fails ends the demo."""
    with tempfile.TemporaryDirectory(prefix="zckpt-demo-") as directory:
        home = Path(directory)
        if all(importlib.util.find_spec(name) for name in ("torch", "pydantic")):
            _train(home)
        else:
            Console().notes(
                [
                    "torch is not installed: a save that comes with zckpt is converted; pip install 'zckpt[train]' adds training"
                ]
            )
            _convert(home)


def _train(home: Path) -> None:
    """Trains two processes with ZeRO-3, then three with ZeRO-2, and compares two exports of the weights."""
    sources = sorted(Path(__file__).parents[1].glob("[c-j]*/*.py"))
    home.joinpath("text.txt").write_text("".join(path.read_text(encoding="utf-8") for path in sources))
    for stage in (3, 2):
        config = {**_CONFIG, "zero_optimization": {"stage": stage}}
        home.joinpath(f"zero{stage}.json").write_text(json.dumps(config))
    common = ("--data", "text.txt", "--out", "run", "--log-every", "1")
    _run_command(home, "train", "zero3.json", *common, "--steps", "8", "--nproc", "2")
    _run_command(
        home, "train", "zero2.json", *common, "--steps", "16", "--nproc", "3", "--resume", "--save-pretrained", "live"
    )
    _run_command(home, "inspect", "run")
    _run_command(home, "to-bf16", "run", "offline")
    _say("", "Three processes wrote live/ from their memory; offline/ was converted from the checkpoint.")
    _run_command(home, "diff", "offline", "live")


def _convert(home: Path) -> None:
    """Converts a save that comes with zckpt, and compares the output with the weights that its trainer gathered."""
    stored = Path(__file__).with_name("demo_save")
    for name in ("checkpoint", "truth.safetensors"):
        home.joinpath(name).symlink_to(stored / name)
    _run_command(home, "inspect", "checkpoint")
    _run_command(home, "map", "checkpoint")
    _run_command(home, "to-fp32", "checkpoint", "model.safetensors")
    _say("", "truth.safetensors has the weights that the training run gathered in memory, by DeepSpeed's own code.")
    _run_command(home, "diff", "model.safetensors", "truth.safetensors")
    _run_command(home, "to-bf16", "checkpoint", "weights")
    _run_command(home, "verify", "checkpoint", "weights")


def _run_command(home: Path, *words: str) -> None:
    """Runs a command as a person would; if it fails, so does the demo."""
    _say("", f"$ zckpt {' '.join(words)}")
    done = subprocess.run([sys.executable, "-m", "zckpt", *words], cwd=home, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)


def _say(*lines: str) -> None:
    Console().result(dict, lambda: lines)
