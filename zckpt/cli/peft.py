"""`zckpt to-peft`: the adapter alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.cli import options as o
from zckpt.cli.convert import show_plan
from zckpt.cli.output import Console, already_done, peak_rss_bytes

if TYPE_CHECKING:
    from zckpt.jobs.to_peft import AdapterReport

OutDirectory = Annotated[str, typer.Argument(metavar="OUT", help="Directory for the adapter.", show_default=False)]
Adapter = Annotated[str | None, typer.Option("--adapter", metavar="NAME", help="Which one, where there are several.")]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "to-peft",
        help="Write the adapter alone (LoRA and other PEFT methods), as PeftModel.from_pretrained loads it.",
        epilog="Example: zckpt to-peft out/checkpoint-500 adapter/",
    )(to_peft)


def to_peft(
    ckpt: o.Checkpoint,
    out: OutDirectory,
    adapter: Adapter = None,
    dtype: o.CastTo = o.Dtype.fp32,
    tag: o.Tag = None,
    also: o.Also = None,
    tp_rules: o.TpRules = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    overflow: o.OverflowOption = o.OverflowChoice.error,
    threads: o.Threads = None,
    dry_run: o.DryRun = False,
    overwrite: o.Overwrite = False,
    allow_unknown_layout: o.AllowUnknownLayout = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Plans, and unless it is a dry run carries out."""
    from zckpt.jobs.options import PeftOptions, to_dtype
    from zckpt.jobs.to_peft import carry_out, prepare

    began = time.perf_counter()
    options = PeftOptions(
        adapter=adapter,
        tag=tag,
        also=also or (),
        dtype=to_dtype(dtype.value),
        overflow=overflow.value,
        threads=threads,
        overwrite=overwrite,
        allow_unknown_layout=allow_unknown_layout,
        wishes=o.wishes(tp_rules, tp, pp),
    )
    sink = Console(as_json=as_json, quiet=quiet)
    prepared = prepare(ckpt, out, options)
    if dry_run:
        show_plan(sink, prepared, dtype.value)
        return
    with sink.progress(prepared.plan.bytes_written, "to peft") as progress:
        report = carry_out(prepared, progress)
    seconds = time.perf_counter() - began
    sink.notes(report.notes)
    sink.result(
        lambda: {
            "out": out,
            "adapter": report.adapter,
            "dtype": dtype.value,
            "files": [{"path": path, "bytes": nbytes} for path, nbytes in report.files],
            "tensors": report.tensors,
            "numel": report.numel,
            "bytes_written": report.bytes_written,
            "already_done": report.already_done,
            "seconds": seconds,
            "peak_rss_bytes": peak_rss_bytes(),
            "untrained": list(report.untrained),
            "overflows": {name: {"count": n, "largest": repr(x)} for name, (n, x) in report.overflows.items()},
            "notes": list(report.notes),
        },
        lambda: _lines(out, report, dtype.value, seconds),
    )


def _lines(out: str, report: AdapterReport, dtype: str, seconds: float) -> Iterator[str]:
    if report.already_done:
        yield already_done(out)
    else:
        yield (
            f"{out}: adapter {report.adapter!r}, {report.tensors:,} tensors, {report.numel:,} elements as {dtype}; "
            f"{report.bytes_written:,} bytes, {seconds:.2f} s"
        )
    yield f"load it with PeftModel.from_pretrained(base, {out!r})"
