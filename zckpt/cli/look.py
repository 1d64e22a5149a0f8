"""`zckpt inspect`, `verify` and `diff`: what a checkpoint is, whether it is intact, and what two do not have in common."""

from __future__ import annotations

import typer

from zckpt.cli import options as o
from zckpt.cli.output import Console


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command(
        "inspect",
        help="Tell what a checkpoint holds, what it lacks, and whether it can be exported and resumed.",
        epilog="Example: zckpt inspect out/checkpoint-500 (exit status 1 when it cannot be exported)",
    )(inspect)
    app.command(
        "verify",
        help="Tell whether a checkpoint is complete and intact, whether CONVERTED is exactly what it says, and whether the "
        "shards may be deleted. A directory with a zckpt.json is checked against it.",
        epilog="Example: zckpt verify out/checkpoint-500 weights/ (exit status 1 when anything is wrong)",
    )(verify)
    app.command(
        "diff",
        help="Compare any two things zckpt reads, in any layout and dtype: names, shapes, dtypes, values.",
        epilog="Example: zckpt diff out/checkpoint-500 weights/ --rtol 0.004 (exit status 0 same, 1 different)",
    )(diff)


def inspect(
    ckpt: o.Looked,
    tag: o.Tag = None,
    also: o.Also = None,
    tp_rules: o.TpRules = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    key: o.Key = None,
    tensors: o.Tensors = False,
    as_json: o.Json = False,
) -> None:
    """Prints an inspection; exit status 1 when the checkpoint cannot be exported."""
    from zckpt.jobs.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(ckpt, tag, also or (), o.wishes(tp_rules, tp, pp, key))
    sink = Console(as_json=as_json)
    sink.result(lambda: inspection.as_json(slices=tensors), lambda: inspection.lines(tensors=tensors, width=sink.width))
    if not inspection.exportable.ok:
        raise typer.Exit(1)


def verify(
    ckpt: o.Looked,
    converted: o.Converted = None,
    deep: o.Deep = False,
    tag: o.Tag = None,
    also: o.Also = None,
    tp_rules: o.TpRules = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    key: o.Key = None,
    threads: o.Threads = None,
    keep_cache: o.KeepCache = None,
    limit_rate: o.LimitRate = None,
    as_json: o.Json = False,
) -> None:
    """Prints a verification; exit status 1 when anything is wrong."""
    from zckpt.checks.verify import verify

    sink = Console(as_json=as_json)
    with sink.progress(None, "verify") as progress:
        found = verify(
            ckpt,
            converted,
            deep=deep,
            tag=tag,
            also=also or (),
            wishes=o.wishes(tp_rules, tp, pp, key),
            pace=o.pace(threads, keep_cache, limit_rate),
            progress=progress or False,
        )
    sink.result(found.as_json, lambda: found.lines(sink.width))
    if not found.ok:
        raise typer.Exit(1)


def diff(
    a: o.SideA,
    b: o.SideB,
    tensors: o.AllTensors = False,
    atol: o.Atol = None,
    rtol: o.Rtol = None,
    tp_rules: o.TpRules = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    threads: o.Threads = None,
    keep_cache: o.KeepCache = None,
    limit_rate: o.LimitRate = None,
    as_json: o.Json = False,
) -> None:
    """Prints differences; exit status 1 when there are any."""
    from zckpt.jobs.diff import diff

    sink = Console(as_json=as_json)
    with sink.progress(None, "diff") as progress:
        found = diff(
            *(a, b),
            atol=atol,
            rtol=rtol,
            wishes=o.wishes(tp_rules, tp, pp),
            pace=o.pace(threads, keep_cache, limit_rate),
            progress=progress or False,
        )
    sink.notes(found.notes)
    sink.result(lambda: found.as_json(tensors=tensors), lambda: found.lines(tensors=tensors, width=sink.width))
    if not found.same:
        raise typer.Exit(1)
