"""`zckpt inspect`, `map`, `verify` and `diff`: what a checkpoint holds and looks like, whether it is intact, how two differ."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.base.errors import UsageError
from zckpt.cli.declare import Checkpoint, Shown, ShownProgress, command, output, positive
from zckpt.jobs.declarations import DIFF, LOOK, VERIFY

if TYPE_CHECKING:
    from zckpt.cli.output import Console
    from zckpt.jobs.declarations import Asked
    from zckpt.jobs.groups import Reading
    from zckpt.jobs.inspection import Inspection
    from zckpt.jobs.own_groups import MergedWith
    from zckpt.jobs.states import NamedStates
    from zckpt.pictures.terminal import Line


_SHOWN = "What to draw"


_shown = partial(typer.Option, rich_help_panel=_SHOWN)
MapPage = Annotated[
    str | None, _shown("--html", metavar="FILE", help="Write the map as one HTML file, which needs no network.")
]
OpenMap = Annotated[bool, _shown("--open", help="Show it in the browser; without --html, from a temporary file.")]
Reshard = Annotated[
    int | None,
    _shown(
        "--reshard", metavar="N", callback=positive, help="Also draw what 'zckpt reshard --world-size N' would write."
    ),
]
Stage = Annotated[
    int | None,
    _shown("--stage", metavar="1|2|3", min=1, max=3, help="ZeRO stage for --reshard; by default CKPT's."),
]


@command(
    "map",
    about="Draw a checkpoint: its files by rank, as long as they are large, and which rows of a tensor each "
    "holds; what is missing is in red. With --html as a page to search and point at, otherwise as bars in the "
    "terminal. Reads indexes only, and changes nothing.",
    job=LOOK,
    example="zckpt map out/checkpoint-500 --html map.html --open",
)
def draw_map(
    ckpt: Checkpoint,
    html: MapPage = None,
    open_page: OpenMap = False,
    reshard: Reshard = None,
    stage: Stage = None,
    *,
    asked: Asked[None],
    shown: Shown,
) -> None:
    """Draws a map."""
    from zckpt.pictures.map_page import map as map_of
    from zckpt.pictures.terminal import draw

    if stage is not None and reshard is None:
        raise UsageError(
            "--stage is of use only with --reshard", found="--stage without --reshard",
            remedy="Add --reshard N, or leave out --stage.",
        )  # fmt: skip
    sink = shown.console
    how = asked.reading
    found = map_of(ckpt, how.tag, how.also, how.read_options, world_size=reshard, stage=stage, as_part=how.as_part)
    if not sink.as_json:
        sink.notes(found.drawn.inspection.place.notes)
    page = place_of_page(html, "map") if html is not None or open_page else None
    if page is not None:
        found.save(page)
    done = "" if page is None else f"The page {page} is complete."
    if sink.as_json:
        sink.result(lambda: {**found.as_json(), "html": page}, tuple, done=done)
    elif page is not None:
        sink.result(dict, lambda: [f"wrote {page}"], done=done)
    elif not sink.quiet:
        draw(found.in_colours(sink.width))
    if open_page and page is not None:
        show_page(page, sink)


def show_page(page: str, sink: Console) -> None:
    """Shows a page in the browser; a note says where the page is if there is none."""
    import webbrowser
    from pathlib import Path

    if not webbrowser.open(Path(page).resolve().as_uri()):
        sink.notes([f"No browser was found to open. The page is in {page}."])


def place_of_page(wanted: str | None, what: str) -> str:
    """The path for a page: the one asked for, or one in a new temporary directory; `what` is on the page."""
    import os
    import tempfile

    return wanted or os.path.join(tempfile.mkdtemp(prefix=f"zckpt-{what}-"), f"{what}.html")


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
Atol = Annotated[
    float | None,
    _checks("--atol", metavar="X", min=0, help="Equal if |a - b| <= X + Y |b|; by default bit for bit."),
]
Rtol = Annotated[float | None, _checks("--rtol", metavar="Y", min=0, help="See --atol.")]
Deep = Annotated[bool, _checks("--deep", help="Read every byte: checksums, copies of weights, NaN and infinity.")]


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
        lambda: {**inspection.facts(tensors), **(named.as_json() if named else {})},
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
    atol: Atol = None,
    rtol: Rtol = None,
    *,
    asked: Asked[None],
    tensors: AllTensors = False,
    html: DiffPage = None,
    open_page: OpenPage = False,
    shown: ShownProgress,
) -> None:
    """Prints differences; exit status 1 if there are any."""
    from zckpt.jobs.diff import diff

    sink = shown.console
    if open_page:
        html = place_of_page(html, "diff")
    if html is not None:
        from zckpt.pictures.page import check_place

        check_place(html)
    with sink.progress(None, "diff") as progress:
        found = diff(
            a, b, atol=atol, rtol=rtol, read_options=asked.reading.read_options,
            as_part=asked.reading.as_part, spreads=html is not None,
            pace=asked.pacing.pace, progress=progress or False,
        )  # fmt: skip
    if html is not None:
        from zckpt.pictures.differences import differences_page
        from zckpt.pictures.page import write_page

        exact = atol is None and rtol is None
        words = "" if exact else f"Numbers are equal if |a - b| is at most {atol or 0:g} + {rtol or 0:g} |b|."
        write_page(html, differences_page(found, a, b, tolerance=words))
        sink.line(f"wrote {html}")
    sink.notes(found.notes)
    sink.result(
        lambda: found.as_json(tensors=tensors), lambda: found.lines(tensors=tensors, width=sink.width),
        done="" if html is None else f"The page {html} is complete.",
    )  # fmt: skip
    if open_page and html is not None:
        show_page(html, sink)
    if not found.same:
        raise typer.Exit(1)
