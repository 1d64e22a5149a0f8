"""`zckpt train`: a language model on a text file, sharded over one process or many."""

from __future__ import annotations

import gc
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.base.errors import UnsupportedError
from zckpt.cli import options
from zckpt.cli.output import Console

if TYPE_CHECKING:
    from zckpt.runtime.command.metrics import Step
    from zckpt.runtime.command.train import Outcome


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "train",
        help="Train a language model on a text file with ZeRO sharding; checkpoints are DeepSpeed's.",
        epilog="Example: zckpt train ds_config.json --data text.txt --out run --steps 1000 --nproc 4 --save-every 200",
    )(train)


def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG.json", help="DeepSpeed's config.", show_default=False)],
    data: Annotated[str, typer.Option("--data", metavar="FILE.txt", help="Text to train on.", show_default=False)],
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="For checkpoints, metrics.jsonl, loss.png.", show_default=False)
    ],
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Optimizer steps, in all.", show_default=False)
    ],
    model: Annotated[
        str, typer.Option("--model", metavar="M", help="tiny-gpt, a config.json, or a model's directory.")
    ] = "tiny-gpt",
    nproc: Annotated[int, typer.Option("--nproc", metavar="N", min=1, help="Processes on this machine.")] = 1,
    save_every: Annotated[
        int | None, typer.Option("--save-every", metavar="N", min=1, help="A checkpoint every N steps.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in DIR.")] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of weights, data order and dropout.")] = 0,
    save_pretrained: Annotated[
        str | None, typer.Option("--save-pretrained", metavar="DIR", help="Write the weights at the end, too.")
    ] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Launches processes, or is one of them."""
    try:
        from zckpt.runtime.command import train as run
        from zckpt.runtime.command.launch import is_worker, launch
    except ImportError as error:
        raise UnsupportedError(
            "training without its libraries", found=str(error), remedy="pip install 'zckpt[train]'"
        ) from error
    job = run.TrainingJob(config, data, out, steps, model, save_every, resume, seed, save_pretrained)
    if not is_worker(os.environ) and nproc > 1:
        run.check(job)
        words = [*job.arguments(), *(["--json"] if as_json else []), *(["--quiet"] if quiet else [])]
        raise typer.Exit(launch(words, nproc))
    gc.enable()  # what is quick for one plan would fill memory in a run of weeks
    first = os.environ.get("RANK", "0") == "0"
    sink = Console(as_json=as_json, quiet=quiet or not first)
    with sink.steps(steps) as show:
        outcome = run.train(job, lambda step: show(step.step, _facts(step)))
    if first:
        sink.notes(outcome.notes)
        sink.result(lambda: asdict(outcome), lambda: _lines(outcome, out))


def _facts(step: Step) -> dict[str, str]:
    """What the bar shows."""
    facts = {"loss": f"{step.loss:.4f}", "tok/s": f"{step.tokens_per_s:,.0f}", "lr": f"{step.lr:.3g}"}
    facts |= {"scale": f"{step.scale:g}"} if step.scale != 1 else {}
    return {**facts, "mem": f"{step.memory_bytes / 2**30:.1f}G"}


def _lines(outcome: Outcome, out: str) -> list[str]:
    what = "stopped as asked" if outcome.stopped else "done"
    ran = f"steps {outcome.began_after + 1}-{outcome.step}" if outcome.step > outcome.began_after else "no step left"
    lines = [f"{what}: {ran} of the run in {out}"]
    if outcome.first_loss is not None:
        lines.append(
            f"  loss {outcome.first_loss:.4f} -> {outcome.last_loss:.4f}, {outcome.tokens_per_s:,.0f} tokens/s"
        )
    lines.append(f"  checkpoint {outcome.checkpoint}")
    return lines
