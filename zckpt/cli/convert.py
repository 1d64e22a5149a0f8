"""`zckpt to-fp32`, `to-fp16`, `to-bf16`: one conversion, three names; and `to-dcp`, the same into shards again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from zckpt.cli import options as o
from zckpt.cli import push
from zckpt.cli.output import Console, already_done, lack_of_space, peak_rss_bytes

if TYPE_CHECKING:
    from zckpt.jobs.convert import PlannedConversion
    from zckpt.jobs.planned import Report

_DTYPES = ("fp32", "fp16", "bf16")


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    for dtype in _DTYPES:
        _register(app, dtype)
    app.command(
        "to-dcp",
        help="Write weights of any layout as a torch.distributed.checkpoint directory, which FSDP loads on any number of ranks.",
        epilog="Example: zckpt to-dcp out/checkpoint-500 fsdp/ --optimizer optim",
    )(to_dcp)


def _register(app: typer.Typer, dtype: str) -> None:
    example = f"Example: zckpt to-{dtype} out/checkpoint-500 weights/"

    @app.command(f"to-{dtype}", help=f"Write a checkpoint's whole weights in {dtype}.", epilog=example)
    def command(
        ckpt: o.Checkpoint,
        out: o.Out,
        tag: o.Tag = None,
        kind: o.FormatOption = None,
        max_shard_size: o.MaxShardSize = "5GB",
        include: o.Include = None,
        exclude: o.Exclude = None,
        exclude_frozen: o.ExcludeFrozen = False,
        strip_prefix: o.StripPrefix = "",
        rename: o.Rename = None,
        overflow: o.OverflowOption = o.OverflowChoice.error,
        also: o.Also = None,
        tp_rules: o.TpRules = None,
        tp: o.Tp = None,
        pp: o.Pp = None,
        to: o.To = None,
        config: o.Config = None,
        layer_names: o.LayerNames = None,
        key: o.Key = None,
        threads: o.Threads = None,
        buffer: o.Buffer = None,
        keep_cache: o.KeepCache = None,
        limit_rate: o.LimitRate = None,
        dry_run: o.DryRun = False,
        overwrite: o.Overwrite = False,
        allow_unknown_layout: o.AllowUnknownLayout = False,
        as_json: o.Json = False,
        quiet: o.Quiet = False,
    ) -> None:
        from zckpt.jobs.convert import prepare
        from zckpt.jobs.options import Options, to_dtype
        from zckpt.naming.transform import Form

        began = time.perf_counter()
        chosen = Options(
            tag=tag,
            also=also or (),
            dtype=to_dtype(dtype),
            format=kind.value if kind else None,
            max_shard_size=max_shard_size,
            include=include or (),
            exclude=exclude or (),
            exclude_frozen=exclude_frozen,
            strip_prefix=strip_prefix,
            rename=[o.split_rename(text) for text in rename or ()],
            overflow=overflow.value,
            threads=threads,
            buffer=o.parse_bytes(buffer, "--buffer"),
            keep_cache=keep_cache,
            limit_rate=o.parse_bytes(limit_rate, "--limit-rate"),
            overwrite=overwrite,
            allow_unknown_layout=allow_unknown_layout,
            wishes=o.wishes(tp_rules, tp, pp, key),
            form=Form(to, config, layer_names),
        )
        sink = Console(as_json=as_json, quiet=quiet)
        if out.startswith("hf://"):
            push.to_page(ckpt, out, chosen, sink, dry_run=dry_run)
            return
        prepared = prepare(ckpt, out, chosen)
        if dry_run:
            show_plan(sink, prepared, dtype)
        else:
            _carry_out(sink, prepared, dtype, began)


def to_dcp(
    ckpt: o.Checkpoint,
    out: o.OutDirectory,
    dtype: o.CastOrKeep = None,
    under: o.Under = "model",
    optimizer: o.OptimizerKey = None,
    tag: o.Tag = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    exclude_frozen: o.ExcludeFrozen = False,
    strip_prefix: o.StripPrefix = "",
    rename: o.Rename = None,
    overflow: o.OverflowOption = o.OverflowChoice.error,
    also: o.Also = None,
    tp_rules: o.TpRules = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    key: o.Key = None,
    threads: o.Threads = None,
    dry_run: o.DryRun = False,
    overwrite: o.Overwrite = False,
    allow_unknown_layout: o.AllowUnknownLayout = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Writes the directory, or prints the plan."""
    from zckpt.jobs.options import DcpOptions, to_dtype
    from zckpt.jobs.to_dcp import prepare

    began = time.perf_counter()
    chosen = DcpOptions(
        under=under,
        optimizer=optimizer,
        tag=tag,
        also=also or (),
        dtype=to_dtype(dtype.value) if dtype else None,
        include=include or (),
        exclude=exclude or (),
        exclude_frozen=exclude_frozen,
        strip_prefix=strip_prefix,
        rename=[o.split_rename(text) for text in rename or ()],
        overflow=overflow.value,
        threads=threads,
        overwrite=overwrite,
        allow_unknown_layout=allow_unknown_layout,
        wishes=o.wishes(tp_rules, tp, pp, key),
    )
    sink = Console(as_json=as_json, quiet=quiet)
    prepared = prepare(ckpt, out, chosen)
    name = dtype.value if dtype else "saved"
    if dry_run:
        show_plan(sink, prepared, name)
    else:
        _carry_out(sink, prepared, name, began)


