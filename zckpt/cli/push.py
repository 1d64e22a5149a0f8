"""`zckpt push`: from a checkpoint to a model page; also `to-*` with `hf://` as OUT."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote

import typer

from zckpt.base.words import count, duration, rate, size
from zckpt.cli.declare import DTYPE, Checkpoint, ShownProgress, command, output
from zckpt.cli.output import Console
from zckpt.jobs.declarations import PUSH
from zckpt.jobs.groups import WHAT
from zckpt.jobs.own_groups import PageOptions

if TYPE_CHECKING:
    from zckpt.hub import PageTarget, PushReport, Ready
    from zckpt.jobs.convert import PlannedConversion
    from zckpt.jobs.declarations import Asked

_ADDRESS = re.compile(
    r"hf://(?:models/)?(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>refs/pr/\d+|[^/]+))?(?:/(?P<path>.*))?", re.DOTALL
)
_SEEN = {
    "nothing": "",
    "the same": "; there already",
    "another": "; replaces the one there",
    "perhaps the same": "; replaces the one there, unless it is the same",
}
_OTHERS = ("datasets", "spaces", "buckets", "kernels")

RepoId = Annotated[
    str, typer.Argument(metavar="REPO_ID", help="OWNER/NAME, or NAME for a page of your own.", show_default=False)
]


Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", rich_help_panel=WHAT, help="By default what config.json says, or that of plain weights.", **DTYPE
    ),
]


@command(
    "push",
    about="Make a model page on the Hugging Face hub of a checkpoint. Shards are sent while they are made; one commit makes "
    "all of them visible.",
    job=PUSH,
    hidden=frozenset({"strip_prefix", "rename", "to", "config", "layer_names", "vocab_size", "allow_unknown_layout"}),
    example="zckpt push out/checkpoint-500 me/my-model --dtype bf16",
)
def push(
    ckpt: Checkpoint,
    repo_id: RepoId,
    dtype: Dtype = None,
    *,
    page: PageOptions,
    asked: Asked[None],
    dry_run: Annotated[bool, output("--dry-run", help="Print exactly what would be sent, and send nothing.")] = False,
    shown: ShownProgress,
) -> None:
    """Pushes a checkpoint, or shows what would be pushed."""
    if page.endpoint:
        os.environ["HF_ENDPOINT"] = page.endpoint  # before huggingface_hub is imported, which reads it then
    from zckpt.hub import PageTarget, load

    if not os.path.exists(ckpt) and os.path.isdir(repo_id):
        from zckpt.jobs.open import check_order

        check_order(ckpt, repo_id)
    planned = load(ckpt, dtype, asked)
    carry_out(planned, PageTarget(repo_id, **asdict(page)), shown.console, dry_run=dry_run)


def carry_out(prepared: PlannedConversion, target: PageTarget, sink: Console, *, dry_run: bool) -> None:
    """Sends a planned conversion to a page."""
    from zckpt.hub import cargo_of, execute, prepare

    ready = prepare(cargo_of(prepared), target, lambda text: sink.notes([text]), dry_run=dry_run)
    if dry_run:
        sink.notes(ready.cargo.notes)
        sink.result(lambda: _facts(ready), lambda: _plan_lines(ready))
        return
    notes = prepared.check() if not ready.already_done else ()
    with sink.progress(sum(shard.nbytes for shard in ready.cargo.shards), "push") as progress:
        try:
            report = execute(ready, progress)
        except Exception:
            raise
        except BaseException:
            sink.notes(["Run the same command again to resume: what the hub has is not sent again."])
            raise
    sink.notes((*report.notes, *notes))
    sink.result(
        lambda: _report_facts(ready, report), lambda: _report_lines(ready, report), done="The push is complete."
    )


def to_page(source: str, out: str, asked: Asked[None], sink: Console, *, dry_run: bool) -> None:
    """Pushes for a `to-*` command with an OUT such as `hf://me/my-model@main/fp32`."""
    from zckpt.base.errors import UsageError
    from zckpt.hub import PageTarget
    from zckpt.jobs.declarations import CONVERT

    found = _ADDRESS.fullmatch(out.rstrip("/"))
    if not found or found["repo"].partition("/")[0] in _OTHERS:
        raise UsageError(
            "is not the address of a model", file=out, expected="hf://OWNER/NAME[@REVISION][/DIRECTORY]",
            remedy="Change OUT, or use zckpt push.",
        )  # fmt: skip
    path = found["path"] or ""
    if path.endswith((".safetensors", ".bin", ".pt")) or asked.sharding.format == "bin":
        raise UsageError(
            "a page gets shards in safetensors, and no single file or .bin", file=out,
            remedy="Give the page, or a directory in it.",
        )  # fmt: skip
    revision, overwrite = unquote(found["revision"] or "main"), asked.publishing.overwrite
    target = PageTarget(found["repo"], revision=revision, path_in_repo=path, yes=overwrite)
    carry_out(CONVERT.prepare(source, "", asked.having(format=None)), target, sink, dry_run=dry_run)


def _facts(ready: Ready) -> dict[str, object]:
    target, cargo = ready.target, ready.cargo
    return {
        "dry_run": True,
        "repo_id": target.repo_id,
        "revision": target.revision,
        "exists": ready.page.exists,
        "private": ready.page.private if ready.page.exists else target.private is not False,
        "create_pr": target.create_pr,
        "files": [
            {"path": path, "bytes": nbytes, "origin": origin, "there": ready.there[path]}
            for path, nbytes, origin in _files(ready)
        ],
        "removed": list(ready.removed),
        "already_done": ready.already_done,
        "bytes": cargo.nbytes,
        "scratch_bytes": ready.room,
        "dtype": cargo.dtype,
        "tensors": len(cargo.catalog),
        "numel": cargo.catalog.numel,
        "card": next((file.read().decode(errors="replace") for file in cargo.small if file.name == "README.md"), None),
        "notes": list(cargo.notes),
    }


def _files(ready: Ready) -> Iterator[tuple[str, int, str]]:
    place = ready.target.place
    for shard in ready.cargo.shards:
        yield place(shard.name), shard.nbytes, "made of the checkpoint" if shard.scratch_bytes else "sent as it is"
    for file in ready.cargo.small:
        yield place(file.name), file.nbytes, file.origin


def _plan_lines(ready: Ready) -> Iterator[str]:
    target, cargo, page = ready.target, ready.cargo, ready.page
    seen = "private" if (page.private if page.exists else target.private is not False) else "public"
    state = f"{'' if page.exists else 'new, '}{seen}{', as a pull request' if target.create_pr else ''}"
    listed = list(_files(ready))
    total = f"{count(len(listed), 'file')}, {size(cargo.nbytes)}"
    yield f"{target.repo_id}@{target.revision} ({state}): would get {total}"
    for path, nbytes, origin in listed:
        yield f"  {size(nbytes):>9}  {path} ({origin}{_SEEN[ready.there[path]]})"
    for path in ready.removed:
        yield f"  {'removed':>9}  {path} (other weights, which would be loaded instead)"
    yield f"{count(len(cargo.catalog), 'tensor')}; at most {size(ready.room)} of scratch space"


def _report_facts(ready: Ready, report: PushReport) -> dict[str, object]:
    return {
        "url": report.url,
        "repo_id": ready.target.repo_id,
        "revision": ready.target.revision,
        "commit": report.commit,
        "pull_request": report.pull_request,
        "files": [{"path": path, "bytes": nbytes, "hash": oid} for path, nbytes, oid in report.files],
        "removed": list(ready.removed),
        "bytes": ready.cargo.nbytes,
        "bytes_made": report.bytes_made,
        "bytes_sent": report.bytes_sent,
        "already_done": report.already_done,
        "seconds": report.seconds,
        "notes": list(report.notes),
    }


def _report_lines(ready: Ready, report: PushReport) -> Iterator[str]:
    files = f"{count(len(report.files), 'file')}, {size(ready.cargo.nbytes)}"
    if report.already_done:
        yield f"already done: the page holds all of {files}; nothing was sent"
        yield report.url
        return
    speed = rate(report.bytes_sent, report.seconds)
    yield f"{files}; {size(report.bytes_sent)} of shards sent in {duration(report.seconds)}{speed}"
    yield "read back: sizes, hashes and headers equal what was sent"
    yield report.pull_request or report.url
