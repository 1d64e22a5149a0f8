"""`zckpt inspect`: what a checkpoint is."""

from __future__ import annotations

import typer

from zckpt.cli import options as o
from zckpt.cli.output import Sink


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "inspect",
        help="Tell what a checkpoint holds, what it lacks, and whether it can be exported and resumed.",
        epilog="Example: zckpt inspect out/checkpoint-500 (exit status 1 when it cannot be exported)",
    )(inspect)


def inspect(
    ckpt: o.Looked,
    tag: o.Tag = None,
    also: o.Also = None,
    tp_rules: o.TpRules = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    tensors: o.Tensors = False,
    as_json: o.Json = False,
) -> None:
    """Prints an inspection; exit status 1 when the checkpoint cannot be exported."""
    from zckpt.report import describe, inspect_checkpoint

    inspection = inspect_checkpoint(ckpt, tag, also or (), o.wishes(tp_rules, tp, pp))
    Sink(as_json=as_json).result(inspection.as_json, lambda: describe(inspection, tensors=tensors))
    if not inspection.exportable.ok:
        raise typer.Exit(1)
