"""`zckpt to-gguf`: a model as GGUF, which llama.cpp runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.base.words import count
from zckpt.cli.arguments import Checkpoint, DryRun, ShownProgress
from zckpt.cli.declare import command
from zckpt.cli.written import Words, finish
from zckpt.jobs.declarations import TO_GGUF

if TYPE_CHECKING:
    from zckpt.jobs.declarations import Asked
    from zckpt.jobs.own_groups import Gguf


OutGguf = Annotated[
    str,
    typer.Argument(
        metavar="OUT", help="A file (.gguf), a directory, or an address of one of these (s3://...).", show_default=False
    ),
]


@command(
    "to-gguf",
    about="Write a model as GGUF, which llama.cpp runs: what its own converter writes, from any checkpoint.",
    job=TO_GGUF,
    example="zckpt to-gguf out/checkpoint-500 model.gguf --type q8_0",
)
def to_gguf(
    ckpt: Checkpoint, out: OutGguf, asked: Asked[Gguf], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes GGUF files."""
    planned, kind = TO_GGUF.prepare(ckpt, out, asked), asked.own.type
    first = planned.plan.files[0][0].path
    path = planned.out if planned.order.single else f"{planned.out.rstrip('/')}/{first}"
    what = f"{count(len(planned.catalog), 'tensor')} as {kind}"
    words = Words(what, lambda files: f"run it with llama-cli -m {path}", {"type": kind})
    finish(planned, words, shown, dry_run=dry_run)
