"""`zckpt reshard` and `zckpt to-universal`: a checkpoint for another machine shape, and one for all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.cli import options as o
from zckpt.cli.output import Console, already_done, lack_of_space, peak_rss_bytes

if TYPE_CHECKING:
    from zckpt.jobs.planned import Report
    from zckpt.jobs.reshard import CheckpointTarget, PlannedReshard


class ModulePrecision(str, Enum):
    """What the module's own weights can be."""

    keep = "keep"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


WorldSize = Annotated[
    int,
    typer.Option("--world-size", metavar="N", min=1, help="Data-parallel ranks that will resume.", show_default=False),
]
Stage = Annotated[
    int | None, typer.Option("--stage", metavar="1|2|3", min=1, max=3, help="ZeRO stage; by default the one it has.")
]
PrecisionOption = Annotated[ModulePrecision, typer.Option("--precision", help="Dtype of the module's own weights.")]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "reshard",
        help="Write a ZeRO checkpoint for another world size, stage or precision; DeepSpeed resumes from it as it is.",
        epilog="Example: zckpt reshard out/checkpoint-500 resumable/ --world-size 4 --stage 3",
    )(reshard)
    app.command(
        "to-universal",
        help="Write a universal checkpoint, which DeepSpeed resumes from at any world size and tensor or pipeline split.",
        epilog="Example: zckpt to-universal out/checkpoint-500 universal/",
    )(to_universal)


def reshard(
    ckpt: o.Checkpoint,
    out: o.OutDirectory,
    world_size: WorldSize,
    stage: Stage = None,
    precision: PrecisionOption = ModulePrecision.keep,
    tag: o.Tag = None,
    also: o.Also = None,
    tp_rules: o.TpRules = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    key: o.Key = None,
    threads: o.Threads = None,
    keep_cache: o.KeepCache = None,
    limit_rate: o.LimitRate = None,
    dry_run: o.DryRun = False,
    overwrite: o.Overwrite = False,
    allow_unknown_layout: o.AllowUnknownLayout = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Plans, and unless it is a dry run carries out."""
    from zckpt.jobs.options import ReshardOptions, to_dtype
    from zckpt.jobs.reshard import prepare

    began = time.perf_counter()
    sink = Console(as_json=as_json, quiet=quiet)
    options = ReshardOptions(
        world_size=world_size,
        stage=stage,
        precision=None if precision is ModulePrecision.keep else to_dtype(precision.value),
        tag=tag,
        also=also or (),
        overwrite=overwrite,
        allow_unknown_layout=allow_unknown_layout,
        wishes=o.wishes(tp_rules, tp, pp, key),
        threads=threads,
        keep_cache=keep_cache,
        limit_rate=o.parse_bytes(limit_rate, "--limit-rate"),
    )
    prepared = prepare(ckpt, out, options)
    what = f"ZeRO-{prepared.target.stage}, world size {world_size}, {prepared.target.precision.torch_name}"
    facts = {"zero_stage": prepared.target.stage, "world_size": world_size}
    _carry_out(prepared, what, facts, began, sink, dry_run=dry_run)


def to_universal(
    ckpt: o.Checkpoint,
    out: o.OutDirectory,
    tag: o.Tag = None,
    also: o.Also = None,
    tp_rules: o.TpRules = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    key: o.Key = None,
    threads: o.Threads = None,
    keep_cache: o.KeepCache = None,
    limit_rate: o.LimitRate = None,
    dry_run: o.DryRun = False,
    overwrite: o.Overwrite = False,
    allow_unknown_layout: o.AllowUnknownLayout = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Plans, and unless it is a dry run carries out."""
    from zckpt.jobs.options import WriteOptions
    from zckpt.jobs.to_universal import prepare

    began = time.perf_counter()
    sink = Console(as_json=as_json, quiet=quiet)
    options = WriteOptions(
        tag=tag,
        also=also or (),
        overwrite=overwrite,
        allow_unknown_layout=allow_unknown_layout,
        wishes=o.wishes(tp_rules, tp, pp, key),
        threads=threads,
        keep_cache=keep_cache,
        limit_rate=o.parse_bytes(limit_rate, "--limit-rate"),
    )
    prepared = prepare(ckpt, out, options)
    what = f"universal checkpoint of {len(prepared.catalog):,} tensors"
    _carry_out(prepared, what, {}, began, sink, dry_run=dry_run)


def _carry_out(
    prepared: PlannedReshard[CheckpointTarget],
    what: str,
    facts: Mapping[str, object],
    began: float,
    sink: Console,
    *,
    dry_run: bool,
) -> None:
    from zckpt.jobs.planned import execute

    sink.notes(prepared.notes)
    what += f", tag {prepared.target.tag}"
    if dry_run:
        sink.notes(lack_of_space(prepared.out, prepared.plan.bytes_written))
        told = {"dry_run": True, **_plan_facts(prepared), **facts}
        sink.result(lambda: told, lambda: _plan_lines(prepared, what))
        return
    with sink.progress(prepared.plan.bytes_written, "write") as progress:
        report = execute(prepared, progress)
    seconds = time.perf_counter() - began
    sink.result(
        lambda: {
            **_plan_facts(prepared),
            **facts,
            "bytes_written": report.bytes_written,
            "kept": report.kept,
            "already_done": report.already_done,
            "seconds": seconds,
            "peak_rss_bytes": peak_rss_bytes(),
        },
        lambda: _lines(prepared, what, report, seconds),
    )


def _plan_facts(prepared: PlannedReshard[CheckpointTarget]) -> dict[str, object]:
    target, catalog = prepared.target, prepared.catalog
    return {
        "out": prepared.out,
        "tag": target.tag,
        "precision": target.precision.torch_name,
        "files": [{"path": file.path, "bytes": file.size} for file, _ in prepared.plan.files],
        "tensors": len(catalog),
        "numel": catalog.numel,
        "bytes_written": prepared.plan.bytes_written,
        "notes": list(prepared.notes),
    }


def _plan_lines(prepared: PlannedReshard[CheckpointTarget], what: str) -> Iterator[str]:
    yield f"{prepared.out} would get {what}"
    for file, _ in prepared.plan.files:
        yield f"  {file.size:>16,} bytes  {file.path}"
    yield f"{prepared.plan.bytes_read:,} bytes read, {prepared.plan.bytes_written:,} bytes written"


def _lines(prepared: PlannedReshard[CheckpointTarget], what: str, report: Report, seconds: float) -> Iterator[str]:
    speed = report.bytes_written / 1e6 / max(seconds, 1e-9)
    if report.already_done:
        yield already_done(prepared.out)
    else:
        yield (
            f"{prepared.out}: {what}; {report.bytes_written:,} bytes in {len(report.files):,} files, "
            f"{seconds:.2f} s, {speed:,.0f} MB/s"
        )
    yield f"resume with engine.load_checkpoint({prepared.out!r})"
