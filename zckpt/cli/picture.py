"""`zckpt map`: what a checkpoint looks like, as a page for a browser or as bars in the terminal."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.cli.arguments import Checkpoint, Shown
from zckpt.cli.declare import command
from zckpt.cli.texts import positive
from zckpt.jobs.declarations import LOOK

if TYPE_CHECKING:
    from zckpt.cli.output import Console
    from zckpt.jobs.declarations import Asked
    from zckpt.pictures.checkpoint_map import CheckpointMap

_shown = partial(typer.Option, rich_help_panel="What to draw")


@dataclass(frozen=True, repr=False, eq=False)
class Drawn:
    """What is drawn, and where to."""

    html: Annotated[
        str | None, _shown("--html", metavar="FILE", help="Write the map as one HTML file, which needs no network.")
    ] = None
    open_page: Annotated[
        bool, _shown("--open", help="Show it in the browser; without --html, from a temporary file.")
    ] = False
    reshard: Annotated[
        int | None,
        _shown(
            "--reshard",
            metavar="N",
            callback=positive,
            help="Also draw what 'zckpt reshard --world-size N' would write.",
        ),
    ] = None
    stage: Annotated[
        int | None,
        _shown("--stage", metavar="1|2|3", min=1, max=3, help="ZeRO stage for --reshard; by default CKPT's."),
    ] = None


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(
        app,
        "map",
        about="Draw a checkpoint: its files by rank, as long as they are large, and which rows of which tensor each "
        "holds; what is missing is in red. With --html as a page to search and point at, otherwise as bars in the "
        "terminal. Reads indexes only, and changes nothing.",
        job=LOOK,
        example="zckpt map out/checkpoint-500 --html map.html --open",
    )(draw_map)


def draw_map(ckpt: Checkpoint, drawn: Drawn, asked: Asked[None], shown: Shown) -> None:
    """Draws a map."""
    from zckpt.pictures.checkpoint_map import checkpoint_map

    if drawn.stage is not None and drawn.reshard is None:
        raise UsageError(
            "--stage is of use only with --reshard", found="--stage without --reshard",
            remedy="Add --reshard N, or leave out --stage.",
        )  # fmt: skip
    sink = shown.console
    found = checkpoint_map(
        ckpt,
        asked.reading.tag,
        asked.reading.also,
        asked.reading.read_options,
        world_size=drawn.reshard,
        stage=drawn.stage,
        as_part=asked.reading.as_part,
    )
    if not sink.as_json:
        sink.notes(found.inspection.place.notes)
    page = _write_page(found, drawn) if drawn.html is not None or drawn.open_page else None
    done = "" if page is None else f"The page {page} is complete."
    if sink.as_json:
        sink.result(lambda: {**found.as_json(), "html": page}, tuple, done=done)
    elif page is not None:
        sink.result(dict, lambda: [f"wrote {page}"], done=done)
    else:
        _in_terminal(found, sink)
    if drawn.open_page and page is not None:
        open_page(page, sink)


def open_page(page: str, sink: Console) -> None:
    """Shows a page in the browser; a note says where the page is if there is none."""
    import webbrowser
    from pathlib import Path

    if not webbrowser.open(Path(page).resolve().as_uri()):
        sink.notes([f"No browser was found to open. The page is in {page}."])


def place_of_page(wanted: str | None, what: str) -> str:
    """The path for a page: the one that is wanted, or else one in a new temporary directory; `what` is on it."""
    import os
    import tempfile

    return wanted or os.path.join(tempfile.mkdtemp(prefix=f"zckpt-{what}-"), f"{what}.html")


def _write_page(found: CheckpointMap, drawn: Drawn) -> str:
    """Writes the page; returns its path."""
    from zckpt.pictures.map_page import map_page
    from zckpt.pictures.page import write_page

    path = place_of_page(drawn.html, "map")
    write_page(path, map_page(found))
    return path


def _in_terminal(found: CheckpointMap, sink: Console) -> None:
    from zckpt.base.words import wrap_text
    from zckpt.pictures.lacks import lacks_said
    from zckpt.pictures.map_page import summary
    from zckpt.pictures.terminal import Line, draw, picture, visible

    if sink.quiet:
        return
    path = visible(found.inspection.place.listing.directory.path)
    said = wrap_text(f"  {summary(found)}", sink.width, "  ")
    lines: list[Line] = [[(path, "bold")], *([(line, "")] for line in said), []]
    lines += picture(found.grid, sink.width, found.contents(), lead="  ")
    if (after := found.after) is not None:
        lines += [[], [(f"  {after.title}", "bold")], []]
        lines += picture(after.grid, sink.width, after.contents(), lead="  ")
    if not found.inspection.exportable.ok:
        reason = wrap_text(f"  {visible(found.inspection.exportable.reason)}", sink.width, "  ")
        lines += [[], *([(line, "red")] for line in reason)]
        if lacks := lacks_said(found):
            lines += [[], *([(line, "")] for line in wrap_text(f"  {lacks}", sink.width, "  "))]
    draw(lines)
