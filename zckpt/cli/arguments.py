"""Arguments and options that many commands share, beside those of their jobs: input, output, and what is printed."""

from __future__ import annotations

import time
from dataclasses import field
from functools import partial
from typing import Annotated, Literal

import typer

from zckpt.base.dataclass import dataclass
from zckpt.cli.output import Console
from zckpt.jobs.groups import OUTPUT, option

output = partial(typer.Option, rich_help_panel=OUTPUT)

Checkpoint = Annotated[
    str,
    typer.Argument(metavar="CKPT", help="Checkpoint, tag or trainer output directory, or weights.", show_default=False),
]
Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="A file (.safetensors, .bin, .pt), a directory for shards, or an address (s3://..., hf://OWNER/NAME).",
        show_default=False,
    ),
]
OutDirectory = Annotated[
    str, typer.Argument(metavar="OUT", help="Directory for the output, or an address.", show_default=False)
]
DryRun = Annotated[bool, output("--dry-run", help="Print what would be written, and write nothing.")]


@dataclass(frozen=True, repr=False, eq=False)
class Shown:
    """What a command prints. It has no repr and no comparison, which would cost time whenever zckpt starts."""

    as_json: bool = option(False, "--json", "flag", "Print one JSON object on stdout.", OUTPUT)
    quiet: bool = option(False, "--quiet", "flag", "Print errors only.", OUTPUT)
    began: float = field(init=False, default_factory=lambda: time.perf_counter())

    @property
    def seconds(self) -> float:
        """Since the command began, its planning included."""
        return time.perf_counter() - self.began

    @property
    def console(self) -> Console:
        """Where the command prints."""
        return Console(as_json=self.as_json, quiet=self.quiet)


@dataclass(frozen=True, repr=False, eq=False)
class ShownProgress(Shown):
    """As `Shown`, for commands that run for long and show their progress."""

    progress_form: Literal["bar", "json"] = option(
        "bar", "--progress", ("bar", "json"), "A bar in a terminal, or JSON lines on stderr for programs.", OUTPUT
    )

    @property
    def console(self) -> Console:  # noqa: D102
        return Console(as_json=self.as_json, quiet=self.quiet, progress_lines=self.progress_form == "json")
