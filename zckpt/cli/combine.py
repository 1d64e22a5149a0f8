"""`zckpt average`: one model out of several checkpoints."""

from __future__ import annotations

import time
from dataclasses import field, replace
from typing import Annotated, Any

import typer

from zckpt.base.dataclass import dataclass
from zckpt.base.words import count
from zckpt.cli import options as o
from zckpt.cli.convert import WeightOptions, words_of
from zckpt.cli.declared import command
from zckpt.cli.written import finish

Checkpoints = Annotated[
    list[str],
    typer.Argument(
        metavar="CKPT...", help="Checkpoints of one model, of any layouts; CKPT:TAG names one save.", show_default=False
    ),
]


Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="A file (.safetensors, .bin, .pt), a directory for shards, or an address (s3://...).",
        show_default=False,
    ),
]


def numbers(text: str) -> tuple[float, ...]:
    """A typer parser of numbers with commas between them."""
    try:
        return tuple(float(part) for part in str(text).split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0.5,0.3,0.2") from error


@dataclass(frozen=True, repr=False, eq=False)
class Way(o.Group):
    """How the checkpoints become one."""

    weights: Annotated[
        str | None,
        o.what(
            "--weights", metavar="LIST", help="What each checkpoint counts, such as 0.7,0.3; by default all the same."
        ),
    ] = None
    ema: Annotated[
        float | None,
        o.what("--ema", metavar="D", help="Exponential moving average, oldest first: D of what was before stays."),
    ] = None
    last: Annotated[int | None, o.what("--last", metavar="N", help="Take the newest N saves of the only CKPT.")] = None
    task_vector: Annotated[
        str | None,
        o.what("--task-vector", metavar="BASE", help="Write BASE plus the weighted differences of CKPT... from it."),
    ] = None
    slerp: Annotated[
        float | None,
        o.what("--slerp", metavar="T", help="Of two: the point at T (0 to 1) of the way along the arc between them."),
    ] = None
    dtype: Annotated[
        o.Dtype | None, o.what("--dtype", help="Of the output; by default that of the last checkpoint's weights.")
    ] = None

    def options(self) -> dict[str, Any]:  # noqa: D102
        weights = None if self.weights is None else numbers(self.weights)
        return {**o.Group.options(self), "weights": weights}


@dataclass(frozen=True, repr=False, eq=False)
class Sources(o.Joining):
    """How all of the checkpoints are read."""

    also: Annotated[
        list[str],
        o.which(
            "--also", metavar="DIR", help="Directory with other parts of the CKPTs, from another node. Repeatable."
        ),
    ] = field(default_factory=list)

    def options(self) -> dict[str, Any]:  # noqa: D102
        return {"also": tuple(self.also), "read_options": self.read_options, "as_part": self.as_part}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(
        app,
        "average",
        about="Average checkpoints of one model in fp32, in one pass, or merge them: weighted, as a moving average, as task "
        "vectors on a base, or along an arc.",
        example="zckpt average run:global_step100 run:global_step200 averaged/ --dtype bf16",
    )(average)


def average(
    ckpts: Checkpoints,
    out: Out,
    way: Way,
    weights: WeightOptions,
    selection: o.Selection,
    names: o.HubNames,
    source: Sources,
    speed: o.WriteSpeed,
    writing: o.Writing,
    shown: o.ShownProgress,
) -> None:
    """Writes one model out of several checkpoints."""
    from zckpt.jobs.average import prepare
    from zckpt.jobs.options import AverageOptions

    began = time.perf_counter()
    planned = prepare(ckpts, out, o.chosen(AverageOptions, way, weights, selection, names, source, speed, writing))
    words = words_of(planned, planned.dtype)
    what = f"{words.what}, of {count(len(planned.checkpoints), 'checkpoint')}"
    finish(planned, replace(words, what=what), began, writing, shown)
