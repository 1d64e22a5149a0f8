"""Carries out or prints a planned job that writes an output, and reports what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OutputError
from zckpt.base.words import count, examples, size
from zckpt.cli.declare import Shown
from zckpt.cli.output import Console, peak_rss_bytes

if TYPE_CHECKING:
    from zckpt.jobs.planned import Planned, Report
    from zckpt.storage.location import Location

_MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a command about its output.

    Attributes:
        what: the output, as in "OUT: 2 tensors as bf16".
        use: how a person loads it, given the names of its files.
        facts: of the command, for `--json`.
    """

    what: str
    use: Callable[[set[str]], str]
    facts: dict[str, object] = field(default_factory=dict[str, object])


P = TypeVar("P", bound="Planned")


def finish(
    planned: P,
    words: Words,
    shown: Shown,
    execute: Callable[[P, Callable[[int], None] | None, Callable[[str], None]], Report] | None = None,
    more: Callable[[Report], dict[str, object]] = lambda report: {},
    *,
    dry_run: bool = False,
) -> None:
    """Carries a job out, or prints its plan.

    Args:
        planned: the job.
        words: how to speak of it.
        shown: what to print.
        execute: what carries it out; None for `jobs.planned.execute`.
        more: facts of the report, for `--json`.
        dry_run: print the plan.
    """
    sink = shown.console
    if dry_run:
        sink.notes(planned.notes)
        sink.notes(lack_of_space(planned.order.out, planned.order.bytes_written))
        sink.result(lambda: _plan_facts(planned, words), lambda: _plan_lines(planned, words))
        return
    from zckpt.jobs import planned as jobs

    with sink.progress(planned.plan.bytes_written, "write") as progress:
        report = (execute or jobs.execute)(planned, progress, lambda note: sink.notes([note]))
    show(sink, planned.out, words, report, shown.seconds, more)


def show(
    sink: Console,
    out: str,
    words: Words,
    report: Report,
    seconds: float,
    more: Callable[[Report], dict[str, object]] = lambda report: {},
) -> None:
    """Reports what was written: to `out`, in `seconds`; `more` are facts of the report, for `--json`."""
    sink.notes(report.notes)
    sink.notes(
        f"{name!r} has {count(number, 'element')} too large for the dtype; the largest is {largest:,}"
        for name, (number, largest) in report.overflows.items()
    )
    sink.result(
        lambda: {
            "out": out,
            **words.facts,
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
            **more(report),
        },
        lambda: _lines(out, words, report, seconds),
        done=f"The output {out} is complete.",
    )


def _files(planned: Planned) -> list[tuple[str, int]]:
    """The files that a job would write, and their bytes."""
    files = [(file.path, file.size) for file, _ in planned.plan.files]
    return files + [(name, file.size()) for file, name in planned.order.copies]


def _plan_facts(planned: Planned, words: Words) -> dict[str, object]:
    return {
        "dry_run": True,
        "out": planned.out,
        **words.facts,
        "files": [{"path": path, "bytes": nbytes} for path, nbytes in _files(planned)],
        "tensors": len(planned.catalog),
        "numel": planned.catalog.numel,
        "moves": planned.plan.move_count,
        "bytes_read": planned.plan.bytes_read,
        "bytes_written": planned.order.bytes_written,
        "left_out": [fate.as_json() for fate in planned.order.left_out],
        **({"trained": list(_fates(planned))} if planned.trained else {}),
        "notes": list(planned.notes),
    }


def _plan_lines(planned: Planned, words: Words) -> Iterator[str]:
    yield f"{planned.out}: would hold {words.what}"
    yield from file_lines(_files(planned))
    for one in _fates(planned):
        to = one["why"] if not one["to"] else examples(one["to"], len(one["to"]))
        yield f"  {one['name']}  {_USES[one['use']]} {to}"
    left: dict[str, list[str]] = {}
    for fate in planned.order.left_out:
        left.setdefault(fate.reason, []).append(fate.name)
    for reason, names in left.items():
        yield f"would leave out {count(len(names), 'tensor')}, {reason}: {examples(names)}"
    yield f"would read {size(planned.plan.bytes_read)} and write {size(planned.order.bytes_written)}"


def _fates(planned: Planned) -> Iterator[dict[str, Any]]:
    """The fate of each trained tensor: a row of the plan of a merge."""
    from zckpt.core.ledger import RULES, trace

    for one, to in zip(planned.trained, trace(planned.trained, planned.catalog.tensors), strict=True):
        use, why = (one.how, None) if to else ("left out", RULES.get(one.why, "no tensor of the output needs it"))
        yield {"name": one.entry.name, "adapter": one.adapter or None, "use": use, "to": to, "why": why}


_USES = {
    "merged": "is merged into",
    "rows": "replaces rows of",
    "whole": "is written as",
    "left out": "is left out, since",
}
"""How a trained tensor is used -> the phrase for it."""


def file_lines(files: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Lines with the names and bytes of the first of these files."""
    for path, nbytes in files[:_MOST_LISTED]:
        yield f"  {size(nbytes):>9}  {path}"
    if len(files) > _MOST_LISTED:
        yield f"  and {len(files) - _MOST_LISTED:,} more files (--json lists all)"


def _lines(out: str, words: Words, report: Report, seconds: float) -> Iterator[str]:
    yield replace(report, out=out, seconds=seconds).line(words.what)
    yield words.use({path for path, _ in report.files})


def lack_of_space(out: Location, needed_bytes: int) -> list[str]:
    """A sentence for a dry run if the disk is too full."""
    from zckpt.output.checks import check_space

    try:
        check_space(out, needed_bytes)
    except OutputError as error:
        return [str(error)]
    return []
