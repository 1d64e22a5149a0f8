"""`zckpt du`, `prune` and `slim`: what the saves of a run take, which of them may go, and smaller ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.base.dataclass import dataclass
from zckpt.cli import options as o
from zckpt.cli.declared import command
from zckpt.cli.written import Words, finish

if TYPE_CHECKING:
    from zckpt.jobs.slim import PlannedSlim

_rules = partial(typer.Option, rich_help_panel="Which saves stay")
Run = Annotated[str, typer.Argument(metavar="RUN", help="Directory that holds the run's saves.", show_default=False)]
Measured = Annotated[
    str, typer.Argument(metavar="RUN|CKPT", help="Directory of a run, or a checkpoint.", show_default=False)
]
Yes = Annotated[bool, o.output("--yes", help="Delete what goes. Without it, only print what would go.")]
Deep = Annotated[bool, o.output("--deep", help="Read every byte of the saves that stay before any goes.")]


@dataclass(frozen=True, repr=False, eq=False)
class Kept(o.Group):
    """Which saves stay."""

    keep_last: Annotated[int | None, _rules("--keep-last", metavar="N", help="The N newest.")] = None
    keep_every: Annotated[int | None, _rules("--keep-every", metavar="M", help="Those at a multiple of M steps.")] = (
        None
    )
    keep_best: Annotated[
        list[str] | None,
        _rules(
            "--keep-best",
            metavar="METRIC[:min|max]",
            help="The best by a metric in trainer_state.json; repeatable. Less is better if its name ends in loss.",
        ),
    ] = None
    incomplete: Annotated[
        bool, _rules("--incomplete", help="Let incomplete saves go too, if a newer one is complete.")
    ] = False


class Dropped(str, Enum):
    """What a smaller save leaves out."""

    optimizer = "optimizer"
    module_weights = "module-weights"
    frozen = "frozen"


Drop = Annotated[
    list[Dropped] | None,
    o.what(
        "--drop",
        help="Leave out the optimizer's states (fp32 weights stay), half-precision weights that fp32 weights give back, or "
        "frozen parameters; repeatable.",
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    command(
        app,
        "du",
        about="Show what the saves of a run, or one checkpoint, take on the disk: weights, masters (fp32 weights of the "
        "optimizer), moments (its states), other, and waste (bytes that no tensor uses). Reads indexes only.",
        example="zckpt du out/",
    )(du)
    command(
        app,
        "prune",
        about="Delete the saves of a run that no rule keeps, after verifying those that stay. Without --yes it only prints what "
        "would go. The newest complete save and what 'latest' names always stay.",
        example="zckpt prune out/ --keep-last 3 --keep-best eval_loss --yes",
    )(prune)

    command(
        app,
        "slim",
        about="Write a smaller save of the same layout: without what --drop names, and without bytes that no tensor uses. Its "
        "framework still loads what remains. Saves of DeepSpeed, rank files, and torch files.",
        example="zckpt slim out/checkpoint-500 slim/ --drop optimizer",
    )(slim)


def du(run: Measured, shown: o.Shown) -> None:
    """Prints what lies where."""
    from zckpt.upkeep.usage import usage_of

    sink = shown.console
    found = usage_of(run)
    sink.result(found.as_json, lambda: found.lines(sink.width))


def prune(
    run: Run, kept: Kept, speed: o.Speed, yes: Yes = False, deep: Deep = False, *, shown: o.ShownProgress
) -> None:
    """Prints which saves stay and which go, and deletes these with --yes."""
    from zckpt.upkeep.keep_rules import KeepRules
    from zckpt.upkeep.metrics import metric_of
    from zckpt.upkeep.prune import prune

    best = tuple(map(metric_of, kept.keep_best or ()))
    rules = KeepRules(kept.keep_last, kept.keep_every, best, kept.incomplete)
    sink = shown.console
    with sink.progress(None, "prune") as progress:
        found = prune(run, rules, delete=yes, deep=deep, pace=speed.pace, progress=progress or False)
    sink.notes(found.notes)
    sink.result(
        found.as_json, lambda: found.lines(sink.width), done="The saves that no rule keeps are deleted." if yes else ""
    )


def slim(
    ckpt: o.Checkpoint,
    out: o.OutDirectory,
    source: o.SourceOptions,
    speed: o.WriteSpeed,
    writing: o.Writing,
    drop: Drop = None,
    *,
    shown: o.ShownProgress,
) -> None:
    """Writes a smaller save."""
    from zckpt.jobs.options import SlimOptions
    from zckpt.jobs.slim import described, execute, prepare

    began = time.perf_counter()
    dropped = tuple(dict.fromkeys(each.value for each in drop or ()))
    planned = prepare(ckpt, out, o.chosen(SlimOptions, source, speed, writing, drop=dropped))
    facts: dict[str, object] = {"dropped": dict(planned.dropped), "saved_bytes": planned.saved_bytes}
    words = Words(described(planned), _loaded(planned, dropped), facts)
    finish(planned, words, began, writing, shown, execute)


def _loaded(planned: PlannedSlim, dropped: tuple[str, ...]) -> Callable[[set[str]], str]:
    """How the smaller save is loaded, as a line."""
    out, layout = planned.out, planned.catalog.source.layout
    if layout == "megatron-core":
        return lambda files: f"load it with Megatron-Core, without an optimizer: --load {out} --no-load-optim"
    if layout == "universal":
        return lambda files: f"load with engine.load_checkpoint({out!r}), load_universal set in the config"
    if planned.stage is None:
        by_items = f"load it with torch.distributed.checkpoint.load into a state dict without the optimizer, from {out}"
        others = f"load the weights as before, from {out}"
        return lambda files: by_items if any(name.endswith(".metadata") for name in files) else others
    options = ["load_optimizer_states=False"] if "optimizer" in dropped else []
    options += ["load_module_strict=False"] if {"module-weights", "frozen"} & {*dropped} else []
    then = ", then engine.optimizer.update_lp_params()" if "module-weights" in dropped else ""
    return lambda files: f"load with engine.load_checkpoint({', '.join([repr(out), *options])}){then}"