def _carry_out(sink: Console, prepared: PlannedConversion, dtype: str, began: float) -> None:
    from zckpt.jobs.planned import execute

    with sink.progress(prepared.plan.bytes_written, f"to {dtype}") as progress:
        report = execute(prepared, progress)
    seconds = time.perf_counter() - began
    sink.notes(report.notes)
    sink.notes(
        f"{count:,} elements of {name!r} were too large for {dtype}, the largest {largest:,}"
        for name, (count, largest) in report.overflows.items()
    )
    sink.result(
        lambda: {
            "out": prepared.out,
            "dtype": dtype,
            "files": [{"path": path, "bytes": nbytes} for path, nbytes in report.files],
            "tensors": report.tensors,
            "numel": report.numel,
            "bytes_written": report.bytes_written,
            "seconds": seconds,
            "peak_rss_bytes": peak_rss_bytes(),
            "engine": report.engine,
            "kept": report.kept,
            "already_done": report.already_done,
            "overflows": {name: {"count": n, "largest": repr(x)} for name, (n, x) in report.overflows.items()},
            "notes": list(report.notes),
        },
        lambda: _report_lines(prepared, report, dtype, seconds),
    )


def _report_lines(prepared: PlannedConversion, report: Report, dtype: str, seconds: float) -> Iterator[str]:
    files = "1 file" if len(report.files) == 1 else f"{len(report.files):,} files"
    if report.kept:
        files += f", {report.kept:,} of them finished by an earlier run and still sound"
    speed = report.bytes_written / 1e6 / max(seconds, 1e-9)
    if report.already_done:
        yield already_done(prepared.out)
    else:
        yield (
            f"{prepared.out}: {report.tensors:,} tensors, {report.numel:,} elements as {dtype}; "
            f"{report.bytes_written:,} bytes in {files}, {seconds:.2f} s, {speed:,.0f} MB/s"
        )
    yield f"load it with {_loader(prepared.out, [path for path, _ in report.files], prepared.order.single)}"


def _loader(out: str, files: list[str], single: bool) -> str:
    """How a person loads the output."""
    if single and out.endswith(".safetensors"):
        return f"safetensors.torch.load_file({out!r})"
    if single:
        return f"torch.load({out!r}, weights_only=True)"
    if ".metadata" in files:
        return f"torch.distributed.checkpoint.load(state_dict, checkpoint_id={out!r})"
    hint = "" if "config.json" in files else ", once the model's config.json lies in it"
    return f"transformers.AutoModelForCausalLM.from_pretrained({out!r}){hint}"


def show_plan(sink: Console, prepared: PlannedConversion, dtype: str) -> None:
    """What a conversion would write."""
    from zckpt.storage.paths import size

    plan = prepared.plan
    files = [(file.path, file.size) for file, _ in plan.files]
    files += [(name, size(path)) for path, name in prepared.order.copies]
    moves = sum(1 for _ in plan.moves())
    facts: dict[str, object] = {
        "dry_run": True,
        "out": prepared.out,
        "dtype": dtype,
        "files": [{"path": path, "bytes": nbytes} for path, nbytes in files],
        "tensors": len(prepared.catalog),
        "numel": prepared.catalog.numel,
        "moves": moves,
        "bytes_read": plan.bytes_read,
        "bytes_written": prepared.order.bytes_written,
        "notes": list(prepared.notes),
    }

    def lines() -> Iterator[str]:
        catalog = prepared.catalog
        yield f"{prepared.out} would get {len(catalog):,} tensors, {catalog.numel:,} elements as {dtype}"
        for path, nbytes in files:
            yield f"  {nbytes:>16,} bytes  {path}"
        yield f"{moves:,} moves: {plan.bytes_read:,} bytes read, {prepared.order.bytes_written:,} bytes written"

    sink.notes(prepared.notes)
    sink.notes(lack_of_space(prepared.out, prepared.order.bytes_written))
    sink.result(lambda: facts, lines)
