"""`zckpt inspect`, `verify` and `diff`: what a checkpoint holds, whether it is intact, and how two differ."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.base.dataclass import dataclass
from zckpt.cli.arguments import Shown, ShownProgress, output
from zckpt.cli.declare import command
from zckpt.jobs.declarations import DIFF, LOOK, VERIFY
from zckpt.jobs.groups import option

if TYPE_CHECKING:
    from zckpt.jobs.declarations import Asked
    from zckpt.jobs.groups import Reading
    from zckpt.jobs.inspection import Inspection
    from zckpt.jobs.own_groups import MergedWith
    from zckpt.jobs.states import NamedStates
    from zckpt.pictures.terminal import Line

_CHECKS = "Checks"
_checks = partial(typer.Option, rich_help_panel=_CHECKS)
Looked = Annotated[
    str, typer.Argument(metavar="CKPT|FILE", help="Checkpoint directory, or a weights file.", show_default=False)
]
Converted = Annotated[
    str | None,
    typer.Argument(metavar="[CONVERTED]", help="Output that was made from CKPT, to compare.", show_default=False),
]
SideA = Annotated[str, typer.Argument(metavar="A", help="Checkpoint or weights.", show_default=False)]
SideB = Annotated[str, typer.Argument(metavar="B", help="What to compare it with.", show_default=False)]
Tensors = Annotated[bool, output("--tensors", help="List every tensor, and which files hold its elements.")]
States = Annotated[bool, output("--states", help="List the optimizer's states and parameter groups.")]
AllTensors = Annotated[bool, output("--tensors", help="List every tensor, also those that are the same.")]
DiffPage = Annotated[
    str | None,
    output("--html", metavar="FILE", help="Write a page for a browser: largest differences first, with histograms."),
]
OpenPage = Annotated[
    bool, output("--open", help="Show the page in the browser; without --html, from a temporary file.")
]
Trusting = Annotated[
    bool,
    _checks(
        "--trust-reader", help="Call the shards safe to delete although no second reader has found their tensors again."
    ),
]
Like = Annotated[
    str | None,
    _checks(
        "--like",
        metavar="MODEL",
        help="Check by headers alone that a loader of this model finds every tensor: a directory, a config.json, or hf://OWNER/NAME.",
    ),
]
Deep = Annotated[bool, _checks("--deep", help="Read every byte: checksums, copies of weights, NaN and infinity.")]


@dataclass(frozen=True, repr=False, eq=False)
class Tolerance:
    """The tolerance within which values count as equal."""

    atol: float | None = option(
        None, "--atol", "real", "Equal if |a - b| <= X + Y |b|; by default bit for bit.", _CHECKS, metavar="X", min=0
    )
    rtol: float | None = option(None, "--rtol", "real", "See --atol.", _CHECKS, metavar="Y", min=0)

    @property
    def words(self) -> str:
        """The tolerance as a sentence; empty for equality bit for bit."""
        if self.atol is None and self.rtol is None:
            return ""
        return f"Numbers are equal if |a - b| is at most {self.atol or 0:g} + {self.rtol or 0:g} |b|."


@command(
    "inspect",
    about="Show what a checkpoint holds and what it lacks, and whether weights can be exported and training can resume.",
    job=LOOK,
    example="zckpt inspect out/checkpoint-500",
    status="0 it can be exported, 1 it cannot, 2 error",
)
def inspect(
    ckpt: Looked, asked: Asked[None], tensors: Tensors = False, states: States = False, *, shown: Shown
) -> None:
    """Prints an inspection; exit status 1 if the checkpoint cannot be exported."""
    from zckpt.jobs.inspection import inspect_checkpoint

    sink = shown.console
    how = asked.reading
    inspection = inspect_checkpoint(ckpt, how.tag, how.also, how.read_options, as_part=how.as_part)
    named = _states(ckpt, how) if states else None
    sink.result(
        lambda: {**inspection.as_json(slices=tensors), **(named.as_json() if named else {})},
        lambda: chain(inspection.lines(tensors=tensors, width=sink.width), named.lines() if named else ()),
    )
    sink.picture(lambda width: _picture(inspection, width))
    if not inspection.exportable.ok:
        raise typer.Exit(1)


def _picture(inspection: Inspection, width: int) -> list[Line]:
    """The files of ranks as bars."""
    from zckpt.pictures.rows import file_grid
    from zckpt.pictures.terminal import picture

    return [[], *picture(file_grid(inspection, ranks_only=True), width, lead="  ")] if inspection.grid else []


def _states(ckpt: str, how: Reading) -> NamedStates:
    from zckpt.jobs.open import open_catalog, states_of

    return states_of(open_catalog(ckpt, how))


@command(
    "verify",
    about="Check that a checkpoint is complete and intact, that CONVERTED equals it, and whether the shards are safe to "
    "delete. A directory with a zckpt.json is checked against it.",
    job=VERIFY,
    example="zckpt verify out/checkpoint-500 weights/",
    status="0 nothing is wrong, 1 something is or cannot be told, 2 error",
)
def verify(
    ckpt: Looked,
    converted: Converted = None,
    deep: Deep = False,
    trust_reader: Trusting = False,
    like: Like = None,
    *,
    asked: Asked[MergedWith],
    shown: ShownProgress,
) -> None:
    """Prints a verification; exit status 1 if anything is wrong, or the comparison was asked for and cannot be trusted."""
    from zckpt.checks.verify import verify

    sink = shown.console
    with sink.progress(None, "verify") as progress:
        found = verify(
            ckpt,
            converted,
            deep=deep,
            tag=asked.reading.tag,
            also=asked.reading.also,
            read_options=asked.reading.read_options,
            as_part=asked.reading.as_part,
            lora=asked.own.lora,
            trust_reader=trust_reader,
            like=like,
            pace=asked.pacing.pace,
            progress=progress or False,
        )
    sink.result(found.as_json, lambda: found.lines(sink.width))
    if not found.ok or (converted is not None and found.not_proved):
        raise typer.Exit(1)


@command(
    "diff",
    about="Compare two checkpoints or weights files, in any layouts: names, shapes, dtypes and values.",
    job=DIFF,
    example="zckpt diff out/checkpoint-500 weights/ --rtol 0.004",
    status="0 the same, 1 different, 2 error",
)
def diff(
    a: SideA,
    b: SideB,
    tolerance: Tolerance,
    asked: Asked[None],
    tensors: AllTensors = False,
    html: DiffPage = None,
    open_page: OpenPage = False,
    *,
    shown: ShownProgress,
) -> None:
    """Prints differences; exit status 1 if there are any."""
    from zckpt.jobs.diff import diff

    sink = shown.console
    if open_page:
        from zckpt.cli import picture

        html = picture.place_of_page(html, "diff")
    if html is not None:
        from zckpt.pictures.page import check_place

        check_place(html)
    with sink.progress(None, "diff") as progress:
        found = diff(
            a, b, atol=tolerance.atol, rtol=tolerance.rtol, read_options=asked.reading.read_options,
            as_part=asked.reading.as_part, spreads=html is not None,
            pace=asked.pacing.pace, progress=progress or False,
        )  # fmt: skip
    if html is not None:
        from zckpt.pictures.differences import differences_page
        from zckpt.pictures.page import write_page

        write_page(html, differences_page(found, a, b, tolerance=tolerance.words))
        sink.line(f"wrote {html}")
    sink.notes(found.notes)
    sink.result(
        lambda: found.as_json(tensors=tensors), lambda: found.lines(tensors=tensors, width=sink.width),
        done="" if html is None else f"The page {html} is complete.",
    )  # fmt: skip
    if open_page and html is not None:
        picture.open_page(html, sink)
    if not found.same:
        raise typer.Exit(1)
