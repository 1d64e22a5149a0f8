"""`zckpt du`, `prune` and `slim`: what the saves of a run take, which of them may go, and smaller ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.cli.declare import Checkpoint, DryRun, OutDirectory, Shown, ShownProgress, command, output
from zckpt.cli.written import Words, finish
from zckpt.jobs.declarations import PRUNE, SLIM
from zckpt.upkeep.keep_rules import KeepRules

if TYPE_CHECKING:
    from zckpt.jobs.declarations import Asked
    from zckpt.jobs.own_groups import Slim
    from zckpt.jobs.slim import PlannedSlim

Run = Annotated[str, typer.Argument(metavar="RUN", help="Directory that holds the run's saves.", show_default=False)]
Measured = Annotated[
    str, typer.Argument(metavar="RUN|CKPT", help="Directory of a run, or a checkpoint.", show_default=False)
]
Yes = Annotated[bool, output("--yes", help="Delete what goes. Without it, only print what would go.")]
Deep = Annotated[bool, output("--deep", help="Read every byte of the saves that stay before any goes.")]


@command(
    "du",
    about="Show what the saves of a run, or one checkpoint, take on the disk: weights, masters (fp32 weights of the "
    "optimizer), moments (its states), other, and waste (bytes that no tensor uses). Reads indexes only.",
    example="zckpt du out/",
)
def du(run: Measured, shown: Shown) -> None:
    """Prints what lies where."""
    from zckpt.upkeep import usage

    sink = shown.console
    found = usage.du(run)
    sink.result(found.as_json, lambda: found.lines(sink.width))


@command(
    "prune",
    about="Delete the saves of a run that no rule keeps, after verifying those that stay. Without --yes it only prints what "
    "would go. The newest complete save and what 'latest' names always stay.",
    job=PRUNE,
    example="zckpt prune out/ --keep-last 3 --keep-best eval_loss --yes",
)
def prune(
    run: Run, rules: KeepRules, asked: Asked[None], yes: Yes = False, deep: Deep = False, *, shown: ShownProgress
) -> None:
    """Prints which saves stay and which go, and deletes these with --yes."""
    from zckpt.upkeep.prune import prune

    sink = shown.console
    with sink.progress(None, "prune") as progress:
        found = prune(run, rules, delete=yes, deep=deep, pace=asked.pacing.pace, progress=progress or False)
    sink.notes(found.notes)
    sink.result(
        found.as_json, lambda: found.lines(sink.width), done="The saves that no rule keeps are deleted." if yes else ""
    )


@command(
    "slim",
    about="Write a smaller save of the same layout: without what --drop names, and without bytes that no tensor uses. Its "
    "framework still loads what remains. Saves of DeepSpeed, rank files, and torch files.",
    job=SLIM,
    example="zckpt slim out/checkpoint-500 slim/ --drop optimizer",
)
def slim(
    ckpt: Checkpoint, out: OutDirectory, asked: Asked[Slim], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes a smaller save."""
    from zckpt.jobs.slim import describe_plan, execute

    planned = SLIM.prepare(ckpt, out, asked)
    facts: dict[str, object] = {"dropped": dict(planned.dropped), "saved_bytes": planned.saved_bytes}
    words = Words(describe_plan(planned), _loading_hint(planned, tuple(asked.own.drop)), facts)
    finish(planned, words, shown, execute, dry_run=dry_run)


def _loading_hint(planned: PlannedSlim, dropped: tuple[str, ...]) -> Callable[[set[str]], str]:
    """A line on how the smaller save is loaded."""
    out, source = planned.out, planned.catalog.source
    if source.layout == "megatron-core":
        return lambda files: f"load it with Megatron-Core, without an optimizer: --load {out} --no-load-optim"
    if source.layout == "universal":
        return lambda files: f"load with engine.load_checkpoint({out!r}), load_universal set in the config"
    if source.zero_stage is None:
        by_items = f"load it with torch.distributed.checkpoint.load into a state dict without the optimizer, from {out}"
        others = f"load the weights as before, from {out}"
        return lambda files: by_items if any(name.endswith(".metadata") for name in files) else others
    options = ["load_optimizer_states=False"] if "optimizer" in dropped else []
    options += ["load_module_strict=False"] if {"module-weights", "frozen"} & {*dropped} else []
    then = ", then engine.optimizer.update_lp_params()" if "module-weights" in dropped else ""
    return lambda files: f"load with engine.load_checkpoint({', '.join([repr(out), *options])}){then}"
