"""`zckpt map`: what a checkpoint looks like, as a page for a browser or as bars in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.cli.arguments import Checkpoint, Shown
from zckpt.cli.declare import command
from zckpt.jobs.declarations import LOOK
from zckpt.jobs.groups import option

if TYPE_CHECKING:
    from zckpt.cli.output import Console
    from zckpt.jobs.declarations import Asked

_SHOWN = "What to draw"


@dataclass(frozen=True, repr=False, eq=False)
class Drawn:
    """What is drawn, and where it goes."""

    html: str | None = option(
        None, "--html", "text", "Write the map as one HTML file, which needs no network.", _SHOWN, metavar="FILE"
    )
    open_page: bool = option(
        False, "--open", "flag", "Show it in the browser; without --html, from a temporary file.", _SHOWN
    )
    reshard: int | None = option(
        None, "--reshard", "positive", "Also draw what 'zckpt reshard --world-size N' would write.", _SHOWN, metavar="N"
    )
    stage: int | None = option(
        None, "--stage", "number", "ZeRO stage for --reshard; by default CKPT's.", _SHOWN, metavar="1|2|3", min=1, max=3
    )


@command(
    "map",
    about="Draw a checkpoint: its files by rank, as long as they are large, and which rows of a tensor each "
    "holds; what is missing is in red. With --html as a page to search and point at, otherwise as bars in the "
    "terminal. Reads indexes only, and changes nothing.",
    job=LOOK,
    example="zckpt map out/checkpoint-500 --html map.html --open",
)
def draw_map(ckpt: Checkpoint, drawn: Drawn, asked: Asked[None], shown: Shown) -> None:
    """Draws a map."""
    from zckpt.pictures.map_page import map as map_of
    from zckpt.pictures.terminal import draw

    if drawn.stage is not None and drawn.reshard is None:
        raise UsageError(
            "--stage is of use only with --reshard", found="--stage without --reshard",
            remedy="Add --reshard N, or leave out --stage.",
        )  # fmt: skip
    sink = shown.console
    how = asked.reading
    found = map_of(
        ckpt, how.tag, how.also, how.read_options, world_size=drawn.reshard, stage=drawn.stage, as_part=how.as_part
    )
    if not sink.as_json:
        sink.notes(found.drawn.inspection.place.notes)
    page = place_of_page(drawn.html, "map") if drawn.html is not None or drawn.open_page else None
    if page is not None:
        found.save(page)
    done = "" if page is None else f"The page {page} is complete."
    if sink.as_json:
        sink.result(lambda: {**found.as_json(), "html": page}, tuple, done=done)
    elif page is not None:
        sink.result(dict, lambda: [f"wrote {page}"], done=done)
    elif not sink.quiet:
        draw(found.in_colours(sink.width))
    if drawn.open_page and page is not None:
        open_page(page, sink)


def open_page(page: str, sink: Console) -> None:
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
