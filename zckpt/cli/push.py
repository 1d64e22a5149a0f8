"""`zckpt push`: from a checkpoint to a model page; also `to-*` with `hf://` as OUT."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote

import typer

from zckpt.cli import options as o
from zckpt.cli.output import Console

if TYPE_CHECKING:
    from zckpt.hub import PageTarget, PushReport, Ready
    from zckpt.jobs.convert import PlannedConversion
    from zckpt.jobs.options import Options

_ADDRESS = re.compile(
    r"hf://(?:models/)?(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>refs/pr/\d+|[^/]+))?(?:/(?P<path>.*))?", re.DOTALL
)
_SEEN = {
    "nothing": "",
    "the same": "; is there already",
    "another": "; replaces the file that is there",
    "perhaps the same": "; replaces a file of the same size that is there, unless it is the same",
}
_OTHERS = ("datasets", "spaces", "buckets", "kernels")

RepoId = Annotated[
    str, typer.Argument(metavar="REPO_ID", help="OWNER/NAME, or a name of your own.", show_default=False)
]
Revision = Annotated[str, typer.Option("--revision", metavar="R", help="Branch; made where it is not there.")]
Visibility = Annotated[
    bool | None, typer.Option("--private/--public", help="Who sees a page that is made: by default only you.")
]
CreatePr = Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")]
Message = Annotated[str | None, typer.Option("--message", metavar="M", help="Of the commit.")]
PathInRepo = Annotated[str, typer.Option("--path-in-repo", metavar="P", help="Directory in the repository.")]
ScratchDir = Annotated[
    str | None, typer.Option("--scratch", metavar="DIR", help="For shards on their way; by default in the hub's cache.")
]
MaxScratch = Annotated[
    str | None,
    typer.Option("--max-scratch", metavar="SIZE", help="Most bytes there; by default two of the largest shard."),
]
NoCard = Annotated[bool, typer.Option("--no-card", help="Write no model card where SOURCE has no README.md.")]
License = Annotated[str | None, typer.Option("--license", metavar="L", help="For the card, as the hub names it.")]
BaseModel = Annotated[str | None, typer.Option("--base-model", metavar="L", help="For the card: what was trained on.")]
Token = Annotated[
    str | None, typer.Option("--token", metavar="T", help="Access token; by default the one logged in, or HF_TOKEN.")
]
Endpoint = Annotated[
    str | None, typer.Option("--endpoint", metavar="URL", help="Address of the hub; by default HF_ENDPOINT.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Go on where the repository holds files.")]
ShowOnly = Annotated[bool, typer.Option("--dry-run", help="Print exactly what would go up, and send nothing.")]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "push",
        help="Make a model page of a checkpoint: shards go up as they are made, and one commit shows them all.",
        epilog="Example: zckpt push out/checkpoint-500 me/my-model --dtype bf16 --license apache-2.0",
    )(push)


def push(
    source: o.Source,
    repo_id: RepoId,
    dtype: o.CastOrConfig = None,
    tag: o.Tag = None,
    revision: Revision = "main",
    private: Visibility = None,
    create_pr: CreatePr = False,
    message: Message = None,
    path_in_repo: PathInRepo = "",
    max_shard_size: o.MaxShardSize = "5GB",
    scratch: ScratchDir = None,
    max_scratch: MaxScratch = None,
    no_card: NoCard = False,
    license_id: License = None,
    base_model: BaseModel = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    exclude_frozen: o.ExcludeFrozen = False,
    overflow: o.OverflowOption = o.OverflowChoice.error,
    also: o.Also = None,
    tp_rules: o.TpRules = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    key: o.Key = None,
    threads: o.Threads = None,
    token: Token = None,
    endpoint: Endpoint = None,
    dry_run: ShowOnly = False,
    yes: Yes = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Pushes a checkpoint, or shows what would be pushed."""
    if endpoint:
        os.environ["HF_ENDPOINT"] = endpoint  # before huggingface_hub is loaded: all of it must know
    from zckpt.hub import MESSAGE, PageTarget, load
    from zckpt.jobs.options import Options

    chosen = Options(
        tag=tag, also=also or (),
                max_shard_size=max_shard_size, include=include or (), exclude=exclude or (), exclude_frozen=exclude_frozen,
        overflow=overflow.value, threads=threads, wishes=o.wishes(tp_rules, tp, pp, key),
    )  # fmt: skip
    target = PageTarget(
        repo_id, revision, path_in_repo, private, create_pr, message or MESSAGE, yes, token, endpoint, scratch,
        o.parse_bytes(max_scratch, "--max-scratch"), not no_card, license_id, base_model,
    )  # fmt: skip
    prepared = load(source, dtype.value if dtype else None, chosen)
    carry_out(prepared, target, Console(as_json=as_json, quiet=quiet), dry_run=dry_run)


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
            sink.notes(["The same command goes on from here: what the hub has is not made or sent again."])
            raise
    sink.notes((*report.notes, *notes))
    sink.result(lambda: _report_facts(ready, report), lambda: _report_lines(ready, report))


def to_page(source: str, out: str, options: Options, sink: Console, *, dry_run: bool) -> None:
    """`to-*` with an OUT such as `hf://me/my-model@main/fp32`."""
    from zckpt.base.errors import UsageError
    from zckpt.hub import PageTarget
    from zckpt.jobs.convert import prepare

    found = _ADDRESS.fullmatch(out.rstrip("/"))
    if not found or found["repo"].partition("/")[0] in _OTHERS:
        raise UsageError("an address that is no model's", file=out, expected="hf://OWNER/NAME[@REVISION][/DIRECTORY]")
    path = found["path"] or ""
    if path.endswith((".safetensors", ".bin", ".pt")) or options.format == "bin":
        raise UsageError(
            "one file, or a .bin, for a page",
            file=out,
            remedy="Give the page or a directory in it; shards are safetensors.",
        )
    target = PageTarget(found["repo"], unquote(found["revision"] or "main"), path, yes=options.overwrite)
    carry_out(prepare(source, "", replace(options, format=None)), target, sink, dry_run=dry_run)


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
        yield place(shard.name), shard.nbytes, "made of the checkpoint" if shard.scratch_bytes else "goes up as it is"
    for file in ready.cargo.small:
        yield place(file.name), file.nbytes, file.origin


def _plan_lines(ready: Ready) -> Iterator[str]:
    target, cargo, page = ready.target, ready.cargo, ready.page
    shown = "private" if (page.private if page.exists else target.private is not False) else "public"
    state = f"{'' if page.exists else 'new, '}{shown}{', as a pull request' if target.create_pr else ''}"
    listed = list(_files(ready))
    yield f"{target.repo_id}@{target.revision} ({state}) would get {len(listed):,} files, {cargo.nbytes:,} bytes"
    for path, nbytes, origin in listed:
        yield f"  {nbytes:>16,} bytes  {path}  ({origin}{_SEEN[ready.there[path]]})"
    for path in ready.removed:
        yield f"  {'removed':>22}  {path}  (other weights, which would be loaded instead)"
    yield f"{len(cargo.catalog):,} tensors, {cargo.catalog.numel:,} elements; at most {ready.room:,} bytes of scratch"


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
    nbytes = f"{len(report.files):,} files, {ready.cargo.nbytes:,} bytes"
    if report.already_done:
        yield f"already done: the page holds all {nbytes}; nothing was sent"
        yield report.url
        return
    yield f"{nbytes}; {report.bytes_sent:,} bytes of shards went up now; {report.seconds:.2f} s"
    yield "read back: sizes, hashes and headers are those that were sent"
    yield report.pull_request or report.url
