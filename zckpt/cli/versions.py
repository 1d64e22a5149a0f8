"""`zckpt delta` and `zckpt apply`: what changed between two versions of weights, and the new version out of the old one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.base.errors import UsageError
from zckpt.base.words import count, duration, size
from zckpt.cli.declare import DryRun, ShownProgress, command
from zckpt.cli.output import peak_rss_bytes
from zckpt.cli.written import Words, file_lines, lack_of_space, show
from zckpt.jobs.declarations import APPLY, DELTA

if TYPE_CHECKING:
    from zckpt.jobs.apply_delta import PlannedApply
    from zckpt.jobs.declarations import Asked
    from zckpt.jobs.delta import DeltaReport, PlannedDelta
    from zckpt.jobs.own_groups import Delta

_NO_SELECTION = frozenset({"include", "exclude", "exclude_frozen"})


OldVersion = Annotated[
    str,
    typer.Argument(metavar="OLD", help="The version that is there: weights, or a checkpoint.", show_default=False),
]
NewVersion = Annotated[
    str, typer.Argument(metavar="NEW", help="The version to get: a checkpoint, or weights.", show_default=False)
]
DeltaOut = Annotated[
    str, typer.Argument(metavar="OUT", help="Directory for the delta, such as weight_v000001.", show_default=False)
]
Chain = Annotated[
    list[str],
    typer.Argument(
        metavar="OLD DELTA... OUT",
        help="The older weights, deltas in order, and the directory to write.",
        show_default=False,
    ),
]


@command(
    "delta",
    about="Write what changed in weights since an older version, as SGLang's weight pull reads it. OLD and NEW may have "
    "any layouts; options for reading and names are for checkpoints, and plain weights keep their names.",
    job=DELTA,
    hidden=_NO_SELECTION,
    example="zckpt delta weights/ out/checkpoint-500 updates/weight_v000001",
)
def delta(
    old: OldVersion,
    new: NewVersion,
    out: DeltaOut,
    asked: Asked[Delta],
    dry_run: DryRun = False,
    *,
    shown: ShownProgress,
) -> None:
    """Writes a delta."""
    from zckpt.jobs.delta import execute

    sink = shown.console
    job = DELTA.prepare(old, new, out, asked)
    if dry_run:
        sink.notes(job.notes)
        sink.result(lambda: _delta_plan(job), lambda: _delta_plan_lines(job))
        return
    with sink.progress(job.nbytes, "compare") as progress:
        report = execute(job, progress, lambda note: sink.notes([note]))
    sink.notes(report.notes)
    seconds = shown.seconds
    sink.result(
        lambda: {
            "out": job.out.path,
            **report.form.metadata,
            **asdict(report.counts),
            "ratio": report.ratio,
            "files": [{"path": path, "bytes": nbytes} for path, nbytes in report.files],
            "bytes_written": 0 if report.already_done else report.nbytes,
            "seconds": seconds,
            "peak_rss_bytes": peak_rss_bytes(),
            "engine": report.engine,
            "kept": report.kept,
            "already_done": report.already_done,
            "notes": list(report.notes),
        },
        lambda: _lines(job.out.path, report, seconds),
        done=f"The output {job.out.path} is complete.",
    )


def _delta_plan(job: PlannedDelta) -> dict[str, object]:
    return {
        "dry_run": True, "out": job.out.path, **job.form.metadata, "tensors": len(job.pairs),
        "numel": sum(pair.old.numel for pair in job.pairs), "nbytes": job.nbytes, "bytes_read": job.bytes_read,
        "most_files": len(job.groups), "notes": list(job.notes),
    }  # fmt: skip


def _delta_plan_lines(job: PlannedDelta) -> Iterator[str]:
    files = "1 file" if len(job.groups) == 1 else f"at most {len(job.groups):,} files"
    yield f"{job.out}: would hold what changed from version {job.form.base_version} to {job.form.version}, in {files}"
    yield f"would read {size(job.bytes_read)} and compare {count(len(job.pairs), 'tensor')} of {size(job.nbytes)}"


def _lines(out: str, report: DeltaReport, seconds: float) -> Iterator[str]:
    counts = report.counts
    if report.already_done:
        yield f"{out}: already done; every file matches its checksum, and nothing was written"
    yield (
        f"{out}: version {report.form.version} from {report.form.base_version}, {size(report.nbytes)}, "
        f"{report.ratio:.2%} of {size(counts.nbytes)}, {duration(seconds)}"
    )
    yield (
        f"changed: {counts.changed:,} of {count(counts.numel, 'element')} ({report.density:.2%}), in "
        f"{counts.changed_tensors:,} of {count(counts.tensors, 'tensor')}"
    )
    yield f"apply it with zckpt apply OLD {out} NEW, or let SGLang pull it"


@command(
    "apply",
    about="Write the weights that deltas, in order, make of an older version. Every tensor is proved by its checksum.",
    job=APPLY,
    hidden=_NO_SELECTION,
    example="zckpt apply weights/ updates/weight_v000001 weights-1/",
)
def apply(paths: Chain, asked: Asked[None], dry_run: DryRun = False, *, shown: ShownProgress) -> None:
    """Writes the weights that deltas make of an older version."""
    from zckpt.cli.loading import loading_line
    from zckpt.jobs.apply_delta import execute

    if len(paths) < 3:
        raise UsageError(
            "an argument is missing", found=count(len(paths), "path"), expected="OLD, at least one DELTA, and OUT",
            remedy="Run zckpt apply OLD DELTA OUT.",
        )  # fmt: skip
    sink = shown.console
    old, *deltas, out = paths
    job = APPLY.prepare(old, deltas, out, asked)
    if dry_run:
        sink.notes((*job.old.notes, *lack_of_space(job.out, job.nbytes)))
        sink.result(lambda: _apply_plan(job), lambda: _apply_plan_lines(job))
        return
    with sink.progress(job.nbytes, "write") as progress:
        report = execute(job, progress, lambda note: sink.notes([note]))
    what = f"version {job.version}, {count(report.tensors, 'tensor')}, each with its checksum"
    tensors = [entry.name for _, entry in job.pairs]
    words = Words(what, lambda files: f"load it with {loading_line(job.out.path, tensors)}", {"version": job.version})
    show(sink, job.out.path, words, report, shown.seconds)


def _apply_plan(job: PlannedApply) -> dict[str, object]:
    return {
        "dry_run": True, "out": job.out.path, "version": job.version,
        "files": [{"path": path, "bytes": nbytes} for path, nbytes in job.files],
        "tensors": len(job.pairs), "numel": sum(old.numel for old, _ in job.pairs), "moves": len(job.pairs),
        "bytes_read": job.bytes_read, "bytes_written": sum(nbytes for _, nbytes in job.files), "notes": list(job.old.notes),
    }  # fmt: skip


def _apply_plan_lines(job: PlannedApply) -> Iterator[str]:
    yield f"{job.out}: would hold version {job.version}, {count(len(job.pairs), 'tensor')}"
    yield from file_lines(job.files)
    yield f"would read {size(job.bytes_read)} and write {size(sum(nbytes for _, nbytes in job.files))}"
