"""`zckpt average`: one model out of several checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.base.words import count
from zckpt.cli.arguments import DryRun, ShownProgress
from zckpt.cli.convert import words_of
from zckpt.cli.declare import command
from zckpt.cli.written import finish
from zckpt.jobs.declarations import AVERAGE

if TYPE_CHECKING:
    from zckpt.jobs.declarations import Asked
    from zckpt.jobs.own_groups import Average

Checkpoints = Annotated[
    list[str],
    typer.Argument(
        metavar="CKPT...", help="Checkpoints of one model, of any layouts; CKPT:TAG names one save.", show_default=False
    ),
]


Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="A file (.safetensors, .bin, .pt), a directory for shards, or an address (s3://...).",
        show_default=False,
    ),
]


@command(
    "average",
    about="Average checkpoints of one model in fp32, in one pass, or merge them: weighted, as a moving average, as task "
    "vectors on a base, or along an arc.",
    job=AVERAGE,
    example="zckpt average run:global_step100 run:global_step200 averaged/ --dtype bf16",
)
def average(
    ckpts: Checkpoints, out: Out, asked: Asked[Average], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes one model out of several checkpoints."""
    planned = AVERAGE.prepare(ckpts, out, asked)
    words = words_of(planned, planned.dtype)
    what = f"{words.what}, of {count(len(planned.checkpoints), 'checkpoint')}"
    finish(planned, replace(words, what=what), shown, dry_run=dry_run)
